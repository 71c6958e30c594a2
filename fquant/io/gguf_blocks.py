"""The block formats of GGUF: rows of float32 to bytes and back, in plain tensor operations.

    kind  code  elements  bytes  content of a block                                value
    f32      0         1      4
    f16      1         1      2
    q4_0     2        32     18  f16 d, u8 codes[16]                               d (q - 8)
    q8_0     8        32     34  f16 d, i8 codes[32]                               d q
    q4_k    12       256    144  f16 d, f16 dmin, u8 scales[12], u8 codes[128]     (d s) q - dmin m, s and m of 32
    q6_k    14       256    210  u8 low[128], u8 high[64], i8 scales[16], f16 d    (d s) (q - 32), s of 16
    bf16    30         1      2

Blocks run along rows. In ``q4_0`` the low halves of the bytes are elements 0 to 15, and the high halves 16 to 31. In
``q4_k`` this holds for runs of 64 elements, and scales and minima are packed in six bits each.

The quantisers are ggml's reference recipes (github.com/ggml-org/ggml, ``ggml-quants.c``): ``quantize_row_q4_0_ref``,
``quantize_row_q8_0_ref``, ``quantize_row_q4_K_ref`` and ``quantize_row_q6_K_ref``. The last two search scale (and
minimum) of a group by least squares over 21 and 19 roundings. Sums are made in ggml's order, so bytes equal those of
its C code, compiled without fused multiply-add. The elements of a group are dim 0, so that each step is one tensor
operation.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from ..tree import at, expect

CHUNK = 1 << 18  # elements that are quantised at a time: their temporaries stay in the cache
TINY = 1e-15  # GROUP_MAX_EPS: q6_k writes smaller groups as zeros


@dataclass(frozen=True)
class Kind:
    """A block format: its number in files, the elements and bytes of a block, and the functions of both directions."""

    code: int
    elements: int
    nbytes: int
    encode: Callable[[Tensor], Tensor]  # f32[blocks, elements] -> u8[blocks, nbytes]
    decode: Callable[[Tensor], Tensor]  # u8[blocks, nbytes] -> f32[blocks, elements]


def encode(rows: Tensor, kind: str) -> Tensor:
    """Quantise f32[rows, width] to the bytes u8[rows, width / elements * nbytes] of ``kind``.

    Raises ValueError for a width that is no multiple of the block, for NaN or infinity, and for scales beyond float16.
    """
    known = KINDS[kind]
    check_width(tuple(rows.shape), kind)
    blocks = rows.reshape(-1, known.elements)
    count = max(1, CHUNK // known.elements)
    with at(kind):
        expect(rows.isfinite().all(), "got a weight that is NaN or infinite; a GGUF must be finite")
        # Threads of our own, because the operations on a chunk are too small for those of torch.
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            out = torch.cat(list(threads.map(known.encode, blocks.split(count))))
    return out.reshape(len(rows), -1)


def decode(rows: Tensor, kind: str) -> Tensor:
    """Decode the bytes u8[rows, nbytes of a row] of ``kind`` to f32[rows, width]."""
    known = KINDS[kind]
    return known.decode(rows.reshape(-1, known.nbytes)).reshape(len(rows), -1)


def check_width(shape: tuple[int, ...], kind: str) -> None:
    """Raise ValueError unless the last dim of ``shape`` holds whole blocks of ``kind``."""
    width, elements = shape[-1], KINDS[kind].elements
    others = [name for name in ("q8_0", "q4_0") if width % KINDS[name].elements == 0] or ["f16", "bf16"]
    fault = f"width {width} is not a multiple of the {elements} elements of a block of {kind}"
    expect(width % elements == 0, f"{fault}; use {' or '.join(others)}")


def _half(d: Tensor) -> Tensor:
    """Return the bytes u8[..., 2] of f32[...] as float16."""
    half = d.half()
    expect(half.isfinite().all(), f"got a scale of {d.abs().max().item():g}, beyond float16's 65504; use f32 or bf16")
    return half[..., None].view(torch.uint8)


def _from_half(x: Tensor) -> Tensor:
    """Return the float16 in the bytes u8[blocks, 2] as f32[blocks, 1]."""
    return x.contiguous().view(torch.float16).float()


def _reciprocal(d: Tensor) -> Tensor:
    return torch.where(d == 0, 0.0, 1 / d)


def _over(number: float, x: Tensor) -> Tensor:
    """Divide ``number`` by x, rounded once; torch's own operator multiplies with the reciprocal."""
    return torch.tensor(number, dtype=x.dtype, device=x.device) / x


def _codes(x: Tensor) -> Tensor:
    """Return x as u8; the product of a zero and the infinite reciprocal of a tiny scale counts as zero."""
    return x.nan_to_num_(0.0, 0.0, 0.0).to(torch.uint8)


def _halves(codes: Tensor) -> Tensor:
    """Pack codes u8[blocks, 2·n] < 16 as bytes [blocks, n]: the first n are the low halves."""
    low, high = codes.chunk(2, -1)
    return low | high << 4


def _encode_q8_0(x: Tensor) -> Tensor:
    d = x.abs().amax(1) / 127
    scaled = x * _reciprocal(d)[:, None]
    whole = scaled.abs().floor()
    away = whole + (2 * (scaled.abs() - whole)).floor()  # halves are rounded away from zero
    codes = (scaled.sign() * away).nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)
    return torch.cat([_half(d), codes.view(torch.uint8)], 1)


def _decode_q8_0(b: Tensor) -> Tensor:
    return b[:, 2:].contiguous().view(torch.int8).float() * _from_half(b[:, :2])


def _encode_q4_0(x: Tensor) -> Tensor:
    largest = x.gather(1, x.abs().argmax(1, keepdim=True))  # with its sign
    d = largest / -8
    codes = _codes((x * _reciprocal(d) + 8.5).trunc_().clamp_(0, 15))
    return torch.cat([_half(d[:, 0]), _halves(codes)], 1)


def _decode_q4_0(b: Tensor) -> Tensor:
    codes = torch.cat([b[:, 2:] & 15, b[:, 2:] >> 4], 1)
    return (codes.float() - 8) * _from_half(b[:, :2])


def _sum(x: Tensor) -> Tensor:
    """Sum over dim 0 in order, as a loop in C does; torch's own order differs."""
    return reduce(add, x.unbind(0))


def _fit_scale_and_min(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Search scale, minimum and codes 0 to 15 of groups f32[32, groups]; ggml's ``make_qkx2_quants``."""
    sum_w, sum_x = _sum(weights), _sum(weights * x)
    tenth = torch.tensor(0.1, dtype=torch.float32, device=x.device)
    least, most = x.amin(0).clamp(max=0), x.amax(0)
    flat = most == least
    inverse = _over(15, most - least)
    scale = 1 / inverse
    codes = (inverse * (x - least)).round_().clamp_(0, 15)
    error = _sum(weights * (scale * codes + least - x).square())
    for step in range(21):
        inverse = ((tenth * step - 1) + 15) / (most - least)  # the minimum is the best one until here
        tried = (inverse * (x - least)).round_().clamp_(0, 15)
        weighted = weights * tried
        sum_l, sum_l2, sum_xl = _sum(weighted), _sum(weighted * tried), _sum(weighted * x)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        its_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        its_least = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        positive = its_least > 0
        its_least, its_scale = its_least.masked_fill(positive, 0), torch.where(positive, sum_xl / sum_l2, its_scale)
        its_error = _sum(weights * (its_scale * tried + its_least - x).square())
        better = (determinant > 0) & (its_error < error)
        codes = torch.where(better, tried, codes)
        error, scale = torch.where(better, its_error, error), torch.where(better, its_scale, scale)
        least = torch.where(better, its_least, least)
    return scale.masked_fill(flat, 0), -least, codes.masked_fill(flat, 0)


def _encode_q4_k(x: Tensor) -> Tensor:
    groups = x.reshape(-1, 32).T.contiguous()  # [32, 8 a block]
    # In float64, because torch's square root of float32 is not always rounded to nearest.
    weights = (_sum(groups.square()) / 32).double().sqrt().float() + groups.abs()
    scale, least, codes = _fit_scale_and_min(groups, weights)
    scale, least = scale.reshape(-1, 8), least.reshape(-1, 8)
    top, bottom = (t.amax(1, keepdim=True).clamp(min=0) + 0.0 for t in (scale, least))  # no negative zero
    s = torch.where(top > 0, _over(63, top) * scale, 0).round_().clamp_(0, 63)
    m = torch.where(bottom > 0, _over(63, bottom) * least, 0).round_().clamp_(0, 63)
    d, dmin = _half(top[:, 0] / 63), _half(bottom[:, 0] / 63)
    s, m = _codes(s), _codes(m)  # [blocks, 8]
    step = (_from_half(d) * s).reshape(-1)  # of each group, as it is decoded
    again = ((groups + (_from_half(dmin) * m).reshape(-1)) / step).round_().clamp_(0, 15)
    codes = _codes(torch.where(step == 0, codes, again)).T.reshape(-1, 4, 64)
    first = torch.cat([s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6], 1)
    scales = torch.cat([first, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4], 1)
    return torch.cat([d, dmin, scales, _halves(codes).reshape(-1, 128)], 1)


def _decode_q4_k(b: Tensor) -> Tensor:
    d, dmin, s = _from_half(b[:, :2]), _from_half(b[:, 2:4]), b[:, 4:16]
    scale = torch.cat([s[:, :4] & 63, s[:, 8:] & 15 | s[:, :4] >> 6 << 4], 1)
    least = torch.cat([s[:, 4:8] & 63, s[:, 8:] >> 4 | s[:, 4:8] >> 6 << 4], 1)
    runs = b[:, 16:].reshape(-1, 4, 1, 32)
    codes = torch.cat([runs & 15, runs >> 4], 2).reshape(-1, 8, 32)
    return ((d * scale)[:, :, None] * codes - (dmin * least)[:, :, None]).reshape(-1, 256)


def _fit_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """Search the scale and codes -32 to 31 of groups f32[16, groups]; ggml's ``make_qx_quants`` with weights x²."""
    largest = x.gather(0, x.abs().argmax(0, keepdim=True))[0]  # with its sign
    scale, best, codes = torch.zeros_like(largest), torch.zeros_like(largest), torch.zeros_like(x)
    weights, tenth = x * x, torch.tensor(0.1, dtype=torch.float32, device=x.device)
    for step in (0, *range(-9, 0), *range(1, 10)):
        tried = (-(32 + tenth * step) / largest * x).round_().clamp_(-32, 31)
        weighted = weights * tried
        sum_xl, sum_l2 = _sum(weights * x * tried), _sum(weighted * tried)
        # The first rounding is taken as it is.
        better = (sum_l2 > 0) & (sum_xl * sum_xl > best * sum_l2) if step else torch.ones_like(best, dtype=torch.bool)
        its_scale = torch.where(sum_l2 > 0, sum_xl / sum_l2, 0)
        codes = torch.where(better, tried, codes)
        scale, best = torch.where(better, its_scale, scale), torch.where(better, its_scale * sum_xl, best)
    zero = largest.abs() < TINY
    return scale.masked_fill(zero, 0), codes.masked_fill(zero, -32)


def _encode_q6_k(x: Tensor) -> Tensor:
    groups = x.reshape(-1, 16).T.contiguous()  # [16, 16 a block]
    scale, codes = _fit_scale(groups)
    scale = scale.reshape(-1, 16)
    largest = scale.gather(1, scale.abs().argmax(1, keepdim=True))
    empty = largest.abs() < TINY
    inverse = _over(-128, largest)
    d = _half(torch.where(empty, 0, 1 / inverse)[:, 0])
    s = (inverse * scale).round_().clamp_(-128, 127).masked_fill_(empty, 0)
    step = (_from_half(d) * s).reshape(-1)
    again = (groups / step).round_().clamp_(-32, 31)
    q = _codes(torch.where(step == 0, codes, again) + 32).T.reshape(-1, 2, 4, 32)
    q = q.masked_fill(empty[:, :, None, None], 0)  # ggml clears the whole block
    low = q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4
    high = q[:, :, 0] >> 4 | q[:, :, 1] >> 4 << 2 | q[:, :, 2] >> 4 << 4 | q[:, :, 3] >> 4 << 6
    return torch.cat([low.flatten(1), high.flatten(1), s.to(torch.int8).view(torch.uint8), d], 1)


def _decode_q6_k(b: Tensor) -> Tensor:
    low, high = b[:, :128].reshape(-1, 2, 2, 32), b[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=b.device)[:, None]
    q = torch.cat([low & 15, low >> 4], 2) | (high >> shifts & 3) << 4
    step = _from_half(b[:, 208:]) * b[:, 192:208].contiguous().view(torch.int8)
    return (step[:, :, None] * (q.reshape(-1, 16, 16).float() - 32)).reshape(-1, 256)


def _plain(dtype: torch.dtype) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return both directions of an unquantised dtype."""

    def cast(x: Tensor) -> Tensor:
        narrow = x.to(dtype)
        name = str(dtype).removeprefix("torch.")
        expect(narrow.isfinite().all(), f"got {x.abs().max().item():g}, beyond the range of {name}; use f32 or bf16")
        return narrow.contiguous().view(torch.uint8)

    return cast, lambda b: b.contiguous().view(dtype).float()


KINDS: dict[str, Kind] = {
    "f32": Kind(0, 1, 4, *_plain(torch.float32)),
    "f16": Kind(1, 1, 2, *_plain(torch.float16)),
    "q4_0": Kind(2, 32, 18, _encode_q4_0, _decode_q4_0),
    "q8_0": Kind(8, 32, 34, _encode_q8_0, _decode_q8_0),
    "q4_k": Kind(12, 256, 144, _encode_q4_k, _decode_q4_k),
    "q6_k": Kind(14, 256, 210, _encode_q6_k, _decode_q6_k),
    "bf16": Kind(30, 1, 2, *_plain(torch.bfloat16)),
}
