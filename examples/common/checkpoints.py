"""The files of a run that hold what it has trained: its checkpoints, and the best of what was published.

    checkpoints/step-40/                the state after 40 steps, in ranges of all ranks (shard/checkpoint/)
    best/                               what was published at the lowest validation loss, and best.json

The last ``--keep`` checkpoints stay. A step's checkpoint is copied to the host and written beside the next steps, so
that one every step costs little. A folder of that name is whole. What a program publishes, such as an adapter, is
written into the run's folder every ``--publish-every`` steps and at the end, and into ``best``. Rank 0 does that
between two steps, and no checkpoint needs it: ``examples.export`` takes it out of each.

A checkpoint has the name of its run (run_folder.py). One that was copied from another run is not gone on from.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import shard
from fquant.io import safetensors
from fquant.tree import expect
from shard import agree
from shard.checkpoint import MANIFEST, Writing

from .progress import lines

RUN, BEST = "run.json", "best.json"
Publish = Callable[[Path], None]  # writes the results of training to a folder; every rank calls it
Validation = tuple[int, float]  # steps done, and the loss in nats a token


def publish_nothing(run: Any, state: Any, folder: Path) -> None:
    """Publish nothing, as a program whose state is all that it has."""


def without_validation(run: Any, state: Any) -> dict[str, Any]:
    """Return no loss, as a program without held-out data."""
    return {"validation": math.nan}


def folder_of(folder: Path) -> Path:
    """Return the folder of the checkpoints of a run."""
    return folder / "checkpoints"


def step_folder(folder: Path, done: int) -> Path:
    """Return the folder of the state after ``done`` steps."""
    return folder_of(folder) / f"step-{done}"


def newest(folder: Path) -> int | None:
    """Return the steps of the last state of a run, or None if it has none."""
    found = shard.checkpoint.steps(folder_of(folder))
    return found[-1] if found else None


def begin(
    folder: Path, state: Any, done: int, keep: int, verified: int, mesh: DeviceMesh, rules: shard.Rules,
    after: Writing | None, run: str = "",
) -> Writing:  # fmt: skip
    """Begin to write the state after ``done`` steps, and finish the checkpoint ``after`` which it comes.

    The last ``keep`` before it stay, and that of the last step at which ranks were ``verified``.
    """
    first = _keep(folder, keep, verified)
    return shard.checkpoint.begin(step_folder(folder, done), state, mesh, rules, after, first, run)


def fault(folder: Path, run: str, writing: Writing | None, is_due: bool) -> str:
    """Return why the next checkpoint would be lost, as this rank sees it without others, or nothing.

    The last one has failed, or the folder of ``run`` was removed, and perhaps made again by another run. The folder is
    looked at if a checkpoint ``is_due``, or failed.
    """
    failed = [] if writing is None else writing.errors
    if not failed and not is_due:
        return ""
    try:
        found = json.loads((folder / RUN).read_bytes())["run"]
    except (OSError, ValueError, KeyError):
        found = None
    if found != run:
        fix = "the run has ended, because its checkpoints would be lost"
        return f"{folder / RUN}: was removed or replaced since the run began; {fix}"
    return f"{writing.folder}: {failed[0]}" if writing is not None and failed else ""


def finish(folder: Path, writing: Writing | None, keep: int, verified: int) -> None:
    """Wait for the last checkpoint, if there is one, and keep those of :func:`begin` and itself."""
    if writing is not None:
        shard.checkpoint.finish(writing)
        if dist.get_rank() == 0:
            _keep(folder, keep, verified)()


def drop(folder: Path, writing: Writing | None, verified: int) -> int:
    """Wait for the last checkpoint, remove those behind the step ``verified``, and return the last step left, or 0."""
    if writing is not None:
        shard.checkpoint.finish(writing)
    found = agree.attempt("checkpoints", lambda: shard.checkpoint.steps(folder_of(folder)))
    if dist.get_rank() == 0:
        shard.checkpoint.remove(folder_of(folder), [step for step in found if step > verified])
    return max((step for step in found if step <= verified), default=0)


def _keep(folder: Path, last: int, verified: int) -> Callable[[], None]:
    return partial(shard.checkpoint.keep, folder_of(folder), last, (verified,))


def load(folder: Path, like: Any, mesh: DeviceMesh, rules: shard.Rules, run: str = "") -> Any:
    """Return the last state in ``folder``, on any mesh, in the form and on the devices of ``like``.

    Raises ValueError on every rank if it is damaged, another tree than ``like``, or not of ``run``.
    """
    found = newest(folder)
    assert found is not None, "there is a checkpoint (run_folder.is_saved)"
    return shard.checkpoint.load(step_folder(folder, found), like, mesh, rules, run)


def validations(folder: Path, done: int) -> list[Validation]:
    """Return the validations among the first ``done`` steps of metrics.jsonl."""
    found = [json.loads(line) for line in lines(folder)[:done]] if done else []
    return [(step["step"] + 1, step["validation"]) for step in found if step.get("validation") is not None]


def is_best(history: Sequence[Validation]) -> bool:
    """Return True if the last validation has the lowest loss so far."""
    return bool(history) and all(history[-1][1] < loss for _, loss in history[:-1])


def is_over(history: Sequence[Validation], patience: int | None) -> bool:
    """Return True if the last ``patience`` validations were not better than one before them."""
    if patience is None or len(history) <= patience:
        return False
    return min(loss for _, loss in history[-patience:]) >= min(loss for _, loss in history[:-patience])


def save_best(folder: Path, history: Sequence[Validation], publish: Publish) -> None:
    """Publish to ``best`` if the last validation is the best; every rank calls it."""
    if not is_best(history):
        return
    if dist.get_rank() == 0:
        (folder / "best").mkdir(exist_ok=True)
    publish(folder / "best")
    if dist.get_rank() == 0:
        done, loss = history[-1]
        with safetensors.replacing(folder / "best" / BEST) as file:
            file.write((json.dumps({"steps": done, "validation": loss}, indent=2) + "\n").encode())


def is_state(path: Path) -> bool:
    """Return True for the folder of a run that has a checkpoint, and for that of a checkpoint."""
    return (path / MANIFEST).is_file() or newest(path) is not None


def run_of(path: Path) -> tuple[Path, Path]:
    """Return the folders of the run and of the checkpoint, for the folder of a run or of a checkpoint.

    Raises ValueError for a path without a checkpoint, or outside a run.
    """
    state, fault = path, f"{path}: got no checkpoint there, wanted the folder of a run or of one of its checkpoints"
    if not (path / MANIFEST).is_file():
        expect((done := newest(path)) is not None, fault)
        state = step_folder(path, done or 0)
    run = next((folder for folder in state.absolute().parents if (folder / RUN).is_file()), None)
    if run is None:
        raise ValueError(f"{path}: got a state outside a run, wanted {RUN} in a folder above it; move it back")
    return run, state
