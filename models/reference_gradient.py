"""Kernels whose derivatives are those of a differentiable reference.

    y, *more = KernelWithReferenceGradient.apply(Implementations(kernel, reference), *tensors)

torch cannot differentiate a fused kernel, or a loop over chunks that records nothing. So every derivative, reverse or
forward and of any order, recomputes by the reference, an equal function in plain tensor operations. Without a
derivative the reference is never run. A Function with a cheaper first derivative derives from this class and overrides
``backward``; ``saved_results`` are the results that it finds behind the saved inputs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fquant.autodiff import pull_back, push_forward, replace_at, to_front, unwrap_dead

TensorFunction = Callable[..., tuple[Tensor, ...]]


class Implementations(NamedTuple):
    """Two equal functions from tensors to a tuple of tensors; they may be one that torch can differentiate.

    Dim 0 of the first ``num_batched`` arguments and of every result is a batch of independent examples. All examples
    share the arguments behind them.
    """

    kernel: TensorFunction
    reference: TensorFunction
    num_batched: int = 0


class KernelWithReferenceGradient(torch.autograd.Function):
    """The kernel with the derivatives of its reference.

    vmap adds the mapped examples to the batch; it loops if there is no batch or a shared argument is mapped.
    """

    saved_results: tuple[int, ...] = ()

    @staticmethod
    def forward(functions: Implementations, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return functions.kernel(*tensors)

    @classmethod
    def setup_context(cls, ctx: Any, inputs: Any, output: Any) -> None:  # type: ignore[override]
        ctx.functions, *tensors = inputs
        ctx.save_for_backward(*tensors, *(output[i] for i in cls.saved_results))
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        inputs = unwrap_dead(ctx.saved_tensors)
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[1:]) if need]
        found = pull_back(ctx.functions.reference, inputs, wanted, grads)
        return None, *replace_at([None] * len(inputs), wanted, found)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        return push_forward(ctx.functions.reference, ctx.saved_tensors, tangents)

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, functions: Implementations, *tensors: Tensor) -> Any:
        dims, count = in_dims[1:], functions.num_batched
        if not count or any(dim is not None for dim in dims[count:]):
            n = info.batch_size
            zeros = lambda t, d: t.new_zeros(t.movedim(d, 0).shape[1:])  # of no examples the results have these shapes
            one = lambda t, d, i: t if d is None else t.select(d, i) if n else zeros(t, d)
            at = lambda i: [one(t, d, i) for t, d in zip(tensors, dims, strict=True)]
            examples = [cls.apply(functions, *at(i)) for i in range(max(n, 1))]
            outputs = tuple(torch.stack(parts)[:n] for parts in zip(*examples, strict=True))
        else:
            front = [to_front(t, dim, info.batch_size) for t, dim in zip(tensors[:count], dims, strict=False)]
            merged = cls.apply(functions, *(t.flatten(0, 1) for t in front), *tensors[count:])
            outputs = tuple(t.unflatten(0, front[0].shape[:2]) for t in merged)
        return outputs, (0,) * len(outputs)


def at_least_float32(x: Tensor) -> Tensor:
    """Cast a narrower float to float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
