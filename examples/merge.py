"""Merge PEFT adapters into their base: a plain 16-bit folder, or packed weights.

    python -m examples.merge BASE ADAPTER OUT                          # a folder that transformers loads
    python -m examples.merge BASE FRENCH LEGAL OUT --scales 1 0.5      # the sum of two updates
    python -m examples.merge BASE ADAPTER OUT --format nf4_dq          # packed, for the other programs here

BASE is a Hugging Face folder, or one that ``examples.quantize`` wrote. Each weight is read, summed in float32, rounded
once and written in turn, so memory is that of the largest. Weights that an adapter stores whole (modules_to_save,
biases) replace those of the base. DoRA adapters act in the order given, as in PEFT. Tokenizer and
generation config are copied from BASE.

Packing rounds a small update away. So with ``--format`` a table shows what was lost of it: ``‖achieved - wanted‖ /
‖wanted‖``, where ``wanted`` is the update and ``achieved`` the change of the decoded weight. 0 is a perfect merge, and
1 as bad as none.
"""

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from fquant import Packed, dequantize, lora, tree
from fquant.format import Format
from fquant.io import peft
from fquant.lazy import Lazy
from models import hf
from models.config import Config
from models.export import dense, folder

from .common import terminal
from .common.command_line import DTYPES, FormatName, check_used, command_line, parse_format
from .common.model_folders import Loss, companions, decoded, is_quantised, kind_of, loss, output, size_of, sources
from .common.progress import bar


@dataclass(frozen=True)
class Options:
    """Merge PEFT adapters into their base, and write a plain 16-bit folder or packed weights."""

    folders: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="BASE ADAPTER... OUT")] = ()
    """Folder of the base, dense or packed; folders of PEFT adapters of it, whose updates add; folder to write."""
    scales: tuple[float, ...] = ()
    """Factor of each adapter's update; default: 1."""
    format: FormatName = "none"
    """none: a plain folder; otherwise pack the matrices of layers, and show what is lost of the updates."""
    block: int | None = None
    """Weights that share a scale; default: the format's own."""
    dtype: Literal["bf16", "f16", "f32"] | None = None
    """Of the result, or of what its packed weights decode to; default: that of the base."""
    shard: float = 5.0
    """GiB in a file of a plain folder, at most; a larger tensor has a file of its own."""
    resume: bool = False
    """Continue an interrupted run of the same options and files: what it has written is kept."""

    def checked(self) -> Format | None:
        """Return the format; raise ValueError for options that do not fit together."""
        if len(self.folders) < 3:
            raise ValueError(f"got {len(self.folders)} folders; wanted BASE ADAPTER... OUT, see --help")
        if self.scales and len(self.scales) != len(self.adapters):
            raise ValueError(f"--scales has {len(self.scales)} numbers; wanted one for each of {len(self.adapters)}")
        if not all(map(math.isfinite, self.scales)):
            raise ValueError(f"--scales {' '.join(map(str, self.scales))}: wanted finite numbers")
        if not 0 < self.shard <= 1 << 20:
            raise ValueError(f"--shard is {self.shard}; wanted GiB above 0")
        check_used(
            self, {"shard": (lambda x: x.format != "none", "is of a plain folder; packed weights have one file")}
        )
        return parse_format(self.format, self.block)

    @property
    def base(self) -> Path:
        """The first folder."""
        return self.folders[0]

    @property
    def adapters(self) -> tuple[Path, ...]:
        """The folders between the first and the last."""
        return self.folders[1:-1]

    @property
    def out(self) -> Path:
        """The last folder."""
        return self.folders[-1]


@dataclass(frozen=True)
class Updates:
    """The changes of the base: low-rank updates, one dict an adapter, and whole weights by path."""

    adapters: list[lora.Adapters]
    whole: dict[str, Tensor]
    lost: dict[str, Loss] = field(default_factory=dict)  # by path, filled as weights are packed

    def paths(self) -> set[str]:
        """Return the paths that change."""
        return {path for adapters in self.adapters for path in adapters} | self.whole.keys()


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args`` and return its exit status: 0, or 2 for bad input, which one line names."""
    console = terminal.console()
    try:
        options = command_line(Options(), args, "python -m examples.merge")
        fmt = options.checked()
        start = time.monotonic()
        with (
            output(options.out, options.resume, sources(options, *options.folders[:-1])),
            bar(console, console.is_terminal) as progress,
        ):
            cfg, params = hf.lazy(options.base)
            updates = load(options, cfg, params)
            task = progress.add_task(f"writing {options.out}", total=len(tree.paths(params)))
            save(options, cfg, params, updates, fmt, lambda: progress.advance(task))
            folder.copy_companions(options.base, options.out)
    except (ValueError, TypeError, OSError) as error:
        terminal.complain("merge", error)
        return 2
    show(console, options, updates, time.monotonic() - start)
    return 0


def load(options: Options, cfg: Config, params: Any) -> Updates:
    """Read the adapters; raise ValueError for one of another model, and for a weight that two store whole."""
    many: list[lora.Adapters] = []
    whole: dict[str, Tensor] = {}
    paths = dict(tree.items(params))
    for i, at in enumerate(options.adapters):
        adapters, weights = peft.load_all(at, partial(hf.path_of, cfg=cfg), tied=hf.tied_modules(cfg))
        with tree.at(str(at)):
            for path in [*adapters, *weights]:
                tree.expect(path in paths, f"{path}: got no weight of that path in the base; use the adapter's own")
            lora.attach(params, adapters)  # raises for an adapter of another shape
            for path, w in weights.items():
                got, wanted = tuple(w.shape), tuple(paths[path].like.shape)
                fault = f"{path}: got the shape {got}, wanted {wanted}; resize the base if its vocabulary has grown"
                tree.expect(got == wanted, fault)
            if twice := sorted(weights.keys() & whole):
                raise ValueError(f"{twice[0]}: two adapters store it whole, and they have no sum; leave one out")
        many.append(lora.scale(adapters, options.scales[i]) if options.scales else adapters)
        whole |= weights
    return Updates(many, whole)


def save(
    options: Options, cfg: Config, params: Any, updates: Updates, fmt: Format | None, done: Callable[[], None]
) -> None:
    """Write the merged folder."""
    dtype = DTYPES.get(options.dtype or "")
    if fmt is not None:
        leaves = tree.map_with_path(partial(packed, updates, fmt, dtype), params)
        hf.save_packed(options.out, cfg, leaves, companions(options.base), lambda path: done(), options.resume)
        _, written = hf.lazy(options.out)
        for path, leaf in tree.items(params):
            out = tree.get(written, path)
            if path in updates.paths() - updates.lost.keys() and isinstance(out.like, Packed):  # of an interrupted run
                w = leaf.read()
                updates.lost[path] = loss(out.read(), total(updates, path, w), decoded(w))
        return
    dtype = dtype or tree.get(params, "embed").like.dtype
    leaves = tree.map_with_path(partial(merged, updates, dtype), params)
    size, count = int(options.shard * 2**30), lambda finished, total: done()
    dense.save(options.out, cfg, leaves, dtype, size, companions(options.base), options.resume, count)


def merged(updates: Updates, dtype: torch.dtype, path: str, leaf: Lazy) -> Lazy:
    """Return a Lazy that reads the weight at ``path`` with its updates, rounded once to ``dtype``."""
    if path not in updates.paths():
        return leaf
    return Lazy(lambda: total(updates, path, leaf.read()).to(dtype), leaf_like(leaf, dtype), leaf.stamp)


def packed(updates: Updates, fmt: Format, dtype: torch.dtype | None, path: str, leaf: Lazy) -> Lazy:
    """Return a Lazy that reads the weight at ``path`` with its updates, packed if it is a matrix of a layer."""
    like, is_changed = leaf.like, path in updates.paths()
    into, is_matrix = dtype or like.dtype, is_quantised(path, like)
    if not is_changed and isinstance(like, Packed) and (like.format, like.dtype) == (fmt, into):
        return leaf

    def read() -> Tensor | Packed:
        w = leaf.read()
        x = folder.check_finite(path, total(updates, path, w) if is_changed else decoded(w))
        if not is_matrix:
            return folder.check_finite(path, x.to(into))
        out = lora.pack_like(like, x.to(into), fmt)
        if is_changed:
            updates.lost[path] = loss(out, x, decoded(w))
        return out

    meta = leaf_like(leaf, into)
    return Lazy(read, lora.pack_like(like, meta, fmt) if is_matrix else meta, leaf.stamp)


def total(updates: Updates, path: str, w: Tensor | Packed) -> Tensor:
    """Return the sum f32 of a weight, or of what replaces it whole, and its low-rank updates."""
    x: Any = {"w": w}
    if path in updates.whole:
        x = lora.replace_weights({"w": decoded(w).float()}, {"w": updates.whole[path]})
    for adapters in updates.adapters:
        if path in adapters:
            x = lora.attach(x, {"w": adapters[path]})
    return decoded(lora.merge(x, {}, torch.float32)["w"]).float()


def leaf_like(leaf: Lazy, dtype: torch.dtype) -> Tensor:
    """Return the meta tensor of a weight in ``dtype``."""
    return dequantize(leaf.like, dtype) if isinstance(leaf.like, Packed) else leaf.like.to(dtype)


def show(console: Console, options: Options, updates: Updates, seconds: float) -> None:
    """Print what was merged, and what packing lost of it."""
    count = len(updates.paths())
    before, now = size_of(options.base), size_of(options.out)
    console.print(f"{count} weights of {options.base} merged, {seconds:.1f} s", highlight=False, soft_wrap=True)
    if updates.lost:
        table = Table("weights", Column("lost of the update", justify="right"), box=SIMPLE_HEAD, pad_edge=False)
        by_kind: dict[str, Loss] = defaultdict(Loss)
        for path, lost in updates.lost.items():
            by_kind[kind_of(path)] += lost
        for name, lost in [*sorted(by_kind.items()), ("all", sum(by_kind.values(), Loss()))]:
            table.add_row(name, str(lost))
        console.print(table)
    console.print(f"{before / 2**20:,.1f} MiB before, {now / 2**20:,.1f} MiB now", highlight=False)
    console.print(f"written {options.out}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
