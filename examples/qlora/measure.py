"""Measurements of a run: the loss of held-out rows while it trains, and bytes and perplexities at its end.

The held-out rows go through the captured forward pass beside the base that is placed already. So a measurement takes no
more memory than a step, except for ``--compare-dense``, which places the base as it was before it was packed.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import shard
from fquant import lazy, lora, optim, tree
from fquant.compile.cost import Cost, cost
from models import decoder
from models.config import Config
from shard.device_mesh import device_of

from ..common import devices, finite, objectives, training_step
from ..common.training_step import Setup, State
from ..data import dataset as data
from .adapters import merged as merged_base
from .train import Run, micro_batches

NO_RATE = optim.constant(1.0)
NO_UPDATE = optim.sgd(NO_RATE)


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
    perplexity_merged: float | None = None  # of the packed weights that the adapter was merged into
    survives: float | None = None  # the share of the gain, in nats, that is left after merging; None without a gain
    perplexity_teacher: float | None = None
    divergence_packed: float | None = None  # from the teacher, in nats a token
    divergence_adapted: float | None = None


@dataclass(frozen=True)
class Judgement:
    """The results of a run on preferences: held-out loss before and after, and the share that is judged right."""

    loss_before: float
    loss_after: float
    right_after: float


def measure(run: Run, state: State, say: Callable[[str], None]) -> Result | Judgement:
    """Return bytes and held-out perplexity of the packed base, of that with the adapter, and of the dense base.

    Of preferences, return their losses instead.
    """
    if run.setup.objective.name not in objectives.ON_DOCUMENTS:
        say("measuring the preferences that were held out")
        after = judged(run, run.local, state.trained)
        frozen, base = untrained(run)
        return Judgement(judged(frozen, base, {})[0], *after)
    say(f"measuring {'the trained model' if run.setup.train else 'the base with its adapter'}")
    adapted = perplexity(run, run.local, state.trained)
    say("measuring the base")
    frozen, base = untrained(run)
    packed = perplexity(frozen, base, {})
    merged = survives = None
    if run.options.merge_aware:
        say("measuring the merged weights")
        setup, dims = run.setup, decoder.dims(run.work.cfg)
        whole = shard.place(merged_base(run.work.packed, state.trained), dims, setup.rules, setup.mesh, run.work.cfg)
        merged = perplexity(run, shard.local(whole), {})
        gain = math.log(packed) - math.log(adapted)
        survives = (math.log(packed) - math.log(merged)) / gain if gain > 0 else None
    more = merged, survives, None, None, None
    if run.teacher is not None:
        say("measuring the teacher")
        divergences = mean_loss(frozen, base, {}), mean_loss(run, run.local, state.trained)
        more = merged, survives, perplexity(frozen, run.teacher, {}, run.setup.objective.teacher), *divergences
    bytes_bf16, bytes_packed = (tree.nbytes(lazy.like(x)) for x in (run.work.dense, run.work.packed))
    sent = bytes_sent(run, state, run.base)
    if run.work.packed is run.work.dense:
        return Result(bytes_bf16, bytes_packed, sent, sent, packed, packed, adapted, *more)
    if not run.options.compare_dense:
        return Result(bytes_bf16, bytes_packed, None, sent, None, packed, adapted, *more)
    say("measuring the dense base")
    dense = shard.place(run.work.dense, decoder.dims(run.work.cfg), run.setup.rules, run.setup.mesh, run.work.cfg)
    plain = perplexity(run, shard.local(dense), {})
    return Result(bytes_bf16, bytes_packed, bytes_sent(run, state, dense), sent, plain, packed, adapted, *more)


def untrained(run: Run) -> tuple[Run, Any]:
    """Return the run beside its base, and this rank's part of that; with full training it is placed once more."""
    if run.setup.train is None:
        return run, run.local
    setup, work = dataclasses.replace(run.setup, train=None), run.work
    placed = shard.place(work.packed, decoder.dims(work.cfg), setup.rules, setup.mesh, work.cfg)
    return dataclasses.replace(run, setup=setup), shard.local(placed)


def bytes_sent(run: Run, state: State, placed: Any) -> int:
    """Return the bytes that one rank sends in a step beside the base ``placed``: of the step that ran, or predicted."""
    if placed is run.base and run.step.traced:
        return training_step.sent(run.step)
    return sum(collective.sent for collective in predict(run, state, placed).collectives)


def predict(run: Run, state: State, placed: Any) -> Cost:
    """Return the cost of a step beside the base ``placed``, read off its graph."""
    local, device = shard.local(placed), device_of(run.setup.mesh)
    args = state, local, *micro_batches(run, 0), run.setup, run.teacher
    return cost(training_step.train_step, *args, **run.setup.capture(), device=device, host=shard.on_host(local))


def perplexity(run: Run, local: Any, adapters: lora.Adapters, cfg: Config | None = None) -> float:
    """Return exp of the mean negative log likelihood of all held-out tokens beside the base ``local`` of ``cfg``."""
    setup = dataclasses.replace(run.setup, objective=objectives.Objective(), cfg=cfg or run.setup.cfg)
    return finite.perplexity(mean_loss(run, local, adapters, setup), "the adapter" if adapters else "the base")


def validate(run: Run, state: State) -> dict[str, float]:
    """Return the mean loss of the held-out rows."""
    return {"validation": mean_loss(run, run.local, state.trained)}


def mean_loss(run: Run, local: Any, adapters: lora.Adapters, setup: Setup | None = None) -> float:
    """Return the mean loss of the held-out rows beside the base ``local``, the same on every rank.

    That is nats a token; of preferences the loss of a pair or answer. ``setup`` is by default that of training.
    """
    if not isinstance(run.work.held, data.Rows):
        return judged(run, local, adapters)[0]
    setup = forward_setup(setup or run.setup)
    device = device_of(setup.mesh)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    taught = run.teacher if setup.objective.name == "distill" else None
    for rows in in_batches(run):
        total += _summed(lambda mine: run.evaluate(adapters, local, mine, setup, taught), rows, setup)
    nats, tokens = total
    return float(nats / tokens)


def _summed(evaluate: Callable[[Any], Tensor], rows: Any, setup: Setup) -> Tensor:
    """Return the sum of ``evaluate`` [n ...] of each rank's share of ``rows``, in one order if sums are ordered."""
    mine, device = shard.share(rows, setup.mesh, setup.rules), device_of(setup.mesh)
    if setup.ordered is None:
        return shard.psum(evaluate(devices.to(mine, device)).sum(0), setup.mesh, setup.rules.batch)
    count = len(tree.leaves(mine)[0])
    some = mine if count else tree.map(lambda t: t[:1], rows)  # a rank without rows calls the same collectives
    each = evaluate(devices.to(some, device))[:count]
    return shard.ordered.sum_rows(each, len(tree.leaves(rows)[0]), setup.mesh, setup.rules)


def forward_setup(setup: Setup) -> Setup:
    """Return the setup with one constant for all optimisers, so that runs of a sweep share the traces of a loss."""
    return dataclasses.replace(setup, opt=NO_UPDATE, schedule=NO_RATE)


def judged(run: Run, local: Any, adapters: lora.Adapters) -> tuple[float, float]:
    """Return the mean loss of the held-out preferences, and the share that is judged right."""
    setup, num_rows = forward_setup(run.setup), 0
    device = device_of(setup.mesh)
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for rows in in_batches(run):
        rows = objectives.complete(setup.objective, rows)
        count, n = objectives.counts(setup.objective, rows), len(tree.leaves(rows)[0])
        count = count.to(device)
        part = _summed(lambda mine, count=count: run.evaluate(adapters, local, mine, count, setup), rows, setup)
        total += part * torch.tensor([n, 1], device=device)
        num_rows += n
    loss, right = (total / num_rows).tolist()
    return loss, right


def in_batches(run: Run) -> list[Any]:
    """Return the held-out rows in batches; one that is left over joins the last, because kto mismatches rows."""
    size, held = run.options.batch, run.work.held
    n = len(tree.leaves(held)[0])
    starts = [first for first in range(0, n, size) if first == 0 or n - first > 1]
    ends = [*starts[1:], n]
    return [tree.map(lambda t, a=a, b=b: t[a:b], held) for a, b in zip(starts, ends, strict=True)]
