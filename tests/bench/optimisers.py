"""Time and state of a step of AdamW: ours with moments of each kind, beside torch's, bitsandbytes' and torchao's.

    python -m tests.bench.optimisers                         # 16 M parameters in float32: a minute on two cores
    python -m tests.bench.optimisers --size 1048576 --torchao --json f.json

Columns: ours with moments of 8 bits, of 4 bits, in FP8 and in float32; ``torch.optim.AdamW(fused=True)``;
``bitsandbytes.optim.AdamW8bit``; with ``--torchao`` its 8-bit AdamW, which first compiles for seconds. Ours is
captured, with parameters and state donated. Rows:

    step, ms    a step of one leaf, the median of interleaved steps; in brackets ours of 8 bits over the column
    state       bytes of moments and step an element

The first column is judged: at most 1.5 times the time of torch in float32, and at most 0.27 times its bytes. The exit
status is 0, or 2 for bad options.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor

from fquant import jit, optim, random, tree
from tests.bench import report, timing
from tests.bench.report import Row, at_most

OURS = {"8 bits": optim.DYNAMIC8, "4 bits": optim.DYNAMIC4, "fp8": optim.FP8, "f32": None}
PEERS = ("torch", "bitsandbytes", "torchao")
MOST_TIME, MOST_BYTES = 1.5, 0.27  # of torch's
LR = 1e-3


@dataclass(frozen=True)
class Options:
    """A step of AdamW on one leaf, beside the steps of peers."""

    size: int = 16 << 20
    """Elements of the parameter."""
    repeats: int = 9
    """Timed steps of each contestant, at least."""
    torchao: bool = False
    """Time torchao too, which compiles its step."""
    seed: int = 0
    """Of the parameter and its gradient."""
    json: Path | None = None
    """File to write the figures to."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        for name, least in (("size", 4096), ("repeats", 1)):  # below 4096 elements the peers keep float32
            if getattr(self, name) < least:
                raise ValueError(f"--{name} is {getattr(self, name)}; wanted at least {least}")
        report.check_writable(self.json)


def ours(moments: optim.Moments | None, param: Tensor, grad: Tensor) -> tuple[Callable[[int], object], int]:
    """Return a captured step that keeps its parameter and state, and the bytes of the state."""
    opt = optim.adamw(LR, moments=moments)

    @jit(donate=("params", "state"))
    def step(params: Any, state: Any, grads: Any) -> Any:
        return optim.step(opt, grads, state, params)

    grads, held = {"w": grad}, [({"w": param.clone()}, opt.init({"w": param}))]
    nbytes = tree.nbytes(held[0][1])

    def call(_: int) -> None:
        held.append(step(*held.pop(), grads))

    return call, nbytes


def peer(name: str, param: Tensor, grad: Tensor) -> tuple[Callable[[int], object], int]:
    """Return the step of a peer, and the bytes of its state after one step."""
    p = torch.nn.Parameter(param.clone())
    p.grad = grad.clone()
    if name == "torch":
        opt: Any = torch.optim.AdamW([p], LR, fused=True)
    elif name == "bitsandbytes":
        import bitsandbytes

        opt = bitsandbytes.optim.AdamW8bit([p], LR)
    else:
        from torchao.optim import AdamW8bit

        opt = AdamW8bit([p], LR)
    opt.step()
    parts = {"codes", "scale"}  # of a subclass of torchao's; the table of values is not counted for any contestant
    state = {key: x for key, x in opt.state[p].items() if isinstance(x, Tensor) and not key.startswith("qmap")}
    inner = lambda x: [getattr(x, part) for part in parts] if hasattr(x, "codes") else [x]
    return lambda _: opt.step(), tree.nbytes([t for x in state.values() for t in inner(x)])


def measure(options: Options) -> list[Row]:
    """Return the rows of the table."""
    key = random.key(options.seed)
    draw = lambda name: random.normal(random.fold(key, name), (options.size,))
    param, grad = draw("parameter"), draw("gradient") * 0.01
    made = {name: ours(moments, param, grad) for name, moments in OURS.items()}
    made |= {name: peer(name, param, grad) for name in PEERS if name != "torchao" or options.torchao}
    times = timing.medians({name: call for name, (call, _) in made.items()}, options.repeats)
    sizes = {name: nbytes / options.size for name, (_, nbytes) in made.items()}
    first = next(iter(OURS))
    judged = at_most("of torch's time", times[first] / times["torch"], MOST_TIME)
    small = at_most("of torch's bytes", sizes[first] / sizes["torch"], MOST_BYTES)
    return [Row("step", "ms", times, [judged]), Row("state", "bytes an element", sizes, [small])]


def run(options: Options) -> None:
    """Measure, print the table, write the figures."""
    rows = measure(options)
    title = f"AdamW, {options.size} elements in float32, {torch.get_num_threads()} threads, seed {options.seed}"
    out = report.console()
    out.print(title, highlight=False, markup=False, soft_wrap=True)
    out.print(report.table(rows, list(rows[0].figures)))
    if options.json is not None:
        figures = {"title": title, "options": asdict(options), "rows": [row._asdict() for row in rows]}
        report.write(options.json, figures)


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; return 0, or 2 for bad options, which one line names."""
    options = tyro.cli(Options, args=sys.argv[1:] if args is None else args, prog="python -m tests.bench.optimisers")
    try:
        options.check()
    except ValueError as error:
        print(f"optimisers: {error}", file=sys.stderr)
        return 2
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
