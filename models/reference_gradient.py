"""again: a function that is computed one way, and where it is differentiated, again in another.

The fast way of computing something is often no chain of ops that torch can differentiate: a fused kernel, a loop over
chunks that records nothing. :class:`Again` is the autograd Function of such a pair of equal functions: ``fast`` makes
the values, and ``slow``, made of plain tensor operations, is computed and differentiated when somebody asks for a
derivative, in reverse or forward. So derivatives of every order exist, and none costs anything until it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fquant.autodiff import forward_mode, unwrap_dead

Verb = Callable[..., tuple[Tensor, ...]]


class Pair(NamedTuple):
    """Two functions of the same tensors with the same results, each a tuple of tensors; ``slow`` may be ``fast``."""

    fast: Verb
    slow: Verb


class Again(torch.autograd.Function):
    """``pair.fast`` of tensors, nothing recorded; its derivatives are those of ``pair.slow``; mapped, it is a loop."""

    @staticmethod
    def forward(pair: Pair, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return pair.fast(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.pair = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        given, f = unwrap_dead(ctx.saved_tensors), ctx.pair.slow
        wanted = tuple(i for i, need in enumerate(ctx.needs_input_grad[1:]) if need)
        out, pull, *_ = torch.func.vjp(lambda *some: f(*put(given, wanted, some)), *[given[i] for i in wanted])
        found = pull(tuple(torch.zeros_like(t) if g is None else g for g, t in zip(grads, out, strict=True)))
        return None, *put([None] * len(given), wanted, found)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        moving, f = tuple(i for i, t in enumerate(tangents) if t is not None), ctx.pair.slow
        with forward_mode(ctx.saved_tensors) as given:
            some = lambda *some: f(*put(given, moving, some))
            return torch.func.jvp(some, tuple(given[i] for i in moving), tuple(tangents[i] for i in moving))[1]

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, pair: Pair, *tensors: Tensor) -> Any:
        each = [
            cls.apply(
                pair, *(t if dim is None else t.select(dim, i) for t, dim in zip(tensors, in_dims[1:], strict=True))
            )
            for i in range(info.batch_size)
        ]
        out = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
        return out, (0,) * len(out)


class Batched(Again):
    """Again, of tensors ``[b ...]`` whose results at each of ``b`` depend on what is there: mapped, there are more."""

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, pair: Pair, *tensors: Tensor) -> Any:
        front = [
            t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            for t, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        out = cls.apply(pair, *(t.flatten(0, 1) for t in front))
        return tuple(t.unflatten(0, front[0].shape[:2]) for t in out), (0,) * len(out)


def put(given: Any, where: tuple[int, ...], some: Any) -> list[Any]:
    """``given`` with ``some`` at the places ``where``."""
    full = list(given)
    for i, t in zip(where, some, strict=True):
        full[i] = t
    return full
