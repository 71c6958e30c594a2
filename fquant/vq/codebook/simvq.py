"""SimVQ: a frozen codebook behind a learned linear map (Zhu et al. 2024).

    state = simvq.init(key, num_codes=8192, dim=64)
    frozen f32[K F]  ->  map  ->  codes f32[K D]          encode: the nearest of them, as for a Book

The map moves all codes together, so none dies. It trains by gradients alone: one linear layer without a bias, or with
``hidden`` widths several with ReLU between. The frozen codes are drawn from N(0, 1 / F). The loss ``codebook`` moves
the map to the rows, ``commitment`` the rows to their codes, which the paper and vector-quantize-pytorch weigh by ¼.
"""

import torch
from torch import Tensor

from ... import random, tree
from ..precision import linear
from ..quantized import Codes, Key, Mask, Quantized, Seed
from ..scalar import projection_layers
from ..scalar.projection_layers import Dense
from . import book as books
from .encode import encode as encode_book
from .gradient_estimators import Estimator, rotation
from .losses import commitment

update = projection_layers.update


@tree.node
class SimVQ:
    """K frozen codes, and the layers of the map to the vectors that rows are compared with."""

    params: list[Dense]  # trainable
    frozen: Tensor  # f32[K F], a constant to every transform
    dim: int = tree.static()


def init(key: Seed, num_codes: int, dim: int, *, frozen_dim: int | None = None, hidden: tuple[int, ...] = ()) -> SimVQ:
    """Create a state for x f[... dim], frozen codes of ``frozen_dim``, by default dim; ValueError for sizes below 1."""
    widths = (dim if frozen_dim is None else frozen_dim, *hidden, dim)
    if num_codes < 1 or min(widths) < 1:
        raise ValueError(f"simvq.init: num_codes is {num_codes} and widths are {widths}; wanted at least 1 of each")
    key = random.key(key)
    layers = enumerate(zip(widths, widths[1:], strict=False))
    params = [projection_layers.dense(random.fold(key, i), out, width, bool(hidden)) for i, (width, out) in layers]
    return SimVQ(params, random.normal(random.fold(key, "frozen"), (num_codes, widths[0])) * widths[0] ** -0.5, dim)


def code_vectors(state: SimVQ) -> Tensor:
    """Return the vectors that rows are compared with and decode to, f32[K D]."""
    return _map(state, state.frozen.detach())


def encode(state: SimVQ, x: Tensor, top: int | None = None) -> Tensor:
    """Return the nearest code of every row of ``x`` f[... dim], i64[...], as ``encode`` of a Book does."""
    return encode_book(books.constant(code_vectors(state).detach()), x, top)


def decode(state: SimVQ, codes: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Look up ``codes`` i64[...]: [... dim] in ``dtype``, or the state's; zeros for -1; with the errors of a Book."""
    q = torch.where((codes == -1)[..., None], 0.0, _map(state, books.decode(books.constant(state.frozen), codes)))
    return q if dtype is None else q.to(dtype)


def apply(
    state: SimVQ, x: Tensor, key: Key = None, mask: Mask = None, *, gradient: Estimator = rotation, codes: Codes = None
) -> Quantized:
    """Quantise x f[... dim], with losses ``codebook`` and ``commitment``, and a RowCounts as statistics.

    ``gradient`` is the gradient estimator for x, and ``key``, whose dims are the first of x, is for it.
    """
    if codes is not None and codes.shape != x.shape[:-1]:
        raise ValueError(f"simvq.apply: codes are {tuple(codes.shape)} for x {tuple(x.shape)}; wanted one for each row")
    point, valid = projection_layers.prepare_rows("simvq.apply", x, state.dim, mask)
    codes = torch.where(valid, encode(state, point) if codes is None else codes, -1)
    valid = codes >= 0
    point = torch.where(valid[..., None], point, 0.0)
    q = decode(state, codes, point.dtype)
    losses = {"codebook": commitment(point.detach(), q, valid), "commitment": commitment(point, q.detach(), valid)}
    out = torch.where(valid[..., None], gradient(point, q, None, key), 0.0)
    return Quantized(out.to(x.dtype), codes, losses, projection_layers.count_rows(valid, mask))


def _map(state: SimVQ, codes: Tensor) -> Tensor:
    for i, layer in enumerate(state.params):
        codes = linear(codes if i == 0 else codes.relu(), layer.weight, layer.bias)
    return codes
