# ruff: noqa: F401  (a face)
"""The backend for CPU tensors: it describes tensors to the C kernels of csrc/, and leaves a few products to torch.

A product never makes a dense weight. C decodes what it multiplies with next. The room that it needs for that and for a
copy of x does not depend on the weight. It computes in float32, or in bfloat16 with float32 sums where the machine can.
If blocks straddle rows, or x is float64, ``codec.TILE`` bytes of rows are decoded at a time. Such a tile is multiplied
as a dense weight, in float64 by torch. Sums over tiles are kept in float32 at least.
"""

from .causal_attention import attention, attention_backward
from .codebook_search import beam_search, nearest, stage_sums, sums_by_code
from .codec import decode, encode, matmul, matmul_t
from .decoding import cached_attention, dense_matmul
from .elementwise import pointwise, root, silu, silu_derivative, turn
from .integers import integer_matmul, integer_mm
from .library import MOST_DIM, isas, load
from .moments import adam_update, momentum_update
from .ordered import ordered_matmul
from .random_bits import bernoulli, bits, fold
from .rows import nll, nll_backward, rms_norm, rms_norm_backward
from .threads import usable_cores

DEVICES = ("cpu",)
