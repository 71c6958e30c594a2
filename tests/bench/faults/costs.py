"""The cost of ordered sums, and of a checkpoint every step, on the step of tests/bench/step.

The contestants are in the same processes and take turns of one step or several, the first in another place each time. A
ratio is the median over turns of the time of one over that of plain steps in the same turn. Turns of one step compare
neighbours, so that a machine whose speed drifts over seconds gives the same ratios. A turn with checkpoints begins
behind two: the second removes an older one and is being written, as those of each later step. The turn does not wait
for its own last one. So each step has one written beside it.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from examples.common import checkpoints
from tests.bench.step_sides import Shape, Take, ours
from tests.helpers import ranks
from tests.helpers.kernels.threads import num_threads

PLAIN, ORDERED, SAVED = "plain", "ordered sums", "a checkpoint every step"
PATIENCE = 1800.0
WARM_UP = 2  # steps


def measure(
    root: Path, shape: Shape, dtype: torch.dtype, axes: dict[str, int], block: int, turns: int
) -> dict[str, tuple[float, float]]:
    """Return the seconds of a step and the ratio to a plain one, by contestant; ``root`` is a new folder.

    ``dtype`` is that of the residual stream.
    """
    world = next(iter(axes.values()))
    times = ranks.run(world, _times, str(root), shape, dtype, axes, block, turns, timeout=PATIENCE)
    slowest = {name: [max(each) for each in zip(*(its[name] for its in times), strict=True)] for name in times[0]}
    ratio = lambda name: median(a / b for a, b in zip(slowest[name], slowest[PLAIN], strict=True))
    return {name: (median(seconds), ratio(name)) for name, seconds in slowest.items()}


def _times(
    root: str, shape: Shape, dtype: torch.dtype, axes: dict[str, int], block: int, turns: int
) -> dict[str, list[float]]:
    """Return the seconds of a step in each turn, by contestant, on a rank; one process has two threads."""
    with num_threads(1 if dist.get_world_size() > 1 else 2):
        return _take_turns(root, shape, dtype, axes, block, turns)


def _take_turns(
    root: str, shape: Shape, dtype: torch.dtype, axes: dict[str, int], block: int, turns: int
) -> dict[str, list[float]]:
    plain, ordered, done = ours(shape, dtype=dtype, **axes), ours(shape, ordered=True, dtype=dtype, **axes), 0

    def with_checkpoints(steps: int) -> float:
        nonlocal done
        setup, writing = plain.setup, None
        for i in range(steps + 2):
            if i == 2:
                began = time.perf_counter()
            if i >= 2:
                plain()
            done += 1
            writing = checkpoints.begin(Path(root), plain.state, done, 1, 0, setup.mesh, setup.rules, after=writing)
        seconds = time.perf_counter() - began
        checkpoints.finish(Path(root), writing, 1, 0)
        return seconds

    takes: dict[str, Callable[[int], float]] = {
        PLAIN: lambda steps: _timed(plain, steps), ORDERED: lambda steps: _timed(ordered, steps),
        SAVED: with_checkpoints,
    }  # fmt: skip
    for take in takes.values():
        take(WARM_UP)
    names, out = list(takes), {name: list[float]() for name in takes}
    for turn in range(turns):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            dist.barrier()
            out[name].append(takes[name](block) / block)
    return out


def _timed(take: Take, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        take()
    return time.perf_counter() - began
