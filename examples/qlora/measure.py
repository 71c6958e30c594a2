"""Measurements of a run: the loss of held-out rows while it trains, and bytes and perplexities at its end.

The held-out rows go through the captured forward pass beside the base that is placed already. So a measurement takes no
more memory than a step, except for ``--compare-dense``, which places the base as it was before it was packed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import shard
from fquant import lazy, lora, tree
from fquant.compile.cost import Cost, cost
from models import decoder

from ..common import training_step
from ..common.training_step import State
from ..data import dataset as data
from .train import Run, micro_batches


@dataclass(frozen=True)
class Result:
    """The results of a run: bytes of the whole base, bytes one rank sends in a step, held-out perplexity.

    What is of the dense base is None if it was not measured.
    """

    bytes_bf16: int
    bytes_packed: int
    wire_bf16: int | None
    wire_packed: int
    perplexity_bf16: float | None
    perplexity_packed: float
    perplexity_adapted: float


def measure(run: Run, state: State, say: Callable[[str], None]) -> Result:
    """Return bytes and held-out perplexity of the packed base, of that with the adapter, and of the dense base."""
    say("measuring the base with its adapter")
    adapted = perplexity(run, run.local, state.adapters)
    say("measuring the base")
    packed = perplexity(run, run.local, {})
    bytes_bf16, bytes_packed = (tree.nbytes(lazy.like(x)) for x in (run.work.dense, run.work.packed))
    sent = bytes_sent(run, state, run.base)
    if run.work.packed is run.work.dense:
        return Result(bytes_bf16, bytes_packed, sent, sent, packed, packed, adapted)
    if not run.options.compare_dense:
        return Result(bytes_bf16, bytes_packed, None, sent, None, packed, adapted)
    say("measuring the dense base")
    dense = shard.place(run.work.dense, decoder.dims(run.work.cfg), run.setup.rules, run.setup.mesh, run.work.cfg)
    plain = perplexity(run, shard.local(dense), {})
    return Result(bytes_bf16, bytes_packed, bytes_sent(run, state, dense), sent, plain, packed, adapted)


def bytes_sent(run: Run, state: State, placed: Any) -> int:
    """Return the bytes that one rank sends in a step beside the base ``placed``: of the step that ran, or predicted."""
    if placed is run.base and run.step.traced:
        return training_step.sent(run.step)
    return sum(collective.sent for collective in predict(run, state, placed).collectives)


def predict(run: Run, state: State, placed: Any) -> Cost:
    """Return the cost of a step beside the base ``placed``, read off its graph."""
    args = state, shard.local(placed), *micro_batches(run, 0), run.setup
    return cost(training_step.train_step, *args, **run.setup.capture())


def perplexity(run: Run, local: Any, adapters: lora.Adapters) -> float:
    """Return exp of the mean loss of all held-out tokens beside the base ``local``."""
    return float(torch.exp(torch.tensor(mean_loss(run, local, adapters), dtype=torch.float64)))


def validate(run: Run, state: State) -> dict[str, float]:
    """Return the mean loss of all held-out tokens in nats."""
    return {"validation": mean_loss(run, run.local, state.adapters)}


def mean_loss(run: Run, local: Any, adapters: lora.Adapters) -> float:
    """Return the mean loss in nats of all held-out tokens beside the base ``local``, the same on every rank."""
    total, setup = torch.zeros(2, dtype=torch.float64, device="cpu"), run.setup
    for rows in zip(*(t.split(run.options.batch) for t in tree.leaves(run.work.held)), strict=True):
        mine = shard.share(data.Rows(*rows), setup.mesh, setup.rules)
        total += run.evaluate(adapters, local, mine, setup)
    nats, tokens = shard.psum(total, setup.mesh, setup.rules.batch)
    return float(nats / tokens)
