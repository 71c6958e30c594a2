"""Attention in Triton (Dao 2023, "FlashAttention-2"): a program has a tile of queries of one head.

The queries stay in shared memory, their sums in registers. Keys and values come a tile at a time, ahead of their use.
Of the scores only the maximum and the sum of a row are kept. When a larger maximum comes, the sums so far are scaled
down. Which keys a program meets is in ``attention_tiles.py``.
"""

# pyright: reportInvalidTypeForm=false
import torch
from torch import Tensor

from .. import reference
from .codes import EXACT, narrow, on, tl, triton

from .attention_tiles import (  # isort: skip
    LN2, Plan, bounds_of_keys, by_tokens, factors, head_of, load_runs, load_tile, operand, padded, plan_of, product,
    reads_by_tma, rows_apart, scores, sees_all, spans, store_rows, visible, weights,
)  # fmt: skip


def attention(
    q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None, window: int | None = None, scale: float | None = None,
    cap: float | None = None, causal: bool = True, sinks: Tensor | None = None, plan: Plan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the op with another plan than that for q."""
    b, h, t, e = q.shape
    plan = plan or plan_of(q)
    if plan is None:
        return reference.attention(q, k, v, runs, window, scale, cap, causal, sinks)
    y, lse = by_tokens(q), q.new_empty(b, h, t, dtype=torch.float32)
    if not y.numel():
        return y, lse
    q, k, v = map(rows_apart, (q, k, v))
    runs, sinks = (None if x is None else x.contiguous() for x in (runs, sinks))
    tiles, tma, (_, factor, limit) = plan.forward, reads_by_tma(plan, q, k, v), factors(scale, cap, e)
    operands = (operand(x, n, tma) for x, n in ((q, tiles.queries), (k, tiles.keys), (v, tiles.keys)))
    tensors = y, lse, runs, spans(runs, tiles.queries), sinks
    strides = (n for x in (q, k, v, y) for n in x.stride()[:3])
    sizes = t, h, h // k.shape[1], sees_all(window, t), factor, limit
    with on(q):
        _forward[(b * h * triton.cdiv(t, tiles.queries),)](
            *operands, *tensors, *strides, *sizes, e, padded(e), tiles.queries, tiles.keys, causal, tma,
            num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=tiles.registers, **EXACT,
        )  # fmt: skip
    return y, lse


@triton.jit
def _forward(
    q, k, v, y, lse, runs, spans, sinks, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, y_b, y_h, y_t,
    t, heads, group, window, factor, limit, HEAD: tl.constexpr, E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CAUSAL: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute y and lse of M queries; the last tiles, which see most, come first."""
    tiles = tl.cdiv(t, M)
    tile, bh = tiles - 1 - tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = bh // heads, bh % heads
    kv = h // group
    q, k, v = head_of(q, b, h, q_b, q_h, TMA), head_of(k, b, kv, k_b, k_h, TMA), head_of(v, b, kv, v_b, v_h, TMA)
    if runs is not None:
        runs += b.to(tl.int64) * t
        spans += (b * tiles + tile) * 4
    i = tile * M + tl.arange(0, M)
    run_i = load_runs(runs, i, t)
    begin, end, inner, outer = bounds_of_keys(spans, tile, t, window, M, N, CAUSAL)
    qs = load_tile(q, b, h, tile * M, q_t, t, M, HEAD, E, TMA)
    acc = tl.zeros([M, E], tl.float32)
    if sinks is None:
        most, total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)
    else:
        most = tl.zeros([M], tl.float32) + tl.load(sinks + bh)
        total = tl.where(most == float("-inf"), 0.0, 1.0)
    for j in range(begin, end, N):
        keys = load_tile(k, b, kv, j, k_t, t, N, HEAD, E, TMA)
        x, _ = scores(product(qs, tl.trans(keys), None), factor, limit)
        if (j < inner) | (j >= outer):
            at = j + tl.arange(0, N)
            run_j = load_runs(runs, at, t)
            seen = visible(i[:, None], at[None, :], t, window, runs, run_i[:, None], run_j[None, :], CAUSAL)
            x = tl.where(seen, x, float("-inf"))
        new = tl.maximum(most, tl.max(x, 1))
        base = tl.where(new == float("-inf"), 0.0, new)  # finite, because it is subtracted
        p, shrink = weights(x, base[:, None]), weights(most, base)
        values = load_tile(v, b, kv, j, v_t, t, N, HEAD, E, TMA)
        acc = product(narrow(p, values.dtype), values, acc * shrink[:, None])
        most, total = new, total * shrink + tl.sum(p, 1)
    base = tl.where(most == float("-inf"), 0.0, most)
    tl.store(lse + bh.to(tl.int64) * t + i, base + tl.log2(total) * LN2, mask=i < t)
    store_rows(head_of(y, b, h, y_b, y_h, False), acc * (1.0 / total)[:, None], tile * M, y_t, t, M, HEAD, E)
