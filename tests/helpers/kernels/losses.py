"""Test data of the loss of logits, and its error bounds.

In float32 the difference of a logit x and the largest, m, is rounded by u |x - m|, u = 2^-24. That is the relative
error of its exponential, which adds a few u. The error of the sum over a row is the mean of these, weighted by the
terms, and the mean of |x - m| so weighted is below log v. A softmax is a quotient of the two:

    |softmax - exact|  <=  u (8 + c log v + c |x - m|) · exact

c is 1, and 2.25 on a card. There the exponential is a power of two, of a product with log2 e. The product is rounded by
u |x - m| as well, and log2 e itself is off by 0.22 u.

The gradient subtracts one at the target and multiplies by a factor, a few u of the result. Then it is rounded once, to
the dtype of the logits. The error of the logarithm of the sum is at most u (8 + c log v). The caller adds the roundings
of the float32 additions to it.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fquant.device import HOST
from fquant.kernels import reference
from tests.helpers.formats import ISAS, alike, shifted, strided

BACKENDS = ("reference", *ISAS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLACES = (lambda t: t, shifted, strided, lambda t: t.mT.contiguous().mT, lambda t: F.pad(t, (3, 5))[:, 3:-5])

EPS = 2.0**-24  # u
TINY = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}  # the least above zero
IGNORE, INF, NAN = -100, math.inf, math.nan


def drawn(c, v, dtype=torch.float32, seed=0, size=3.0, ignored=True, device=HOST):
    """Draw logits [c v] and targets [c], every third ignored, on the host, and move them."""
    random = torch.Generator().manual_seed(seed)
    logits = (size * torch.randn(c, v, generator=random)).to(dtype)
    targets = torch.randint(v, (c,), generator=random)
    targets = torch.where(torch.arange(c) % 3 < 2, targets, IGNORE) if ignored else targets
    return logits.to(device), targets.to(device)


def exact(
    logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None = None, on_card: bool = False
) -> tuple[Tensor, ...]:
    """Return values [c] and gradients [c v] in float64, and their bounds without additions to the values."""
    x, v = logits.double(), logits.shape[1]
    f = torch.ones(len(x)) if factor is None else factor
    value, slope = reference.nll_backward(x, targets, ignore, f.double())
    c, down = 2.25 if on_card else 1.0, (x.amax(-1, keepdim=True) - x).nan_to_num(0.0, 0.0, 0.0).clamp(max=200)
    few = 8 + c * math.log(v)
    own = torch.finfo(logits.dtype).eps / 2 * slope.abs() + TINY[logits.dtype] * (1 + f.abs()[:, None])
    at = F.one_hot(targets.clamp(0, v - 1), v)
    error = EPS * f.abs()[:, None] * (x.softmax(-1) * (few + c * down) + 4 * at)
    return value, slope, value.new_full(value.shape, EPS * few), (error + own).nan_to_num(0.0)


def assert_near(got, exact, bound, *note):
    """Check that ``got`` is within ``bound`` of ``exact``, and equal where that is not finite in its dtype."""
    wanted = exact.to(got.dtype)
    finite, off = wanted.isfinite(), (got.double() - exact).abs()
    about = " ".join(map(str, note))
    assert alike(got[~finite], wanted[~finite]), f"{about}: not as infinite as the reference"
    assert bool((off <= bound)[finite].all()), f"{about}: off by {float((off / bound)[finite].max()):.3g} times of it"


def spread(*at, fill=-1.0, width=5003):
    """Return a row of ``fill`` with values at places in all the parts that a kernel cuts it into."""
    row = torch.full((width,), fill)
    for place, value in at:
        row[place] = value
    return row


ROWS = {
    "all equal": spread(),
    "all zero": spread(fill=0.0),
    "one huge": spread((4097, 3e38)),
    "the largest and the least": spread((0, -3.4e38), (1, 3.4e38), (5002, -3.4e38)),
    "denormal": torch.arange(5003) * 1.4e-45,
    "rising": torch.linspace(-90, 90, 5003),
    "falling": torch.linspace(90, -90, 5003),
    "far below zero": torch.linspace(-3e4, -3e4 + 50, 5003),
    "masked": torch.where(torch.arange(5003) % 3 == 0, 1.0, -INF),
    "the first piece masked": torch.where(torch.arange(5003) < 4096, -INF, -3e4),
    "all masked but the last": spread((-1, -250.0), fill=-INF),
    "all masked": spread(fill=-INF),
    "infinite at the start": spread((0, INF)),
    "infinite at the end": spread((-1, INF)),
    "infinite twice": spread((17, INF), (4999, INF)),
    "infinite both ways": spread((3, INF), (17, -INF)),
    "not a number": spread((4095, NAN)),
    "not a number at the end": spread((-1, NAN)),
    "not a number, and infinite": spread((0, NAN), (-1, INF)),
    "infinite, and then not a number": spread((0, INF), (-1, NAN)),
    "not a number among masked": spread((16, NAN), fill=-INF),
    "no numbers": spread(fill=NAN),
}  # fmt: skip
