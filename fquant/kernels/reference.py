"""Every kernel in plain torch: what the others must equal, quantising and dequantising bit for bit.

It runs on every device, in every dtype. The arithmetic is that of bitsandbytes to the bit:

* absmax is taken in float32; elements are multiplied by its float32 reciprocal, except in a short last block, where
  they are divided by it; the nearest table value is found between midpoints, a tie going to the smaller value.
* The dynamic 8-bit map is looked up on a grid of 65536 points. (bitsandbytes on CUDA takes the exact nearest
  instead, which moves about one code in a thousand by one step.)
* Codes without a table are those of LLM.int8(): rounded to float16 first, then ``round(x * (127 / absmax))``.

Random words are those of Threefry-2x32-20 (Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011). One counter gives two: element 2j and 2j + 1 are the words of counter j. Here they live in int64 tensors, as
torch has no arithmetic for uint32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..format import Format, num_blocks
from .program import parse
from .reference_attention import attention as attention
from .reference_attention import attention_slope as attention_slope
from .spec import Spec, scales, split

CHUNK = 1 << 20  # elements quantised at a time: bounds what quantising needs beside the weight
TINY = 1e-38  # keeps the reciprocal of an all-zero block finite

Word = Tensor | int
MASK = 0xFFFFFFFF
PARITY = 0x1BD11BDA
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
FOLDED = 0x243F6A8885A308D3  # folding and drawing use different keys, or a folded key would be two drawn words


def encode(rows: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """``rows`` f[... n] to (codes u8[... n·bits/8] or i8[... n], absmax f32[... blocks])."""
    *outer, width = rows.shape
    parts = rows.reshape(-1, width).split(max(1, CHUNK // max(width, 1)))
    codes, absmax = zip(*[_encode_rows(part, format) for part in parts], strict=True)
    join = lambda parts: (torch.cat(parts) if len(parts) > 1 else parts[0]).reshape(*outer, parts[0].shape[-1])
    return join(codes), join(absmax)


def _encode_rows(rows: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    x = rows.float()
    if format.table is None:
        x = rows.half().float()
    width = x.shape[-1]
    block = format.block or max(width, 1)
    whole = width - width % block
    blocks = x[..., :whole].unflatten(-1, (whole // block, block))
    absmax = blocks.abs().amax(-1)  # [... whole / block]
    if format.table is None:
        codes = _round(blocks, absmax[..., None]).flatten(-2)
        if whole < width:
            last = x[..., whole:].abs().amax(-1, keepdim=True)
            codes = torch.cat([codes, _round(x[..., whole:], last)], -1)
            absmax = torch.cat([absmax, last], -1)
        return codes, absmax
    scaled = (blocks * (1.0 / absmax.clamp(min=TINY))[..., None]).flatten(-2)
    if whole < width:
        last = x[..., whole:].abs().amax(-1, keepdim=True).clamp(min=TINY)
        scaled = torch.cat([scaled, x[..., whole:] / last], -1)
        absmax = torch.cat([absmax, last], -1)
    index = _nearest(scaled.clamp(-1, 1), format)
    if format.bits == 8:
        return index, absmax
    if width % 2:
        zero = _nearest(scaled.new_zeros((*scaled.shape[:-1], 1)), format)
        index = torch.cat([index, zero], -1)
    return index[..., 0::2] << 4 | index[..., 1::2], absmax


def decode(buffers: Sequence[Tensor], spec: Spec, out: torch.dtype) -> Tensor:
    """The array that the buffers stand for, f[*stack *shape], in ``spec.dtype``, rounded once, then in ``out``."""
    format, shape, dtype = spec
    codes, scale, offset, _ = split(spec, buffers)
    absmax = scale[0] if format.scale is None else decode(scale, scales(spec), torch.float32)
    if format.flat:
        codes = codes.flatten(-len(shape)) if format.bits == 8 else codes
        values = _decode_rows(codes, absmax, format, math.prod(shape)).unflatten(-1, shape)
    else:
        values = _decode_rows(codes, absmax, format, shape[-1])
    if offset is not None:
        values = values + offset.reshape(offset.shape + (1,) * len(shape))
    return values.to(dtype).to(out)


def matmul(x: Tensor, buffers: Sequence[Tensor], spec: Spec) -> Tensor:
    """``x · Wᵀ``: x f[*stack m in] and the buffers of a packed [*stack out in] to f[*stack m out]."""
    return x @ decode(buffers, spec, x.dtype).mT


def matmul_t(g: Tensor, buffers: Sequence[Tensor], spec: Spec) -> Tensor:
    """``g · W``: g f[*stack m out] and the buffers of a packed [*stack out in] to f[*stack m in]."""
    return g @ decode(buffers, spec, g.dtype)


def _decode_rows(codes: Tensor, absmax: Tensor, format: Format, width: int) -> Tensor:
    """Codes and absmax f32[... blocks] of :func:`encode` to f32[... width]."""
    if format.table is None:
        values = codes.float()
    elif format.bits == 8:
        values = torch.tensor(format.table, dtype=torch.float32, device=codes.device)[codes.int()]
    else:
        # Both values of a byte at once: half as many look-ups, and no unpacked indices.
        pairs = [(high, low) for high in format.table for low in format.table]
        table = torch.tensor(pairs, dtype=torch.float32, device=codes.device)
        values = F.embedding(codes.int(), table).flatten(-2)[..., :width]
    values = times_scale(values, absmax, format, width)
    return values * (1 / 127) if format.table is None else values


def times_scale(values: Tensor, absmax: Tensor, format: Format, width: int) -> Tensor:
    """Values f32[... width] times the absmax f32[... blocks] of their blocks."""
    if not width:
        return values
    block = format.block or width
    if width % block == 0:
        return (values.unflatten(-1, (num_blocks(format, width), block)) * absmax[..., None]).flatten(-2)
    return values * absmax.repeat_interleave(block, -1)[..., :width]


def _round(x: Tensor, absmax: Tensor) -> Tensor:
    """LLM.int8: nearest of -127 .. 127, a block of zeros giving zeros."""
    return torch.where(absmax > 0, torch.round(x * (127.0 / absmax)), 0.0).to(torch.int8)


def _nearest(x: Tensor, format: Format) -> Tensor:
    """u8 index of the table value nearest to ``x`` f32 in [-1, 1]."""
    if format.bits == 8:
        at = (x + 1.0) * 0.5 * 65535.0 + 0.5
        return grid(format).to(x.device)[at.nan_to_num().int()]  # NaN is no index; who quantises refuses it by absmax
    order, middles = midpoints(format)
    index = torch.bucketize(x.contiguous(), middles.to(x.device), out_int32=True)
    if order != sorted(order):
        index = torch.tensor(order, dtype=torch.int64, device=x.device)[index]
    return index.to(torch.uint8)


@lru_cache(maxsize=256)
def midpoints(format: Format) -> tuple[list[int], Tensor]:
    """The codes in the order of their values, and what lies halfway between those values, f32[codes - 1]."""
    assert format.table is not None
    order = sorted(range(len(format.table)), key=format.table.__getitem__)
    table = torch.tensor([format.table[i] for i in order], dtype=torch.float32, device="cpu")
    return order, (table[:-1] + table[1:]) / 2


@lru_cache(maxsize=256)
def grid(format: Format) -> Tensor:
    """The code nearest to every one of 65536 points in [-1, 1], u8."""
    order, middles = midpoints(format)
    points = torch.arange(65536, dtype=torch.float32, device="cpu") * 2.0 / 65535.0 - 1.0
    return torch.tensor(order, dtype=torch.uint8, device="cpu")[torch.bucketize(points, middles)]


def fold(key: Tensor, data: Tensor) -> Tensor:
    """Keys i64[...] from ``key`` and ``data``, i64 that broadcast."""
    high, low = threefry(_halves(key ^ FOLDED), _halves(data))
    return ((high << 32) | low).contiguous()  # type: ignore[union-attr]


def bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Words in [0, 2^32), i64[*key *shape]: of every key i64, those at the flat positions of ``shape``."""
    n = math.prod(shape)
    counter = torch.arange((n + 1) // 2, device=key.device)
    pairs = torch.stack(threefry(_halves(key[..., None]), _halves(counter)), -1)  # type: ignore[arg-type]
    return pairs.flatten(-2)[..., :n].reshape((*key.shape, *shape)).contiguous()


def bernoulli(key: Tensor, threshold: int, shape: Sequence[int]) -> Tensor:
    """Whether the words of :func:`bits` are below ``threshold``, bool[*key *shape]."""
    return bits(key, shape) < threshold


def threefry(key: tuple[Word, Word], counter: tuple[Word, Word]) -> tuple[Word, Word]:
    """Threefry-2x32-20: two 32-bit words from a key and a counter of two 32-bit words each.

    Words are int64 tensors that broadcast, or integers, in [0, 2^32).
    """
    k0, k1 = key
    keys = (k0, k1, k0 ^ k1 ^ PARITY)
    x0, x1 = counter[0] + k0, (counter[1] + k1) & MASK
    for four in range(5):
        for r in ROTATIONS[four % 2]:
            x0 = x0 + x1  # at most 26 sums of 32-bit words: masked once, at the end
            x1 = (((x1 << r) | (x1 >> (32 - r))) ^ x0) & MASK
        x0 = x0 + keys[(four + 1) % 3]
        x1 = (x1 + keys[(four + 2) % 3] + (four + 1)) & MASK
    return x0 & MASK, x1


def nll(logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
    """What rows [c v] say of their targets i64[c], -log softmax: f32[c], f64 of f64, zero where that is ``ignore``."""
    wide, counted = _wide(logits), targets != ignore
    chosen = wide.gather(-1, torch.where(counted, targets, 0)[:, None]).squeeze(-1)
    return torch.where(counted, wide.logsumexp(-1) - chosen, 0.0)


def nll_slope(logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """:func:`nll`, and the gradient of ``(factor · nll).sum()`` with respect to the logits, in their dtype."""
    wide, counted = _wide(logits), (targets != ignore)[:, None]
    minus = wide.new_full((), -1.0).expand(counted.shape)
    slope = wide.softmax(-1).scatter_add(-1, torch.where(counted, targets[:, None], 0), minus)
    slope = slope if factor is None else slope * factor[:, None]
    return nll(logits, targets, ignore), torch.where(counted, slope, 0.0).to(logits.dtype).contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x / rms(x)``, rounded, times the weight [d], and what x [... d] was multiplied by: f32[...], f64 of f64."""
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1) + eps)
    return (weight.to(x.dtype) * (wide * scale[..., None]).to(x.dtype)).contiguous(), scale


def rms_norm_slope(g: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The gradient of ``(g · y).sum()`` with respect to x, of whose :func:`rms_norm` y and scale are; in x's dtype."""
    normed, along = _wide(x) * scale[..., None], _wide(g) * _wide(weight.to(x.dtype))
    slope = (along - normed * (along * normed).mean(-1, keepdim=True)) * scale[..., None]
    return slope.to(x.dtype).contiguous()


def silu(x: Tensor) -> Tensor:
    """``x · sigmoid(x)`` as torch has it, contiguous."""
    return F.silu(x).contiguous()


def silu_slope(x: Tensor) -> Tensor:
    """The derivative of ``x · sigmoid(x)`` as torch has it, contiguous."""
    return torch.ops.aten.silu_backward(x.new_ones(()).expand_as(x), x).contiguous()


def turn(x: Tensor, forth: bool) -> Tensor:
    """x [... 2h] with its halves turned: [-second, first], or [second, -first] for the way back."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first] if forth else [second, -first], -1)


_OWN = {"silu": silu, "silu_slope": silu_slope}


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The lower and the upper 32 bits."""
    return x & MASK, (x >> 32) & MASK


def pointwise(read: Sequence[Tensor], write: Sequence[Tensor], text: str) -> list[Tensor]:
    """The steps of a program, one after another; see ``fquant.kernels.pointwise``."""
    program = parse(text)
    values, shape = list(read), torch.broadcast_shapes(*(t.shape for t in read))
    for op, dtype, args in program.steps:
        given = [values[a] if isinstance(a, int) else a for a in args]
        if op == "to":
            values.append(given[0].to(dtype))  # type: ignore[union-attr]
            continue
        if op == "turn":
            values.append(turn(given[0].to(dtype).expand(shape), given[1] > 0))  # type: ignore[union-attr]
            continue
        cast = [a.to(dtype) if isinstance(a, Tensor) and a.dtype is not torch.bool else a for a in given]
        values.append(_OWN[op](*cast) if op in _OWN else getattr(torch, op)(*cast))  # type: ignore[arg-type]
    made = [values[i].expand(shape).clone(memory_format=torch.contiguous_format) for i in (*program.new, *program.over)]
    for into, value in zip(write, made[len(program.new) :], strict=True):
        into.copy_(value)
    return made[: len(program.new)]
