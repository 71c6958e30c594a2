"""The number and the sum of the rows of each code as one op, for the means of k-means and of running averages.

    sums_by_code(x, codes, num_codes)     x f[s n d], codes i64[s n] to counts f[s num_codes], sums f[s num_codes d]

A row whose code is negative counts for none. Rows are added one after the other, in float32 or float64, on CPUs in
their order. So a sum has the bits of ``index_add``, and does not depend on the number of threads. Rows are counted as
integers: as float32 a count would stay at 16,777,216.

The op has no derivatives. Under vmap, mapped rows are more sets ``s``.
"""

import torch
from torch import Tensor

from ..dispatch import is_direct
from ..registry import by_backend, map_rows, register


def sums_by_code(x: Tensor, codes: Tensor, num_codes: int) -> tuple[Tensor, Tensor]:
    """Return the number f[s num_codes] and the sum f[s num_codes d] of the rows x f[s n d] of each code i64[s n].

    x is f32 or f64, and so are the results. Raises TypeError for other dtypes, ValueError for other shapes or devices,
    and for fewer codes than one. A code from ``num_codes`` on raises IndexError where values can be seen on a CPU.
    """
    if x.is_meta or not is_direct(x, codes):
        return _OP(x, codes, num_codes)
    _check("sums_by_code", x, codes, num_codes)
    return by_backend("sums_by_code", x, codes, num_codes)


def _check(op: str, x: Tensor, codes: Tensor, num_codes: int) -> None:
    if x.dtype not in (torch.float32, torch.float64) or codes.dtype is not torch.int64:
        raise TypeError(f"{op} got x {x.dtype} and codes {codes.dtype}; wanted f32 or f64, and i64")
    if x.ndim != 3 or codes.shape != x.shape[:2]:
        raise ValueError(f"{op} got x {tuple(x.shape)}, codes {tuple(codes.shape)}; wanted [s n d] and [s n]")
    if num_codes < 1:
        raise ValueError(f"{op} got {num_codes} codes; wanted at least 1")
    if x.device != codes.device:
        raise ValueError(f"{op} got x on {x.device}, codes on {codes.device}; move one")


_FIX = "it computes values only; detach the rows, as fquant.vq.stats does"
_empty = lambda x, codes, num_codes: (
    x.new_empty(len(x), num_codes),
    x.new_empty(len(x), num_codes, x.shape[2]),
)
_OP = register(sums_by_code, _check, _empty, map_rows, _FIX)
