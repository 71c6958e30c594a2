"""Adapters that begin as a part of their weight, or of its inputs, instead of at zero.

    adapters, base = lora.pissa(base, r"layers\\.\\d+\\.(q|v)", rank=16)

* ``pissa``: the ``rank`` largest singular components of W. The base becomes the residual W - s·b·a.
* ``olora``: s·Q[:, :rank]·R[:rank] of W = Q·R. The base becomes the residual.
* ``loftq``: the largest components of the error of quantisation. The base becomes the quantised weight.
* ``eva``: zero, with the principal directions of the weight's inputs in ``a``. The base stays.

A residual of a packed weight is quantised to the weight's format again; that of a dense weight stays dense. Weights are
dequantised and decomposed one at a time, in float32.

Sources: PiSSA, Meng et al. 2024; OLoRA, Büyükakyüz 2024; LoftQ, Li et al. 2023; EVA, Paischer et al. 2024. Scalings and
the redistribution of EVA's ranks are those of PEFT, except that LoftQ here divides by s, which PEFT takes for 1.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import random, tree
from ..communication import Loadable
from ..format import NF4, Format
from ..packed import Packed, dequantize, quantize
from ..packed_linear import Adapted, Lora, scaling
from ..tree import expect
from .adapters import Adapters, matching

Start = Callable[[Tensor, Any, Lora], tuple[Lora, Any]]  # (W in f32, the leaf, an empty Lora) -> the Lora, the new leaf


def pissa(
    base: Any, targets: str, rank: int, alpha: float = 16.0, *, niter: int | None = None, key: int | Tensor = 0,
    rank_stabilised: bool = False, dropout: float = 0.0, dtype: torch.dtype = torch.float32,
) -> tuple[Adapters, Any]:  # fmt: skip
    """Move the ``rank`` largest singular components of every weight whose path matches ``targets`` to an adapter.

    ``b · √S`` and ``√S · a`` share the singular values, divided by the scaling s. Returns the adapters and the base of
    residuals, so that W is the sum of both. With ``niter`` the SVD is randomised (Halko et al. 2011), with ``niter``
    power iterations that begin at numbers from ``key``: seconds in place of minutes for a large weight. W is then still
    the sum of both. Raises ValueError as :func:`fquant.lora.init` does.
    """
    expect(niter is None or niter >= 0, f"niter is {niter}; wanted None, or at least 0")

    def start(w: Tensor, leaf: Any, lora: Lora) -> tuple[Lora, Any]:
        parts = _largest(w, rank) if niter is None else _randomised(w, rank, niter, random.key(key))
        lora = _factors(*parts, lora, dtype)
        return lora, _residual(w, leaf, lora)

    return _decompose(base, targets, start, rank, alpha, rank_stabilised, dropout)


def olora(
    base: Any, targets: str, rank: int, alpha: float = 16.0, *, rank_stabilised: bool = False, dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Adapters, Any]:  # fmt: skip
    """Start from the first ``rank`` orthonormal columns of W = Q·R and the rows of R; return adapters and residuals."""

    def start(w: Tensor, leaf: Any, lora: Lora) -> tuple[Lora, Any]:
        q, r = torch.linalg.qr(w)
        lora = _lora(r[:rank], q[:, :rank], lora, dtype)
        return lora, _residual(w, leaf, lora)

    return _decompose(base, targets, start, rank, alpha, rank_stabilised, dropout)


def loftq(
    base: Any, targets: str, rank: int, alpha: float = 16.0, *, format: Format = NF4, iterations: int = 1,
    rank_stabilised: bool = False, dropout: float = 0.0, dtype: torch.dtype = torch.float32,
) -> tuple[Adapters, Any]:  # fmt: skip
    """Quantise the matching weights to ``format``, with adapters that make up for the error.

    Each of the ``iterations`` quantises ``W - s·b·a`` and truncates the SVD of the error that is left. Start from the
    16-bit weights: of a packed weight only what its format kept can be restored.
    """
    expect(iterations >= 1, f"iterations is {iterations}; wanted at least 1")

    def start(w: Tensor, leaf: Any, lora: Lora) -> tuple[Lora, Any]:
        packed, rest = None, w
        for _ in range(iterations):
            packed = quantize(rest.to(leaf.dtype), format)
            lora = _factors(*_largest(w - dequantize(packed, torch.float32), rank), lora, dtype)
            rest = w - _update(lora)
        return lora, packed

    return _decompose(base, targets, start, rank, alpha, rank_stabilised, dropout)


def eva(
    base: Any, inputs: Mapping[str, Tensor], rank: int, alpha: float = 16.0, *, rho: float = 2.0,
    rank_stabilised: bool = False, dropout: float = 0.0, dtype: torch.dtype = torch.float32,
) -> Adapters:  # fmt: skip
    """Start ``a`` as the principal directions of ``inputs`` f[... in], the activations before the weight at each path.

    The mean rank is ``rank``. Directions that explain more of the variance of their inputs come first, and no path has
    more than ``round(rank · rho)``; a path that gets none has no adapter. alpha grows with the rank, so that s is that
    of ``rank``. ``b`` is zero. Computed in float64 from centred inputs. Raises ValueError for inputs that do not fit.
    """
    expect(inputs, "eva got no inputs; wanted the activations of at least one path")
    expect(rho >= 1, f"rho is {rho}; wanted at least 1")
    most, weights = round(rank * rho), dict(tree.items(base, is_leaf=lambda x: isinstance(x, Packed)))
    directions: dict[str, Tensor] = {}
    explained: list[tuple[float, str]] = []
    for path, x in inputs.items():
        with tree.at(path):
            expect(path in weights, "got inputs of no weight of the base; check the path")
            rows = x.detach().reshape(-1, x.shape[-1]).to(torch.float64)
            out, width = _checked(weights[path], rank)
            expect(x.shape[-1] == width, f"got inputs {tuple(x.shape)}, wanted [... {width}] for {(out, width)}")
            got = f"got {rows.shape[0]} inputs of width {width}"
            expect(min(rows.shape) >= most, f"{got}, wanted at least rank · rho = {most} of each; lower rho")
            expect(bool(rows.isfinite().all()), "got inputs that are not finite; check the activations")
            _, s, vh = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
            share = s.square() / s.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
        directions[path] = vh[:most]
        explained += [(float(v), path) for v in share[:most]]
    explained.sort(key=lambda item: -item[0])
    ranks = Counter(path for _, path in explained[: rank * len(directions)])
    adapters: Adapters = {}
    for path, vh in directions.items():
        if n := ranks[path]:
            growth = (n / rank) ** (0.5 if rank_stabilised else 1.0)
            a, b = vh[:n].to(dtype), torch.zeros(tuple(weights[path].shape)[0], n, dtype=dtype, device=vh.device)
            adapters[path] = Lora(a.contiguous(), b, None, alpha * growth, rank_stabilised, dropout)
    return adapters


def _decompose(
    base: Any, targets: str, start: Start, rank: int, alpha: float, rank_stabilised: bool, dropout: float
) -> tuple[Adapters, Any]:
    expect(0 <= dropout < 1, f"dropout is {dropout}; wanted 0 <= dropout < 1")
    expect(alpha > 0, f"alpha is {alpha}; wanted it above 0, because the singular values are divided by the scaling")
    wanted, adapters = dict(matching(base, targets)), {}

    def leaf(path: str, x: Any) -> Any:
        if path not in wanted:
            return x
        out, width = _checked(x, rank)
        dense = dequantize(x, torch.float32) if isinstance(x, Packed) else x.detach().float()
        empty = Lora(dense.new_empty(rank, width), dense.new_empty(out, rank), None, alpha, rank_stabilised, dropout)
        adapters[path], new = start(dense, x, empty)
        return new

    return adapters, tree.map_with_path(leaf, base, is_leaf=lambda x: isinstance(x, Packed | Adapted | Loadable))


def _checked(w: Any, rank: int) -> tuple[int, int]:
    fault = f"a {type(w).__name__} cannot be decomposed, wanted a tensor or Packed; read it or load it first"
    expect(isinstance(w, Tensor | Packed), fault)
    shape = tuple(w.shape)
    expect(len(shape) == 2, f"a weight of shape {shape} cannot be adapted; wanted [out in]")
    expect(1 <= rank <= min(shape), f"rank is {rank}; wanted 1 to {min(shape)} for a weight {shape}")
    return shape[0], shape[1]


def _largest(w: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    u, s, vh = torch.linalg.svd(w, full_matrices=False)
    return u[:, :rank], s[:rank], vh[:rank]


def _randomised(w: Tensor, rank: int, niter: int, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Truncate the SVD of the projection of ``w`` on the space of a few random combinations of its columns."""
    size = min(rank + 8, *w.shape)
    q = torch.linalg.qr(w @ random.normal(key.to(w.device), (w.shape[1], size)))[0]  # [out size]
    for _ in range(niter):
        q = torch.linalg.qr(w @ torch.linalg.qr(w.mT @ q)[0])[0]
    u, s, vh = torch.linalg.svd(q.mT @ w, full_matrices=False)
    return (q @ u)[:, :rank], s[:rank], vh[:rank]


def _factors(u: Tensor, s: Tensor, vh: Tensor, lora: Lora, dtype: torch.dtype) -> Lora:
    root = (s / scaling(lora)).sqrt()
    return _lora(root[:, None] * vh, u * root, lora, dtype)


def _lora(a: Tensor, b: Tensor, like: Lora, dtype: torch.dtype) -> Lora:
    cast = lambda t: t.to(dtype).contiguous()
    return Lora(cast(a), cast(b), None, like.alpha, like.rank_stabilised, like.dropout)


def _update(lora: Lora) -> Tensor:
    return scaling(lora) * (lora.b.float() @ lora.a.float())


def _residual(w: Tensor, leaf: Any, lora: Lora) -> Any:
    rest = (w - _update(lora)).to(leaf.dtype)
    return quantize(rest, leaf.format) if isinstance(leaf, Packed) else rest
