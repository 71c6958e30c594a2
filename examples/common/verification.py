"""Comparisons of bits between ranks: every ``--verify-every`` steps, and before a state is judged or published.

A rank whose memory has a flipped bit goes on like the others, and prints their loss (shard/integrity). So copies of the
state are compared, and an eighth of the blocks that are not trained is compared with what was placed. A check costs
below 1 % of the steps between two (docs/sharding.md). Checkpoints between two checks are not compared.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

import shard
from shard import integrity


class Placed(NamedTuple):
    """The mesh of a run, its rules, and what is not trained, by name: trees of this rank's bytes."""

    mesh: DeviceMesh
    rules: shard.Rules
    frozen: Mapping[str, Any] = {}


def is_due(done: int, every: int | None, save_every: int) -> bool:
    """Return True for steps to compare at: all so many, of which there is a checkpoint, and those of rare ones.

    So the last checkpoint at which ranks were equal is one of the last steps that were compared.
    """
    if every is None:
        return False
    if save_every >= every:
        return done % every == 0 or done % save_every == 0
    return done % (-(-every // save_every) * save_every) == 0


def begin(placed: Placed | None) -> Callable[[Any, int], None]:
    """Record the frozen bytes; return a check of the state after a number of steps, which every rank calls.

    The check raises integrity.Diverged on every rank, with the step. Without ``placed`` it checks nothing.
    """
    if placed is None:
        return lambda state, done: None
    known, turns = {name: integrity.record(x) for name, x in placed.frozen.items()}, itertools.count()

    def check(state: Any, done: int) -> None:
        turn = next(turns)
        try:
            integrity.check_copies("the state", state, placed.mesh, placed.rules)
            for name, x in placed.frozen.items():
                integrity.check_record(name, x, known[name], turn)
        except integrity.Diverged as error:
            raise integrity.Diverged(f"after step {done}: {error}") from None

    return check
