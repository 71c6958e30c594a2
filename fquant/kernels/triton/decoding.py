"""Attention to the slots of a cache in Triton, split over the slots (Dao et al. 2023, "Flash-Decoding").

Bytes bound it: each key and value is read once, for all heads of its group. These are the rows of the product, at
least 16 on tensor cores. A batch of few sequences has few heads. So the slots of a head are dealt out to ``parts``
programs, one tile to each in turn. Any position thus keeps all of them busy. The number of parts follows from the
shapes and the device, because the host does not know positions. Programs leave their sums in float32, and a second
kernel adds them in a fixed order.
"""

# pyright: reportInvalidTypeForm=false
from typing import NamedTuple

import torch
from torch import Tensor

from .. import reference
from ..arguments import dense_rows
from .attention_tiles import factors, padded, product, scores, weights
from .codes import EXACT, narrow, on, tl, triton

MOST_HEAD = 256  # elements of a head; the reference takes larger ones
BLOCKS = 2  # programs that a multiprocessor should have
PARTS = 64  # programs of a head, at most


class Split(NamedTuple):
    """The sizes of the first kernel."""

    slots: int  # of a tile
    warps: int
    stages: int
    parts: int | None = None  # programs of a head; by default as many as fill the device


CANDIDATES = tuple(Split(slots, warps, stages) for slots in (32, 64, 128) for warps in (4, 8) for stages in (2, 3, 4))


def cached_attention(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float | None = None, cap: float | None = None,
    sinks: Tensor | None = None, plan: Split | None = None,
) -> Tensor:  # fmt: skip
    """Compute the op with another plan than that for q and k."""
    (b, h, e), (slots, kv) = q.shape, k.shape[1:3]
    if e > MOST_HEAD:
        return reference.cached_attention(q, k, v, position, scale, cap, sinks)
    y = q.new_empty(q.shape)
    if not y.numel():
        return y
    plan = plan or Split(64 if k.itemsize * e <= 256 else 32, 4, 3)
    parts = plan.parts or parts_of(q, kv, triton.cdiv(slots, plan.slots))
    q, k, v, position = q.contiguous(), dense_rows(k), dense_rows(v), position.contiguous()
    sums, states = (q.new_empty(b, h, parts, n, dtype=torch.float32) for n in (e, 2))
    rows, (_, factor, limit) = max(16, triton.next_power_of_2(h // kv)), factors(scale, cap, e)
    strides = *k.stride()[:3], *v.stride()[:3]
    with on(q):
        _attend[(b * kv * parts,)](
            q, k, v, position, sums, states, *strides, slots, kv, h // kv, parts, factor, limit, e, padded(e), rows,
            plan.slots, num_warps=plan.warps, num_stages=plan.stages, **EXACT,
        )  # fmt: skip
        _merge[(b * h,)](
            sums, states, None if sinks is None else sinks.contiguous(), y, parts, e, padded(e),
            triton.next_power_of_2(parts), num_warps=4, **EXACT,
        )  # fmt: skip
    return y


def parts_of(q: Tensor, kv: int, tiles: int) -> int:
    """Return the number of programs of a head: what fills the device of q, but no more than there are tiles."""
    count = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 132
    return max(1, min(tiles, PARTS, triton.cdiv(BLOCKS * count, len(q) * kv)))


@triton.jit
def _attend(
    q, k, v, position, sums, states, k_b, k_s, k_h, v_b, v_s, v_h, slots, kv, group, parts, factor, limit,
    HEAD: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute the sums of one part of the slots for a group of heads."""
    part, head = tl.program_id(0) % parts, tl.program_id(0) // parts
    b, h = (head // kv).to(tl.int64), (head % kv).to(tl.int64)
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    row, c = tl.arange(0, ROWS), tl.arange(0, E)[None, :]
    line = head.to(tl.int64) * group + row  # of q [b h]
    qs = tl.load(q + line[:, None] * HEAD + c, mask=(row[:, None] < group) & (c < HEAD), other=0.0)
    end = tl.minimum(tl.load(position + b) + 1, slots).to(tl.int32)
    acc = tl.zeros([ROWS, E], tl.float32)
    most, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for first in range(part * N, end, parts * N):
        slot = first + tl.arange(0, N)
        at, mask = slot.to(tl.int64)[:, None], (slot < end)[:, None] & (c < HEAD)
        keys = tl.load(k + at * k_s + c, mask=mask, other=0.0)
        values = tl.load(v + at * v_s + c, mask=mask, other=0.0)
        x, _ = scores(product(qs, tl.trans(keys), None), factor, limit)
        x = tl.where((slot < end)[None, :], x, float("-inf"))
        new = tl.maximum(most, tl.max(x, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p, shrink = weights(x, base[:, None]), weights(most, base)
        acc = product(narrow(p, v.dtype.element_ty), values, acc * shrink[:, None])
        most, total = new, total * shrink + tl.sum(p, 1)
    line = line * parts + part
    there = row < group
    tl.store(sums + line[:, None] * HEAD + c, acc, mask=there[:, None] & (c < HEAD))
    tl.store(states + line * 2, most, mask=there)
    tl.store(states + line * 2 + 1, total, mask=there)


@triton.jit
def _merge(sums, states, sinks, y, parts, HEAD: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr):
    """Add the sums of all parts of one head."""
    head = tl.program_id(0).to(tl.int64)
    part, c = tl.arange(0, PARTS), tl.arange(0, E)[None, :]
    line = head * parts + part
    most = tl.load(states + line * 2, mask=part < parts, other=float("-inf"))
    total = tl.load(states + line * 2 + 1, mask=part < parts, other=0.0)
    top = tl.max(most, 0)
    if sinks is not None:
        sink = tl.load(sinks + head)
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = weights(most, top)
    whole = tl.sum(weight * total, 0)
    if sinks is not None:
        whole += weights(sink, top)
    mask = (part[:, None] < parts) & (c < HEAD)
    acc = tl.load(sums + line[:, None] * HEAD + c, mask=mask, other=0.0)
    acc = tl.sum(acc * weight[:, None], 0) * (1.0 / whole)
    at = tl.arange(0, E)
    tl.store(y + head * HEAD + at, narrow(acc, y.dtype.element_ty), mask=at < HEAD)
