"""Grouped products: those of groups of rows, each with a weight of its own, as the experts of a mixture need them.

    y = grouped_linear(x, w, counts)     # x f[rows in], w [groups out in], counts i64[groups]  ->  f[rows out]

Rows are sorted by group: the first ``counts[0]`` of them are multiplied with ``w[0]``, and so on. Shapes do not depend
on counts, so a mixture can be captured, and ``vmap`` maps over anything.

The weight is a dense tensor or a packed stack, which is not decoded as a whole. A packed stack is a constant: gradients
pass through it to ``x``. The three Functions are closed under derivatives:

    packed product     its derivatives by x are the product itself, transposed or not
    dense product      by x the same; by w the outer products ``g_eᵀ · x_e``
    outer product      by either argument a dense product

*vmap* merges the examples into one call. Where they share the weights, their rows are sorted by group once more, so
that a weight is decoded once for all of them.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import random
from .adapted.merge_aware import StraightThrough, passed
from .autodiff import forward_mode, to_front
from .communication import wanted_weights
from .kernels import grouped_ops, packed_ops
from .kernels.spec import SLOTS, Spec
from .packed import Packed, buffers
from .packed_linear import Adapted, Weight, merged, scaling
from .packed_product import CONSTANT


def grouped_linear(x: Tensor, w: Weight, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x_e · W_eᵀ + bias_e``, f[rows out] in x's dtype, for x f[rows in] sorted by group, w [groups out in].

    ``counts`` i64[groups] are the rows of each group, on x's device; they add up to the rows. ``bias`` is
    f[groups out]. A weight is a tensor, cast to x's dtype; or a Packed, of three dims or stacked from packed matrices;
    or an Adapted, whose adapter has a [groups rank in] and b [groups out rank], or either without groups, shared by
    them. Raises TypeError for another kind of weight or dtype, ValueError for sizes and counts that do not fit, and for
    DoRA.
    """
    match w:
        case Packed():
            _check(x, counts, full_shape(w))
            inputs = buffers(w)
            if (n := len(inputs)) > SLOTS:
                raise ValueError(
                    f"grouped_linear got a weight of {n} buffers; wanted at most {SLOTS}, nest scales less"
                )
            product = _Product(Spec(w.format, w.shape, w.dtype))
            y = _apply(_Packed, _PackedReverse, x, counts, product, *inputs, *[None] * (SLOTS - n))
        case Tensor():
            _check(x, counts, tuple(w.shape))
            y = _product(x, counts, w.to(x.dtype), False)
        case Adapted(merge_aware=False):
            y = _adapted(x, w, counts)
        case Adapted() | StraightThrough():
            found = merged(w)
            update = lambda a, b: _factor(_factor(x.to(a.dtype), a, counts), b, counts)
            y = passed(grouped_linear(x, found.merged, counts), update, found.a, found.b)
        case _:
            raise wanted_weights("grouped_linear", w)
    if bias is None:
        return y
    if bias.shape != (wanted := (counts.shape[0], y.shape[-1])):
        raise ValueError(f"grouped_linear got a bias {tuple(bias.shape)}; wanted {wanted}, a row a group")
    return y + bias.to(y.dtype)[groups_of(counts, x.shape[0])]


def groups_of(counts: Tensor, rows: int) -> Tensor:
    """Return the group i64[... rows] of each of ``rows`` sorted rows, for counts i64[... groups]."""
    ends = counts.cumsum(-1).clamp(0, rows)
    marks = counts.new_zeros(*counts.shape[:-1], rows + 1).scatter_add(-1, ends, torch.ones_like(ends))
    return marks[..., :rows].cumsum(-1).clamp(max=counts.shape[-1] - 1)


def full_shape(w: Packed) -> tuple[int, ...]:
    """Return the shape of the array that ``w`` decodes to: that of its stack, then its own."""
    inner = 1 if w.format.flat and w.format.bits != 8 else len(w.shape)  # dims of the codes of one array
    return *w.codes.shape[: w.codes.ndim - inner], *w.shape


def dequantize_matrix(w: Packed, e: int, dtype: torch.dtype | None = None) -> Tensor:
    """Decode matrix ``e`` f[out in] of a packed stack [groups out in], to the stack's dtype or cast to ``dtype``."""
    parts, spec = grouped_ops.member(buffers(w), Spec(w.format, w.shape, w.dtype), e)
    return packed_ops.decode(parts, spec, dtype or w.dtype)


def _adapted(x: Tensor, w: Adapted, counts: Tensor) -> Tensor:
    lora = w.lora
    if lora.magnitude is not None:
        raise ValueError("grouped_linear got DoRA, which is not implemented for stacks; train a Lora without magnitude")
    y = grouped_linear(x, w.base, counts)
    rows = x if w.key is None else random.dropout(x, lora.dropout, w.key)
    inner = scaling(lora) * _factor(rows.to(lora.a.dtype), lora.a, counts)  # scaled where it is smallest
    return y + _factor(inner, lora.b, counts).to(y.dtype)


def _factor(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
    return x @ w.mT if w.ndim == 2 else grouped_linear(x, w, counts)


class _Product(NamedTuple):
    """The static half of a packed product: the spec of the weight, and ``x · W`` or ``x · Wᵀ``."""

    spec: Spec
    transposed: bool = False


class _PackedReverse(torch.autograd.Function):
    """The product with a packed stack. It takes exactly ``SLOTS`` buffers, for the reason in ``packed_linear``."""

    @staticmethod
    def forward(
        x: Tensor, counts: Tensor, product: _Product,
        b0: Tensor, b1: Tensor, b2: Tensor | None, b3: Tensor | None,
        b4: Tensor | None, b5: Tensor | None, b6: Tensor | None, b7: Tensor | None,
    ) -> Tensor:  # fmt: skip
        present = [b for b in (b0, b1, b2, b3, b4, b5, b6, b7) if b is not None]
        return grouped_ops.packed(x, counts, present, product.spec, product.transposed)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.product = inputs[2]
        ctx.save_for_backward(inputs[1], *inputs[3:])
        ctx.save_for_forward(inputs[1], *inputs[3:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if any(ctx.needs_input_grad[3:]):
            raise TypeError(CONSTANT.format("gradient"))
        if g is None:
            return (None,) * (3 + SLOTS)
        counts, *rest = ctx.saved_tensors
        product = ctx.product._replace(transposed=not ctx.product.transposed)
        return _apply(_Packed, _PackedReverse, g, counts, product, *rest), *(None,) * (2 + SLOTS)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, counts: Tensor, product: _Product, *rest: Tensor | None) -> Any:
        n, dims = info.batch_size, in_dims[3:]
        x, counts = (to_front(t, dim, n) for t, dim in zip((x, counts), in_dims, strict=False))
        f = lambda x, counts, *rest: _apply(_Packed, _PackedReverse, x, counts, product, *rest)
        if all(dim is None for dim in dims):
            return _merged(f, x, counts, *rest), 0
        stacked = [t if t is None else to_front(t, dim, n) for t, dim in zip(rest, dims, strict=True)]
        if len(product.spec.shape) == 2:  # a stack of n · groups weights
            y = f(x.flatten(0, 1), counts.flatten(), *(t if t is None else t.flatten(0, 1) for t in stacked))
            return y.unflatten(0, (n, x.shape[1])), 0
        return torch.stack([f(x[i], counts[i], *(t if t is None else t[i] for t in stacked)) for i in range(n)]), 0


class _Packed(_PackedReverse):
    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *tangents: Any) -> Tensor:
        if any(t is not None for t in tangents[2:]):
            raise TypeError(CONSTANT.format("tangent"))
        counts, *rest = ctx.saved_tensors
        return _apply(_Packed, _PackedReverse, dx, counts, ctx.product, *rest)


class _Bilinear(torch.autograd.Function):
    """A function ``f(a, b, counts)`` that is linear in a and in b, without its jvp."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.transposed = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)


class _DenseReverse(_Bilinear):
    """``x_e · w_eᵀ``, or ``x_e · w_e`` if transposed."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, counts: Tensor, transposed: bool) -> Tensor:
        return grouped_ops.dense(x, counts, w, transposed)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return None, None, None, None
        (x, w, counts), need = ctx.saved_tensors, ctx.needs_input_grad
        dx = _product(g, counts, w, not ctx.transposed) if need[0] else None
        dw = (_outer(x, g, counts) if ctx.transposed else _outer(g, x, counts)) if need[1] else None
        return dx, dw, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor, counts: Tensor, transposed: bool) -> Any:
        n, w_dim = info.batch_size, in_dims[1]
        x, counts = to_front(x, in_dims[0], n), to_front(counts, in_dims[2], n)
        if w_dim is None:
            return _merged(lambda x, counts, w: _product(x, counts, w, transposed), x, counts, w), 0
        y = _product(x.flatten(0, 1), counts.flatten(), to_front(w, w_dim, n).flatten(0, 1), transposed)
        return y.unflatten(0, (n, x.shape[1])), 0


class _Dense(_DenseReverse):
    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dw: Tensor | None, *_: Any) -> Any:
        with forward_mode(ctx.saved_tensors) as (x, w, counts):
            parts = [] if dx is None else [_product(dx, counts, w, ctx.transposed)]
            parts += [] if dw is None else [_product(x, counts, dw, ctx.transposed)]
            return sum(parts[1:], parts[0])


class _OuterReverse(_Bilinear):
    """``a_eᵀ · b_e``; the last argument is not used."""

    @staticmethod
    def forward(a: Tensor, b: Tensor, counts: Tensor, transposed: bool) -> Tensor:
        return grouped_ops.outer(a, b, counts)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if g is None:
            return None, None, None, None
        (a, b, counts), need = ctx.saved_tensors, ctx.needs_input_grad
        da = _product(b, counts, g, False) if need[0] else None
        db = _product(a, counts, g, True) if need[1] else None
        return da, db, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, a: Tensor, b: Tensor, counts: Tensor, _: bool) -> Any:
        n = info.batch_size
        a, b, counts = (to_front(t, dim, n) for t, dim in zip((a, b, counts), in_dims, strict=False))
        return _outer(a.flatten(0, 1), b.flatten(0, 1), counts.flatten()).unflatten(0, counts.shape), 0


class _Outer(_OuterReverse):
    @staticmethod
    def jvp(ctx: Any, da: Tensor | None, db: Tensor | None, *_: Any) -> Any:
        with forward_mode(ctx.saved_tensors) as (a, b, counts):
            parts = [] if da is None else [_outer(da, b, counts)]
            parts += [] if db is None else [_outer(a, db, counts)]
            return sum(parts[1:], parts[0])


def _product(x: Tensor, counts: Tensor, w: Tensor, transposed: bool) -> Tensor:
    return _apply(_Dense, _DenseReverse, x, w, counts, transposed)


def _outer(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    return _apply(_Outer, _OuterReverse, a, b, counts, False)


def _apply(function: Any, reverse: Any, x: Tensor, *rest: Any) -> Tensor:
    """Apply the Function, without its jvp under torch.compile, which refuses one."""
    if torch.compiler.is_dynamo_compiling():
        return reverse.apply(x.view_as(x), *rest)  # because torch.compile takes grad's own x for a constant
    return function.apply(x, *rest)


def _merged(f: Any, x: Tensor, counts: Tensor, *shared: Any) -> Tensor:
    """Apply ``f`` to the rows of all examples at once: x [n rows in], counts [n groups] -> [n rows out]."""
    n, rows = x.shape[:2]
    order = groups_of(counts, rows).flatten().argsort(stable=True)
    y = f(x.flatten(0, 1)[order], counts.sum(0), *shared)
    return y[order.argsort()].unflatten(0, (n, rows))


def _check(x: Tensor, counts: Tensor, shape: tuple[int, ...]) -> None:
    if len(shape) != 3:
        raise ValueError(f"grouped_linear got a weight of shape {shape}; wanted [groups out in]")
    if not x.is_floating_point():
        raise TypeError(f"grouped_linear got x of {x.dtype}; wanted a float")
    if x.ndim != 2 or x.shape[1] != shape[2]:
        raise ValueError(f"grouped_linear got x {tuple(x.shape)} and a weight {shape}; wanted x [rows {shape[2]}]")
    if not isinstance(counts, Tensor) or counts.dtype is not torch.int64:
        got = counts.dtype if isinstance(counts, Tensor) else type(counts).__name__
        raise TypeError(f"grouped_linear got counts of {got}; wanted int64")
    if counts.shape != shape[:1]:
        raise ValueError(f"grouped_linear got counts {tuple(counts.shape)} for a weight {shape}; wanted {shape[:1]}")
