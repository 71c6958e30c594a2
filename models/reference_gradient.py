"""Kernels whose derivatives are those of a differentiable reference.

    y, *more = KernelWithReferenceGradient.apply(Implementations(kernel, reference), *tensors)

A fused kernel, or a loop over chunks that records nothing, is no chain of operations that torch can differentiate. So
the Function computes by the kernel. Every derivative, reverse or forward and of any order, recomputes by the reference,
an equal function in plain tensor operations. Without a derivative the reference is never run.

A Function with a cheaper first derivative derives from this class and overrides ``setup_context`` and ``backward``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fquant.autodiff import forward_mode, unwrap_dead

TensorFunction = Callable[..., tuple[Tensor, ...]]


class Implementations(NamedTuple):
    """Two equal functions from tensors to a tuple of tensors, and the rule by which vmap maps them.

    Dim 0 of the first ``num_batched`` arguments and of every result is a batch of independent examples. The arguments
    behind them are shared by all examples. ``reference`` may be ``kernel`` itself if torch can differentiate it.
    """

    kernel: TensorFunction
    reference: TensorFunction
    num_batched: int = 0


class KernelWithReferenceGradient(torch.autograd.Function):
    """The kernel of an :class:`Implementations` with the derivatives of its reference.

    vmap adds the mapped examples to the batch. It loops if there is no batch or a shared argument is mapped.
    """

    @staticmethod
    def forward(functions: Implementations, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return functions.kernel(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.functions = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        inputs, f = unwrap_dead(ctx.saved_tensors), ctx.functions.reference
        wanted = tuple(i for i, need in enumerate(ctx.needs_input_grad[1:]) if need)
        of_wanted = lambda *some: f(*replace_at(inputs, wanted, some))
        outputs, pull, *_ = torch.func.vjp(of_wanted, *[inputs[i] for i in wanted])
        found = pull(tuple(torch.zeros_like(t) if g is None else g for g, t in zip(grads, outputs, strict=True)))
        return None, *replace_at([None] * len(inputs), wanted, found)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        moving, f = tuple(i for i, t in enumerate(tangents) if t is not None), ctx.functions.reference
        with forward_mode(ctx.saved_tensors) as inputs:
            of_moving = lambda *some: f(*replace_at(inputs, moving, some))
            return torch.func.jvp(of_moving, tuple(inputs[i] for i in moving), tuple(tangents[i] for i in moving))[1]

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, functions: Implementations, *tensors: Tensor) -> Any:
        dims, count = in_dims[1:], functions.num_batched
        if not count or any(dim is not None for dim in dims[count:]):
            examples = [
                cls.apply(
                    functions, *(t if dim is None else t.select(dim, i) for t, dim in zip(tensors, dims, strict=True))
                )
                for i in range(info.batch_size)
            ]
            outputs = tuple(torch.stack(parts) for parts in zip(*examples, strict=True))
        else:
            front = [to_front(t, dim, info.batch_size) for t, dim in zip(tensors[:count], dims, strict=False)]
            merged = cls.apply(functions, *(t.flatten(0, 1) for t in front), *tensors[count:])
            outputs = tuple(t.unflatten(0, front[0].shape[:2]) for t in merged)
        return outputs, (0,) * len(outputs)


def to_front(t: Tensor, dim: int | None, batch_size: int) -> Tensor:
    """Move the mapped ``dim`` of ``t`` to the front; expand an argument that is not mapped."""
    return t.expand(batch_size, *t.shape) if dim is None else t.movedim(dim, 0)


def replace_at(values: Sequence[Any], positions: tuple[int, ...], replacements: Sequence[Any]) -> list[Any]:
    """Return ``values`` with ``replacements`` at ``positions``."""
    out = list(values)
    for i, item in zip(positions, replacements, strict=True):
        out[i] = item
    return out


def at_least_float32(x: Tensor) -> Tensor:
    """Cast a narrower float to float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
