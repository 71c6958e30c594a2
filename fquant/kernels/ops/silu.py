"""silu, the activation of SwiGLU, and its slope as two ops: elementwise, and steps of elementwise programs.

    silu(x)          f[...] to f[...]: x · s, s = 1 / (1 + exp(-x))     (Elfwing et al. 2017; Hendrycks & Gimpel 2016)
    silu_derivative(x)    f[...] to f[...]: s · (1 + x · (1 - s)), its derivative

torch's own would do for values. But a program (``pointwise.py``) is to give the bits of what it replaces, and torch
leaves exponentials to libraries that differ between builds: so ``F.silu`` would cut every chain of a captured graph in
two. And a backward that can be differentiated again, as those of torch.func are, is with torch a chain of six
steps, each rounded to the dtype of ``x``; here it is a product with the slope, which is rounded once.

What they are is defined by ``reference.py``, in torch. The kernels of csrc/kernels.c compute in float32 and round once, to the
dtype of ``x``. Before that, in units in the last place of float32,

    silu          is within 4 units of the exact value
    silu_derivative    is within 5 units of s + |x| s (1 - s), the sizes of its two terms, which cancel near x = -1.28

but for 2^-142 more below x = -87, where the exponential is denormal. What is infinite or not a number comes out as in
torch: silu(-inf) is NaN, and so is the slope at both infinities. Alone an op is the program of one step: the bits of an
element depend on nothing but it, and are the same on all instruction sets that have fused multiply-adds; those of plain
C may differ by a few units of float32, and differ for no bf16.

The ops are registered beside the others of ``fquant::`` and computed by the same table of backends; of float64, and on
devices that have no kernel of them, CUDA among them, by the reference. They have no derivatives: the autograd Function
of them is in models/swiglu.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch import backend
from ..registry import register
from ..spec import FLOATS
from .pointwise_program import OWN


def silu(x: Tensor) -> Tensor:
    """``x · sigmoid(x)`` of x f[...] in f32, bf16, f16 or f64: its dtype and shape, contiguous.

    Raises TypeError for another dtype.
    """
    return OPS["silu"](x)


def silu_derivative(x: Tensor) -> Tensor:
    """The derivative of :func:`silu` at x f[...]: its dtype and shape, contiguous. Raises what :func:`silu` does."""
    return OPS["silu_derivative"](x)


def _real(name: str, x: Tensor, **out: Tensor) -> Tensor:
    _check(name, x)
    return getattr(backend(x.device.type)[1], name)(x, **out)


def _fake(name: str, x: Tensor) -> Tensor:
    _check(name, x)
    return x.new_empty(x.shape)


def _check(name: str, x: Tensor) -> None:
    if x.dtype not in (*FLOATS, torch.float64):
        raise TypeError(f"{name} got {x.dtype} {tuple(x.shape)}; wanted f32, bf16, f16 or f64")


def _vmap(name: str, info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
    return OPS[name](x), in_dims[0]


_POINTWISE = torch.Tag.pointwise
_FIX = (
    "it computes values only: differentiate torch.nn.functional.silu, or call this one inside an autograd Function "
    "whose backward multiplies by the slope, as models.swiglu.gated does"
)
OPS = {
    name: register(
        name, "(Tensor x) -> Tensor", partial(_real, name), partial(_fake, name), partial(_vmap, name), _FIX, _POINTWISE
    )
    for name in OWN
}
