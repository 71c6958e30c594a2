"""Figures of a run for TensorBoard or Weights & Biases, beside metrics.jsonl.

    tensorboard    event files in RUN/tensorboard; look at them with: tensorboard --logdir runs
    wandb          a run of the project "fquant"; with WANDB_MODE=offline in the environment it stays in RUN/wandb

A resumed run goes on in the same events.
"""

import importlib
import math
import numbers
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fquant.io.safetensors import replacing

Tracker = Literal["tensorboard", "wandb"]


class Tracking(NamedTuple):
    """The functions of an open tracker."""

    log: Callable[[int, Mapping[str, Any]], None]  # step, figures
    close: Callable[[], None]


NOTHING = Tracking(lambda step, figures: None, lambda: None)


def check(name: Tracker | None) -> None:
    """Raise ValueError if the package of a tracker is not installed."""
    try:
        if name is not None:
            _module(name)
    except ImportError as error:
        raise ValueError(f"--track {name}: {error}; install it with pip install 'fquant[track]'") from None


def start(name: Tracker | None, folder: Path, done: int, options: Mapping[str, Any]) -> Tracking:
    """Open a tracker for the run in ``folder`` that goes on after ``done`` steps; None tracks nothing."""
    if name is None:
        return NOTHING
    if name == "tensorboard":
        writer = _module(name).SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

        def log(step: int, figures: Mapping[str, Any]) -> None:
            for key, value in numbers_in(figures).items():
                writer.add_scalar(key, value, step)

        return Tracking(log, writer.close)
    wandb = _module(name)
    file = folder / "wandb-id.txt"
    if not file.exists():
        with replacing(file) as new:
            new.write(uuid.uuid4().hex[:8].encode())
    run = wandb.init(
        project="fquant", name=folder.name, id=file.read_text(), resume="allow", dir=folder, config=dict(options)
    )
    return Tracking(lambda step, figures: run.log(numbers_in(figures), step=step), run.finish)


def numbers_in(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among ``figures`` but the step's own."""
    found = {key: x for key, x in figures.items() if isinstance(x, numbers.Real) and not isinstance(x, bool)}
    return {key: float(x) for key, x in found.items() if key != "step" and math.isfinite(x)}


def _module(name: Tracker) -> Any:
    """Import the package of a tracker, which need not be installed; raise ImportError."""
    if name == "wandb":
        return importlib.import_module("wandb")
    return importlib.import_module("torch.utils.tensorboard")
