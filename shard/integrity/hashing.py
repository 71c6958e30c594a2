"""A digest of the bytes of a tensor, computed where the tensor is: multilinear hashing (Lemire and Kaser 2014).

    words w[i, j], 32 bits each, in rows of 65,536    ->    sum_i a_i sum_j k_j w[i, j]  mod 2^64

The keys a and k are 64-bit and odd: outputs of SplitMix64 (Steele et al. 2014), the same on every rank and device.
Bytes at the end that fill no word are a row of their own, padded with zeros.

A change within one word is always found: its difference d has 0 < |d| < 2^32, and a product with odd keys is 0 mod 2^64
only if d is. Any other change is missed with a probability below 2^-25 over random keys. (A column that changed has a
sum of differences that ends in t zeros with at most 2^(32-t). Its key then cancels the other columns with 2^(t-63). The
sum over t is below 34 * 2^-31.) Keys are fixed, so this guards against faults and not against an attacker.

Products and sums of integers are exact in any order. So the digest does not depend on the device, or on threads.
"""

from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from fquant.device import HOST

from ..bundle import raw

ROW = 1 << 16  # words of a row: 256 KiB, which stay in the cache of a core with their keys and products
AT_A_TIME = 64  # rows, on a device whose kernels are large
RUN = 1 << 20  # bytes that are put together


def digest(t: Tensor) -> Tensor:
    """Return the digest i64[] of the bytes of ``t``, of any dtype, on its device."""
    data = raw(t)
    data = data.clone() if data.storage_offset() % 4 else data  # a view of words must be aligned
    end = data.numel() // 4 * 4
    words, keys = data[:end].view(torch.int32), _keys(0, ROW, t.device)
    begin = words.numel() // ROW * ROW  # of the words that fill no row
    rows = words[:begin].view(-1, ROW).split(1 if t.device == HOST else AT_A_TIME)
    sums = [(some * keys).sum(-1) for some in rows if begin]
    rest = pad(data[end:], (0, 4 - data[end:].numel())).view(torch.int32) if end < data.numel() else data[:0]
    for few in (words[begin:], rest):
        if few.numel():
            sums.append((few * keys[: few.numel()]).sum().view(1))
    of_rows = torch.cat(sums) if sums[1:] else sums[0] if sums else keys[:0]
    return (of_rows * _keys(ROW, of_rows.numel(), t.device)).sum()


def runs(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the bytes of ``tensors`` in order as fewer tensors u8[n]: small ones of a device are put together."""
    some, size = list[Tensor](), 0
    for t in tensors:
        if some and (size + t.nbytes > RUN or t.device != some[0].device):
            yield torch.cat(some)
            some, size = [], 0
        if t.nbytes > RUN:
            yield raw(t)
        else:
            some.append(raw(t))
            size += t.nbytes
    if some:
        yield torch.cat(some)


@cache
def _keys(start: int, count: int, device: torch.device) -> Tensor:
    """Return ``count`` odd outputs i64[count] of SplitMix64, behind the first ``start``."""
    x = torch.arange(start + 1, start + count + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return (x ^ _shifted(x, 31)) | 1


def _shifted(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)  # torch shifts copies of the sign in


def _signed(n: int) -> int:
    return n - (1 << 64)
