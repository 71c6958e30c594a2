"""Start, record and resume a run of a program that trains.

    run.json              the options, the mesh, the processes of the run, and digests (examples/common/run_folder.py)
    metrics.jsonl         a line a step (examples/common/progress.py)
    checkpoints/step-40/  the state, every so many steps and at the end (examples/common/checkpoints.py)
    result.json           the results

Each file and each checkpoint is written whole, so the state of a killed run is that of one step. A run resumes on any
mesh from its folder, to the bit, or on the same mesh if sums over rows follow the mesh. With more ``--steps`` it goes
on beyond its end. One that was killed before its first checkpoint begins again. A checkpoint that is damaged and data
or a model that changed since the start are refused.

A run that is stopped by Ctrl-C or SIGTERM leaves with a checkpoint (launch/interrupts.py). One of which a rank
dies begins again from its last checkpoint if it may. With ``--restarts`` this program starts all local ranks again.
With ``--elastic`` a command begins the run in ``--out``, or goes on there with as many processes as there are now.
torchrun starts the same command line again after a death.
"""

import math
import os
import signal
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from . import checkpoints, devices, launch, run_folder, terminal, tracking, verification
from .checkpoints import RUN
from .command_line import axes_in, check_least, command_line
from .training_loop import Fault, work

RESULT = "result.json"
COUNTS = ("batch", "steps", "save_every", "publish_every", "keep", "validate_every", "patience", "verify_every")
# Options that are not of the run itself.
FREE = ("out", "resume", "elastic", "restarts", "mesh", "device", "show_data", "json")


class Options:
    """The options of a program that trains: the base of a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    ALONE: ClassVar[int]  # processes that the program starts on the host without --mesh
    LEAST: ClassVar[dict[str, int]]  # values of some options
    POSITIVE: ClassVar[tuple[str, ...]]  # options that are numbers above 0
    mesh: str | None
    device: str
    batch: int
    steps: int | None  # None until the data are known
    save_every: int | None  # None until it is known what is trained
    out: Path | None
    resume: Path | None
    keep: int = 1  # checkpoints
    publish_every: int = 20  # steps
    elastic: bool = False
    restarts: int = 0
    track: tracking.Tracker | None = None
    validate_every: int | None = None  # steps
    patience: int | None = None  # validations
    verify_every: int | None = 20  # steps; None: never

    def check(self) -> None:
        """Raise ValueError for values out of range, before anything is started or read."""
        check_least(self, self.LEAST | dict.fromkeys(COUNTS, 1) | {"restarts": 0})
        for name in self.POSITIVE:
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; wanted a number above 0")
        if self.patience is not None and self.validate_every is None:
            raise ValueError(f"--patience is {self.patience} without --validate-every; give both")
        tracking.check(self.track)
        if self.resume is not None and self.out is not None:
            raise ValueError("--resume continues in its own folder; leave out --out")
        if self.restarts and "RANK" in os.environ:
            raise ValueError(f"--restarts {self.restarts} under torchrun, which restarts ranks; use its --max-restarts")
        if self.elastic and self.out is None and self.resume is None:
            raise ValueError("--elastic begins a run in --out or goes on there; give --out")

    def axes(self, world: int | None = None) -> dict[str, int]:
        """Return the mesh as axis -> size; without --mesh, fsdp over all processes, or over all CUDA devices.

        ``world`` is their number, None if this program starts them. Raises ValueError for a mesh of another size.
        """
        if self.mesh is None:
            return {"fsdp": world or devices.num_ranks(self.device, self.ALONE, self.batch)}
        axes = axes_in(self.mesh)
        if world is not None and (ranks := math.prod(axes.values())) != world:
            fix = f"wanted sizes that multiply to {world}, such as fsdp={world}"
            raise ValueError(f"--mesh {self.mesh} has {ranks} ranks, and there are {world} processes; {fix}")
        return axes

    def shared(self) -> dict[str, Any]:
        """Return the options that must be equal on every rank and in a resumed run: all that change the result."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in FREE}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    def folder(self) -> Path:
        """Return the folder of the run."""
        found = self.resume or self.out
        assert found is not None, "the command chooses a folder before ranks start"
        return found

    @staticmethod
    def upgraded(values: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a run.json in today's names and values."""
        return values


def without_weights(run: Any) -> tuple[Any, ...]:
    """Return no trees."""
    return ()


class Program(NamedTuple):
    """The functions of a program that trains; all but ``prepare`` run on each rank, ``show`` on the first.

    The constants of a run have ``options``, in which nothing is left open, and ``inputs`` (run_folder.digests).
    """

    name: str
    options: Any  # by default
    prepare: Callable[[Any], bool]  # checks all input of the options, before processes start; True: that was all
    # options -> constants of the run, first or loaded state; before anything is placed it calls run_folder.check_same
    start: Callable[[Any], tuple[Any, Any]]
    take: Callable[[Any, Any], tuple[Any, Any]]  # run, state -> next state, figures of the step with ``step``, ``loss``
    measure: Callable[..., Any]  # run, state, function that prints a line -> results
    title: Callable[[Any], str]  # run -> a line
    summary: Callable[[Any], str]  # figures of a step -> a line
    show: Callable[..., None]  # run, state, results -> files and a table
    placed: Callable[[Any], verification.Placed]  # run -> the mesh, the rules, and what is not trained
    # run, state, folder: writes what is of use without the state, on rank 0; every rank calls it
    publish: Callable[..., None] = checkpoints.publish_nothing
    # run, state -> fields of the step's figures, "validation" among them: the loss of held-out data, in nats a token
    validate: Callable[..., dict[str, Any]] = checkpoints.without_validation
    # run, state, figures of the step, folder -> what is published at the lowest loss, if it is not that of any step
    publish_best: Callable[..., None] | None = None
    weights: Callable[[Any], tuple[Any, ...]] = without_weights  # run -> trees, perhaps lazy, that its first loss is of


T = TypeVar("T", bound=Options)


def command(program: Program, args: list[str] | None) -> int:
    """Run the command line ``args`` of ``program`` and return its exit status.

    The status is 0, 1 if a rank failed, 2 for bad input, which one line names, 130 after Ctrl-C and 143 after SIGTERM.
    """
    is_own, options = False, None  # a fault of this rank alone
    try:
        options = parse(program.options, args, f"python -m examples.{program.name}")
        options.check()
        under_torchrun = "RANK" in os.environ
        axes = options.axes(int(os.environ["WORLD_SIZE"]) if under_torchrun else None)
        options = replace(options, mesh=",".join(f"{axis}={size}" for axis, size in axes.items()))
        if under_torchrun and options.out is None and options.resume is None:
            raise ValueError("under torchrun ranks cannot choose a folder each; give --out")
        ranks = math.prod(axes.values())
        if not under_torchrun:
            devices.check_ranks(options.device, ranks)
        is_local = not under_torchrun and (ranks > 1 or options.restarts > 0)
        if is_local:
            launch.import_early(program.prepare.__module__)
        if options.resume is not None and not options.elastic:  # of which some options are open
            run_folder.check_resumed(options.resume, options)
        if not under_torchrun and program.prepare(options):
            return 0
        with run_folder.held(options, f"runs/{program.name}") as options:
            if is_local:
                terminal.console().print(f"starting {ranks} ranks", style="dim", highlight=False)
                fault = _local(program, options, ranks)
            else:
                fault = work(program, options)
        if fault is None:
            return 0
        status, message = fault
    except ValueError as error:
        status, message, is_own = 2, str(error), isinstance(error, devices.Refused)
    except (launch.RankFailed, OSError) as error:  # such as a full disk
        status, message = 1, str(error)
    except torch.OutOfMemoryError as error:
        status, message = 1, f"{str(error).partition('. ')[0]}; use a smaller --batch or --seq, or more fsdp"
    except (KeyboardInterrupt, launch.Stopped) as error:
        status, message = 128 + getattr(error, "sigval", signal.SIGINT), stopped(program, options)
    if is_own or os.environ.get("RANK", "0") == "0":
        terminal.complain(program.name, message)
    return status


def _local(program: Program, options: Any, ranks: int) -> Fault | None:
    """Run on local ranks, all of which begin again from the last checkpoint, some times, after one has failed."""
    for left in reversed(range(options.restarts + 1)):
        try:
            return launch.local(ranks, work, program, options)
        except launch.RankFailed as error:
            if not left:
                raise
            if (options.folder() / RUN).is_file():
                options = replace(options, out=None, resume=options.folder())
            done, times = checkpoints.newest(options.folder()) or 0, f"{left - 1} more time{'s' * (left != 2)}"
            terminal.complain(program.name, f"{error}; all begin again from step {done}, and may {times}")
    raise AssertionError("a run ends or raises")


def stopped(program: Program, options: Any) -> str:
    """Return how to go on with a run that was stopped by a signal, as one line."""
    folder = options and (options.resume or options.out)
    if folder is None or not (folder / RUN).is_file():
        return "stopped before the run began; start it again"
    done = checkpoints.newest(folder)
    where = "before its first checkpoint" if done is None else f"after step {done}"
    return f"stopped {where}; continue with python -m examples.{program.name} --resume {folder}"


def parse(default: T, args: list[str] | None, prog: str) -> T:
    """Return the options on the command line; others are those of the run to resume, or of ``default``.

    With ``elastic`` the command line is that of the start, so its options alone count.
    """
    options = command_line(default, args, prog)
    if options.elastic and options.out is not None and (options.out / RUN).is_file():
        return replace(options, out=None, resume=options.out)
    if options.resume is None or not (options.resume / RUN).is_file():
        return options
    return command_line(run_folder.restored(type(default), options.resume / RUN), args, prog)
