"""AWQ: input channels that matter are made larger before the weight is rounded, and their inputs smaller.

    w = awq(INT4_ZERO)(w, stats)       # Scaled: linear(x * (1 / s), Packed of W * s)

s = (mean |x|)^a, normalised by √(max · min), where the exponent a in [0, 1] minimises ``‖(W - Ŵ) · xᵀ‖²``, which the
statistics give without another pass. The factors 1 / s stay beside the weight (as those of IA3), so nothing before it
changes; exponent 0 is rounding to nearest, so the error is never larger.

Source: Lin et al. 2023 (AWQ), without the search for clipping.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..adapted.nodes import Ia3, Scaled
from ..format import Format
from ..packed import Packed, dequantize, quantize
from ..tree import expect
from .statistics import Statistics


def error(w: Tensor, decoded: Tensor, stats: Statistics) -> Tensor:
    """Return the mean over rows x of ``‖(W - Ŵ) · x‖²``, f32[]."""
    off = w.float() - decoded.float()
    return ((off @ stats.second) * off).sum() / stats.count


def awq(format: Format, steps: int = 20) -> Callable[[Tensor, Statistics | None], Scaled | Packed]:
    """Return the function from a weight f[out in] and its statistics to the scaled Packed; plain if exponent 0 wins.

    Raises ValueError for ``steps`` below 1.
    """
    expect(steps >= 1, f"awq: steps is {steps}; wanted at least 1")

    def method(w: Tensor, stats: Statistics | None) -> Scaled | Packed:
        expect(stats is not None, "awq: got no statistics; wanted those of calibration data")
        assert stats is not None
        mean = (stats.magnitude / stats.count).clamp(min=1e-4)
        best: tuple[float, Scaled | Packed] | None = None
        for i in range(steps):
            s = mean ** (i / steps)
            s = s / (s.max() * s.min()).sqrt()
            p = quantize((w.float() * s).to(w.dtype), format)
            off = float(error(w, dequantize(p, torch.float32) / s, stats))
            if best is None or off < best[0]:
                best = off, p if i == 0 else Scaled(p, Ia3(inputs=1.0 / s))
        assert best is not None
        return best[1]

    return method
