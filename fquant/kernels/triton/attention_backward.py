"""The gradients of attention in Triton: one pass over tiles of keys, and one over tiles of queries.

With p = exp(score - lse) and delta = sum(g * y), the gradient of a score is p * (g·v - delta) (Dao et al. 2022,
"FlashAttention", appendix B). A program of the first pass has the keys and values of a tile. It meets all queries that
see them, of all heads of the group. So dk and dv are sums in registers, rounded once. A program of the second has a
tile of queries, and meets their keys. No sum is made by atomic additions, so the bits are the same each time. Scores
and their slopes are computed in both passes: 7 products instead of 5.
"""

# pyright: reportInvalidTypeForm=false
import torch
from torch import Tensor

from .. import reference
from .codes import EXACT, narrow, on, tl, triton, widen

from .attention_tiles import (  # isort: skip
    Plan, bounds_of_keys, bounds_of_queries, by_tokens, factors, head_of, load_runs, load_tile, operand, padded,
    plan_of, product, reads_by_tma, rows_apart, scores, sees_all, softmax, spans, store_rows, visible,
)  # fmt: skip

ROWS = 64  # of y and its gradient that a program multiplies


def attention_backward(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None,
    window: int | None = None, scale: float | None = None, cap: float | None = None, causal: bool = True,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the op with another plan than that for q."""
    (b, h, t, e), kv = q.shape, k.shape[1]
    plan = plan or plan_of(q)
    if plan is None:
        return reference.attention_backward(g, y, lse, q, k, v, runs, window, scale, cap, causal)
    dq, dk, dv = map(by_tokens, (q, k, v))
    if not dq.numel():
        return dq, dk, dv
    g, y, q, k, v = map(rows_apart, (g, y, q, k, v))
    lse, runs = lse.contiguous(), None if runs is None else runs.contiguous()
    tma, (scale, factor, limit) = reads_by_tma(plan, q, k, v, g), factors(scale, cap, e)
    of_keys = plan.of_keys if cap is None else plan.of_capped_keys or plan.of_keys
    delta = torch.empty_like(lse)
    strides = [n for x in (q, k, v, g) for n in x.stride()[:3]]
    sizes = t, h, h // kv, sees_all(window, t), scale, factor, limit, e, padded(e)
    with on(q):
        _delta[(b * h * triton.cdiv(t, ROWS),)](
            g, y, delta, *g.stride()[:3], *y.stride()[:3], t, h, e, padded(e), ROWS, num_warps=4, **EXACT
        )
        for kernel, tiles, heads, size, out in (
            (_of_keys, of_keys, kv, of_keys.keys, (dk, dv)),
            (_of_queries, plan.of_queries, h, plan.of_queries.queries, (dq,)),
        ):
            pairs = (q, tiles.queries), (k, tiles.keys), (v, tiles.keys), (g, tiles.queries)
            kernel[(b * heads * triton.cdiv(t, size),)](
                *(operand(x, n, tma) for x, n in pairs), lse, delta, *out, runs, spans(runs, size), *strides,
                *out[0].stride()[:3], *sizes, tiles.queries, tiles.keys, causal, tma, num_warps=tiles.warps,
                num_stages=tiles.stages, maxnreg=tiles.registers, **EXACT,
            )  # fmt: skip
    return dq, dk, dv


@triton.jit
def _delta(
    g, y, delta, g_b, g_h, g_t, y_b, y_h, y_t, t, heads, HEAD: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr
):
    """Compute the sums of g * y over the elements of ROWS rows."""
    tiles = tl.cdiv(t, ROWS)
    first, bh = tl.program_id(0) % tiles * ROWS, tl.program_id(0) // tiles
    b, h = bh // heads, bh % heads
    gs = load_tile(head_of(g, b, h, g_b, g_h, False), b, h, first, g_t, t, ROWS, HEAD, E, False)
    ys = load_tile(head_of(y, b, h, y_b, y_h, False), b, h, first, y_t, t, ROWS, HEAD, E, False)
    i = first + tl.arange(0, ROWS)
    tl.store(delta + bh.to(tl.int64) * t + i, tl.sum(widen(gs) * widen(ys), 1), mask=i < t)


@triton.jit
def _of_keys(
    q, k, v, g, lse, delta, dk, dv, runs, spans, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    d_b, d_h, d_t, t, heads, group, window, scale, factor, limit, HEAD: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of N keys; the first tiles, which most queries see, come first."""
    tiles, num_kv = tl.cdiv(t, N), heads // group
    tile, head = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, kv = head // num_kv, head % num_kv
    k, v = head_of(k, b, kv, k_b, k_h, TMA), head_of(v, b, kv, v_b, v_h, TMA)
    if runs is not None:
        runs += b.to(tl.int64) * t
        spans += (b * tiles + tile) * 4
    j = tile * N + tl.arange(0, N)
    run_j = load_runs(runs, j, t)
    begin, end, inner, outer = bounds_of_queries(spans, tile, t, window, N, M, CAUSAL)
    keys = load_tile(k, b, kv, tile * N, k_t, t, N, HEAD, E, TMA)
    values = load_tile(v, b, kv, tile * N, v_t, t, N, HEAD, E, TMA)
    acc_k, acc_v = tl.zeros([N, E], tl.float32), tl.zeros([N, E], tl.float32)
    for h in range(kv * group, kv * group + group):
        qh, gh = head_of(q, b, h, q_b, q_h, TMA), head_of(g, b, h, g_b, g_h, TMA)
        row = (b * heads + h).to(tl.int64) * t
        for first in range(begin, end, M):
            i = first + tl.arange(0, M)
            qs = load_tile(qh, b, h, first, q_t, t, M, HEAD, E, TMA)
            base = tl.load(lse + (row + i), mask=i < t, other=float("inf"))  # infinite, so that p is 0
            x, bend = scores(product(keys, tl.trans(qs), None), factor, limit)
            if (first < inner) | (first >= outer):
                run_i = load_runs(runs, i, t)
                seen = visible(i[None, :], j[:, None], t, window, runs, run_i[None, :], run_j[:, None], CAUSAL)
                x = tl.where(seen, x, float("-inf"))
            p = softmax(x, base[None, :])
            gs = load_tile(gh, b, h, first, g_t, t, M, HEAD, E, TMA)
            acc_v = product(narrow(p, gs.dtype), gs, acc_v)
            level = tl.load(delta + (row + i), mask=i < t, other=0.0)
            slope = p * (product(values, tl.trans(gs), None) - level[None, :])
            if limit is not None:
                slope = slope * (1.0 - bend * bend)
            acc_k = product(narrow(slope, qs.dtype), qs, acc_k)
    store_rows(head_of(dk, b, kv, d_b, d_h, False), acc_k * scale, tile * N, d_t, t, N, HEAD, E)
    store_rows(head_of(dv, b, kv, d_b, d_h, False), acc_v, tile * N, d_t, t, N, HEAD, E)


@triton.jit
def _of_queries(
    q, k, v, g, lse, delta, dq, runs, spans, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    d_b, d_h, d_t, t, heads, group, window, scale, factor, limit, HEAD: tl.constexpr, E: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute dq of M queries, as :func:`attention._forward` visits their keys."""
    tiles = tl.cdiv(t, M)
    tile, bh = tiles - 1 - tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = bh // heads, bh % heads
    kv = h // group
    k, v = head_of(k, b, kv, k_b, k_h, TMA), head_of(v, b, kv, v_b, v_h, TMA)
    if runs is not None:
        runs += b.to(tl.int64) * t
        spans += (b * tiles + tile) * 4
    i = tile * M + tl.arange(0, M)
    run_i = load_runs(runs, i, t)
    begin, end, inner, outer = bounds_of_keys(spans, tile, t, window, M, N, CAUSAL)
    qs = load_tile(head_of(q, b, h, q_b, q_h, TMA), b, h, tile * M, q_t, t, M, HEAD, E, TMA)
    gs = load_tile(head_of(g, b, h, g_b, g_h, TMA), b, h, tile * M, g_t, t, M, HEAD, E, TMA)
    row = bh.to(tl.int64) * t + i
    base = tl.load(lse + row, mask=i < t, other=float("inf"))
    level = tl.load(delta + row, mask=i < t, other=0.0)
    acc = tl.zeros([M, E], tl.float32)
    for first in range(begin, end, N):
        keys = load_tile(k, b, kv, first, k_t, t, N, HEAD, E, TMA)
        x, bend = scores(product(qs, tl.trans(keys), None), factor, limit)
        if (first < inner) | (first >= outer):
            j = first + tl.arange(0, N)
            run_j = load_runs(runs, j, t)
            seen = visible(i[:, None], j[None, :], t, window, runs, run_i[:, None], run_j[None, :], CAUSAL)
            x = tl.where(seen, x, float("-inf"))
        p = softmax(x, base[:, None])
        values = load_tile(v, b, kv, first, v_t, t, N, HEAD, E, TMA)
        slope = p * (product(gs, tl.trans(values), None) - level[:, None])
        if limit is not None:
            slope = slope * (1.0 - bend * bend)
        acc = product(narrow(slope, keys.dtype), keys, acc)
    store_rows(head_of(dq, b, h, d_b, d_h, False), acc * scale, tile * M, d_t, t, M, HEAD, E)
