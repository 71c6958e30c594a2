"""Quantised arrays: packed codes beside their scales.

    p = quantize(w, NF4_DQ)        # w f[... out in]
    w = dequantize(p)

The invariants of a Packed, for a weight of shape ``(out, in)``:

* ``codes`` is u8[out, in·bits/8], or i8[out, in] for a format without a table. A row is a stream of bits, the first
  code in the highest bits (``format.bits``), padded to whole bytes.
* ``scale`` is f32[out, blocks], one absmax a block, or a Packed of that array (double quantisation).
* Blocks run along rows, and the last block of a row may be short. If ``in`` is a multiple of the block size, the
  buffers are bitsandbytes' flat ones, reshaped. They equal those of its CPU backend byte for byte. Integer codes are
  those of LLM.int8(), but for rows below float16's normal range, 6e-5, of which that makes zeros (``tiny_blocks``).
* So dim i of every buffer is dim i of the weight, and sharding code cuts buffers without knowledge of bits.
* In a format that learns vectors ``codes`` is u8[out, in·stages/dim], rows padded to whole groups; the codes of all
  stages of a group of ``dim`` elements are adjacent. ``vectors`` is f32[stages·256·dim], one flat list for the whole
  array. ``scale`` is a root mean square a block.
* In a *flat* format blocks run over the flattened array instead: ``scale`` is f32[blocks], and 4-bit ``codes`` are
  u8[bytes]. Nested scales are flat, as are imported weights whose blocks straddle rows.
* ``offset`` f32[] exists only in a centred format, and is added after decoding.
* ``zero`` exists only in a format with zero points: f32[out, blocks], one value a block, in units of the scale, integer
  or not. A value is ``(table[code] - zero) * scale`` in float32, rounded once to ``dtype``.
* ``shape`` and ``dtype`` are those of the array that was quantised. Buffers may have further dims in front, the same
  for each (a stack of weights); ``shape`` does not count them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch
from torch import Tensor

from . import lazy, tree
from .autodiff import is_mapped
from .communication import Loadable
from .device import HOST, is_recording
from .format import Format
from .kernels import packed_ops
from .kernels.dispatch import empty, has_no_values
from .kernels.spec import FLOATS, Spec
from .lazy import Lazy
from .quantizers import additive_quantization, round_to_nearest, tiny_blocks, validate
from .tree import expect, node, static

PIECE = 1 << 20  # bytes of the rows that are read at a time to the host
LARGE_PIECE = 64 << 20  # and to a device, where a small op takes as long as its launch
LARGEST_SUM = 64.0  # of learned vectors, and more than that of a table without values


@node
class Packed:
    """A quantised array; the module's docstring lists its invariants."""

    codes: Tensor
    scale: Tensor | Packed
    format: Format = static()
    shape: tuple[int, ...] = static()
    dtype: torch.dtype = static()
    offset: Tensor | None = None
    vectors: Tensor | None = None
    zero: Tensor | None = None

    # Errors of code that takes a Packed for a tensor name the function to call instead.
    def __matmul__(self, other: Any) -> NoReturn:
        raise TypeError("a Packed is data and has no @; multiply with fquant.linear(x, w)")

    __rmatmul__ = __matmul__

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> NoReturn:
        name = getattr(function, "__name__", function)
        raise TypeError(f"{name} got a Packed, which is data; use fquant.linear(x, w), or fquant.dequantize(w) first")

    if not TYPE_CHECKING:  # type checkers would take every name for an attribute

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_") or not hasattr(Tensor, name):
                raise AttributeError(f"'Packed' object has no attribute {name!r}")
            fix = "use fquant.dequantize(w), or tree.map to move its tensors"
            raise AttributeError(f"a Packed is data and has no {name!r}; {fix}")


@overload
def quantize(w: Tensor, format: Format, importance: Tensor | None = None) -> Packed: ...
@overload
def quantize(w: Lazy, format: Format, importance: Tensor | None = None) -> Lazy: ...
def quantize(w: Tensor | Lazy, format: Format, importance: Tensor | None = None) -> Packed | Lazy:
    """Quantise ``w`` f32, bf16 or f16 [... out in] to ``format``.

    ``importance`` f[in] or f[... out in] weighs the squared error of each column or element, in formats that learn
    vectors: use the mean square of a linear weight's inputs. Meta tensors give a Packed of meta tensors. A Lazy gives
    one that quantises what it reads. Not differentiable.

    Raises TypeError for another dtype, and RuntimeError under vmap. Raises ValueError for NaN, for infinity, for a
    vector unless the format is flat, and for importance that does not fit. Raises ValueError for values that would
    decode to infinity in their dtype, and for a format whose table has no recipe. Raises ValueError for no rows if
    the format learns vectors from them. The recipes of integers, E2M1 and
    E4M3 are in :mod:`fquant.quantizers.round_to_nearest`. Values below 1.2e-38, the least normal float32, may become
    zeros.
    """
    if isinstance(w, Lazy):
        each = partial(quantize, format=format, importance=importance)
        if w.parts and importance is None:
            return lazy.stack([each(part) for part in w.parts])
        by_rows = w.rows is not None and importance is None and len(w.like.shape) > 1 and format.rows_alone
        whole = lazy.map(each, w)
        return replace(whole, read=partial(_by_rows, w, format)) if by_rows else whole
    expect(isinstance(w, Tensor), f"quantize got a {type(w).__name__}; wanted a tensor", TypeError)
    expect(
        w.dtype in FLOATS,
        f"quantize got {validate.name(w.dtype)}; wanted {', '.join(map(validate.name, FLOATS))}",
        TypeError,
    )
    got = f"quantize got shape {tuple(w.shape)}"
    expect(w.ndim and w.shape[-1], f"{got}; wanted at least one element along one dim")
    rows = w.numel() or format.vectors is None
    expect(rows, f"{got}; {format.name} learns its vectors from the weight, which needs at least one row")
    expect(w.ndim > 1 or format.flat, f"{got}; wanted a matrix [out in], leave norms and biases dense")
    fix = "quantize each weight before, and stack them with tree.map(lambda *t: torch.stack(t), *packed)"
    expect(not is_mapped(w), f"quantize was called under vmap; {fix}", RuntimeError)
    learned = format.vectors is not None and is_recording(w.device)
    expect(
        not learned, f"{format.name} learns vectors, which a CUDA graph cannot record; quantize before", RuntimeError
    )
    if importance is not None:
        validate.check_importance(importance, w, format)
        importance = importance.detach().reshape(-1, w.shape[-1])  # [1 in] or [rows in]
    return _quantize(w.detach(), format, importance)


def unchecked(w: Tensor, format: Format, draws: Tensor | None = None) -> Packed:
    """Quantise ``w`` f[... out in] without a look at its values, for a trace: a block that is not finite is NaN.

    With ``draws`` f32[... out in], uniform in [0, 1), integers are rounded up with the probability of the rest. Scales
    then cover their blocks, so that no value is beyond the table.

    Blocks so small that kernels lose them may become zeros (``quantizers.tiny_blocks``).
    """
    return _quantize(w.detach(), format, checks=False, draws=draws)


def _quantize(
    w: Tensor, format: Format, importance: Tensor | None = None, is_scale: bool = False, checks: bool = True,
    draws: Tensor | None = None,
) -> Packed:  # fmt: skip
    shape, dtype, w = tuple(w.shape), w.dtype, w.contiguous()  # because the order of a sum depends on strides
    offset = (_mean(w) if w.numel() else w.new_zeros((), dtype=torch.float32)) if format.center else None
    given = w.reshape(-1, shape[-1])  # [rows width]
    if offset is not None:
        w = w.float() - offset
    rows = w.reshape(1, -1) if format.flat else w.reshape(given.shape)  # [rows width], along which blocks run
    by_rows = lambda part: part[0] if format.flat else part.reshape(*shape[:-1], part.shape[-1])
    vectors = zero = None
    if format.vectors is not None:
        absmax = additive_quantization.scales(rows, format)
        top = validate.largest(given, absmax, format)
        codes, vectors = additive_quantization.learn(rows, absmax, format, importance)
    elif format.in_absmax:
        codes, absmax = tiny_blocks.encode(rows, format) if checks else packed_ops.encode(rows, format)
        top = validate.largest(given, absmax, format) if checks else 0.0
    else:
        absmax, zero = round_to_nearest.scales(rows, format, covers=draws is not None)
        top = validate.largest(given, absmax, format) if checks else 0.0
    scale = by_rows(absmax) if format.scale is None else _quantize(by_rows(absmax), format.scale, None, True, checks)
    if format.vectors is None and not format.in_absmax:
        decoded = (
            dequantize(scale).reshape(absmax.shape) if isinstance(scale, Packed) and format.scale_first else absmax
        )
        codes = round_to_nearest.codes(rows, decoded, zero, format, draws)
    codes = codes.reshape(shape) if format.flat and format.bits == 8 else by_rows(codes)
    zero = None if zero is None else by_rows(zero)
    out = Packed(codes, scale, format, shape, dtype, offset, vectors, zero)
    if checks and not is_scale:
        _check_range(out, top)
    return out


def _by_rows(w: Lazy, format: Format) -> Packed:
    """Quantise a Lazy matrix that reads rows, a few at a time, to the same bytes."""
    assert w.rows is not None
    like = w.like
    count, step = like.shape[0], max(1, (PIECE if w.device == HOST else LARGE_PIECE) // max(1, like[:1].nbytes))
    # Made before any piece: results of pieces between their temporaries would leave holes in the heap.
    whole = [empty(t.shape, t.dtype, w.device) for t in tree.leaves(quantize(like, format.plain))]
    for i in range(0, count, step):
        some = slice(i, min(i + step, count))
        try:
            part = quantize(w.rows(some), format.plain)
        except ValueError:
            return quantize(w.read(), format)  # raises with the row in the whole weight
        for to, t in zip(whole, tree.leaves(part), strict=True):
            to[some] = t
    codes, scale, zero = *whole[:2], whole[2] if format.zero else None
    nested = scale if format.scale is None else _quantize(scale, format.scale, is_scale=True)
    out = Packed(codes, nested, format, tuple(like.shape), like.dtype, zero=zero)
    _check_range(out, float(scale.max()))
    return out


def _mean(w: Tensor) -> Tensor:
    """Return the mean f32[] of ``w``, in float64 if the sum of finite values is beyond float32.

    It is taken where ``w`` is, as in bitsandbytes. A device sums in another order than the host, which sums in that of
    its number of threads. So the last bit may differ.
    """
    mean = w.float().mean()
    return torch.where(mean.isfinite(), mean, w.mean(dtype=torch.float64).float())


def _check_range(p: Packed, scale: float | Tensor) -> None:
    """Raise ValueError if values near the end of the range of ``p.dtype``, of the largest ``scale``, are infinite.

    A tensor is not read: the device asserts that values are not near the end of the range.
    """
    unit, most = (max(map(abs, filter(math.isfinite, p.format.table or (LARGEST_SUM,))))), torch.finfo(p.dtype).max
    if isinstance(scale, Tensor):
        fault = f"{p.format.name}: values above {most / 8:g} in a CUDA graph; quantise outside, or divide the weight"
        return torch._assert_async(scale * unit <= most / 8, fault)
    if scale * unit > most / 8 and not bool(dequantize(p).isfinite().all()):
        fault = f"{p.format.name}: values up to {scale * unit:g} decode beyond {validate.name(p.dtype)}"
        raise ValueError(f"{fault}; divide the weight, or use a wider dtype or another format")


def concatenate(parts: Sequence[Packed]) -> Packed:
    """Return the packed array of the rows of ``parts``, matrices one below the other; codes stay, nested scales decode.

    Raises ValueError for another format, dtype or width than the first's, and for a format whose parts share numbers:
    flat, centred, or with learned vectors.
    """
    first = parts[0]
    format, width = first.format, first.shape[1:]
    expect(format.rows_alone, f"{format.name}: packed arrays of this format have no common rows; dequantize them first")
    for p in parts:
        got, wanted = (p.format.name, p.shape[1:], p.dtype), (format.name, width, first.dtype)
        expect(p.format == format and got == wanted, f"got rows of {got}, wanted {wanted} as in the first part")
    scales = [p.scale if isinstance(p.scale, Tensor) else _decoded(p.scale) for p in parts]
    zero = None if first.zero is None else torch.cat([p.zero for p in parts if p.zero is not None])
    shape = sum(p.shape[0] for p in parts), *width
    codes = torch.cat([p.codes for p in parts])
    return replace(first, codes=codes, scale=torch.cat(scales), zero=zero, format=format.plain, shape=shape)


def take_rows(p: Packed, index: slice | Tensor) -> Packed:
    """Return the rows of ``p`` [out ...] at ``index``; codes stay, nested scales decode. The format has rows alone."""
    scale = p.scale if isinstance(p.scale, Tensor) else _decoded(p.scale)
    codes, zero = p.codes[index], None if p.zero is None else p.zero[index]
    shape = len(codes), *p.shape[1:]
    return replace(p, codes=codes, scale=scale[index], zero=zero, format=p.format.plain, shape=shape)


def _decoded(scale: Packed) -> Tensor:
    return scale.codes.new_empty(scale.shape, dtype=torch.float32) if has_no_values(scale.codes) else dequantize(scale)


@overload
def dequantize(p: Packed, dtype: torch.dtype | None = None) -> Tensor: ...
@overload
def dequantize(p: Any, dtype: torch.dtype | None = None) -> Any: ...
def dequantize(p: Any, dtype: torch.dtype | None = None) -> Any:
    """Decode ``p`` to f[... *p.shape], rounded once from f32 to ``p.dtype``, then cast to ``dtype``.

    In any other tree, decode every Packed and keep the other leaves. A Lazy gives one that decodes what it reads.
    Raises ValueError, with the path, for a subtree that is not loaded.
    """
    if isinstance(p, Packed):
        return packed_ops.decode(buffers(p), Spec(p.format, p.shape, p.dtype), dtype or p.dtype)
    if isinstance(p, Lazy):
        return lazy.map(partial(dequantize, dtype=dtype), p)
    if isinstance(p, Loadable):
        raise ValueError(f"dequantize got a {type(p).__name__}, which is not loaded; use shard.collect first")
    special = lambda x: isinstance(x, Packed | Lazy | Loadable)
    return tree.map_with_path(lambda _, x: dequantize(x, dtype) if special(x) else x, p, is_leaf=special)


def buffers(p: Packed) -> list[Tensor]:
    """Return ``tree.leaves(p)`` faster, because the product of one row hardly takes longer than the pytree."""
    found = [p.codes, *(buffers(p.scale) if isinstance(p.scale, Packed) else (p.scale,))]
    return found + [t for t in (p.offset, p.vectors, p.zero) if t is not None]
