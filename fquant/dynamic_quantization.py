"""Dynamic quantisation of activations: a product whose input is quantised as it arrives.

    y = linear(x, w, act=INT8_ROW)                     # x f[... in], quantised by rows (tokens)
    y = linear(x, w, act=Outliers(INT8, 6.0))          # LLM.int8(): columns with large values stay in x's dtype
    x = fake_quantize(x, FP8_E4M3)                     # the values that quantised x has, in x's dtype

``linear(x, w, act=A)`` is ``linear(fake_quantize(x, A), w)`` by definition. If A is 8-bit integers by rows, and the
codes of w are integers in blocks along rows, codes are multiplied (``kernels.integer_ops``): their sums are exact. Any
other pair is computed by that definition.

Derivatives are *straight-through*, those of ``linear(x, w)``: rounding is taken for the identity (Bengio et al. 2013).
So the gradient of x is ``g · W`` with decoded weights and an unquantised g. A base with act trains a Lora beside it;
torchao's linear of this kind cuts the gradient.

LLM.int8() is Dettmers et al. 2022: a column in which a value reaches the threshold is multiplied in x's dtype, with
decoded weights, and is zero in the integers. All rows of a call share the columns, each mapped example under vmap its
own.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import packed
from .format import Format
from .tree import expect, value


@value
@dataclass(frozen=True)
class Outliers:
    """Activations in ``format``, but for the columns in which a magnitude is at least ``threshold``."""

    format: Format
    threshold: float = 6.0

    def __post_init__(self) -> None:
        expect(self.threshold > 0, f"outliers: threshold is {self.threshold}; wanted above 0")


Activations = Format | Outliers


def fake_quantize(x: Tensor, format: Format) -> Tensor:
    """Return ``dequantize(quantize(x, format))`` f[... n] in x's dtype, with straight-through derivatives.

    It never reads a value: NaN and infinity in a block make the block NaN. Under vmap each example is quantised for
    itself. Raises TypeError for another dtype than f32, bf16 and f16. Raises ValueError for a format with learned
    vectors, and for one of rows if x has no rows.
    """
    if not isinstance(x, Tensor) or x.dtype not in packed.FLOATS:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"fake_quantize got {got}; wanted f32, bf16 or f16")
    if format.vectors is not None:
        raise ValueError(f"fake_quantize got {format.name}, whose vectors are learned; quantize once, and train a Lora")
    if not x.ndim or not x.shape[-1]:
        raise ValueError(f"fake_quantize got shape {tuple(x.shape)}; wanted at least one element along one dim")
    return _FakeQuantize.apply(x, format)


def separate(x: Tensor, act: Outliers) -> tuple[Tensor, Tensor]:
    """Return x [... in] with zeros in the columns of outliers, and those columns with zeros elsewhere."""
    large = (x.detach().abs() >= act.threshold).reshape(math.prod(x.shape[:-1]), x.shape[-1]).any(0)
    return torch.where(large, 0.0, x).to(x.dtype), torch.where(large, x, 0.0).to(x.dtype)


class _FakeQuantize(torch.autograd.Function):
    """Quantisation and dequantisation with the derivatives of the identity."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor, format: Format) -> Tensor:
        rows = x if format.flat or x.ndim > 1 else x[None]
        return packed.dequantize(packed.unchecked(rows, format)).reshape(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, _: None) -> Tensor:
        return dx.view_as(dx)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, format: Format) -> tuple[Tensor, int]:
        x = x.movedim(in_dims[0], 0)
        if format.rows_alone and format.scale is None and x.ndim > 1:
            return _FakeQuantize.apply(x, format), 0
        return torch.stack([_FakeQuantize.apply(each, format) for each in x]) if len(x) else x, 0
