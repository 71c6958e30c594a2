"""Every kernel in plain torch: what the others must equal, quantising and dequantising bit for bit.

It runs on every device, in every dtype. The arithmetic is that of bitsandbytes to the bit:

* absmax is taken in float32; elements are multiplied by its float32 reciprocal, except in a short last block, where
  they are divided by it; the nearest table value is found between midpoints, a tie going to the smaller value.
* The dynamic 8-bit map is looked up on a grid of 65536 points. (bitsandbytes on CUDA takes the exact nearest
  instead, which moves about one code in a thousand by one step.)
* Codes without a table are those of LLM.int8(): rounded to float16 first, then ``round(x * (127 / absmax))``.

Random words are those of Threefry-2x32-20 (Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011). One counter gives two: element 2j and 2j + 1 are the words of counter j. Here they live in int64 tensors, as
torch has no arithmetic for uint32.
"""

from .causal_attention import attention, attention_backward
from .codec import CHUNK, TINY, decode, encode, grid, matmul, matmul_t, midpoints, times_scale
from .elementwise import pointwise, silu, silu_derivative, turn
from .losses import nll, nll_backward
from .norms import rms_norm, rms_norm_backward
from .threefry import FOLDED, MASK, PARITY, ROTATIONS, bernoulli, bits, fold

__all__ = [
    "CHUNK", "FOLDED", "MASK", "PARITY", "ROTATIONS", "TINY", "attention", "attention_backward", "bernoulli", "bits",
    "decode", "encode", "fold", "grid", "matmul", "matmul_t", "midpoints", "nll", "nll_backward", "pointwise",
    "rms_norm", "rms_norm_backward", "silu", "silu_derivative", "times_scale", "turn",
]  # fmt: skip
