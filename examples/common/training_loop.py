"""The loop of a run on each rank: steps, validations, checkpoints, and an end that all ranks agree on.

After each step its figures are written, then its checkpoint is begun, if one is due. So a killed run
has the figures of all steps of its last checkpoint, and a resumed one drops those of later steps. Ranks leave the loop
together: at the last step, when validations are no better, or after a signal (interrupts.py), with a checkpoint.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

import shard

from . import checkpoints, devices, finite, launch, run_folder, tracking, verification
from .checkpoints import Validation
from .launch import interrupts
from .progress import Report

if TYPE_CHECKING:
    from .runs import Options, Program


class Fault(NamedTuple):
    """The end of a run that all ranks know: its exit status and a line."""

    status: int
    message: str


@launch.record
def work(program: Program, options: Options) -> Fault | None:
    """Run one rank; return a fault that all ranks know: of the input, or of ranks that have other bits than others.

    Raises Refused for a device that this rank does not get, so that the others are stopped; Stopped on all ranks after
    a signal.
    """
    devices.begin(options.device)
    try:
        run, state = program.start(options)
        options, first, ranks = run.options, dist.get_rank() == 0, dist.get_world_size()
        history = checkpoints.validations(options.folder(), int(state.done))
        run_folder.announce(options, run.inputs)
        figures = tracking.start(options.track if first else None, options.folder(), int(state.done), options.shared())
        total, done = options.steps or 0, int(state.done)
        with Report(options.folder(), first, total, done, program.summary, figures) as shown:
            where = f"{ranks} rank{'s' * (ranks > 1)} on {devices.name(options.device)}, mesh {options.mesh}"
            shown.say(f"{where}; {program.title(run)}; writing {options.folder()}")
            state, number = train(program, run, state, history, shown)
            measured = None if number else program.measure(run, state, shown.say)
            finite.check(measured, "the result")
        if first and not number:
            program.show(run, state, measured)
        shard.close()
    except ValueError as error:
        return Fault(2, str(error))
    except shard.integrity.Diverged as error:
        return Fault(1, str(error))
    if number:
        raise launch.Stopped("the run was stopped by a signal", signal.Signals(number))


def _fix(program: Program, run: Any, done: int) -> str:
    """Return what to do about a step whose figures are not finite; no rate is to blame for the first."""
    if not done and (weights := program.weights(run)):
        return finite.culprit(*weights)
    return finite.SMALLER + ", or --dtype f32" * hasattr(run.options, "dtype")


def train(program: Program, run: Any, state: Any, history: list[Validation], shown: Report) -> tuple[Any, int]:
    """Take all steps, verify, validate, and save what is trained; return the last state and the signal that ended them.

    That is 0 if there was none. If ranks have different bits, checkpoints behind the last step at which they were equal
    are removed. A resumed run goes on from there.
    """
    options, placed = run.options, program.placed(run)
    folder, done = options.folder(), int(state.done)
    name = run_folder.run_name(folder)
    verify = verification.begin(placed if options.verify_every else None)
    writing, number, verified = None, 0, done
    with interrupts.noticed() as signals:
        while done < options.steps and not number and not checkpoints.is_over(history, options.patience):
            state, step = program.take(run, state)
            finite.check(step, f"step {done}", partial(_fix, program, run, done))
            done += 1
            is_published = done % options.publish_every == 0 or done == options.steps
            is_validated = options.validate_every and (done % options.validate_every == 0 or done == options.steps)
            if is_published or is_validated or verification.is_due(done, options.verify_every, options.save_every):
                try:
                    verify(state, done)
                except shard.integrity.Diverged as error:
                    last = checkpoints.drop(folder, writing, verified)
                    raise shard.integrity.Diverged(f"{error}; --resume goes on behind step {last}") from None
                verified = done
            if is_validated:
                step = replace(step, **program.validate(run, state))
                finite.check(step, f"after step {done}")
                history.append((done, step.validation))
                publish = partial(program.publish, run, state)
                best = partial(program.publish_best, run, state, step) if program.publish_best else publish
                checkpoints.save_best(folder, history, best)
            fault = ""
            try:
                shown.step(step)
            except OSError as error:  # of this rank alone
                fault = str(error)
            if is_over := checkpoints.is_over(history, options.patience):
                shown.say(f"stopped after {done} steps: {options.patience} validations were no better than the best")
            is_due = done == options.steps or is_over or done % options.save_every == 0
            fault = fault or checkpoints.fault(folder, name, writing, bool(is_due or signals.number))
            number = interrupts.agreed(signals, fault)
            is_last = done == options.steps or is_over or number
            if is_last or is_due:
                kept = options.keep, verified
                writing = checkpoints.begin(folder, state, done, *kept, placed.mesh, placed.rules, writing, name)
            if is_last or is_published:
                program.publish(run, state, folder)
        checkpoints.finish(folder, writing, options.keep, verified)
    return state, number
