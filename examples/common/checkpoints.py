"""The files of a run that hold what it has trained: its last state, earlier ones, and the best.

    state.safetensors                   the last state
    checkpoints/step-40/                the state after 40 steps, one of the last ``--keep``
    best/                               what was published at the lowest validation loss, and best.json

A program publishes its results, such as an adapter, into the run's folder with every state, and into ``best``. Rank 0
writes, and each file is written whole.
"""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fquant import tree
from fquant.io import safetensors, tree_json
from fquant.lazy import Lazy
from fquant.tree import expect
from shard import agree

from .progress import lines

RUN, STATE, BEST = "run.json", "state.safetensors", "best.json"
Publish = Callable[[Path], None]  # writes the results of training to a folder
Validation = tuple[int, float]  # steps done, and the loss in nats a token


def publish_nothing(run: Any, state: Any, folder: Path) -> None:
    """Publish nothing, as a program whose state is all that it has."""


def without_validation(run: Any, state: Any) -> dict[str, Any]:
    """Return no loss, as a program without held-out data."""
    return {"validation": math.nan}


def no_inputs(run: Any) -> dict[str, str]:
    """Return no digests, as a program that reads no files."""
    return {}


def as_it_is(run: Any, state: Any) -> Any:
    """Return the state, of which every rank has all."""
    return state


def save(folder: Path, state: Any, done: int, keep: int, publish: Publish) -> None:
    """Write the state after ``done`` steps and what is published, and remove all but the last ``keep``."""
    if dist.get_rank():
        return
    if keep > 1 and (folder / STATE).exists():
        was = int(safetensors.read(safetensors.header(folder / STATE), "done"))
        if was < done:  # copied, so that there is a last state at any time
            before = step_folder(folder, was)
            before.mkdir(parents=True, exist_ok=True)
            with safetensors.replacing(before / STATE) as file:
                file.write((folder / STATE).read_bytes())
    safetensors.save(folder / STATE, state)
    publish(folder)
    for old in steps_in(folder)[: -(keep - 1) or None]:
        shutil.rmtree(step_folder(folder, old))


def load(folder: Path, like: Any) -> Any:
    """Return the last state of a run, each tensor on the device of ``like``'s, and on the host if that is meta.

    Raises ValueError on every rank if its structure is not ``like``'s.
    """
    there = lambda t, like: t.to(like.device) if isinstance(t, Tensor) and not like.is_meta else t

    def read() -> Any:
        return tree.map(there, _checked(folder, safetensors.load(folder / STATE), like), like)

    return agree.attempt("resume", read)


def lazy(folder: Path, like: Any) -> Any:
    """Return the last state of a run as :func:`load` does, except that no tensor is read yet (fquant.lazy)."""

    def opened() -> Any:
        found = safetensors.tree_header(folder / STATE)

        def leaf(name: str) -> Lazy:
            entry = found.tensors[name]
            meta = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            return Lazy(partial(safetensors.read, found, name), meta, partial(safetensors.stamp, found, name))

        return _checked(folder, tree_json.decode(found.metadata[safetensors.TREE], leaf), like)

    return agree.attempt("resume", opened)


def _checked(folder: Path, state: Any, like: Any) -> Any:
    fault = f"{folder / STATE}: holds another tree than this run's; resume with the release that wrote it"
    expect(tree.structure(state) == tree.structure(like), fault)
    return state


def step_folder(folder: Path, done: int) -> Path:
    """Return the folder of the state after ``done`` steps."""
    return folder / "checkpoints" / f"step-{done}"


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the earlier states that a run has kept, in order."""
    names = [path.name.removeprefix("step-") for path in (folder / "checkpoints").glob("step-*")]
    return sorted(int(name) for name in names if name.isdecimal())


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
    """Publish to ``best`` if the last validation is the best."""
    if dist.get_rank() or not is_best(history):
        return
    (folder / "best").mkdir(exist_ok=True)
    publish(folder / "best")
    done, loss = history[-1]
    with safetensors.replacing(folder / "best" / BEST) as file:
        file.write((json.dumps({"steps": done, "validation": loss}, indent=2) + "\n").encode())


def run_of(path: Path) -> tuple[Path, Path]:
    """Return the run's folder and the state's file, for the folder of a run, of an earlier state, or a state's file.

    Raises ValueError for a path without a state, or outside a run.
    """
    state = path / STATE if path.is_dir() else path
    expect(state.is_file(), f"{path}: got no {STATE} there, wanted the folder of a run or of one of its checkpoints")
    run = next((folder for folder in state.absolute().parents if (folder / RUN).is_file()), None)
    if run is None:
        raise ValueError(f"{path}: got a state outside a run, wanted {RUN} in a folder above it; move it back")
    return run, state
