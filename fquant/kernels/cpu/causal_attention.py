"""Attention on the CPU, by csrc/attention.h: strides of tensors, and boundaries of documents.

Queries, keys and values may have any strides, except that the elements of a head are contiguous. Capped scores are left
to the reference.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..arguments import dense_rows
from ..reference import causal_attention
from .library import DTYPES, Attention, Long, call, result

PANEL = 64  # tokens after the last that an instruction set may read


def attention(
    q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None, window: int | None = None, scale: float | None = None,
    cap: float | None = None, causal: bool = True, sinks: Tensor | None = None, out: Sequence = (None, None),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if cap is not None:
        return causal_attention.attention(q, k, v, runs, window, scale, cap, causal, sinks)
    y, lse = _by_tokens(out[0], q), result(out[1], *q.shape[:3], dtype=torch.float32)
    if y.numel():
        _call(runs, window, scale, causal, sinks, lse=lse, q=q, k=k, v=v, y=y)
    return y, lse


def attention_backward(
    g: Tensor, y: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None = None,
    window: int | None = None, scale: float | None = None, cap: float | None = None, causal: bool = True,
    out: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if cap is not None:
        return causal_attention.attention_backward(g, y, lse, q, k, v, runs, window, scale, cap, causal)
    dq, dk, dv = map(_by_tokens, out or (None, None, None), (q, k, v))
    if q.numel():
        _call(runs, window, scale, causal, lse=lse.contiguous(), q=q, k=k, v=v, g=g, y=y, dq=dq, dk=dk, dv=dv)
    return dq, dk, dv


def _by_tokens(out: Tensor | None, like: Tensor) -> Tensor:
    b, heads, t, e = like.shape
    rows = None if out is None else out.transpose(1, 2)
    return result(rows, b, t, heads, e, dtype=like.dtype).transpose(1, 2)


def _call(
    runs: Tensor | None, window: int | None, scale: float | None, causal: bool, sinks: Tensor | None = None, *,
    lse: Tensor, **tensors: Tensor,
) -> None:  # fmt: skip
    dense = {name: dense_rows(t) for name, t in tensors.items()}
    q, labels = dense["q"], None if runs is None else _labels(runs)
    work = Attention(**{name: t.data_ptr() for name, t in dense.items()}, lse=lse.data_ptr())
    for name, t in dense.items():
        if name != "dv":  # which has the strides of dk
            setattr(work, f"{name}s", (Long * 3)(*t.stride()[:3]))
    work.batch, work.heads, work.t, work.e = q.shape
    work.kv, work.dtype = dense["k"].shape[1], DTYPES[q.dtype]
    work.scale = q.shape[3] ** -0.5 if scale is None else scale
    work.causal, rows = causal, None if sinks is None else sinks.contiguous()
    work.sinks = None if rows is None else rows.data_ptr()
    work.window = window if window is not None and window < q.shape[2] else 0
    if labels is not None:
        work.labels, work.labelled = labels.data_ptr(), labels.shape[1]
    call("attention", ctypes.byref(work))


def _labels(runs: Tensor) -> Tensor:
    """Return the first token of each token's document, i32[b t + PANEL]."""
    place = torch.arange(runs.shape[1], device="cpu")
    if bool((runs[:, 1:] >= runs[:, :-1]).all()):  # sorted, as models.blocks.runs are
        order, sorted_runs = place.expand_as(runs), runs
    else:
        sorted_runs, order = runs.sort(dim=1, stable=True)
    begins = F.pad(sorted_runs[:, 1:] != sorted_runs[:, :-1], (1, 0), value=True)
    first = order.gather(1, torch.where(begins, place, 0).cummax(1).values)
    return F.pad(torch.empty_like(first).scatter_(1, order, first), (0, PANEL)).to(torch.int32)
