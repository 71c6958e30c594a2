"""The kernels of csrc/kernels.c: what they are told, and the few products that they leave to torch.

A product never makes a dense weight: csrc/kernels.c decodes what it multiplies with next, and tells how much room it needs for
that and for a copy of x, which is the same for weights of any size. It computes in float32, or in bfloat16 with float32
sums where the machine can. Where blocks straddle rows, or x is float64, ``TILE`` bytes of rows are decoded at a time
and torch multiplies; sums over them are kept in float32 at least.
"""

from .causal_attention import attention, attention_backward
from .codec import decode, encode
from .elementwise import pointwise, silu, silu_derivative
from .library import isas, load
from .losses import nll, nll_backward
from .norms import rms_norm, rms_norm_backward
from .products import matmul, matmul_t
from .random_words import bernoulli, bits, fold
from .threads import usable_cores

__all__ = [
    "DEVICES", "attention", "attention_backward", "bernoulli", "bits", "decode", "encode", "fold", "isas", "load",
    "matmul", "matmul_t", "nll", "nll_backward", "pointwise", "rms_norm", "rms_norm_backward", "silu",
    "silu_derivative", "usable_cores",
]  # fmt: skip

DEVICES = ("cpu",)
