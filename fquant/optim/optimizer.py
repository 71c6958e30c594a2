"""Optimisers as pairs of pure functions, how they compose, and how their updates are applied."""

import math
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import random, tree
from ..autodiff import check_floats
from ..communication import Loadable
from ..global_norm import root, sum_of_squares
from ..tree import expect, node
from .schedules import Rate, Schedule, constant
from .stochastic_rounding import round_stochastically

Tree = TypeVar("Tree")  # of parameters, their gradients or updates
State = TypeVar("State")

_BELOW_1, _FINITE = (1, "in [0, 1)"), (math.inf, "a finite number of at least 0")
RANGES = {"b1": _BELOW_1, "b2": _BELOW_1, "momentum": _BELOW_1, "eps": _FINITE, "weight_decay": _FINITE}


class Optimizer(NamedTuple, Generic[State]):
    """A pair of pure functions: ``init(params) -> state`` and ``update(grads, state, params) -> (updates, state)``.

    ``step(grads, state, params, key=None) -> (params, state)`` is both an update and its application, if an optimiser
    can do that in one pass over memory; call :func:`step`, which works for every optimiser.
    """

    init: Callable[[Any], State]
    update: Callable[[Any, State, Any], tuple[Any, State]]
    step: Callable[..., tuple[Any, State]] | None = None


@node
class AdamState:
    """Running means of the gradient and of its square."""

    step: Tensor  # i64[], updates made
    mean: Any  # like the parameters, each leaf f32 or Packed
    square: Any  # like the parameters, each leaf f32 or Packed


@node
class MomentumState:
    """A running mean (Lion, Muon) or sum (SGD) of gradients; absent in SGD without momentum."""

    step: Tensor  # i64[], updates made
    momentum: Any = None  # like the parameters, each leaf f32 or Packed


def clip_by_global_norm(max_norm: float, norm: Callable[[Any], Tensor] | None = None) -> Optimizer[tuple[()]]:
    """Scale all gradients in float32 by min(1, max_norm / (norm + 1e-6)), as torch's ``clip_grad_norm_`` does.

    ``norm`` is :func:`global_norm` by default; of gradients that are spread over ranks, one such as
    ``shard.global_norm``. It may be beyond float32 (f64[]). A gradient that is not finite gives updates that are not.
    """
    expect(max_norm > 0, f"max_norm: got {max_norm}, wanted above 0")

    def update(grads: Tree, state: tuple[()], params: Tree) -> tuple[Tree, tuple[()]]:
        total = (norm or global_norm)(grads)
        near, far = (max_norm / (t + 1e-6) for t in (total.float(), total.double()))
        factor = torch.where(total.float().isinf(), far.float(), near).clamp(max=1.0)
        return tree.map(lambda g: g.float() * factor, grads), state

    return Optimizer(lambda params: (), update)


def chain(*optimizers: Optimizer[Any]) -> Optimizer[tuple[Any, ...]]:
    """Compose optimisers: the updates of each are the gradients of the next; the state is a tuple of their states."""

    def run(some: Any, grads: Tree, state: tuple[Any, ...], params: Tree) -> tuple[Tree, tuple[Any, ...]]:
        states = []
        for each, old in zip(some, state, strict=True):
            grads, new = each.update(grads, old, params)
            states.append(new)
        return grads, tuple(states)

    def fused(
        grads: Tree, state: tuple[Any, ...], params: Tree, key: Tensor | None = None
    ) -> tuple[Tree, tuple[Any, ...]]:
        grads, states = run(optimizers[:-1], grads, state[:-1], params)
        params, last = step(optimizers[-1], grads, state[-1], params, key)
        return params, (*states, last)

    init = lambda params: tuple(each.init(params) for each in optimizers)
    has_step = bool(optimizers) and optimizers[-1].step is not None
    return Optimizer(init, lambda *args: run(optimizers, *args), fused if has_step else None)


def step(
    optimizer: Optimizer[State], grads: Tree, state: State, params: Tree, key: Tensor | None = None
) -> tuple[Tree, State]:
    """Return the updated parameters and the new state: ``update``, then :func:`apply_updates` with ``key``.

    For AdamW, Adam, Lion and SGD that is one pass over memory. The bits are those of the two calls.
    """
    if optimizer.step is not None:
        return optimizer.step(grads, state, params, key)
    updates, state = optimizer.update(grads, state, params)
    return apply_updates(params, updates, key), state


def global_norm(x: Any) -> Tensor:
    """Return the Euclidean norm of all leaves together, f64[]: a float32 number, unless its square is beyond those."""
    return root(sum_of_squares(tree.leaves(x)))


def apply_updates(params: Tree, updates: Tree, key: Tensor | None = None, start: int | dict[str, int] = 0) -> Tree:
    """Return ``params + updates``, added in the wider dtype and cast once to the parameter's dtype.

    With a ``key`` of :mod:`fquant.random` the cast to bf16 or f16 is stochastic rounding: up or down with
    probabilities that make its mean the sum. It draws from the key, folded with the path of the leaf, at the flat index
    of each element plus ``start``. So a slice of rows of a leaf draws what the whole draws there; ``start`` is one
    number, or one for each path. Fold a new key for each step. Raises ValueError for a path that is not in the tree.
    """
    check_like(updates, params)
    if key is None:
        return tree.map(lambda p, u: (p + u).to(p.dtype), params, updates)
    if isinstance(start, dict) and (unknown := set(start) - set(tree.paths(params))):
        raise ValueError(f"start: got {min(unknown)!r}, which is no path of the parameters; remove it")
    leaves, structure = tree.flatten(params)
    out = []
    for (path, p), u in zip(tree.items(params), tree.leaves(updates), strict=True):
        first = start.get(path, 0) if isinstance(start, dict) else start
        with tree.at(path):
            out.append(round_stochastically(p + u, p.dtype, random.fold(key, path), first))
    assert len(out) == len(leaves)
    return tree.unflatten(structure, out)


def applied(p: Tensor, change: Tensor, key: Tensor | None) -> Tensor:
    """Return ``p + change`` in the dtype of ``p``, rounded by ``key`` i64[] if that is given."""
    return (p + change).to(p.dtype) if key is None else round_stochastically(p + change, p.dtype, key)


def debias(b: float, step: Tensor) -> Tensor:
    """Return 1 - b^step f32[], by expm1, because the difference loses four digits in float32 for b near one."""
    return -torch.expm1(step.float() * (math.log(b) if b else -math.inf))


def first_step(params: Any) -> Tensor:
    """Return the step 0, i64[], on the device of the parameters."""
    device = next((p.device for p in tree.leaves(params)), None)
    return torch.zeros((), dtype=torch.int64, device=device)


def check_float(params: Any) -> None:
    """Raise TypeError, with the path, for a leaf that is no tensor of real floats."""
    check_floats(params, "optimise only the trainable part of the tree", allow_complex=False)


def check_whole(params: Any, name: str) -> None:
    """Raise ValueError, with the path, for a block that is not loaded, in which a rank has a part of each tensor."""
    is_closed = lambda x: isinstance(x, Loadable)
    for path, leaf in tree.items(params, is_leaf=is_closed):
        fault = f"{path}: got a {type(leaf).__name__}, of which a rank has a part, and {name} needs whole tensors"
        expect(not is_closed(leaf), f"{fault}; use shard.on_whole(optimizer, mesh, rules)")


def check_like(grads: Any, params: Any) -> None:
    """Raise ValueError unless ``grads`` has the structure and the shapes of ``params``, which are floats."""
    check_float(params)
    if tree.structure(grads) != tree.structure(params):
        odd = set(tree.paths(grads)) ^ set(tree.paths(params))
        where = f"{min(odd)} is in one only" if odd else "their static fields or containers differ"
        raise ValueError(f"gradients: got another structure than that of the parameters ({where}); pass the same tree")
    for (path, g), p in zip(tree.items(grads), tree.leaves(params), strict=True):
        if g.shape != p.shape:
            raise ValueError(f"{path}: gradient of shape {tuple(g.shape)}, wanted the parameter's {tuple(p.shape)}")


def as_schedule(lr: Rate, **options: float) -> Schedule:
    """Check the options of an optimiser; return its learning rate as a schedule."""
    for name, x in options.items():
        end, wanted = RANGES[name]
        expect(0 <= x < end, f"{name}: got {x}, wanted {wanted}")
    return lr if callable(lr) else constant(lr)
