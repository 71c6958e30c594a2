"""The error bound of a product.

A float32 sum of n products, in any order and with or without fused multiply-adds, rounds each term at most n times.
Each rounding is a factor of at most 1 + u, u = 2^-24. So with x · w in exact arithmetic (here float64, whose own error
is 2^-29 of this),

    |sum - x · w|  <=  c · n u / (1 - n u) · |x| · |w|  +  tiny

(Higham 2002, section 3.1). This holds for any order of summation, tiles and threads; nothing is measured. c is 1, and 2
for bfloat16, because Arm's dot products round the sum of two to odd, by up to two units. It is 2 for float16 on a GPU
too: tensor cores shift the terms of a step to the exponent of the largest and cut them off (Fasi et al. 2021,
"Numerical behavior of NVIDIA tensor cores"). There a denormal factor has the exponent of the least normal number, which
|x| and |w| therefore are at least. ``tiny`` is the loss near zero: half of float32's least denormal a rounding. The dot
products of bfloat16 flush denormal inputs and sums, and lose 2^-126 a rounding, and 2^-126 times the other factor a
term.

Then the sum is rounded once to x's dtype, by half a unit in its last place, or half of the least denormal. float32 has
no such rounding. For float64 all arithmetic is float64.

The bound is attained within a few percent. It excludes weights of float32 that are rounded to bfloat16, a missing term,
and a second rounding to x's dtype.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def bound(x: Tensor, w: Tensor, tensor_cores: bool = False) -> Tensor:
    """Return the bound of ``x · w``: x f[... m n] in the dtype of the result, w [... n k] as multiplied."""
    n, dtype = x.shape[-1], x.dtype
    x, w = x.double(), w.double()
    exact, size = (x @ w).abs(), x.abs() @ w.abs()
    if dtype == torch.float64:
        return n * 2.0**-52 * size  # twice, because the exact product is float64 too
    c, tiny, lost = 1, 2.0**-150, x.new_tensor(2 * n)
    if dtype == torch.bfloat16:
        c, tiny, lost = 2, 2.0**-126, lost + x.abs().sum(-1, keepdim=True) + w.abs().sum(-2, keepdim=True)
    if dtype == torch.float16 and tensor_cores:
        least = torch.finfo(dtype).smallest_normal
        c, size = 2, x.abs().clamp(min=least) @ w.abs().clamp(min=least)
    error = c * n * 2.0**-24 / (1 - n * 2.0**-24) * size + lost * tiny
    if dtype == torch.float32:
        return error
    kind = torch.finfo(dtype)
    return error + kind.eps / 2 * (exact + error).clamp(min=kind.smallest_normal)


def assert_product(got: Tensor, x: Tensor, w: Tensor, note: object = "") -> None:
    """Check that ``got`` f[... m k] is ``x · w`` in x's dtype, within its bound: x f[... m n], w [... n k].

    All may be on any device; the exact product is computed on the host.
    """
    product_of(x, w)(got, note)


def product_of(x: Tensor, w: Tensor) -> Callable[[Tensor, object], None]:
    """Return ``assert_product`` for these factors, with the exact product computed once for many results."""
    tensor_cores, x, w = x.is_cuda, x.cpu(), w.cpu()
    exact, allowed, dtype = x.double() @ w.double(), bound(x, w, tensor_cores), x.dtype

    def check(got: Tensor, note: object) -> None:
        assert got.dtype == dtype and got.shape == exact.shape, (note, got.dtype, got.shape)
        got = got.cpu()
        wrong = ~((got.double() - exact).abs() <= allowed)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            found = f"{got[at].item():g}, exactly {exact[at].item():g}, may be off by {allowed[at].item():g}"
            raise AssertionError(f"{note}: {int(wrong.sum())} of {wrong.numel()} are wrong, the first at {at}: {found}")

    return check
