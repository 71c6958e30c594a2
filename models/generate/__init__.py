"""Text from a decoder: prefill, decode with a cache, and sampling.

``text.py`` has prefill, decode and the loop over both. ``kv_cache.py`` has the cache, and attention to it.
``sampling.py`` chooses the next token. ``adapter_rows.py`` gives each row of a batch its own adapter.
"""

from .adapter_rows import aligned, rows
from .kv_cache import Cache
from .sampling import GREEDY, Sampling, filtered, sample
from .text import captured_step, check_request, decode, generate, prefill, step, stream

__all__ = [
    "GREEDY", "Cache", "Sampling", "aligned", "captured_step", "check_request", "decode", "filtered", "generate",
    "prefill", "rows", "sample", "step", "stream",
]  # fmt: skip
