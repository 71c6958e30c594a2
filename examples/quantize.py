"""Quantise a Hugging Face folder once, and keep the packed weights for the other programs.

    python -m examples.quantize DIR OUT                                # NF4 with double quantisation, 4.13 bits
    python -m examples.quantize DIR OUT --format int4 --block 64       # also nf4, fp4, int8, fp8, mxfp4, ...
    python -m examples.quantize DIR OUT --format aq_2x8 --resume       # goes on where it was interrupted
    python -m examples.qlora --model OUT                               # trains beside these weights

Each weight is read, quantised and written in turn, so memory is that of the largest. Matrices of layers are quantised;
embeddings, head, norms, biases and routers of experts stay dense. Tokenizer and generation config are copied. A weight
that is packed already is kept if it has the format, and otherwise quantised again from its decoded values. At the end a
table shows, for each kind of weight, bytes and the relative error ``‖decoded - w‖ / ‖w‖``, measured on the way.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor

from fquant import Packed, dequantize, quantize, tree
from fquant.format import Format
from fquant.lazy import Lazy
from models import hf
from models.config import Config
from models.export import folder

from .common import terminal
from .common.command_line import DTYPES, FormatName, command_line, parse_format
from .common.model_folders import MIB, Loss, companions, count, is_quantised, kind_of, loss, output, sources
from .common.progress import bar

NOT_GIVEN = Path()


@dataclass(frozen=True)
class Options:
    """Quantise the linear weights of a Hugging Face folder, and write a packed folder for the other programs here."""

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="IN")]
    """Folder with config.json and safetensors."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT")]
    """Folder to write: config.json, packed.safetensors, and the tokenizer."""
    format: FormatName = "nf4_dq"
    """How weights are packed; aq_2x8 and aq_3x8 learn 16 and 24 KiB of vectors a weight, slowly."""
    block: int | None = None
    """Weights that share a scale; default: the format's own, of int8, aq_2x8 and aq_3x8 a row."""
    dtype: Literal["bf16", "f16", "f32"] | None = None
    """Of the dense weights and of decoded ones; default: as in the files."""
    resume: bool = False
    """Continue an interrupted run of the same options and files: weights that it has written are kept."""

    def checked(self) -> Format:
        """Return the format; raise ValueError for options that do not fit together."""
        for name, at in (("IN", self.model), ("OUT", self.out)):
            if at == NOT_GIVEN:
                raise ValueError(f"there is no {name}; wanted a folder to read, and one to write; see --help")
        fmt = parse_format(self.format, self.block)
        if fmt is None:
            raise ValueError("--format none leaves nothing to do; wanted a format, see --help")
        return fmt


@dataclass(frozen=True)
class Sums:
    """The sums over all weights of a kind: their number, elements, bytes before and now, and the loss."""

    tensors: int = 0
    elements: int = 0
    before: int = 0
    now: int = 0
    loss: Loss | None = None

    def __add__(self, other: "Sums") -> "Sums":
        losses = [x.loss for x in (self, other) if x.loss is not None]
        total = sum(losses, Loss()) if losses else None
        both = zip(astuple(self)[:4], astuple(other)[:4], strict=True)
        return Sums(*(a + b for a, b in both), loss=total)


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args`` and return its exit status: 0, or 2 for bad input, which one line names."""
    console = terminal.console()
    try:
        options = command_line(Options(NOT_GIVEN, NOT_GIVEN), args, "python -m examples.quantize")
        fmt = options.checked()
        start = time.monotonic()
        with (
            output(options.out, options.resume, sources(options, options.model)),
            bar(console, console.is_terminal) as progress,
        ):
            cfg, params = hf.lazy(options.model)
            task = progress.add_task(f"writing {options.out}", total=len(tree.paths(params)))
            found = save(options, cfg, params, fmt, lambda path: progress.advance(task))
            copied = folder.copy_companions(options.model, options.out)
    except (ValueError, TypeError, OSError) as error:
        terminal.complain("quantize", error)
        return 2
    show(console, options, found, time.monotonic() - start)
    console.print(f"copied {', '.join(copied)}" if copied else "there is no tokenizer to copy", highlight=False)
    console.print(f"written {options.out}", highlight=False, soft_wrap=True)
    return 0


def save(options: Options, cfg: Config, params: Any, fmt: Format, done: Callable[[str], None]) -> dict[str, Sums]:
    """Write the packed folder; return the sums of each kind of weight."""
    found: dict[str, Sums] = {}
    pack = partial(packed, fmt=fmt, dtype=DTYPES.get(options.dtype or ""))

    def leaf(path: str, x: Lazy) -> Lazy:
        def read() -> Tensor | Packed:
            w = x.read()
            out = folder.check_finite(path, pack(path, w))
            found[path] = sums(w, out)
            return out

        return Lazy(read, pack(path, x.like), x.stamp)

    wanted = tree.map_with_path(leaf, params)
    hf.save_packed(options.out, cfg, wanted, companions(options.model), done, options.resume)
    _, written = hf.lazy(options.out)
    by_kind: dict[str, Sums] = defaultdict(Sums)
    for path, x in tree.items(params):
        if path not in found:  # an interrupted run has written it
            found[path] = sums(x.read(), tree.get(written, path).read())
        by_kind[kind_of(path)] += found[path]
    return by_kind


def sums(w: Tensor | Packed, out: Tensor | Packed) -> Sums:
    """Return the sizes of one weight before and now, and its loss if it was quantised."""
    same = isinstance(w, Packed) and isinstance(out, Packed) and w.format == out.format and w.dtype == out.dtype
    lost = loss(out, w) if isinstance(out, Packed) and not same else None
    return Sums(1, count(w), tree.nbytes(w), tree.nbytes(out), lost)


def packed(path: str, w: Tensor | Packed, fmt: Format, dtype: torch.dtype | None) -> Tensor | Packed:
    """Quantise ``w``, cast to ``dtype`` if given; keep what stays dense, and what has the format already."""
    if isinstance(w, Packed):
        if w.format == fmt and dtype in (None, w.dtype):
            return w
        w = dequantize(w, dtype)
    w = w.to(dtype=dtype)
    return quantize(w, fmt) if is_quantised(path, w) else w


def show(console: Console, options: Options, found: dict[str, Sums], seconds: float) -> None:
    """Print a row for each kind of weight, and the sums."""
    right = [Column(name, justify="right") for name in ("tensors", "MiB before", "MiB now", "bits", "error")]
    table = Table("weights", *right, box=SIMPLE_HEAD, pad_edge=False, show_footer=False)
    total = sum(found.values(), Sums())
    for name, x in [*sorted(found.items(), key=lambda item: -item[1].before), ("all", total)]:
        sizes = f"{x.before / MIB:,.1f}", f"{x.now / MIB:,.1f}", f"{8 * x.now / max(1, x.elements):.2f}"
        table.add_row(name, f"{x.tensors}", *sizes, "" if x.loss is None else str(x.loss))
    console.print(f"{options.model} in {options.format}, {seconds:.1f} s", highlight=False, soft_wrap=True)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
