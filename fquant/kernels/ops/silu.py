"""silu, the activation of SwiGLU, and its derivative as two elementwise ops, and as steps of elementwise programs.

    silu(x)               f[...] to f[...]: x · s, s = 1 / (1 + exp(-x))  (Elfwing et al. 2017; Hendrycks & Gimpel 2016)
    silu_derivative(x)    f[...] to f[...]: s · (1 + x · (1 - s))

Torch's own has two disadvantages. Its exponentials differ between builds, but a program (``pointwise.py``) has to give
the bits of the ops that it replaces. And its backward under torch.func is six steps that each round to the dtype of
``x``. Here it is a product with the derivative, which is rounded once.

The reference defines both in torch. The kernels compute in float32 and round once, to the dtype of ``x``. Before that,
in units in the last place of float32,

    silu               is within 4 units of the exact value
    silu_derivative    is within 5 units of s + |x| s (1 - s), the sizes of its two terms, which cancel near x = -1.28

plus 2^-142 below x = -87, where the exponential is denormal. Infinities and NaN give the results of torch: silu(-inf)
is NaN, and so is the derivative at both infinities. The bits of an element depend on that element only. They are the
same on all instruction sets with fused multiply-adds and on CUDA; those of plain C, and of Triton's interpreter, may
differ by a few units of float32.

float64 and devices without a kernel take the reference. The ops have no derivatives; models/swiglu.py has an autograd
Function of them.
"""

import torch
from torch import Tensor

from ..arguments import check_floats
from ..registry import register


def silu(x: Tensor) -> Tensor:
    """Return ``x · sigmoid(x)`` of x f[...] in f32, bf16, f16 or f64, contiguous; TypeError for another dtype."""
    return OPS["silu"](x)


def silu_derivative(x: Tensor) -> Tensor:
    """Return the derivative of :func:`silu` at x f[...], contiguous; TypeError for another dtype."""
    return OPS["silu_derivative"](x)


_FIX = (
    "it computes values only: differentiate torch.nn.functional.silu, or call this one inside an autograd Function "
    "whose backward multiplies by the slope, as models.swiglu.gated does"
)
_vmap = lambda op, info, in_dims, x: (op(x), in_dims[0])
_empty = lambda x: x.new_empty(x.shape)
OPS = {
    op.__name__: register(op, check_floats, _empty, _vmap, _FIX, torch.Tag.pointwise) for op in (silu, silu_derivative)
}
