"""Training of weights that stay quantised: int8 codes and scales are the only copy.

    carriers = weights.carriers(packed)                           # packed: dict[path, Packed]; zeros without memory
    grads = grad(lambda c: loss(weights.attach(base, packed, c), tokens))(carriers)
    updates, state = opt.update(grads, state, weights.dense(packed))
    packed = weights.apply_updates(packed, updates, key)          # requantised with stochastic rounding

Codes have no gradient, so a *carrier* of zeros is differentiated in their place: ``linear`` adds ``x · carrierᵀ``. It
does not compute that, and its gradient ``gᵀ · x`` is that of the weight.

A value y between two codes becomes the upper one with probability y - floor(y), so the mean of many small updates is
kept, which rounding to nearest loses. The draw depends on the key, the path, the row and the column: the same key gives
the same bits on any mesh, and a slice of rows the same as the whole (``first``). The verbs of trees that are spread
over a mesh are in shard/trained/weights.py, and call these.

Source: torchao's ``int8_weight_only_quantized_training`` rounds in each in-place write, on load as well, so that two
loads of a file differ; here loading is exact. Stochastic rounding: Gupta et al. 2015.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import random, tree
from ..autodiff import to_front
from ..communication import AfterLoad, Loadable
from ..format import Format
from ..packed import Packed, dequantize, unchecked
from ..tree import expect, node


@node
class Carried:
    """A packed weight [out in] that is trained, and zeros f[out in] that receive its gradient."""

    packed: Packed
    carrier: Tensor


def carriers(packed: Mapping[str, Packed]) -> dict[str, Tensor]:
    """Return zeros f32[out in] for each weight, without memory of their own.

    torch's ``jvp`` refuses to take tangents of such; give it ``tree.map(torch.clone, carriers)``.

    Raises ValueError for a weight that cannot be trained: wanted integers in blocks along rows.
    """
    return {path: _zeros(path, w) for path, w in packed.items()}


def _zeros(path: str, w: Packed) -> Tensor:
    with tree.at(path):
        check_weight(w)
    return w.codes.new_zeros((), dtype=torch.float32).expand(w.shape)


def is_packed(x: Any) -> bool:
    """Return True for a Packed."""
    return isinstance(x, Packed)


def rows(w: Packed) -> Packed:
    """Return ``w``, whose tensors may be cut to some rows, with the shape that these have."""
    return replace(w, shape=(w.codes.shape[0], *w.shape[1:]))


def check_weight(w: Packed) -> None:
    """Raise ValueError for other than a matrix in a format whose codes can be rounded stochastically, row by row."""
    check(w.format)
    expect(len(w.shape) == 2, f"got shape {w.shape}; wanted a matrix [out in]")


def check(format: Format) -> None:
    """Raise ValueError for a format whose codes cannot be rounded stochastically, row by row."""
    fits = format.integers is not None and not (format.flat or format.center or format.shared or format.scale)
    fault = f"{format.name} cannot be trained: wanted integers in blocks along rows with float32 scales"
    expect(fits and not format.mean, f"{fault}; use INT8_ROW or INT8_GROUP")


def attach(base: Any, packed: Mapping[str, Packed], carriers: Mapping[str, Tensor]) -> Any:
    """Return ``base`` with a :class:`Carried` at each path of ``packed``.

    Raises ValueError for a path that ``base`` lacks, and for other paths of ``carriers``.
    """
    expect(set(packed) == set(carriers), f"carriers: got {sorted(carriers)}, wanted those of {sorted(packed)}")
    left = set(packed)

    def visit(prefix: str, x: Any) -> Any:
        if prefix in packed:
            left.discard(prefix)
            return Carried(packed[prefix], carriers[prefix])
        inside = lambda name, child: visit(f"{prefix}.{name}" if prefix else name, child)
        return x if isinstance(x, Tensor | Packed | Loadable | AfterLoad) else tree.map_children(inside, x)

    out = visit("", base)
    expect(not left, f"{', '.join(sorted(left))}: the base has no such weight; pass the paths of its weights")
    return out


def dense(packed: Mapping[str, Packed]) -> dict[str, Tensor]:
    """Return the weights f32[out in], as an optimiser with weight decay wants them."""
    return {path: dequantize(w, torch.float32) for path, w in packed.items()}


def apply_updates(
    packed: Mapping[str, Packed], updates: Mapping[str, Tensor], key: Tensor, first: Mapping[str, int] | None = None
) -> dict[str, Packed]:
    """Return the weights after ``updates`` f[out in] are added in float32, rounded stochastically from ``key`` i64[].

    A weight may be some rows of a whole one, with the number of the ``first`` of them; the default is 0. Raises
    ValueError for other paths, another shape, or a format that cannot be trained.
    """
    expect(set(packed) == set(updates), f"updates: got {sorted(updates)}, wanted those of {sorted(packed)}")

    def one(path: str, w: Packed) -> Packed:
        with tree.at(path):
            got, wanted = tuple(updates[path].shape), w.shape
            expect(got == wanted, f"an update of shape {got}; wanted {wanted}")
            total = dequantize(replace(w, dtype=torch.float32)) + updates[path]  # bf16 would round what is trained
            new = stochastic_quantize(total, w.format, random.fold(key, path), first[path] if first else 0)
        return replace(w, codes=new.codes, scale=new.scale, zero=new.zero)

    return {path: one(path, w) for path, w in packed.items()}


def stochastic_quantize(w: Tensor, format: Format, key: Tensor, first: int = 0) -> Packed:
    """Quantise ``w`` f[out in], rounding each value up with the probability of the rest.

    The mean over keys is ``w``, also at the extremes of a block. So scales cover their blocks: those of INT3, INT2 and
    formats with zero points are up to 1.5 times as large as :func:`fquant.quantize`'s, and others are equal to them.
    Values below 1.2e-38 may become zeros.

    ``first`` is the number of the first row in the whole weight. No value is read: a row that is not finite has a scale
    that is not. Raises ValueError for a format that cannot be trained.
    """
    check(format)
    rows = torch.arange(first, first + w.shape[0], device=w.device)
    draws = random.uniform(random.fold(key, rows), tuple(w.shape))
    return unchecked(w, format, draws)


def linear(x: Tensor, w: Carried) -> Tensor:
    """Return what is added to the product with ``w.packed``: zeros f[... out] whose derivative is the carrier's."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return _Carry.apply(rows, w.carrier).reshape(*x.shape[:-1], w.carrier.shape[0])


class _Carry(torch.autograd.Function):
    """``x · carrierᵀ`` of a carrier of zeros."""

    @staticmethod
    def forward(x: Tensor, carrier: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], carrier.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, carrier = ctx.saved_tensors
        return None, (g.mT @ x).to(carrier.dtype) if ctx.needs_input_grad[1] else None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dcarrier: Tensor | None) -> Tensor | None:
        x, carrier = ctx.saved_tensors
        if dcarrier is None:
            return x.new_zeros(x.shape[0], carrier.shape[0])
        return x @ dcarrier.to(x.dtype).mT

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, carrier: Tensor) -> tuple[Tensor, int]:
        n, (of_x, of_carrier) = info.batch_size, in_dims
        if of_carrier is None:
            rows = x.movedim(of_x, 0)
            return _Carry.apply(rows.flatten(0, 1), carrier).unflatten(0, rows.shape[:2]), 0
        xs, carriers = to_front(x, of_x, n), to_front(carrier, of_carrier, n)
        return torch.stack([_Carry.apply(a, b) for a, b in zip(xs, carriers, strict=True)]), 0
