"""Runs that are killed, files that are damaged, and ranks that deviate: what becomes of them, and what it costs.

    python -m tests.bench.faults                            # everything: some hours on 2 cores
    python -m tests.bench.faults --only kills --faults 20   # some rows, by the names below

    kills        faults at random moments of runs that go on at other world sizes                        (kills.py)
    throughput   steps a second that are kept with a fault every 30 s                                    (throughput.py)
    damage       flipped bits, cuts and torn writes in checkpoints, adapters and bases                   (damage.py)
    mismatches   seconds until ranks that do different things have an error                              (mismatches.py)
    bits         losses and adapters of each step on 1, 2, 3, 5 and 8 ranks                              (bits.py)
    costs        ordered sums, and a checkpoint every step, on the step of tests.bench.step              (costs.py)

All is a function of the seed but for the moments at which processes run. Times mean something on a quiet machine only.
This is no test: the exit status is 0 if bounds are met or missed, and 2 for bad options.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import tyro
from rich.box import SIMPLE_HEAD
from rich.table import Table

from examples.common.command_line import DTYPES
from tests.bench import report
from tests.bench.report import Wanted, at_most
from tests.bench.step_sides import Shape

from . import bits, costs, damage, kills, mismatches, throughput


class Part(NamedTuple):
    """A row of the table: its name, its figures as lines, and the bounds."""

    name: str
    figures: list[str]
    wanted: list[Wanted]


@dataclass(frozen=True)
class Options:
    """Print what becomes of faults beside what is wanted."""

    only: tuple[str, ...] = ()
    """Rows; the default is all of them."""
    faults: int = 200
    """Of kills."""
    minutes: float = 4.0
    """Of throughput: of each of two runs."""
    every: float = 30.0
    """Of throughput: seconds between two faults."""
    damages: int = 1000
    """Of damage."""
    steps: int = 1000
    """Of bits."""
    shape: tyro.conf.OmitArgPrefixes[Shape] = field(default_factory=Shape)
    """Of costs: the model, and the tokens of a step."""
    dtype: Literal["bf16", "f32"] = "bf16"
    """Of costs: of the residual stream; bf16 is slow on a CPU without products for it."""
    block: int = 1
    """Of costs: steps of a turn."""
    turns: int = 40
    """Of costs: turns of each contestant."""
    seed: int = 0
    """Of faults and damages."""
    json: Path | None = None
    """A file for the figures."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        if unknown := [name for name in self.only if name not in ROWS]:
            raise ValueError(f"--only {', '.join(unknown)}; wanted some of {', '.join(ROWS)}")
        for name in ("faults", "damages", "steps", "block", "turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; wanted at least 1")
        for name in ("minutes", "every"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name} is {getattr(self, name)}; wanted a number above 0")
        report.check_writable(self.json)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _kills(options: Options, root: Path) -> Part:
    found = kills.measure(root / "kills", options.faults, options.seed, _say)
    return of_kills(found, options.faults)


def of_kills(found: kills.Found, wanted: int) -> Part:
    """Judge what ``wanted`` faults did."""
    count = sum(found.faults.values())
    figures = [f"{count} faults: {', '.join(f'{n} {kind}' for kind, n in sorted(found.faults.items()))}"]
    figures += [f"{kind}: named after {_spread(seconds)} s" for kind, seconds in found.named.items()]
    if found.gone:
        figures.append(f"ranks live on for {_spread(found.gone)} s without their launcher")
    figures += [f"failed: {error}" for error in found.failures] + [f"not named: {text}" for text in found.unnamed]
    judged = [
        Wanted(f"{count} faults of {wanted}", count == wanted),
        at_most(f"of {count} faults not resumed", count - found.resumed, 0),
        at_most(f"of {found.runs} adapters with other bytes", found.runs - found.identical, 0),
        at_most("steps lost, repeated or of another loss", found.wrong_steps, 0),
        at_most("launchers that left processes", found.processes, 0),
        at_most(f"temporary files in folders of runs {_few(found.files)}".strip(), len(found.files), 0),
        at_most(f"files left in the folder of temporary ones {_few(found.temporary)}".strip(), len(found.temporary), 0),
        at_most("ranks not named", len(found.unnamed), 0),
    ]
    judged += [at_most(f"s to name a rank, {k}", max(found.named[k]), kills.NAMED[k]) for k in sorted(found.named)]
    return Part("kills", figures, judged)


def _throughput(options: Options, root: Path) -> Part:
    found = throughput.measure(root / "throughput", 60 * options.minutes, options.every, _say)
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in found.medians().items())
    rates = lambda some: ", ".join(f"{rate:.1f}" for rate in some)
    figures = [
        f"steps a second: {rates(found.alone)} alone, {rates(found.disturbed)} with a fault every {options.every:g} s",
        f"a fault: {parts}; imports alone take {found.imports:.1f} s",
    ]
    return Part("throughput", figures, [Wanted(f"{found.kept:.2f} kept, at least 0.9", found.kept >= 0.9)])


def _damage(options: Options, root: Path) -> Part:
    return of_damage(damage.measure(root / "damage", options.damages, options.seed))


def of_damage(found: damage.Found) -> Part:
    """Judge what readers did."""
    count = sum(found.damages.values())
    figures = [f"{count} damages: {', '.join(f'{kind} {n}' for kind, n in sorted(found.damages.items()))}"]
    figures += [f"missed: {text}" for text in found.missed]
    return Part(
        "damage",
        figures,
        [
            at_most(f"of {count} not refused by the name of the file", count - found.refused, 0),
            at_most(f"of {count} refused without the place", count - found.placed, 0),
        ],
    )


def _mismatches(options: Options, root: Path) -> Part:
    return of_mismatches({name: mismatches.measure(name) for name in mismatches.CASES})


def of_mismatches(found: dict[str, mismatches.Outcome]) -> Part:
    """Judge the errors of mismatches."""
    took = {name: it.seconds for name, it in found.items() if it.seconds is not None}
    figures = [f"{name}: {took[name]:.2f} s" if name in took else f"{name}: {it.error}" for name, it in found.items()]
    unnamed = [name for name, it in found.items() if not it.named]
    return Part(
        "mismatches",
        figures,
        [
            at_most("s to an error", max(took.values(), default=0.0), mismatches.WANTED),
            at_most(f"of {len(found)} without an error on every rank", len(found) - len(took), 0),
            at_most(f"errors that do not name both ranks {_few(unnamed)}".strip(), len(unnamed), 0),
        ],
    )


def _bits(options: Options, root: Path) -> Part:
    wanted, figures, differ = bits.oracle(options.steps), list[str](), 0
    cases = [({"fsdp": 1}, True), *((axes, captured) for axes in bits.MESHES for captured in (True, False))]
    for axes, captured in cases:
        first = bits.measure(axes, captured, options.steps, wanted)
        mesh = ",".join(f"{axis}={size}" for axis, size in axes.items())
        _say(f"bits: {mesh}, {'captured' if captured else 'not captured'}: {'same' if first is None else first}")
        if first is not None:
            differ += 1
            figures.append(f"{mesh}{', captured' if captured else ''}: other bits after step {first}")
    figures.append(f"{options.steps} steps on {len(cases)} meshes, captured and not, beside one process")
    return Part("bits", figures, [at_most(f"of {len(cases)} with other losses or adapters", differ, 0)])


def _costs(options: Options, root: Path) -> Part:
    figures, judged = list[str](), list[Wanted]()
    for axes in ({"fsdp": 1}, {"fsdp": 2}):
        where = f"fsdp={axes['fsdp']}"
        found = costs.measure(root / where, options.shape, DTYPES[options.dtype], axes, options.block, options.turns)
        figures.append(f"{where}: {', '.join(f'{name} {seconds:.3f} s' for name, (seconds, _) in found.items())}")
        judged.append(at_most(f"of a plain step, {costs.ORDERED}, {where}", found[costs.ORDERED][1], 1.03))
        judged.append(at_most(f"of a plain step, {costs.SAVED}, {where}", found[costs.SAVED][1], 1.01))
    return Part("costs", figures, judged)


ROWS: dict[str, Callable[[Options, Path], Part]] = {
    "kills": _kills, "throughput": _throughput, "damage": _damage, "mismatches": _mismatches, "bits": _bits,
    "costs": _costs,
}  # fmt: skip


def _spread(seconds: list[float]) -> str:
    found = sorted(seconds)
    return f"{found[len(found) // 2]:.1f}" + (f" (at most {found[-1]:.1f})" if found[1:] else "")


def _few(names: list[str]) -> str:
    return f"({', '.join(names[:3])}{', ...' if names[3:] else ''})" if names else ""


def table(parts: list[Part]) -> Table:
    """Return a table with a row for each part: its figures, and its bounds with their verdicts."""
    out = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "figures", "wanted"):
        out.add_column(name, no_wrap=not name)
    for part in parts:
        lines = "\n".join(line.replace("[", r"\[") for line in part.figures)
        out.add_row(part.name, lines, "\n".join(map(report.verdict, part.wanted)))
    return out


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; return 0, or 2 for bad options, which one line names."""
    options = tyro.cli(Options, args=args, description=Options.__doc__, prog="python -m tests.bench.faults")
    try:
        options.check()
    except ValueError as error:
        print(f"faults: {error}", file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of what ranks are forked from; each sets its own number
    parts = list[Part]()
    with tempfile.TemporaryDirectory(prefix="faults-") as root:
        for name, row in ROWS.items():
            if name in options.only or not options.only:
                _say(name)
                parts.append(row(options, Path(root)))
    report.console().print(table(parts))
    if options.json is not None:
        report.write(options.json, {"options": asdict(options), "rows": [part._asdict() for part in parts]})
    return 0
