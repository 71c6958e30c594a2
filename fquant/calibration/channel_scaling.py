"""AWQ: input channels that matter are made larger before the weight is rounded, and outliers of blocks are clipped.

    w = awq(INT4_ZERO)(w, stats)       # Scaled: linear(x * (1 / s), Packed of W * s)

s = (mean |x|)^a, normalised by √(max · min), where the exponent a in [0, 1] minimises ``‖(W - Ŵ) · xᵀ‖²``, which the
statistics give without another pass. The factors 1 / s stay beside the weight (as those of IA3), so nothing before it
changes; exponent 0 is rounding to nearest, so the error is never larger.

Then each block of the scaled weight is clipped to a share of its largest magnitude, from 1 down to 0.55. The share
minimises ``‖(w - ŵ) · xᵀ‖²`` over the columns of the block. If that does not make the error of the whole smaller,
nothing is clipped.

Source: Lin et al. 2023 (AWQ), and its program, whose grids of 20 exponents and 10 shares these are.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..adapted.nodes import Ia3, Scaled
from ..format import Format
from ..packed import Packed, dequantize, quantize
from ..tree import expect
from .statistics import Statistics

SHARES = 10  # of the largest magnitude, in steps of 0.05


def error(w: Tensor, decoded: Tensor, stats: Statistics) -> Tensor:
    """Return the mean over rows x of ``‖(W - Ŵ) · x‖²``, f32[]."""
    off = w.float() - decoded.float()
    return ((off @ stats.second) * off).sum() / stats.count


def awq(format: Format, steps: int = 20, clip: bool = True) -> Callable[[Tensor, Statistics | None], Scaled | Packed]:
    """Return the function from a weight f[out in] and its statistics to the scaled Packed; plain if exponent 0 wins.

    Without ``clip`` no block is clipped; the paper's program clips all but queries and keys. Raises ValueError for
    ``steps`` below 1.
    """
    expect(steps >= 1, f"awq: steps is {steps}; wanted at least 1")

    def method(w: Tensor, stats: Statistics | None) -> Scaled | Packed:
        expect(stats is not None, "awq: got no statistics; wanted those of calibration data")
        assert stats is not None
        mean = (stats.magnitude / stats.count).clamp(min=1e-4)
        best: tuple[float, Packed, Tensor] | None = None
        for i in range(steps):
            s = mean ** (i / steps)
            s = s / (s.max() * s.min()).sqrt()
            p = quantize((w.float() * s).to(w.dtype), format)
            off = float(error(w, dequantize(p, torch.float32) / s, stats))
            if best is None or off < best[0]:
                best = off, p, s
        assert best is not None
        off, p, s = best
        if clip:
            narrower = quantize(clipped((w.float() * s).to(w.dtype), format, stats.second / torch.outer(s, s)), format)
            p = narrower if float(error(w, dequantize(narrower, torch.float32) / s, stats)) < off else p
        return p if bool((s == 1).all()) else Scaled(p, Ia3(inputs=1.0 / s))

    return method


def clipped(w: Tensor, format: Format, second: Tensor) -> Tensor:
    """Return ``w`` f[out in] with each block along rows clipped for the least error, given Σ x xᵀ f32[in in].

    A format without blocks has rows for blocks.
    """
    rows, width = w.shape
    block = min(format.block or width, width)
    columns = -width % block  # that pad the last block
    second = F.pad(second, (0, columns, 0, columns))
    count = second.shape[0] // block
    within = second.view(count, block, count, block).diagonal(dim1=0, dim2=2).movedim(-1, 0)  # [blocks block block]
    by_block = lambda t: F.pad(t.float(), (0, columns)).view(rows, count, block)
    best, out = torch.full((rows, count, 1), torch.inf, dtype=torch.float32, device=w.device), by_block(w)
    largest = out.abs().amax(-1, keepdim=True)
    for i in range(SHARES):
        most = largest * (1 - 0.5 * i / SHARES)
        narrow = by_block(w).clamp(-most, most)
        tried = narrow.view(rows, -1)[:, :width].to(w.dtype)
        off = by_block(w) - by_block(dequantize(quantize(tried, format), torch.float32))
        found = (torch.einsum("rbi,bij->rbj", off, within) * off).sum(-1, keepdim=True)
        out, best = torch.where(found < best, narrow, out), torch.minimum(found, best)
    return out.view(rows, -1)[:, :width].to(w.dtype)
