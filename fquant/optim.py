"""Optimisers as pairs of pure functions, and learning rates as functions of the step.

    opt = chain(clip_by_global_norm(1.0), adamw(cosine(2e-4, total=1000, warmup=50)))
    state = opt.init(params)
    updates, state = opt.update(grads, state, params)
    params = apply_updates(params, updates)

An update is *added* to a parameter: sign and learning rate are already in it. Moments have the structure of the
parameters. Everything is computed in float32; ``apply_updates`` casts once, to the parameter's dtype.

The arithmetic is torch's. AdamW (Loshchilov & Hutter 2019) and Lion (Chen et al. 2023) decay weights beside the
gradient; SGD adds the decay to the gradient. A schedule gets the number of updates made before, so the first is step 0.
"""

import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from . import tree
from .tree import expect, node

Tree = TypeVar("Tree")  # of parameters, their gradients or updates
State = TypeVar("State")
Schedule: TypeAlias = Callable[[Tensor], Tensor]  # step i64[] -> learning rate f32[]
Rate: TypeAlias = float | Schedule

_BELOW_1, _FINITE = (1, "in [0, 1)"), (math.inf, "a finite number of at least 0")
RANGES = {"b1": _BELOW_1, "b2": _BELOW_1, "momentum": _BELOW_1, "eps": _FINITE, "weight_decay": _FINITE}


class Optimizer(NamedTuple, Generic[State]):
    """A pair of pure functions: ``init(params) -> state`` and ``update(grads, state, params) -> (updates, state)``."""

    init: Callable[[Any], State]
    update: Callable[[Any, State, Any], tuple[Any, State]]


@node
class AdamState:
    """Running means of the gradient and of its square."""

    step: Tensor  # i64[], updates made
    mean: Any  # f32, like the parameters
    square: Any  # f32, like the parameters


@node
class MomentumState:
    """A running mean (Lion) or sum (SGD) of gradients; absent in SGD without momentum."""

    step: Tensor  # i64[], updates made
    momentum: Any = None  # f32, like the parameters


def adamw(
    lr: Rate, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01
) -> Optimizer[AdamState]:
    """Return AdamW as in ``torch.optim.AdamW``."""
    rate = _rate(lr, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    init = lambda params: AdamState(*_zeros(params, 2))

    def update(grads: Tree, state: AdamState, params: Tree) -> tuple[Tree, AdamState]:
        _check_like(grads, params)
        step = state.step + 1
        mean = tree.map(lambda m, g: b1 * m + (1 - b1) * g.float(), state.mean, grads)
        square = tree.map(lambda v, g: b2 * v + (1 - b2) * g.float() ** 2, state.square, grads)
        debias1, debias2, factor = _debias(b1, step), _debias(b2, step), -rate(state.step)
        change = lambda m, v, p: factor * ((m / debias1) / ((v / debias2).sqrt() + eps) + weight_decay * p.float())
        return tree.map(change, mean, square, params), AdamState(step, mean, square)

    return Optimizer(init, update)


def sgd(lr: Rate, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Optimizer[MomentumState]:
    """Return gradient descent with momentum as in ``torch.optim.SGD`` without dampening."""
    rate = _rate(lr, momentum=momentum, weight_decay=weight_decay)
    expect(momentum > 0 or not nesterov, "nesterov: got momentum 0.0, wanted one above 0; use momentum=0.9")
    init = lambda params: MomentumState(*_zeros(params, 1 if momentum else 0))

    def update(grads: Tree, state: MomentumState, params: Tree) -> tuple[Tree, MomentumState]:
        _check_like(grads, params)
        factor, buffer = -rate(state.step), None
        direction = tree.map(lambda g, p: g.float() + weight_decay * p.float(), grads, params)
        if momentum:
            buffer = tree.map(lambda m, d: momentum * m + d, state.momentum, direction)
            direction = tree.map(lambda d, m: d + momentum * m, direction, buffer) if nesterov else buffer
        return tree.map(lambda d: factor * d, direction), MomentumState(state.step + 1, buffer)

    return Optimizer(init, update)


def lion(lr: Rate, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0) -> Optimizer[MomentumState]:
    """Return Lion, whose update is the sign of a mean that leans towards the newest gradient."""
    rate = _rate(lr, b1=b1, b2=b2, weight_decay=weight_decay)
    init = lambda params: MomentumState(*_zeros(params, 1))

    def update(grads: Tree, state: MomentumState, params: Tree) -> tuple[Tree, MomentumState]:
        _check_like(grads, params)
        factor = -rate(state.step)
        change = lambda m, g, p: factor * (torch.sign(b1 * m + (1 - b1) * g.float()) + weight_decay * p.float())
        mean = tree.map(lambda m, g: b2 * m + (1 - b2) * g.float(), state.momentum, grads)
        return tree.map(change, state.momentum, grads, params), MomentumState(state.step + 1, mean)

    return Optimizer(init, update)


def clip_by_global_norm(max_norm: float, norm: Callable[[Any], Tensor] | None = None) -> Optimizer[tuple[()]]:
    """Scale all gradients in float32 by min(1, max_norm / (norm + 1e-6)), as torch's ``clip_grad_norm_`` does.

    ``norm`` is :func:`global_norm` by default; of gradients that are spread over ranks, one such as
    ``shard.global_norm``.
    """
    expect(max_norm > 0, f"max_norm: got {max_norm}, wanted above 0")

    def update(grads: Tree, state: tuple[()], params: Tree) -> tuple[Tree, tuple[()]]:
        factor = (max_norm / ((norm or global_norm)(grads) + 1e-6)).clamp(max=1.0)
        return tree.map(lambda g: g.float() * factor, grads), state

    return Optimizer(lambda params: (), update)


def chain(*optimizers: Optimizer[Any]) -> Optimizer[tuple[Any, ...]]:
    """Compose optimisers: the updates of each are the gradients of the next; the state is a tuple of their states."""

    def update(grads: Tree, state: tuple[Any, ...], params: Tree) -> tuple[Tree, tuple[Any, ...]]:
        states = []
        for each, old in zip(optimizers, state, strict=True):
            grads, new = each.update(grads, old, params)
            states.append(new)
        return grads, tuple(states)

    return Optimizer(lambda params: tuple(each.init(params) for each in optimizers), update)


def global_norm(x: Any) -> Tensor:
    """Return the Euclidean norm of all leaves together, f32[]."""
    squares = [leaf.float().square().sum() for leaf in tree.leaves(x)]
    expect(squares, "global_norm: got a tree without leaves, wanted at least one tensor")
    return torch.stack(squares).sum().sqrt()


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Return ``params + updates``, added in the wider dtype and cast once to the parameter's dtype."""
    _check_like(updates, params)
    return tree.map(lambda p, u: (p + u).to(p.dtype), params, updates)


def constant(lr: float, warmup: int = 0) -> Schedule:
    """Return the schedule ``lr`` after a linear warmup: step i < warmup has lr * (i + 1) / (warmup + 1)."""
    return _schedule(lr, warmup, torch.ones_like)


def linear(lr: float, total: int, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Return a warmup as in :func:`constant`, then a line from ``lr`` at ``warmup`` to ``end`` from ``total`` on."""
    return _decay(lr, total, warmup, end, lambda t, low: 1 - (1 - low) * t)


def cosine(lr: float, total: int, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Return a schedule as :func:`linear` that falls along half a cosine (Loshchilov & Hutter 2017)."""
    return _decay(lr, total, warmup, end, lambda t, low: low + (1 - low) * 0.5 * (1 + torch.cos(math.pi * t)))


def _decay(lr: float, total: int, warmup: int, end: float, shape: Callable[[Tensor, float], Tensor]) -> Schedule:
    schedule = _schedule(lr, warmup, lambda i: shape((i / (total - warmup)).clamp(max=1.0), end / lr))
    expect(total > warmup, f"total: got {total} steps, wanted more than the {warmup} of warmup")
    expect(0 <= end <= lr, f"end: got {end}, wanted between 0 and lr = {lr}")
    return schedule


def _schedule(lr: float, warmup: int, after_warmup: Callable[[Tensor], Tensor]) -> Schedule:
    expect(0 < lr < math.inf, f"lr: got {lr}, wanted a finite number above 0")
    expect(warmup >= 0, f"warmup: got {warmup} steps, wanted at least 0")

    def schedule(step: Tensor) -> Tensor:
        i = step.float()  # exact up to 2^24 steps
        return lr * torch.where(i < warmup, (i + 1) / (warmup + 1), after_warmup(i - warmup))

    return schedule


def _debias(b: float, step: Tensor) -> Tensor:
    # expm1, because 1 - b**step loses four digits in float32 for b near one
    return -torch.expm1(step.float() * (math.log(b) if b else -math.inf))


def _zeros(params: Any, count: int) -> list[Any]:
    """Return the step 0, and ``count`` moments of zeros."""
    _check_float(params)
    device = next((p.device for p in tree.leaves(params)), None)
    moment = lambda: tree.map(lambda p: torch.zeros_like(p, dtype=torch.float32), params)
    return [torch.zeros((), dtype=torch.int64, device=device), *(moment() for _ in range(count))]


def _check_float(params: Any) -> None:
    tree.check_floats(params, "optimise only the trainable part of the tree", allow_complex=False)


def _check_like(grads: Any, params: Any) -> None:
    _check_float(params)
    if tree.structure(grads) != tree.structure(params):
        odd = set(tree.paths(grads)) ^ set(tree.paths(params))
        where = f"{min(odd)} is in one only" if odd else "their static fields or containers differ"
        raise ValueError(f"gradients: got another structure than that of the parameters ({where}); pass the same tree")
    for (path, g), p in zip(tree.items(grads), tree.leaves(params), strict=True):
        if g.shape != p.shape:
            raise ValueError(f"{path}: gradient of shape {tuple(g.shape)}, wanted the parameter's {tuple(p.shape)}")


def _rate(lr: Rate, **options: float) -> Schedule:
    """Check the options of an optimiser; return its learning rate as a schedule."""
    for name, x in options.items():
        end, wanted = RANGES[name]
        expect(0 <= x < end, f"{name}: got {x}, wanted {wanted}")
    return lr if callable(lr) else constant(lr)
