"""Test data of norms of rows, and their error bounds.

A square is rounded by u = 2^-24, and takes part in at most 22 sums of numbers that are not negative, each another u.
(Backends other than C sum pairwise, with as many roundings.) The scale has half of that error, and u for the root:

    |scale - exact|  <=  13 u · exact       in csrc/norm.h
                     <=  16 u · exact       elsewhere, where the mean, eps and the root are rounded too

For that scale y equals torch's to the bit. With n = x · scale, a = g · w and m = mean(a n) the gradient is
(a - n m) · scale. All of a, n, their products, the sums and m are rounded, each by u of its value. The gradient is
rounded once, to its dtype:

    |dx - exact|  <=  u · scale · (4 |a| + 30 |n| mean(|a n|)) + rounding
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fquant.device import HOST
from fquant.kernels import dispatch
from tests.helpers.formats import ISAS, shifted, strided
from tests.helpers.kernels.losses import EPS, TINY, assert_near

BACKENDS = ("reference", *ISAS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLACES = (lambda t: t, shifted, strided, lambda t: t.mT.contiguous().mT, lambda t: F.pad(t, (3, 5))[:, 3:-5])
EPSILON = 1e-5

SCALE = {"cpu": 13, "triton": 16, "reference": 16}


def drawn(n, d, dtype=torch.float32, seed=0, size=1.0, device=HOST):
    """Draw g [n d], x [n d] and a weight [d], on the host, and move them."""
    random = torch.Generator().manual_seed(seed)
    g, x = (torch.randn(n, d, generator=random) for _ in range(2))
    return tuple(t.to(device, dtype) for t in (g, size * x, 0.5 + torch.rand(d, generator=random)))


def normed(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return y for a scale, exact to the bit."""
    return weight.to(x.dtype) * (x.float() * scale[:, None]).to(x.dtype)


def assert_scale(scale: Tensor, x: Tensor, eps: float, slack: float = 1, *note: object) -> None:
    """Check the scale of x; squares are float32, with a loss that is negligible beside eps or themselves."""
    own = SCALE[dispatch.backend(x.device.type)[0]]
    scale, x = scale.cpu(), x.cpu()
    mean = x.float().square().double().mean(-1) + eps
    exact = mean.rsqrt()
    bound = exact * (EPS * own + 2.0**-149 / mean)
    assert_near(scale, exact, slack * bound.nan_to_num(0.0), "a scale", *note)


def assert_backward(
    dx: Tensor, g: Tensor, x: Tensor, weight: Tensor, scale: Tensor, slack: float = 1, *note: object
) -> None:
    """Check that ``dx`` is the gradient for x and its scale."""
    dx, g, x, weight, scale = (t.cpu() for t in (dx, g, x, weight, scale))
    s = scale.double()[:, None]
    n, a = x.double() * s, g.double() * weight.to(x.dtype).double()
    exact = (a - n * (a * n).mean(-1, keepdim=True)) * s
    error = EPS * s * (4 * a.abs() + 30 * n.abs() * (a * n).abs().mean(-1, keepdim=True))
    own = torch.finfo(x.dtype).eps / 2 * exact.abs() + TINY[x.dtype] + 2.0**-149 * s * (1 + n.abs())
    assert_near(dx, exact, slack * (error + own).nan_to_num(0.0), "a slope", *note)
