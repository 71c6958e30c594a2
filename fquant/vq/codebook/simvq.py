"""SimVQ: a codebook that does not move, seen through a linear map that is learnt (Zhu et al. 2024).

    state = simvq.init(key, num_codes=8192, dim=64)
    grads = grad(lambda params: loss(replace(state, params=params)))(state.params)

All codes move together when the map does, so none is left behind, and a large codebook stays in use. There are no
averages and nothing to update; gradients do everything, and on a mesh they are summed with all others.

    frozen f32[K F]  ->  map  ->  codes f32[K D]          encode: the nearest of them, as for a Book

The frozen codes are drawn from N(0, 1 / F). The map is one linear layer without a bias, or with ``hidden`` widths
several with ReLU between. Two losses come of each apply, whose weights are the caller's: ``codebook`` moves the map
to the rows, ``commitment`` the rows to their codes; the paper and vector-quantize-pytorch weigh the second by ¼.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import random, tree
from ..precision import times
from ..quantized import Quantized
from ..scalar import projection_layers
from ..scalar.projection_layers import Dense, RowCounts
from .book import Book
from .book import decode as decode_book
from .encode import encode as encode_book
from .gradient_estimators import Path, rotation
from .losses import commitment


@tree.node
class SimVQ:
    """K codes that stand still, and the layers of the map from them to those that rows are compared with."""

    params: list[Dense]  # what trains
    frozen: Tensor  # f32[K F], a constant to every transform
    dim: int = tree.static()


def init(
    key: int | Tensor, num_codes: int, dim: int, *, frozen_dim: int | None = None, hidden: tuple[int, ...] = ()
) -> SimVQ:
    """A state for x f[... dim]; ``frozen_dim``, by default dim, is that of the frozen codes.

    Raises ValueError for sizes below 1.
    """
    widths = (dim if frozen_dim is None else frozen_dim, *hidden, dim)
    if num_codes < 1 or min(widths) < 1:
        raise ValueError(f"simvq.init: num_codes is {num_codes} and widths are {widths}; wanted at least 1 of each")
    key = random.key(key)
    each = enumerate(zip(widths, widths[1:], strict=False))
    params = [projection_layers.dense(random.fold(key, i), out, width, bool(hidden)) for i, (width, out) in each]
    return SimVQ(params, random.normal(random.fold(key, "frozen"), (num_codes, widths[0])) * widths[0] ** -0.5, dim)


def code_vectors(state: SimVQ) -> Tensor:
    """The codes that rows are compared with and decode to, f32[K D]."""
    return _mapped(state, state.frozen.detach())


def encode(state: SimVQ, x: Tensor, top: int | None = None) -> Tensor:
    """The nearest code of every row of ``x`` f[... dim], i64[...]; what ``encode`` of a Book does, and raises."""
    return encode_book(_book(code_vectors(state).detach()), x, top)


def decode(state: SimVQ, codes: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """What ``codes`` i64[...] stand for, [... dim] in ``dtype``, that of the codes if None; zeros for -1.

    Raises what ``decode`` of a Book does.
    """
    q = torch.where((codes == -1)[..., None], 0.0, _mapped(state, decode_book(_book(state.frozen), codes)))
    return q if dtype is None else q.to(dtype)


def apply(
    state: SimVQ,
    x: Tensor,
    key: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    gradient: Path = rotation,
    codes: Tensor | None = None,
) -> Quantized:
    """x f[... dim] quantised, the losses ``codebook`` and ``commitment``, and a RowCounts as statistics.

    ``mask`` bool[...] is True for the rows that count, ``gradient`` is how derivatives reach x (``gradient.py``), and
    ``key``, whose shape leads x's, is for it; ``codes`` i64[...] are those that rows have got already.

    Raises TypeError for what is no float or no mask, ValueError for another shape.
    """
    if codes is not None and codes.shape != x.shape[:-1]:
        raise ValueError(f"simvq.apply: codes are {tuple(codes.shape)} for x {tuple(x.shape)}; wanted one for each row")
    point, kept = projection_layers.prepare_rows("simvq.apply", x, state.dim, mask)
    codes = torch.where(kept, encode(state, point) if codes is None else codes, -1)
    live = codes >= 0
    point = torch.where(live[..., None], point, 0.0)
    q = decode(state, codes, point.dtype)
    losses = {"codebook": commitment(point.detach(), q, live), "commitment": commitment(point, q.detach(), live)}
    out = torch.where(live[..., None], gradient(point, q, None, key), 0.0)
    return Quantized(out.to(x.dtype), codes, losses, projection_layers.count_rows(live, mask))


def update(state: SimVQ, stats: RowCounts) -> SimVQ:
    """The state itself: nothing of it is a statistic."""
    return state


def _mapped(state: SimVQ, codes: Tensor) -> Tensor:
    for i, layer in enumerate(state.params):
        codes = times(codes if i == 0 else codes.relu(), layer.weight, layer.bias)
    return codes


def _book(codes: Tensor) -> Book:
    return Book(codes, torch.ones_like(codes[:, 0]), codes)
