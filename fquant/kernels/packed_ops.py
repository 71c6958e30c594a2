"""The four ops of packed arrays: encode, decode, and the products with a packed weight in both orientations.

A function takes the buffers of a Packed and its Spec; the op of torch takes the fields of the Spec. A call that needs
no dispatcher (``dispatch.is_direct``) bypasses torch.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..format import Format, num_blocks, num_bytes, read
from . import additive_codebooks
from .arguments import COMPUTED
from .dispatch import backend, is_direct
from .registry import register
from .spec import FLOATS, Spec, check, code_dtype, spec_of, stack


def encode(rows: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Quantise ``rows`` f[... n] to (codes u8[... n·bits/8] or i8[... n], absmax f32[... blocks])."""
    return _ENCODE(rows, format.text)


def decode(buffers: Sequence[Tensor], spec: Spec, out: torch.dtype) -> Tensor:
    """Dequantise to f[*stack *shape]: rounded once to ``spec.dtype``, then cast to ``out``."""
    return _DECODE(buffers, spec.format.text, spec.shape, spec.dtype, out)


def matmul(x: Tensor, buffers: Sequence[Tensor], spec: Spec) -> Tensor:
    """Return ``x · Wᵀ`` f[*stack m out] in x's dtype, for x f[*stack m in] and the buffers of W [*stack out in]."""
    return _call("matmul", x, buffers, spec)


def matmul_t(g: Tensor, buffers: Sequence[Tensor], spec: Spec) -> Tensor:
    """Return ``g · W`` f[*stack m in] in g's dtype, for g f[*stack m out] and the buffers of W [*stack out in]."""
    return _call("matmul_t", g, buffers, spec)


def product(name: str, x: Tensor, buffers: Sequence[Tensor], spec: Spec) -> Tensor:
    """Compute the product ``name`` without torch's dispatcher, for arguments of which :func:`is_direct` is true."""
    return _product(name, *_checked_product(name, x, buffers, spec))


def product_into(name: str, x: Tensor, buffers: Sequence[Tensor], spec: Spec, y: Tensor) -> None:
    """Compute the product ``name`` of checked arguments into ``y``, which is contiguous; for the inside of ops."""
    if x.device.type == "cpu" and x.dtype is not torch.float64 and backend("cpu")[0] == "cpu":
        _product(name, x, buffers, spec, out=y)
    else:
        y.copy_(_product(name, x, buffers, spec))


def _call(name: str, x: Tensor, buffers: Sequence[Tensor], spec: Spec) -> Tensor:
    if is_direct(x, *buffers):
        return product(name, x, buffers, spec)
    return _PRODUCTS[name](x, buffers, spec.format.text, spec.shape, spec.dtype)


def _backend(spec: Spec, device: torch.device) -> Any:
    module, vectors = backend(device.type)[1], spec.format.vectors
    in_c = vectors is None or vectors.dim <= getattr(module, "MOST_DIM", 0)
    return module if in_c else additive_codebooks


def _checked_encode(op: str, rows: Tensor, text: str) -> tuple[Tensor, Format]:
    format = read(text)
    if format.vectors is not None:
        raise ValueError(f"encode got {format.name}, whose vectors have to be learned; use fquant.quantize")
    if not format.in_absmax:
        raise ValueError(f"encode got {format.name}, whose table is not in units of the absmax; use fquant.quantize")
    if rows.dtype not in FLOATS or rows.ndim == 0:
        raise TypeError(f"encode got {rows.dtype} {tuple(rows.shape)}; wanted f32, bf16 or f16 with at least one dim")
    return rows, format


def _empty_codes(rows: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    *outer, width = rows.shape
    codes = rows.new_empty(*outer, num_bytes(format, width), dtype=code_dtype(format))
    return codes, rows.new_empty(*outer, num_blocks(format, width), dtype=torch.float32)


def _checked_decode(buffers: list[Tensor], spec: Spec, out: torch.dtype) -> tuple[Any, ...]:
    if out not in COMPUTED:
        raise TypeError(f"decode got {out}; wanted f32, bf16, f16 or f64")
    check(spec, buffers)
    return buffers, spec, out


def _checked_product(name: str, x: Tensor, buffers: Sequence[Tensor], spec: Spec) -> tuple[Any, ...]:
    if len(spec.shape) != 2 or x.dtype not in COMPUTED or x.ndim < 2:
        got = f"x {x.dtype} {tuple(x.shape)} and a weight {spec.shape}"
        raise TypeError(f"{name} got {got}; wanted f[*stack m n], 2 dims")
    check(spec, buffers, tuple(x.shape[:-2]))
    inner = spec.shape[name == "matmul"]
    if x.shape[-1] != inner:
        raise ValueError(f"{name} got x {tuple(x.shape)} and a weight {spec.shape}; x's last dim must be {inner}")
    if x.device != buffers[0].device:
        raise ValueError(f"{name} got x on {x.device} and a weight on {buffers[0].device}; move one")
    return x, buffers, spec


def _product(name: str, x: Tensor, buffers: Sequence[Tensor], spec: Spec, **out: Tensor) -> Tensor:
    return getattr(_backend(spec, x.device), name)(x, buffers, spec, **out)


def _decode_vmap(op: Any, info: Any, in_dims: Any, buffers: list[Tensor], *rest: Any) -> tuple[Tensor, int]:
    """Map decode: a mapped dim of a packed array becomes the first dim of a stack."""
    front = lambda b, at: b.expand(info.batch_size, *b.shape) if at is None else b.movedim(at, 0)
    return op(list(map(front, buffers, in_dims[0])), *rest), 0


_FIX = (
    "a Packed is a constant: train a Lora beside it (fquant.lora.init, attach) or a dense weight, and multiply with "
    "fquant.linear, which has derivatives with respect to x"
)
_PACKED = "Tensor[] buffers, str format, int[] shape, ScalarType dtype"
_ENCODE = register(
    "encode(Tensor rows, str format) -> (Tensor codes, Tensor absmax)", _checked_encode, _empty_codes, None, _FIX,
    real=lambda rows, format: backend(rows.device.type)[1].encode(rows, format), out=False,
)  # fmt: skip
_DECODE = register(
    f"decode({_PACKED}, ScalarType out) -> Tensor",
    lambda op, buffers, *fields: _checked_decode(buffers, spec_of(*fields[:-1]), fields[-1]),
    lambda buffers, spec, out: buffers[0].new_empty(*stack(spec, buffers), *spec.shape, dtype=out), _decode_vmap, _FIX,
    real=lambda buffers, spec, out: _backend(spec, buffers[0].device).decode(buffers, spec, out), out=False,
)  # fmt: skip
_PRODUCTS = {
    name: register(
        f"{name}(Tensor {x}, {_PACKED}) -> Tensor",
        lambda op, x, buffers, *fields: _checked_product(op, x, buffers, spec_of(*fields)),
        lambda x, buffers, spec, across=name == "matmul_t": x.new_empty(*x.shape[:-1], spec.shape[across]),
        None, _FIX, real=partial(_product, name),
    )
    for name, x in (("matmul", "x"), ("matmul_t", "g"))
}  # fmt: skip
# those of the dense weight; torch's counter gives shapes for tensors
register_flop_formula([torch.ops.fquant.matmul, torch.ops.fquant.matmul_t])(
    lambda x, buffers, format, shape, *_, **__: 2 * math.prod(x[:-1]) * math.prod(shape)
)
