"""Merge-aware products: an adapted packed weight is used as the packed weight that merging will make of it.

    w' = quantize(dequantize(w) + s · b · a)          the bytes of lora.merge_packed
    y  = x · dequantize(w')ᵀ                          straight-through: dL/db, dL/da as if quantize were the identity

A 4-bit format rounds a small update away when the adapter is merged after training. Here the forward has rounded it
already, so the loss that was trained is that of the merged file. The straight-through estimator is that of Bengio et
al. 2013; quantisation-aware LoRA in integers is that of Xu et al. 2023 (QA-LoRA) and Jeon et al. 2024 (L4Q).

*Cost.* The gradients have LoRA's form, so no outer product [out in] exists:

    da = s · (g · b)ᵀ · x        db = s · gᵀ · (x · aᵀ)        dx = g · w'

Each product packs one weight anew: pieces of rows are decoded, summed and quantised. The packed result is kept for the
backward, which takes half a byte an element in 4 bits. If a block is recomputed, it lives as long as the block.

*Equal bytes.* An update is summed in float64 and rounded to float32, then to the weight's dtype. So the order of sums,
and with it the number of threads and the size of a product, practically never changes a bit. :func:`add_update` is the
one sum of all merges. Bytes are equal if adapters are attached in the dtype in which they are merged: do not cast them.
The mean of centred scales (``NF4_DQ``) is an exception. It is summed in float32, or in float64 in a CUDA graph. Its
last bit, and with it a code of a scale, depends on that and on the number of threads.

A dense weight is rounded to its dtype instead, as merging does. Refused by name: dropout, DoRA, learned vectors.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..autodiff import forward_mode, to_front
from ..device import HOST
from ..kernels import packed_ops
from ..kernels.registry import register
from ..kernels.spec import SLOTS, Spec, layout, scales, spec_of, stack
from ..packed import Packed, _quantize, buffers, concatenate, dequantize, quantize, take_rows
from ..tree import expect, node

PIECE = 1 << 18  # elements of a weight that are summed at a time on CPUs, in float64, so that they stay in a cache


@node
class StraightThrough:
    """The merged weight of a merge-aware Adapted, and the adapter that gradients go to."""

    merged: Any  # Packed | Tensor, [*stack out in]; constant
    a: Tensor  # f[*stack rank in]
    b: Tensor  # f[*stack out rank], times the adapter's scaling


def check(base: Any, lora: Any, dropout: bool = False) -> None:
    """Raise ValueError for a weight or an adapter that merge-aware training does not support, TypeError for others."""
    expect(isinstance(base, Packed | Tensor), f"merge-aware got a {type(base).__name__}; merge it first", TypeError)
    fix = "train it without merge_aware, and merge into 16 bits"
    expect(lora.magnitude is None, f"merge-aware got DoRA, which is not implemented; {fix}")
    expect(
        not dropout, f"merge-aware got dropout {lora.dropout}, which drops inputs of a product that is merged; use 0"
    )
    if not isinstance(base, Packed):
        return
    expect(
        not base.format.vectors, f"merge-aware got learned vectors, which would be learned anew in every product; {fix}"
    )


def straight_through(base: Any, lora: Any, s: float) -> StraightThrough:
    """Merge ``base`` [*stack out in] and its adapter, whose scaling is ``s``. Raises the errors of :func:`check`."""
    check(base, lora)
    a, b = lora.a.detach(), lora.b.detach()
    if isinstance(base, Tensor):
        merged: Any = add_update(base.detach(), a, b, s).to(base.dtype)
    else:
        fields = base.format.text, base.shape, base.dtype
        merged = tree.unflatten(tree.structure(base), _MERGE(a, b, s, buffers(base), *fields))
    return StraightThrough(merged, lora.a, s * lora.b)


def add_update(w: Tensor, a: Tensor, b: Tensor, s: float) -> Tensor:
    """Return ``w + s · b · a`` f32[*stack out in], summed in float64; a and b may lack the stack of w."""
    wide, rows = a.double(), _rows(w.device, math.prod(w.shape) // max(1, w.shape[-2]))
    pieces = zip(w.split(rows, -2), b.split(rows, -2), strict=True)
    found = [torch.add(w, b.double() @ wide, alpha=s).float() for w, b in pieces]
    return found[0] if len(found) == 1 else torch.cat(found, -2)


def _rows(device: torch.device, width: int) -> int:
    """Return the number of rows of a piece; a GPU, which has to be kept busy, takes larger ones."""
    return max(1, (PIECE if device == HOST else PIECE << 6) // max(1, width))


def pack_sum(base: Packed, a: Tensor, b: Tensor, s: float) -> Packed:
    """Return ``quantize(dequantize(base) + s · b · a)`` in the format and dtype of ``base``, a few rows at a time."""
    if outer := base.codes.shape[: base.codes.ndim - len(layout(_spec(base))[0].shape)]:  # each of a stack by itself
        inner = len(outer) - 1 + len(base.shape)  # dims of a member
        one = lambda t, i: t[i] if t.ndim == inner + 1 else t
        each = [pack_sum(tree.map(lambda t, i=i: t[i], base), one(a, i), one(b, i), s) for i in range(outer[0])]
        return tree.map(lambda *t: torch.stack(t), *each)
    format = base.format
    once = lambda w, format, b: quantize(add_update(dequantize(w), a, b, s).to(base.dtype), format)
    if not format.rows_alone or len(base.shape) != 2:
        return once(base, format, b)
    out, width = base.shape
    count, rows = _rows(base.codes.device, width), take_rows(base, slice(None))
    pieces = [slice(i, i + count) for i in range(0, out, count)]
    whole = concatenate([once(take_rows(rows, some), rows.format, b[some]) for some in pieces])
    if format.scale is None:
        return whole
    assert isinstance(whole.scale, Tensor)
    return replace(whole, scale=_quantize(whole.scale, format.scale, is_scale=True), format=format)


def linear(x: Tensor, w: StraightThrough) -> Tensor:
    """Return ``x · w'ᵀ`` f[... out] in x's dtype; gradients as in the module's docstring."""
    a, b = w.a.to(x.dtype), w.b.to(x.dtype)
    if isinstance(w.merged, Packed):
        given = buffers(w.merged)
        return _product(x, a, b, _Static(_spec(w.merged)), *given, *[None] * (SLOTS - len(given)))
    return _product(x, a, b, _Static(None), w.merged.to(x.dtype), *[None] * (SLOTS - 1))


def passed(value: Tensor, update: Any, a: Tensor, b: Tensor) -> Tensor:
    """Return ``value`` with the gradients of ``update(a, b)`` with respect to a and b."""
    return value + (update(a, b) - update(a.detach(), b.detach())).to(value.dtype)


class _Static(NamedTuple):
    """The static half of a product: the spec of the merged weight, None of a dense one; ``x · W`` if transposed."""

    spec: Spec | None
    transposed: bool = False
    stacked: int = 0


class _ReverseOnly(torch.autograd.Function):
    """``x · w'ᵀ`` f[*stack ... out], or ``x · w'``, of x, a and b, and the buffers of w' as in ``packed_linear``."""

    @staticmethod
    def forward(
        x: Tensor, a: Tensor, b: Tensor, static: _Static,
        b0: Tensor, b1: Tensor | None, b2: Tensor | None, b3: Tensor | None,
        b4: Tensor | None, b5: Tensor | None, b6: Tensor | None, b7: Tensor | None,
    ) -> Tensor:  # fmt: skip
        k = static.stacked
        rows = x.reshape(*x.shape[:k], math.prod(x.shape[k:-1]), x.shape[-1])  # [*stack m in]
        if static.spec is None:
            y = rows @ (b0 if static.transposed else b0.mT)
        else:
            present = [t for t in (b0, b1, b2, b3, b4, b5, b6, b7) if t is not None]
            y = (packed_ops.matmul_t if static.transposed else packed_ops.matmul)(rows, present, static.spec)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, a, b, ctx.static, *merged = inputs
        ctx.save_for_backward(x, a, b, *merged)
        ctx.save_for_forward(x, a, b, *merged)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        nothing = (None,) * (1 + SLOTS)
        if g is None:
            return None, None, None, *nothing
        (x, a, b, *merged), static, need = ctx.saved_tensors, ctx.static, ctx.needs_input_grad
        turned = static._replace(transposed=not static.transposed)
        dx = _product(g, a, b, turned, *merged) if need[0] else None
        flat = lambda t: t.flatten(static.stacked, -2) if t.ndim > static.stacked + 1 else t.unsqueeze(-2)
        left, right = map(flat, (x, g) if static.transposed else (g, x))  # dL/dW = leftᵀ · right
        da = (left @ b).mT @ right if need[1] else None
        db = left.mT @ (right @ a.mT) if need[2] else None
        return dx, da, db, *nothing

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, a: Tensor, b: Tensor, static: _Static, *merged: Tensor | None) -> Any:
        n, k = info.batch_size, static.stacked
        given, dims = (a, b, *merged), (*in_dims[1:3], *in_dims[4:])
        if all(dim is None for dim in dims):  # one more dim of rows
            return _product(x.movedim(in_dims[0], k), a, b, static, *merged), k
        a, b, *merged = (t if t is None else to_front(t, dim, n) for t, dim in zip(given, dims, strict=True))  # type: ignore[assignment]
        return _product(to_front(x, in_dims[0], n), a, b, static._replace(stacked=k + 1), *merged), 0


class _Product(_ReverseOnly):
    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, da: Tensor | None, db: Tensor | None, *_: Any) -> Any:
        with forward_mode(ctx.saved_tensors[:3]) as (x, a, b):
            static, merged = ctx.static, ctx.saved_tensors[3:]
            k, parts = static.stacked, [] if dx is None else [_product(dx, a, b, static, *merged)]
            rows = x.reshape(*x.shape[:k], math.prod(x.shape[k:-1]), x.shape[-1])
            for one, other in ((da, b), (a, db)):  # of W = b · a
                if one is not None and other is not None:
                    y = (rows @ other) @ one if static.transposed else (rows @ one.mT) @ other.mT
                    parts.append(y.reshape(*x.shape[:-1], y.shape[-1]))
            return sum(parts[1:], parts[0])


def _product(x: Tensor, *rest: Any) -> Tensor:
    if torch.compiler.is_dynamo_compiling():  # see packed_linear
        return _ReverseOnly.apply(x.view_as(x), *rest)
    return _Product.apply(x, *rest)


def _spec(p: Packed) -> Spec:
    return Spec(p.format, p.shape, p.dtype)


def _check_op(_: str, a: Tensor, b: Tensor, s: float, given: list[Tensor], format: str, *rest: Any) -> tuple[Any, ...]:
    shape, dtype = rest
    return a, b, s, given, spec_of(format, shape, dtype)


def _empty(a: Tensor, b: Tensor, s: float, given: list[Tensor], spec: Spec) -> list[Tensor]:
    outer = stack(spec, given)
    return [given[0].new_empty((*outer, *leaf.shape), dtype=leaf.dtype) for leaf in layout(spec)]


def _real(a: Tensor, b: Tensor, s: float, given: list[Tensor], spec: Spec) -> list[Tensor]:
    return [t.contiguous() for t in buffers(pack_sum(packed_of(given, spec), a, b, s))]


def packed_of(given: list[Tensor], spec: Spec) -> Packed:
    """Return the Packed of ``given`` buffers, in the order of their layout."""
    rest = iter(given)

    def build(format: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Packed:
        codes = next(rest)
        nested = scales(Spec(format, shape, dtype))
        scale = next(rest) if format.scale is None else build(format.scale, nested.shape, torch.float32)
        offset, zero = next(rest) if format.center else None, next(rest) if format.zero else None
        return Packed(codes, scale, format, shape, dtype, offset, None, zero)

    return build(*spec)


def _vmap(op: Any, info: Any, in_dims: Any, a: Tensor, b: Tensor, s: float, given: list[Tensor], *rest: Any) -> Any:
    n = info.batch_size
    a, b = to_front(a, in_dims[0], n), to_front(b, in_dims[1], n)
    dims = in_dims[3] if in_dims[3] is not None else [None] * len(given)
    found = op(a, b, s, [to_front(t, dim, n) for t, dim in zip(given, dims, strict=True)], *rest)
    return found, [0] * len(found)


_FIX = "merging is not differentiable; detach the adapter, as straight_through does"
_MERGE = register(
    "merge(Tensor a, Tensor b, float s, Tensor[] buffers, str format, int[] shape, ScalarType dtype) -> Tensor[]",
    _check_op, _empty, _vmap, _FIX, real=_real, out=False,
)  # fmt: skip
