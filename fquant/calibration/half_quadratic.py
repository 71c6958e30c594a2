"""HQQ: zero points that fit a heavy-tailed error, found without data.

    p = hqq(INT4_ZERO)(w)

Alternates between the error that an lp norm with p < 1 leaves, ``e = shrink(W - Ŵ)``, and the zero point of each block
that fits ``W - e``: ``zero = mean(code - (W - e) / scale)``. Scales stay those of ``quantize``. The best zero points of
all rounds are kept, so the error is never larger.

Source: Badri & Shaji 2023 (half-quadratic quantization), and torchao's ``_choose_qparams_and_quantize_affine_hqq``.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..format import Format, bits
from ..packed import Packed, quantize
from ..tree import expect


def hqq(
    format: Format, norm: float = 0.7, beta: float = 10.0, growth: float = 1.01, rounds: int = 20
) -> Callable[..., Packed]:
    """Return the function from a weight f[out in] to a Packed in ``format``, which has zero points.

    ``beta`` weighs the split of the error and grows by ``growth`` each round. Raises ValueError for a format without
    zero points, and for options out of range.
    """
    expect(format.zero and format.scale is None, f"hqq: {format.name} has no zero points; use INT4_ZERO or INT2_ZERO")
    expect(
        0 < norm <= 1 and beta > 0 and growth > 0 and rounds >= 1, "hqq: wanted norm in (0, 1], and the rest above 0"
    )

    def method(w: Tensor, stats: object = None) -> Packed:
        p = quantize(w, format)
        assert isinstance(p.scale, Tensor) and p.zero is not None
        rows = w.detach().float()
        width, block = rows.shape[1], format.block or rows.shape[1]
        by_block = lambda t: torch.nn.functional.pad(t, (0, -width % block)).unflatten(1, (-1, block))
        there, x, scale = by_block(torch.ones_like(rows)), by_block(rows), p.scale[..., None].clamp(min=1e-38)
        first, last = format.integers or (0, 0)
        zero, best, least, weight = p.zero[..., None], p.zero, torch.inf, beta
        for _ in range(rounds + 1):
            code = torch.round(x / scale + zero).clamp(first, last)
            off = (x - (code - zero) * scale) * there
            if (size := float(off.abs().mean())) >= least:
                break
            least, best = size, zero[..., 0]
            shrunk = off.sign() * (off.abs() - off.abs().clamp(min=1e-30) ** (norm - 1) / weight).clamp(min=0)
            zero = ((code - (x - shrunk) / scale) * there).sum(-1, keepdim=True) / there.sum(-1, keepdim=True)
            weight *= growth
        index = (torch.round(x / scale + best[..., None]).clamp(first, last) - first).to(torch.uint8)
        return replace(p, codes=bits.pack(index.flatten(1)[:, :width], format.bits), zero=best.contiguous())

    return method
