"""Text from a decoder: prefill, decode with a cache, and sampling.

text.py          prefill, decode, and the loop over both
kv_cache.py      the cache of keys and values, and attention to it
sampling.py      the choice of the next token
adapter_rows.py  an adapter for each row of a batch
"""

from .adapter_rows import aligned, rows
from .kv_cache import Cache
from .sampling import GREEDY, Sampling, filtered, sample
from .text import captured_step, check_request, decode, generate, prefill, step, stream

__all__ = [
    "GREEDY", "Cache", "Sampling", "aligned", "captured_step", "check_request", "decode", "filtered", "generate",
    "prefill", "rows", "sample", "step", "stream",
]  # fmt: skip
