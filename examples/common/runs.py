"""Start, record and resume a run of a program that trains.

    run.json              the options, the mesh, the processes of the run, and digests (examples/common/run_folder.py)
    metrics.jsonl         a line a step (examples/common/progress.py)
    state.safetensors     the state, every so many steps and at the end (examples/common/checkpoints.py)
    result.json           the results

Each file is written whole, so the state of a killed run is that of one step. A run resumes on any mesh from its folder,
and on the same mesh to the bit. With more ``--steps`` it goes on beyond its end. One that was killed before its first
state begins again. A state that is damaged and data or a model that changed since the start are refused.
"""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console

import shard

from . import checkpoints, devices, launch, run_folder, tracking, verification
from .checkpoints import RUN, Validation
from .command_line import axes_in, check_least, command_line
from .progress import Report

RESULT = "result.json"
FREE = ("out", "resume", "mesh", "device", "show_data", "json")  # options that are not of the run itself


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
    save_every: int
    out: Path | None
    resume: Path | None
    keep: int = 1  # states
    track: tracking.Tracker | None = None
    validate_every: int | None = None  # steps
    patience: int | None = None  # validations
    verify_every: int | None = 20  # steps; None: never

    def check(self) -> None:
        """Raise ValueError for values out of range, before anything is started or read."""
        counts = "batch", "steps", "save_every", "keep", "validate_every", "patience", "verify_every"
        check_least(self, self.LEAST | dict.fromkeys(counts, 1))
        for name in self.POSITIVE:
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; wanted a number above 0")
        if self.patience is not None and self.validate_every is None:
            raise ValueError(f"--patience is {self.patience} without --validate-every; give both")
        tracking.check(self.track)
        if self.resume is not None and self.out is not None:
            raise ValueError("--resume continues in its own folder; leave out --out")

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


class Program(NamedTuple):
    """The functions of a program that trains; all but ``prepare`` run on each rank, ``publish``, ``show`` on the first.

    The constants of a run have ``options``, in which nothing is left open.
    """

    name: str
    options: Any  # by default
    prepare: Callable[[Any], bool]  # checks all input of the options, before processes start; True: that was all
    start: Callable[[Any], tuple[Any, Any]]  # options -> constants of the run, first or loaded state
    take: Callable[[Any, Any], tuple[Any, Any]]  # run, state -> next state, figures of the step with ``step``, ``loss``
    measure: Callable[..., Any]  # run, state, function that prints a line -> results
    title: Callable[[Any], str]  # run -> a line
    summary: Callable[[Any], str]  # figures of a step -> a line
    show: Callable[..., None]  # run, state, results -> files and a table
    # run, whole state, folder: writes what is of use without the state
    publish: Callable[..., None] = checkpoints.publish_nothing
    # run, state -> fields of the step's figures, "validation" among them: the loss of held-out data, in nats a token
    validate: Callable[..., dict[str, Any]] = checkpoints.without_validation
    # run, state, figures of the step, folder -> what is published at the lowest loss, if it is not that of any step
    publish_best: Callable[..., None] | None = None
    inputs: Callable[[Any], dict[str, str]] = checkpoints.no_inputs  # run -> digests (run_folder.digests)
    whole: Callable[[Any, Any], Any] = checkpoints.as_it_is  # of all ranks, on rank 0; every rank calls it
    placed: Callable[[Any], verification.Placed] | None = None  # run -> what is compared between ranks


class Fault(NamedTuple):
    """The end of a run that all ranks know: its exit status and a line."""

    status: int
    message: str


T = TypeVar("T", bound=Options)


def command(program: Program, args: list[str] | None) -> int:
    """Run the command line ``args`` of ``program`` and return its exit status.

    The status is 0, 1 if a rank failed, or 2 for bad input, which one line names.
    """
    is_own = False  # a fault of this rank alone
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
        if options.resume is not None:
            run_folder.check_resumed(options.resume, options)
        if not under_torchrun and program.prepare(options):
            return 0
        if options.resume is None and os.environ.get("RANK", "0") == "0":
            options = replace(options, out=run_folder.free(options.out, f"runs/{program.name}"))
        if under_torchrun or ranks == 1:
            fault = work(program, options)
        else:
            Console().print(f"[dim]starting {ranks} ranks[/]", highlight=False)
            fault = launch.local(ranks, work, program, options)
        if fault is None:
            return 0
        status, message = fault
    except ValueError as error:
        status, message, is_own = 2, str(error), isinstance(error, devices.Refused)
    except launch.RankFailed as error:
        status, message = 1, str(error)
    except torch.OutOfMemoryError as error:
        status, message = 1, f"{str(error).partition('. ')[0]}; use a smaller --batch or --seq, or more fsdp"
    except (KeyboardInterrupt, launch.Stopped):
        status, message = 130, "stopped; continue with --resume and the folder of the run, if it has run.json"
    if is_own or os.environ.get("RANK", "0") == "0":
        print(f"{program.name}: {message}", file=sys.stderr)
    return status


@launch.record
def work(program: Program, options: Options) -> Fault | None:
    """Run one rank; return a fault that all ranks know: of the input, or of ranks that have other bits than others.

    Raises Refused for a device that this rank does not get, so that the others are stopped.
    """
    devices.begin(options.device)
    try:
        run, state = program.start(options)
        options, first, ranks = run.options, dist.get_rank() == 0, dist.get_world_size()
        inputs = program.inputs(run)
        run_folder.check_inputs(options, inputs)
        history = checkpoints.validations(options.folder(), int(state.done))
        run_folder.announce(options, inputs)
        figures = tracking.start(options.track if first else None, options.folder(), int(state.done), options.shared())
        total, done = options.steps or 0, int(state.done)
        with Report(options.folder(), first, total, done, program.summary, figures) as shown:
            where = f"{ranks} rank{'s' * (ranks > 1)} on {devices.name(options.device)}, mesh {options.mesh}"
            shown.say(f"{where}; {program.title(run)}; writing {options.folder()}")
            state = train(program, run, state, history, shown)
            measured = program.measure(run, state, shown.say)
        if first:
            program.show(run, state, measured)
        shard.close()
    except ValueError as error:
        return Fault(2, str(error))
    except shard.integrity.Diverged as error:
        return Fault(1, str(error))


def train(program: Program, run: Any, state: Any, history: list[Validation], shown: Report) -> Any:
    """Take all steps, verify, validate, and save what is trained; return the last state."""
    options = run.options
    folder, done = options.folder(), int(state.done)
    verify = verification.begin(program.placed(run) if program.placed and options.verify_every else None)
    while done < options.steps and not checkpoints.is_over(history, options.patience):
        state, step = program.take(run, state)
        if not math.isfinite(step.loss):
            raise ValueError(f"step {done}: the loss is {step.loss}; use a smaller --lr")
        if not math.isfinite(norm := getattr(step, "grad_norm", 0.0)):
            raise ValueError(f"step {done}: the norm of the gradient is {norm}; use a smaller --lr, or --dtype f32")
        done += 1
        is_validated = options.validate_every and (done % options.validate_every == 0 or done == options.steps)
        is_saved = done % options.save_every == 0 or done == options.steps
        if is_validated or is_saved or done % (options.verify_every or 1) == 0:
            verify(state, done)
        if is_validated:
            step = replace(step, **program.validate(run, state))
            history.append((done, step.validation))
            if checkpoints.is_best(history):
                kept = program.whole(run, state)
                publish = partial(program.publish, run, kept)
                best = partial(program.publish_best, run, kept, step) if program.publish_best else publish
                checkpoints.save_best(folder, history, best)
        shown.step(step)
        if is_over := checkpoints.is_over(history, options.patience):
            shown.say(f"stopped after {done} steps: {options.patience} validations were no better than the best")
        if is_saved or is_over:
            kept = program.whole(run, state)
            checkpoints.save(folder, kept, done, options.keep, partial(program.publish, run, kept))
    return state


def parse(default: T, args: list[str] | None, prog: str) -> T:
    """Return the options on the command line; others are those of the run to resume, or of ``default``."""
    options = command_line(default, args, prog)
    if options.resume is None or not (options.resume / RUN).is_file():
        return options
    return command_line(run_folder.restored(type(default), options.resume / RUN), args, prog)
