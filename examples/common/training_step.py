"""One step of fine-tuning as one pure function: the job runs it, the plan prices it, the benchmark times it.

    step = jit(train_step, **setup.capture())
    state, measured = step(state, base, micros, count, setup)

The whole step is one captured graph: the gradients of every micro-batch, their sum over ranks, clipping, the optimiser
and the new adapters, which are written over the old ones. Adapters are kept in float32 and computed with in
``Setup.dtype``, the dtype of the residual stream. The norms of DoRA stay in float32.

With ``Setup.train`` the parameters themselves are trained, in bundles of floats over the mesh, in place of adapters.
Each rank then has its part of them, of their gradients and moments. Nothing is frozen, and what stands in place of the
base are the scales of messages (``shard.wire_scales``), if their format has any.

With ``Setup.ordered`` the gradients of rows are added in one order (``shard.ordered``). Then the adapters have the same
bits on any mesh, and with any micro-batches.

Checkpointing modes:

    full        keep the input of each block, and recompute the block in the backward
    selective   keep what is expensive to recompute; jit recomputes the rest
    none        keep every activation

No mode keeps gathered weights: they are gathered again, one block ahead, for the backward. Modes change no bit.

Nor does *offload*. The blocks of layers and the head may be in the host's memory, from which each is fetched a block
ahead of its use. Activations may be stashed there until the backward, as far as the link has time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.func import grad_and_value, vmap

import shard
from fquant import Comm, batch_invariant, lora, optim, random, tree
from fquant.compile import Pass, roofline
from fquant.compile.cost import of as cost_of
from fquant.compile.passes.rematerialize import rematerialize
from models.config import Config
from shard import weights

from ..data import dataset as data
from . import objectives
from .objectives import Objective

Checkpoint = Literal["full", "selective", "none"]
Offload = Literal["block"]
ROOM = 0.9  # of the memory that a device has: a step that is predicted to take more is recomputed or stashed instead
MODES: tuple[Checkpoint, ...] = ("none", "selective", "full")  # the fastest first
Micro = tuple[Any, Tensor | None]  # this rank's rows of a micro-batch, and their dropout keys i64[rows]


@dataclass(frozen=True)
class Setup:
    """The static half of a step. A rank has at most ``rows`` rows of ``seq`` tokens in a micro-batch."""

    cfg: Config
    mesh: DeviceMesh
    opt: optim.Optimizer
    schedule: optim.Schedule
    rows: int
    seq: int
    checkpoint: Checkpoint = "full"
    dtype: torch.dtype = torch.bfloat16
    rules: shard.Rules = shard.Rules()
    objective: Objective = Objective()
    merge_aware: bool = False  # compute with the packed weights that the adapters will be merged into
    stash: roofline.Device | None = None  # whose link to the host has time for activations, or whose memory needs it
    train: shard.Precision | None = None  # of the parameters; None trains adapters
    seed: int = 0  # of the stochastic rounding of weights that are trained in codes
    ordered: int | None = None  # rows of a step on all ranks, to add up in one order; None adds in that of the mesh

    def comm(self, by_row: bool = False) -> Comm:
        """Return the communication of a forward pass, of all rows of this rank or ``by_row``."""
        again, most = self.checkpoint == "full", self.rows * self.seq
        return shard.comm(self.mesh, self.rules, recompute=again, tokens=most, by_row=by_row)

    def capture(self) -> dict[str, Any]:
        """Return the options of ``jit`` and ``cost``: state is donated, passes place gathers, jit may recompute."""
        passes, recompute = self.gathering(), self.checkpoint == "selective"
        if self.stash is not None:  # what is cheap to recompute is not worth the link
            again = (rematerialize,) if recompute else ()
            stash = shard.passes.offload_activations(device=self.stash, room=int(ROOM * self.stash.memory))
            passes, recompute = (*passes, *again, stash), False
        return {"donate": ("state",), "passes": passes, "recompute": recompute}

    def gathering(self) -> tuple[Pass, ...]:
        """Return the passes that place gathers and fetches."""
        again = () if self.checkpoint == "full" else (shard.passes.regather_blocks(),)
        reductions = () if self.train is None else (shard.passes.overlap_reductions(),)
        return (*again, shard.passes.prefetch_gathers(), *reductions)


def rules(offload: Offload | None) -> shard.Rules:
    """Return the sharding of a run; the embedding stays on the device, where rows of it are looked up."""
    return shard.Rules() if offload is None else shard.Rules(offload=offload, resident="embed")


@tree.node
class State:
    """The adapters or the parameters, the optimiser's moments, and the number of steps done, i64[]."""

    trained: Any  # dict of Lora by path; with full training the parameters, f32 or codes
    moments: Any
    done: Tensor


tree.FORMER_FIELDS["examples.State", "adapters"] = "trained"


@tree.node
class Measured:
    """Figures of one step over the global batch, each f32[]: nats a token, the norm of the gradient, the rate."""

    loss: Tensor
    grad_norm: Tensor
    lr: Tensor


def held(trained: Any, base: Any, setup: Setup) -> Any:
    """Return what a step holds fixed: the base, or with full training the scales of messages."""
    return base if setup.train is None else shard.wire_scales(trained, setup.mesh, setup.rules)


def attached(adapters: Any, base: Any, keys: Tensor | None, setup: Setup) -> Any:
    """Return the parameters: the base with its adapters; a merge-aware sum is in float32, as in the file.

    With full training they are given in place of adapters, and :func:`held` in place of the base.
    """
    if setup.train is not None:
        return shard.scaled(adapters, base)
    if setup.merge_aware:
        return lora.attach(base, adapters, keys, merge_aware=True)
    cast = lambda x: replace(x, a=x.a.to(setup.dtype), b=x.b.to(setup.dtype))  # but not the norms of DoRA
    return lora.attach(base, {path: cast(x) for path, x in adapters.items()}, keys)


def loss(
    adapters: Any, base: Any, batch: Any, count: Tensor, keys: Tensor | None, setup: Setup, teacher: Any = None,
    by_row: bool = False,
) -> Tensor:  # fmt: skip
    """Return the summed loss of ``batch`` over ``count``, that of the global batch (see ``objectives``): f32[]."""
    params, reference = attached(adapters, base, keys, setup), base if teacher is None else teacher
    options = setup.cfg, setup.comm(by_row), setup.dtype
    return objectives.loss(setup.objective, params, reference, batch, count, *options)


def train_step(
    state: State, base: Any, micros: Sequence[Micro], count: Tensor, setup: Setup, teacher: Any = None
) -> tuple[State, Measured]:
    """Take one step: gradients of all ``micros``, their sum over ranks, and one update of what is trained.

    ``base`` is ``shard.local(...)`` of the placed base, and so is ``teacher``, of the objective that has one; ``count``
    i64[] is the number of targets of the global batch. With full training ``base`` is not used.
    """
    return update(state, *gradients(state.trained, base, micros, count, setup, teacher), setup)


def gradients(
    trained: Any, base: Any, micros: Sequence[Micro], count: Tensor, setup: Setup, teacher: Any = None
) -> tuple[Any, Tensor]:
    """Return the gradients and the loss of all ``micros`` of all ranks; see :func:`train_step`."""
    base = held(trained, base, setup)
    if setup.ordered is not None:

        def of_row(adapters: Any, row: Any) -> Tensor:
            batch, *keys = tree.map(lambda t: t[None], row)
            return loss(adapters, base, batch, count, keys[0] if keys else None, setup, teacher, by_row=True)

        summed = shard.ordered.grad_and_value(of_row, setup.mesh, setup.rules, setup.ordered)
        return summed(trained, [(batch,) if keys is None else (batch, keys) for batch, keys in micros])
    total = None
    of = lambda carriers, *rest: loss(weights.attach(trained, carriers), *rest)
    carriers = weights.carriers(trained)  # what is trained itself, but for weights in codes
    for batch, keys in micros:
        gradient = grad_and_value(of)(carriers, base, batch, count, keys, setup, teacher)
        total = gradient if total is None else tree.map(torch.add, total, gradient)
    return shard.reduce(total, setup.mesh, setup.rules)


def update(state: State, grads: Any, value: Tensor, setup: Setup) -> tuple[State, Measured]:
    """Update what is trained with the gradients and the loss of the global batch."""
    updates, moments = setup.opt.update(grads, state.moments, weights.dense(state.trained))
    key = random.fold(state.done, setup.seed)
    trained = weights.apply_updates(state.trained, updates, key, setup.mesh, setup.rules)
    value = value.clone()  # a view of the buffer that was summed over ranks would keep all gradients
    measured = Measured(value, shard.global_norm(grads, setup.mesh, setup.rules), setup.schedule(state.done))
    return State(trained, moments, state.done + 1), measured


def judge(adapters: Any, base: Any, batch: Any, count: Tensor, setup: Setup) -> Tensor:
    """Return the loss of preferences over ``count``, and of what is judged right: f64[n 2], see :func:`evaluate`."""
    base = held(adapters, base, setup)

    def of(batch: Any) -> Tensor:
        by_row = setup.ordered is not None
        params, options = attached(adapters, base, None, setup), (setup.cfg, setup.comm(by_row), setup.dtype)
        value = loss(adapters, base, batch, count, None, setup, by_row=by_row)
        right = objectives.num_right(setup.objective, params, base, batch, *options)
        return torch.stack([value.double(), right])

    return _for_each_row(of, batch, setup)


def evaluate(adapters: Any, base: Any, batch: data.Rows, setup: Setup, teacher: Any = None) -> Tensor:
    """Return the summed loss in nats and the number of targets of each of this rank's rows: f64[n 2].

    Without ordered sums that is one row, their sum.
    """
    base, one = held(adapters, base, setup), torch.ones((), device=batch.tokens.device)

    def of(batch: data.Rows) -> Tensor:
        nats = loss(adapters, base, batch, one, None, setup, teacher, by_row=setup.ordered is not None)
        return torch.stack([nats.double(), (batch.targets >= 0).sum().double()])

    return _for_each_row(of, batch, setup)


def _for_each_row(f: Callable[[Any], Tensor], batch: Any, setup: Setup) -> Tensor:
    """Return ``f`` of each row, or of all rows where sums may depend on the mesh, stacked; without derivatives."""
    with torch.no_grad():
        if setup.ordered is None:
            return f(batch)[None]
        leaves, structure = tree.flatten(batch)
        with batch_invariant():
            return vmap(lambda *row: f(tree.map(lambda t: t[None], tree.unflatten(structure, row))))(*leaves)


@cache
def sent(step: Any) -> int:
    """Return the bytes that a rank sends in a call of the captured ``step``, read off its graph once it is traced."""
    (captured,) = step.traced.values()
    return sum(collective.sent for collective in cost_of(captured).collectives)


def share(step: Any, device: roofline.Device, seconds: float) -> float | None:
    """Return the seconds of the captured ``step`` at the limit of ``device`` over those that it took.

    None if that is above 1: a host reached less when it was measured, because other processes computed.
    """
    return found if (found := limit(step, device) / seconds) <= 1 else None


@cache
def limit(step: Any, device: roofline.Device) -> float:
    """Return the seconds of the captured ``step`` at the limit of ``device``, read off its graph once it is traced."""
    (captured,) = step.traced.values()
    return roofline.limit(captured.module.graph, device)


def initial(trained: Any, opt: optim.Optimizer) -> State:
    """Return the state before the first step."""
    return State(trained, opt.init(weights.dense(trained)), torch.tensor(0, device=tree.leaves(trained)[0].device))
