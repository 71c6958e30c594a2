"""Dense products inside ``fquant.batch_invariant()`` beside torch's own: time, and rows whose bits depend on others.

    python -m tests.bench.batch_invariant
    python -m tests.bench.batch_invariant --dtype f32 --threads 1 --tokens 512

Shown first are the products of a step with adapters: of a linear with a low rank, of a dense head, and the batched ones
that make a gradient for each row of the batch. Operands have the layouts of such a step. Contestants take turns, and in
brackets is our time over torch's. Results go into memory that was used before, as in a captured step.

Then come products of other sizes. Each is computed for all rows of tokens, and for fewer of them. Counted are those in
which a row has other bits than beside all others. The exit status is 0, or 2 for bad options.
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import tyro
from torch import Tensor

from fquant.kernels.ops.ordered_matmul import ordered_matmul
from tests.bench import report, timing
from tests.bench.report import Row

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
OURS, TORCH = "in order", "torch"
WIDTHS, RESULTS, SHARES = (256, 512, 1024, 2048, 4096), (64, 512, 1024, 2048), (16, 3, 2)


@dataclass(frozen=True)
class Options:
    """Time dense products in a fixed order beside torch's, and count those whose bits depend on other rows."""

    tokens: int = 1024
    """Rows of tokens in a step."""
    batch: int = 4
    """Rows of the batch, of equal length."""
    dim: int = 1024
    """The width of the residual stream."""
    vocab: int = 4096
    """Rows of the head."""
    rank: int = 16
    """Of adapters."""
    dtype: Literal["bf16", "f32"] = "bf16"
    """Of all operands."""
    threads: int = 2
    """Threads of a product."""
    repeats: int = 15
    """Timed turns."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        for name in ("tokens", "batch", "dim", "vocab", "rank", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; wanted at least 1")
        if self.tokens % self.batch:
            raise ValueError(f"--tokens is {self.tokens}; wanted a multiple of --batch, {self.batch}")
        timing.check_threads(self.threads)


def operands(options: Options) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the operands of each product, by name."""
    tokens, dim, vocab, rank = options.tokens, options.dim, options.vocab, options.rank
    drawn = lambda *shape: torch.randn(*shape, dtype=DTYPES[options.dtype])
    by_row = lambda *width: drawn(options.batch, tokens // options.batch, *width)
    return {
        "x · aᵀ": (drawn(tokens, dim), drawn(rank, dim).mT),
        "u · bᵀ": (drawn(tokens, rank), drawn(dim, rank).mT),
        "g · b": (drawn(tokens, dim), drawn(dim, rank)),
        "g · a": (drawn(tokens, rank), drawn(rank, dim)),
        "gradients of b": (by_row(dim).mT, by_row(rank)),
        "gradients of a": (by_row(rank).mT, by_row(dim)),
        "x · headᵀ": (drawn(tokens, dim), drawn(vocab, dim).mT),
        "g · head": (drawn(tokens, vocab), drawn(vocab, dim)),
    }


def times(a: Tensor, b: Tensor, repeats: int) -> dict[str, float]:
    """Return the milliseconds of a product, by contestant."""
    y = a.new_empty(*a.shape[:-1], b.shape[-1])
    theirs = torch.bmm if a.ndim == 3 else torch.mm
    takes: dict[str, Callable[[int], Any]] = {
        OURS: lambda _: torch.ops.fquant.ordered_matmul.out(a, b, out0=y),
        TORCH: lambda _: theirs(a, b, out=y),
    }
    return timing.medians(takes, repeats)


def differ(mm: Callable[[Tensor, Tensor], Tensor], options: Options, share: int) -> int:
    """Count the products in which the first rows, 1 of ``share``, have other bits alone than beside all tokens."""
    found = 0
    for k, n, is_turned in itertools.product(WIDTHS, RESULTS, (False, True)):
        a, b = (torch.randn(*shape, dtype=DTYPES[options.dtype]) for shape in ((options.tokens, k), (k, n)))
        b = b.mT.contiguous().mT if is_turned else b
        few = max(1, options.tokens // share)
        found += not torch.equal(mm(a[:few], b), mm(a, b)[:few])
    return found


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; see the module's docstring."""
    options, console = tyro.cli(Options, args=args, description=Options.__doc__), report.console()
    try:
        options.check()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    with timing.threads(options.threads):
        rows = [
            Row(f"{name} {tuple(a.shape)}", "ms", times(a, b, options.repeats), [])
            for name, (a, b) in operands(options).items()
        ]
        console.print(report.table(rows, [OURS, TORCH]))
        all_of_them = len(WIDTHS) * len(RESULTS) * 2
        for share, (name, mm) in itertools.product(SHARES, ((OURS, ordered_matmul), (TORCH, torch.mm))):
            few, found = max(1, options.tokens // share), differ(mm, options, share)
            console.print(f"{few} of {options.tokens} rows, {name}: {found} of {all_of_them} products have other bits")
    return 0


if __name__ == "__main__":
    sys.exit(main())
