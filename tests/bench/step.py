"""fquant's training step beside those of PEFT with bitsandbytes, torchao and dense weights, in one run.

    python -m tests.bench.step                              # the comparison, on one process and on two
    python -m tests.bench.step --only fquant bnb limit      # some contestants, by the names below
    python -m tests.bench.step --layers 6 --dim 1536 --hidden 4096 --vocab 50000 --dtype f32
    python -m tests.bench.step --scale                      # fquant's step against layers and sequence length

Contestants are those of tests/bench/step_sides.py, each in processes of its own, so that its memory is its own. All are
started first, and then take steps in turns, one at a time, while the others sleep. On one process a step has all
threads, on two each has half.

Shown are the median step, tokens a second, and the peak of resident memory during steps, the first included. The peak
is over the memory of the loaded model and all modules of torch that a step takes; of several processes the first one's.

The bounds are meant for 2 cores and the default sizes, and are judged for any options. The share of the limit is the
time of products and attention alone over that of a step. This is no test: the exit status is 0 if bounds are met or
missed, 2 for bad options, and 1 if a contestant of ours failed.
"""

import contextlib
import gc
import importlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket
from statistics import median
from typing import Any, Literal

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.table import Table

from examples.common.command_line import DTYPES
from tests.bench import report, timing
from tests.bench.report import Wanted, at_most
from tests.bench.step_sides import SIDES, Shape, Side

PATIENCE = 600.0  # seconds for a contestant to load, or to take a step
LEAVE = 20.0  # seconds for its processes to end
PEERS, PEERS_2 = ("dense", "bnb", "torchao"), ("dense fsdp=2", "torchao fsdp=2", "bnb ddp=2")
LIMITS = (("fquant", "limit"), ("fquant fsdp=2", "limit on two"), ("fquant dp=2", "limit on two"))
LAYERS, LENGTHS = (2, 4, 8, 16), (64, 128, 256, 512)  # of --scale


@dataclass(frozen=True)
class Options:
    """Time fquant's QLoRA step beside PEFT over dense weights, bitsandbytes and torchao, in turns and in one run.

    Prints the median step, tokens a second and the peak of resident memory over the loaded model, and judges the
    bounds. Peers that are not installed, or fail, are named with the reason.
    """

    shape: tyro.conf.OmitArgPrefixes[Shape] = field(default_factory=Shape)
    """The model, and the tokens of a step."""
    steps: int = 5
    """Timed steps of each contestant, behind one that is not."""
    threads: int = 2
    """Threads on one process; each of two has half of them."""
    dtype: Literal["bf16", "f32"] = "bf16"
    """Of the residual stream, and of the peers' and the limit's weights."""
    only: tuple[str, ...] = ()
    """Contestants; the default is all of them."""
    scale: bool = False
    """Time fquant alone, against the number of layers and the length of sequences."""
    json: Path | None = None
    """A file for the figures."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        if unknown := [name for name in self.only if name not in SIDES]:
            raise ValueError(f"--only {', '.join(unknown)}; wanted some of {', '.join(SIDES)}")
        if self.steps < 1:
            raise ValueError(f"--steps is {self.steps}; wanted at least 1")
        timing.check_threads(self.threads)
        report.check_writable(self.json)


@dataclass
class Figures:
    """The figures of a contestant: seconds of the first step and the others, MiB, the last loss, and its facts."""

    first: float
    steps: list[float]
    loaded: float
    peak: float
    loss: float
    facts: dict[str, int]

    @property
    def step(self) -> float:
        """Return the median step in seconds."""
        return median(self.steps)

    @property
    def over(self) -> float:
        """Return the MiB at the peak over the loaded model."""
        return self.peak - self.loaded


class Failed(Exception):
    """Raised if a contestant could not do its step."""


class Contestant:
    """The processes of one side, and their last answers."""

    def __init__(self, side: Side, shape: Shape, threads: int) -> None:
        ranks, context = side.ranks, multiprocessing.get_context("spawn")
        with socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.ends, self.processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            each = max(1, threads // ranks)
            process = context.Process(target=_serve, args=(side, shape, rank, each, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.ends.append(ours)
            self.processes.append(process)
        self.loaded = self._answers()[0]

    def step(self) -> float:
        """Take a step; return the seconds of the slowest rank."""
        answers = self._ask("step")
        self.peak, self.loss = answers[0][1:]
        return max(seconds for seconds, *_ in answers)

    def close(self) -> dict[str, int]:
        """Return the facts of the side and end it."""
        facts = self._ask("facts")[0]
        for end in self.ends:
            end.send("end")
        self.kill(LEAVE)
        return facts

    def kill(self, seconds: float = 0.0) -> None:
        """End the processes now, or after so many seconds: a killed process leaks its semaphores."""
        for process in self.processes:
            process.join(seconds)
            process.kill()
            process.join()

    def _ask(self, what: str) -> list[Any]:
        for end in self.ends:
            with contextlib.suppress(OSError):  # a process that died, of which there is no answer
                end.send(what)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for end in self.ends:
            try:
                answer = end.recv() if end.poll(PATIENCE) else Failed(f"no answer in {PATIENCE:.0f} s")
            except (EOFError, OSError):
                answer = Failed("its process died; out of memory?")
            if isinstance(answer, Failed):
                self.kill()
                raise answer
            answers.append(answer)
        return answers


def _serve(side: Side, shape: Shape, rank: int, threads: int, port: int, end: Connection) -> None:
    """Run one process of a side: load, then answer requests."""
    try:
        importlib.import_module("torch._dynamo")  # fake tensors and the peers import it at their first use
        torch.set_num_threads(threads)
        if side.ranks > 1:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
            os.environ |= {"WORLD_SIZE": str(side.ranks), "LOCAL_RANK": str(rank)}
            if not side.is_ours:
                torch.distributed.init_process_group("gloo")
        take = side.make(shape)
        gc.collect()
        with timing.memory("fresh") as trim:
            trim()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        end.send(_resident("VmRSS"))
        while (asked := end.recv()) != "end":
            if asked == "step":
                began = time.perf_counter()
                loss = take()
                end.send((time.perf_counter() - began, _resident("VmHWM"), loss))
            else:
                end.send(getattr(take, "facts", dict)())
    except EOFError:
        pass
    except Exception as error:
        end.send(Failed(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"))
        if side.is_ours:
            traceback.print_exc()


def _resident(field: str) -> float:
    """Return the MiB resident in this process, now (VmRSS) or at most (VmHWM)."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def measure(
    sides: Mapping[str, Side], shape: Shape, steps: int, threads: int
) -> tuple[dict[str, Figures], dict[str, str]]:
    """Measure every contestant; return the figures, and the reasons of those without."""
    running, first, missing = dict[str, Contestant](), dict[str, float](), dict[str, str]()
    seen: dict[str, list[float]] = {name: [] for name in sides}
    with report.progress() as bar:
        task = bar.add_task("loading", total=len(sides) * (steps + 2))

        def attempt(name: str, what: Any) -> None:
            bar.update(task, description=name)
            try:
                what()
            except Failed as error:
                missing[name] = str(error)
                running.pop(name, None)
            bar.advance(task)

        for name, side in sides.items():
            attempt(name, lambda name=name, side=side: running.__setitem__(name, Contestant(side, shape, threads)))
        for name in list(running):
            attempt(name, lambda name=name: first.__setitem__(name, running[name].step()))
        for _ in range(steps):
            for name in list(running):
                attempt(name, lambda name=name: seen[name].append(running[name].step()))
        figures = {}
        for name, it in running.items():
            bar.update(task, description=f"{name}: what was predicted")
            figures[name] = Figures(first[name], seen[name], it.loaded, it.peak, it.loss, it.close())
    return figures, missing


def judge(figures: dict[str, Figures]) -> list[Wanted]:
    """Judge the bounds of the contestants that are there."""
    out: list[Wanted] = []
    ours, one = figures.get("fquant"), [figures[name] for name in PEERS if name in figures]
    if ours and one:
        out.append(at_most("of the fastest peer's step", ours.step / min(f.step for f in one), 1 / 1.15))
        out.append(at_most("of the smallest peer's peak over loaded", ours.over / min(f.over for f in one), 0.35))
    if ours and (eager := figures.get("fquant eager")):
        out.append(at_most("of the eager step's peak over loaded", ours.over / eager.over, 0.3))
    for name, limit in LIMITS:
        if name in figures and limit in figures:
            ratio = figures[name].step / figures[limit].step
            out.append(
                at_most(f"of the limit's step, {name} (its share of the limit: {1 / ratio:.3f})", ratio, 1 / 0.95)
            )
    sharded = figures.get("fquant fsdp=2")
    if sharded and (torchao := figures.get("torchao fsdp=2")):
        out.append(at_most("of the step of PEFT, FSDP2 and torchao, fsdp=2", sharded.step / torchao.step, 1 / 1.7))
    if sharded and (whole := figures.get("fquant dp=2")):
        out.append(at_most("of our own step with dp=2, fsdp=2", sharded.step / whole.step, 1.05))
    for name, f in figures.items():
        if f.facts:
            off = f.facts["predicted"] / f.facts["measured"] - 1
            out.append(at_most(f"off the measured peak of tensors, {name}", abs(off), 0.1))
            if f.facts["sent"]:
                same = f.facts["sent predicted"] == f.facts["sent"]
                out.append(Wanted(f"{f.facts['sent']:,} bytes sent, as predicted, {name}", same))
    return out


def table(figures: dict[str, Figures], tokens: int) -> Table:
    """Return a table with a row for each contestant; in brackets our step over theirs."""
    out = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "step, s", "tok/s", "peak over loaded, MiB", "loaded, MiB", "first step, s", "loss"):
        out.add_column(name, justify="right" if name else "left", no_wrap=True)
    for name, f in figures.items():
        ours = figures.get("fquant" if SIDES[name].ranks == 1 else "fquant fsdp=2")
        ratio = "" if ours is None or ours is f else f" ({ours.step / f.step:.2f})"
        loss = f"{f.loss:.3f}" if f.loss else ""
        cells = (f"{f.step:.3f}{ratio}", f"{tokens / f.step:.0f}", f"{f.over:.0f}", f"{f.loaded:.0f}", f"{f.first:.1f}")
        out.add_row(name, *cells, loss)
    return out


def sides_in(dtype: torch.dtype, names: Iterable[str]) -> dict[str, Side]:
    """Return the contestants of these names, whose residual stream is of ``dtype``."""
    return {name: SIDES[name]._replace(make=partial(SIDES[name].make, dtype=dtype)) for name in names}


def scale(options: Options) -> Table:
    """Time fquant against layers and length: the step, and its time per layer and token, which should be constant."""
    out = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("layers", "sequence", "step, s", "per layer and token, µs", "peak over loaded, MiB", "first step, s"):
        out.add_column(name, justify="right")
    sides = sides_in(DTYPES[options.dtype], ["fquant"])
    shapes = [replace(options.shape, layers=n) for n in LAYERS] + [replace(options.shape, seq=n) for n in LENGTHS]
    for shape in dict.fromkeys(shapes):
        figures, missing = measure(sides, shape, options.steps, options.threads)
        if missing:
            raise Failed(missing["fquant"])
        f = figures["fquant"]
        each = f.step / shape.layers / shape.tokens * 1e6
        cells = (f"{f.step:.3f}", f"{each:.1f}", f"{f.over:.0f}", f"{f.first:.1f}")
        out.add_row(str(shape.layers), str(shape.seq), *cells)
    return out


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; see the module's docstring."""
    options, console = tyro.cli(Options, args=args, description=Options.__doc__), report.console()
    try:
        options.check()
        if options.scale:
            console.print(scale(options))
            return 0
        sides = sides_in(DTYPES[options.dtype], [name for name in SIDES if name in options.only or not options.only])
        figures, missing = measure(sides, options.shape, options.steps, options.threads)
    except (ValueError, Failed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    console.print(table(figures, options.shape.tokens))
    for name, why in missing.items():
        console.print(f"{name}: {why}", markup=False)
    for wanted in judge(figures):
        console.print(report.verdict(wanted))
    if options.json is not None:
        report.write(options.json, {name: asdict(f) for name, f in figures.items()})
    return 1 if any(name.startswith("fquant") for name in missing) else 0


if __name__ == "__main__":
    sys.exit(main())
