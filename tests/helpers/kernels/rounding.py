"""How far a product may be from the exact one, and still be right.

A sum of n products computed in float32, in whatever order and with or without fused multiply-adds, rounds every term at
most n times, each time by a factor of at most 1 + u, u = 2^-24. So with x · w in exact arithmetic (here float64, whose
own error is 2^-29 of this),

    |sum - x · w|  <=  c · n u / (1 - n u) · |x| · |w|  +  tiny

(Higham 2002, section 3.1), with nothing to be said of the order of summation, tiles or threads, and nothing measured.
c is 1, and 2 for bfloat16, since Arm's dot products round the sum of two to odd, by up to two units. ``tiny`` is what
is lost near zero: half of float32's least denormal a rounding; for bfloat16, whose dot products take denormal inputs
for zero and flush denormal sums, 2^-126 a rounding, and 2^-126 times the other factor a term.

Then the sum is rounded once to x's dtype: by half a unit in its last place, or half of the least denormal. For float32
there is no such rounding, for float64 all of it is in float64.

The bound is attained within a few percent. Rounding a float32's weights to bfloat16, leaving out a term, or rounding
twice to x's dtype exceeds it.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def bound(x: Tensor, w: Tensor) -> Tensor:
    """How far ``x · w`` may be from exact: x f[... m n] in the dtype of the result, w [... n k] as multiplied."""
    n, dtype = x.shape[-1], x.dtype
    x, w = x.double(), w.double()
    exact, size = (x @ w).abs(), x.abs() @ w.abs()
    if dtype == torch.float64:
        return n * 2.0**-52 * size  # as much again for what it is compared with
    c, tiny, lost = 1, 2.0**-150, x.new_tensor(2 * n)
    if dtype == torch.bfloat16:
        c, tiny, lost = 2, 2.0**-126, lost + x.abs().sum(-1, keepdim=True) + w.abs().sum(-2, keepdim=True)
    error = c * n * 2.0**-24 / (1 - n * 2.0**-24) * size + lost * tiny
    if dtype == torch.float32:
        return error
    kind = torch.finfo(dtype)
    return error + kind.eps / 2 * (exact + error).clamp(min=kind.smallest_normal)


def assert_product(got: Tensor, x: Tensor, w: Tensor, note: object = "") -> None:
    """``got`` f[... m k] is ``x · w``, in x's dtype and within its rounding: x f[... m n], w [... n k]."""
    product_of(x, w)(got, note)


def product_of(x: Tensor, w: Tensor) -> Callable[[Tensor, object], None]:
    """``assert_product`` of these factors, for many that computed it: what is exact is computed once."""
    exact, allowed, dtype = x.double() @ w.double(), bound(x, w), x.dtype

    def check(got: Tensor, note: object) -> None:
        assert got.dtype == dtype and got.shape == exact.shape, (note, got.dtype, got.shape)
        wrong = ~((got.double() - exact).abs() <= allowed)
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            found = f"{got[at].item():g}, exactly {exact[at].item():g}, may be off by {allowed[at].item():g}"
            raise AssertionError(f"{note}: {int(wrong.sum())} of {wrong.numel()} are wrong, the first at {at}: {found}")

    return check
