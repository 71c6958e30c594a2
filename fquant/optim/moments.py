"""Moments of optimisers as data: a float32 tensor, or a Packed of one.

    opt = adamw(1e-3, moments=DYNAMIC8)                          # a quarter of the bytes of float32
    opt = adamw(1e-3, moments=replace(DYNAMIC8, min_size=4096))  # float32 for small leaves, as the peers do

A :class:`Moments` names the formats of a moment with a sign (means of gradients) and of one without (means of squares):

    DYNAMIC8          8 bits, the dynamic maps of bitsandbytes and torchao, blocks of 256     2.03 bytes for two moments
    DYNAMIC4          4 bits, torchao's: a dynamic map, and sixteenths without zero, blocks of 128         1.06 bytes
    FP8               E4M3 for both, blocks of 256                                                         2.03 bytes
    DYNAMIC8_GRID     DYNAMIC8 with bitsandbytes' rounding on the CPU
    DYNAMIC8_TORCHAO  DYNAMIC8 with torchao's rounding, which is not safe (below)

A block is of the flattened parameter, and the last may be short (the peers keep such a leaf in float32). A leaf without
dims, or with fewer than ``min_size`` elements, keeps float32. A step uses the moments that it computes unrounded, and
stores them rounded.

Three recipes:

    nearest  the nearest value, ties up, the default. A mean of squares above zero keeps at least the least value above
             zero. So an element with gradients far below the largest of its block takes smaller steps than in float32,
             never a step of mean / eps.
    grid     bitsandbytes' on the CPU: the nearest of 65536 points first. A zero becomes 1.5e-5 of the largest value of
             its block. So small means of squares make steps smaller, too. An element without gradients moves if
             others of its block have some, by whole steps with Lion. On CUDA bitsandbytes takes the nearest value.
    torchao  the nearest value of a scale of at least 1e-12, within 3e-5 of a step of torchao's thresholds. With 8 bits
             a mean of squares becomes zero if the largest of its block is 6e6 times as large (a gradient 2,500 times as
             large, or 680 times in E4M3). The step is then mean / eps: thousands of times too long. Use it only to
             reproduce torchao.

In 100 steps of AdamW no element of *nearest* and *grid* moved further from float32's result than 4.7 times the mean
movement. Of a million elements it was 5.9 times. One column had gradients 1 to 1e6 times as large, or each row a
gradient in every 16th or 64th step.

A gradient that is NaN or infinite makes the scale of its block NaN or infinite. So all moments of the block, and every
later update from them, are not finite. Nothing is raised; check the norm of the gradients before a step.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import tree
from ..autodiff import has_derivatives
from ..communication import Memory
from ..format import MOMENT4, MOMENT4_UNSIGNED, MOMENT8, MOMENT8_UNSIGNED, MOMENT_FP8, Format
from ..kernels.moment_codes import ROUNDINGS
from ..kernels.reference.moments import FLOAT32
from ..kernels.spec import FLOATS, Spec, layout
from ..packed import Packed
from ..tree import at, expect
from .optimizer import check_float


@dataclass(frozen=True)
class Moments:
    """Say how moments are stored: formats of those with a sign and without, the rounding, which leaves keep float32.

    The rounding "torchao" cannot promise that a small mean of squares stays above zero; the others can.

    Raises TypeError for another thing than a Format, and ValueError for a format or a number that does not fit.
    """

    signed: Format
    unsigned: Format
    rounding: str = "nearest"  # or "grid", "torchao"
    min_size: int = 0  # elements below which a leaf keeps float32

    def __post_init__(self) -> None:
        choices = ", ".join(map(repr, ROUNDINGS))
        expect(self.rounding in ROUNDINGS, f"rounding: got {self.rounding!r}, wanted one of {choices}")
        is_size = isinstance(self.min_size, int) and self.min_size >= 0
        expect(is_size, f"min_size: got {self.min_size!r}, wanted a number of elements of at least 0")
        for name in ("signed", "unsigned"):
            with at(name):
                self._check(getattr(self, name), name == "signed")

    def _check(self, format: Any, signed: bool) -> None:
        got = f"got {type(format).__name__}, wanted a Format; use fquant.format.MOMENT8"
        expect(isinstance(format, Format), got, TypeError)
        names = ("table", "flat", "block", "center", "scale", "zero", "vectors")
        table, flat, block, *others = (getattr(format, name) for name in names)
        fault = f"{format.name} cannot hold a moment"
        fix = "; use a format like fquant.format.MOMENT8"
        expect(table, f"{fault}: it has no table of values, and its values are learned or integers{fix}")
        expect(flat and block, f"{fault}: its blocks follow rows, and those of a moment the flattened leaf{fix}")
        odd = [name for name, part in zip(names[3:], others, strict=True) if part]
        expect(not odd, f"{fault}: it has {', '.join(odd)}, which a step cannot update{fix}")
        whole = format.bits == 8 or all(map(math.isfinite, table))
        expect(whole, f"{fault}: it has codes of 4 bits or fewer that are no finite number{fix}")
        low, high = (pick(x for x in table if x == x) for pick in (min, max))
        expect(high > 0, f"{fault}: it has no values above zero{fix}")
        fault = f"{format.name} has no values below zero, and a mean of gradients has a sign"
        expect(low < 0 or not signed, f"{fault}; use a signed format such as MOMENT8 here")
        on_grid = self.rounding != "grid" or (format.bits == 8 and format.in_absmax)
        expect(on_grid, f"{format.name}: the grid is of 8 bits in units of the absmax; use rounding='nearest'")


DYNAMIC8 = Moments(MOMENT8, MOMENT8_UNSIGNED)
DYNAMIC8_GRID = replace(DYNAMIC8, rounding="grid")
DYNAMIC8_TORCHAO = replace(DYNAMIC8, rounding="torchao")  # small means of squares become zero; see above
DYNAMIC4 = Moments(MOMENT4, MOMENT4_UNSIGNED)
FP8 = Moments(MOMENT_FP8, MOMENT_FP8)

Stored: TypeAlias = Moments | Format | None  # one format for all moments; None: float32


def as_moments(moments: Stored) -> Moments | None:
    """Check the option ``moments`` of an optimiser; raise TypeError for anything else."""
    if moments is None or isinstance(moments, Moments):
        return moments
    fix = "use optim.DYNAMIC8, a Format, or None for float32"
    expect(isinstance(moments, Format), f"moments: got {type(moments).__name__}; {fix}", TypeError)
    with at("moments"):
        return Moments(moments, moments)


def zeros(params: Any, moments: Moments | None, memory: Memory, signed: bool = True) -> Any:
    """Return a moment of zeros like the parameters, in ``memory``; codes and scales of a packed one are zeros."""
    check_float(params)

    def one(p: Tensor) -> Tensor | Packed:
        if moments is None or p.ndim == 0 or p.numel() < max(1, moments.min_size):
            return memory.zeros(tuple(p.shape), torch.float32, p)
        format, shape = (moments.signed if signed else moments.unsigned), tuple(p.shape)
        leaves = layout(Spec(format, shape, torch.float32))
        codes, scale = (memory.zeros(leaf.shape, leaf.dtype, p) for leaf in leaves)
        return Packed(codes, scale, format, shape, torch.float32)

    return tree.map(one, params)


def narrow(x: Tensor) -> Tensor:
    """Return ``x`` in a dtype that steps with packed moments read, float32 for float64."""
    return x if x.dtype in FLOATS else x.float()


def fuses(grad: Tensor, *tensors: Tensor | Packed) -> bool:
    """Return True if a step of gradient, parameter and moments is to be one op.

    With packed moments it is. In float32 the formula is computed where that has what the op lacks: derivatives,
    float64, the parameter's strides, fusion by torch.compile. Bits are equal. The gradient may have any strides.
    """
    if any(isinstance(t, Packed) for t in tensors):
        return True
    if torch.compiler.is_dynamo_compiling():
        return False
    plain = [grad, *(t for t in tensors if isinstance(t, Tensor))]
    is_constant = all(t.dtype in FLOATS and not has_derivatives(t) for t in plain)
    return is_constant and all(t.is_contiguous() for t in plain[1:])


def codes_and_scale(moment: Tensor | Packed) -> tuple[Tensor, Tensor]:
    """Return the two buffers of a moment as an op takes them; one in float32 has no scales, f32[0]."""
    if isinstance(moment, Tensor):
        return moment, moment.new_empty(0)
    assert isinstance(moment.scale, Tensor)
    return moment.codes, moment.scale


def text_of(moment: Tensor | Packed) -> str:
    """Return the format of a moment as an op takes it."""
    return FLOAT32 if isinstance(moment, Tensor) else moment.format.text


def moment_like(moment: Tensor | Packed, codes: Tensor, scale: Tensor) -> Tensor | Packed:
    """Return a moment with new codes and scales, or with the values ``codes``."""
    if isinstance(moment, Tensor):
        return codes
    return Packed(codes, scale, moment.format, moment.shape, moment.dtype)


def rounding_of(moments: Moments | None) -> str:
    """Return how moments are rounded; those in float32 are not."""
    return "nearest" if moments is None else moments.rounding
