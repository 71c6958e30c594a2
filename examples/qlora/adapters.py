"""The adapters of a run: their options, and how they begin.

New adapters have a zero update. Those of ``--adapter`` are read from a PEFT folder, which then says rank, alpha and
targets. A DoRA adapter begins with the norms of the rows of its weight. So each weight is read and quantised once more,
before the base is placed.
"""

import dataclasses
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import tyro

from fquant import lora, random, tree
from fquant.adapted.dora import row_norms
from fquant.io import peft
from fquant.lazy import Lazy
from models import decoder, hf
from models.config import Config

from ..common.command_line import parse_targets

PATHS = {"embed": "embed", "head": r"final\.head"}  # of weights outside the layers


@dataclass(frozen=True)
class AdapterOptions:
    """The options of adapters."""

    READ: ClassVar[tuple[str, ...]] = ("rank", "alpha", "targets", "dora", "rank_stabilised", "rank_pattern")

    rank: int = 16
    """Rank of the adapters."""
    alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    targets: str = "all"
    """Weights to adapt, comma-separated, of q k v o gate up down (of a Phi-3: qkv o gate_up down) embed head; all, or
    all-linear: every linear of the layers. A head that is tied to the embedding is adapted with it."""
    dropout: float = 0.0
    """Share of an adapter's inputs that is dropped."""
    dora: bool = False
    """Train the norm of each row besides (DoRA)."""
    rank_stabilised: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA)."""
    rank_pattern: str | None = None
    """Other ranks of some targets, as in down=32,q=8."""
    alpha_pattern: str | None = None
    """Other alphas of some targets, as in down=64."""
    adapter: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """PEFT folder of an adapter to start from, with its own rank, alpha and targets."""

    def check_adapters(self) -> None:
        """Raise ValueError for values out of range, and for options that an adapter from a file already has."""
        if not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout is {self.dropout}; wanted 0 <= dropout < 1")
        names = targets_in(self.targets)
        for option in ("rank_pattern", "alpha_pattern"):
            for name in numbers_in(option, getattr(self, option)):
                if name not in names:
                    raise ValueError(f"{flag(option)}: {name!r} is not among the targets {','.join(names)}")
        for name, rank in numbers_in("rank_pattern", self.rank_pattern).items():
            if rank != int(rank):
                raise ValueError(f"--rank-pattern: {name}={rank}; wanted a whole number")
        defaults = {field.name: field.default for field in dataclasses.fields(AdapterOptions)}
        for option in (*self.READ, "alpha_pattern"):
            if self.adapter is not None and getattr(self, option) != defaults[option]:
                raise ValueError(f"{flag(option)} with --adapter {self.adapter}, which has its own; leave one out")


def flag(option: str) -> str:
    """Return the name of an option on the command line."""
    return "--" + option.replace("_", "-")


def targets_in(text: str, cfg: Config | None = None) -> tuple[str, ...]:
    """Return the names in --targets; raise ValueError for one that a model, or that of ``cfg``, does not have."""
    names = tuple(name.strip() for name in text.split(","))
    outside = tuple(name for name in names if name in PATHS)
    if "head" in outside and cfg is not None and cfg.tied:
        raise ValueError("--targets: the head of this model is its embedding; use embed, which adapts both")
    inside = ",".join("all" if name == "all-linear" else name for name in names if name not in PATHS)
    return (*(parse_targets(inside, cfg) if inside else ()), *outside)


def numbers_in(option: str, text: str | None) -> dict[str, float]:
    """Return the numbers above 0 by name in a text such as q=8,down=32; raise ValueError for any other."""
    out: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, number = (x.strip() for x in part.partition("="))
        if not re.fullmatch(r"\d+(\.\d+)?", number) or not float(number) or name in out:
            raise ValueError(
                f"{flag(option)} {text}: cannot read {part!r}; wanted names and numbers such as q=8,down=32"
            )
        out[name] = float(number)
    return out


def expression(name: str) -> str:
    """Return the regular expression of the paths of a target."""
    return PATHS.get(name, rf"layers\.\d+\.{name}")


def start(options: AdapterOptions, cfg: Config, packed: Any, seed: int) -> lora.Adapters:
    """Return the adapters as they begin beside the lazy base ``packed``, DoRA's norms left out; read no weights.

    Raises ValueError for targets that the model does not have, and for an adapter of another model.
    """
    if options.adapter is not None:
        adapters = peft.load(options.adapter, partial(hf.path_of, cfg=cfg), hf.tied_modules(cfg))
        with tree.at(str(options.adapter)):
            lora.attach(decoder.shapes(cfg), adapters)
        return {path: dataclasses.replace(x, dropout=options.dropout) for path, x in adapters.items()}
    ranks = numbers_in("rank_pattern", options.rank_pattern)
    alphas = numbers_in("alpha_pattern", options.alpha_pattern)
    found: lora.Adapters = {}
    for name in targets_in(options.targets, cfg):
        more: dict[str, Any] = {"dropout": options.dropout, "rank_stabilised": options.rank_stabilised}
        alpha = alphas.get(name, options.alpha)
        found |= lora.init(packed, expression(name), int(ranks.get(name, options.rank)), alpha, seed, **more)
    adapters = {path: found[path] for path in tree.paths(decoder.shapes(cfg)) if path in found}
    for path, adapter in adapters.items():
        if adapter.a.ndim > 2 and (options.dropout or options.dora):
            what = f"--dropout is {options.dropout}" if options.dropout else "--dora is given"
            raise ValueError(f"{path}: {what}, but PEFT has none for adapters of experts; use --targets q,k,v,o")
    return adapters


def merged(packed: Any, adapters: lora.Adapters) -> Any:
    """Return the lazy base ``packed`` with each adapter merged into its weight, in its format, when that is read."""

    def leaf(path: str, w: Any) -> Any:
        if path not in adapters:
            return w
        return Lazy(lambda: lora.merge_packed({"w": w.read()}, {"w": adapters[path]})[0]["w"], w.like, w.stamp)

    return tree.map_with_path(leaf, packed, is_leaf=lambda x: isinstance(x, Lazy))


def beside(options: Any, adapters: lora.Adapters, packed: Any) -> lora.Adapters:
    """Return the adapters with what depends on the weights of the lazy base ``packed``: DoRA's norms, and dither."""
    if options.merge_aware and options.adapter is None:
        key = random.key(options.seed)
        for path, one in adapters.items():
            w = tree.get(packed, path)
            w = w.read() if isinstance(w, Lazy) else w
            adapters |= lora.dither({path: w}, {path: one}, key, options.dither)
    if not options.dora:
        return adapters

    def norms(w: Any) -> torch.Tensor:
        return row_norms(w.read() if isinstance(w, Lazy) else w).float()

    return {path: dataclasses.replace(x, magnitude=norms(tree.get(packed, path))) for path, x in adapters.items()}
