"""Searches in codebooks and sums by code on the CPU, in float32: csrc/nearest.h, beam_search.h and sums_by_code.h."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import reference
from ..reference.codebook_search import compared
from .library import call, empty, result


def nearest(x: Tensor, codes: Tensor, half: Tensor, top: int = 1) -> tuple[Tensor, Tensor]:
    if codes.dtype is torch.float64:
        return reference.nearest(x, codes, half, top)
    (s, n, d), k = x.shape, codes.shape[1]
    index, score = empty(s, n, top, dtype=torch.int64), empty(s, n, top, dtype=torch.float32)
    if index.numel():
        x, codes, half = x.float().contiguous(), codes.contiguous(), half.contiguous()
        if call("nearest", x, codes, half, s, n, k, d, top, index, score):  # some scores may be NaN
            return reference.nearest(x, codes, half, top)
    return index, score


def beam_search(x: Tensor, near: Tensor | None, vectors: Tensor, width: int) -> Tensor:
    codes = empty(len(x), len(vectors), dtype=torch.uint8)
    if codes.numel():
        x, vectors, near = x.contiguous(), vectors.contiguous(), None if near is None else near.contiguous()
        tables, half = compared(vectors, near is not None)
        sizes = len(x), x.shape[1], len(vectors), width
        call("beam_search", x, near, vectors, tables, half, *sizes, codes)
    return codes


def sums_by_code(x: Tensor, codes: Tensor, num_codes: int, out: Sequence = (None, None)) -> tuple[Tensor, Tensor]:
    s, n, d = x.shape
    counts = result(out[0], s, num_codes, dtype=torch.float32)
    sums = result(out[1], s, num_codes, d, dtype=torch.float32)
    if s and call("sums_by_code", x.contiguous(), codes.contiguous(), s, n, d, num_codes, counts, sums):
        raise IndexError(f"sums_by_code got code {int(codes.max())}; wanted codes below {num_codes}")
    return counts, sums


def stage_sums(x: Tensor, mass: Tensor, codes: Tensor, vectors: Tensor, stage: int) -> tuple[Tensor, Tensor]:
    x, mass, codes, vectors = (t.contiguous() for t in (x, mass, codes, vectors))
    d, m, num_codes = x.shape[1], mass.shape[1], vectors.shape[1]
    sums = torch.zeros(num_codes, d + m, dtype=torch.float64, device="cpu")
    if x.numel():
        call("stage_sums", x, mass, codes, vectors, len(x), d, m, len(vectors), stage, sums)
    return sums[:, :d], sums[:, d:]
