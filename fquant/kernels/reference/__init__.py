# ruff: noqa: F401  (a face)
"""Every kernel in plain torch, on every device: the definition of the results of all backends.

Other backends equal it bit for bit in quantising and dequantising. That arithmetic is bitsandbytes' to the bit:

* absmax is taken in float32. Elements are multiplied by its float32 reciprocal; in a short last block they are divided
  by it. The nearest table value is found between midpoints, a tie going to the smaller value.
* The dynamic 8-bit map is looked up on a grid of 65536 points. (bitsandbytes on CUDA takes the exact nearest instead,
  which moves about one code in a thousand by one step.)
* Codes without a table are those of LLM.int8(): rounded to float16 first, then ``round(x * (127 / absmax))``.
"""

from .causal_attention import attention, attention_backward
from .codebook_search import beam_search, nearest, stage_sums, sums_by_code
from .codec import CHUNK, TINY, decode, encode, grid, matmul, matmul_t, midpoints, times_scale
from .decoding import cached_attention, dense_matmul
from .elementwise import pointwise, root, silu, silu_derivative, turn
from .integers import integer_matmul, integer_mm, quantize_rows
from .moments import adam_update, encode_moment, momentum_update
from .ordered import ordered_matmul
from .random_bits import FOLDED, MASK, PARITY, bernoulli, bits, fold, threefry
from .rows import nll, nll_backward, rms_norm, rms_norm_backward
