"""The four ops of packed arrays: encode, decode, and the products with a packed weight in both orientations.

A function takes the buffers of a Packed and its Spec; the op of torch takes the fields of the Spec. A call that needs
no dispatcher (``dispatch.is_direct``) bypasses torch.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..format import Format, num_blocks, num_bytes, read
from . import additive_codebooks
from .arguments import COMPUTED
from .dispatch import backend, is_direct
from .registry import LIBRARY, define_out, refuse_derivatives
from .spec import FLOATS, Spec, check, code_dtype


def encode(rows: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Quantise ``rows`` f[... n] to (codes u8[... n·bits/8] or i8[... n], absmax f32[... blocks])."""
    return _OPS["encode"](rows, format.text)


def decode(buffers: Sequence[Tensor], spec: Spec, out: torch.dtype) -> Tensor:
    """Dequantise to f[*stack *shape]: rounded once to ``spec.dtype``, then cast to ``out``."""
    return _OPS["decode"](buffers, spec.format.text, spec.shape, spec.dtype, out)


def matmul(x: Tensor, buffers: Sequence[Tensor], spec: Spec) -> Tensor:
    """Return ``x · Wᵀ`` f[*stack m out] in x's dtype, for x f[*stack m in] and the buffers of W [*stack out in]."""
    if is_direct(x, *buffers):
        return product("matmul", x, buffers, spec)
    return _OPS["matmul"](x, buffers, spec.format.text, spec.shape, spec.dtype)


def matmul_t(g: Tensor, buffers: Sequence[Tensor], spec: Spec) -> Tensor:
    """Return ``g · W`` f[*stack m in] in g's dtype, for g f[*stack m out] and the buffers of W [*stack out in]."""
    if is_direct(g, *buffers):
        return product("matmul_t", g, buffers, spec)
    return _OPS["matmul_t"](g, buffers, spec.format.text, spec.shape, spec.dtype)


def _backend(spec: Spec, device: torch.device) -> ModuleType:
    return backend(device.type)[1] if spec.format.vectors is None else additive_codebooks


def _spec(format: str, shape: list[int], dtype: torch.dtype) -> Spec:
    return Spec(read(format), tuple(shape), dtype)


def _encode(rows: Tensor, format: str) -> tuple[Tensor, Tensor]:
    _check_rows(rows, kind := read(format))
    return backend(rows.device.type)[1].encode(rows, kind)


def _encode_fake(rows: Tensor, format: str) -> tuple[Tensor, Tensor]:
    _check_rows(rows, kind := read(format))
    *outer, width = rows.shape
    codes = rows.new_empty(*outer, num_bytes(kind, width), dtype=code_dtype(kind))
    return codes, rows.new_empty(*outer, num_blocks(kind, width), dtype=torch.float32)


def _decode(buffers: list[Tensor], *static: Any) -> Tensor:
    *fields, out = static
    _check_decode(spec := _spec(*fields), buffers, out)
    return _backend(spec, buffers[0].device).decode(buffers, spec, out)


def _decode_fake(buffers: list[Tensor], *static: Any) -> Tensor:
    *fields, out = static
    stack = _check_decode(spec := _spec(*fields), buffers, out)
    return buffers[0].new_empty(*stack, *spec.shape, dtype=out)


def _product(name: str, x: Tensor, buffers: list[Tensor], *fields: Any, **out: Tensor) -> Tensor:
    return product(name, x, buffers, _spec(*fields), **out)


def product(name: str, x: Tensor, buffers: Sequence[Tensor], spec: Spec, **out: Tensor) -> Tensor:
    """Compute the product ``name`` without torch's dispatcher, for arguments of which :func:`is_direct` is true."""
    _check_product(name, x, buffers, spec)
    return getattr(_backend(spec, x.device), name)(x, buffers, spec, **out)


def _product_fake(name: str, x: Tensor, buffers: list[Tensor], *fields: Any) -> Tensor:
    _check_product(name, x, buffers, spec := _spec(*fields))
    return x.new_empty(*x.shape[:-1], spec.shape[name == "matmul_t"])


def _check_rows(rows: Tensor, format: Format) -> None:
    if format.vectors is not None:
        raise ValueError(f"encode got {format.name}, whose vectors have to be learned; use fquant.quantize")
    if rows.dtype not in FLOATS or rows.ndim == 0:
        raise TypeError(f"encode got {rows.dtype} {tuple(rows.shape)}; wanted f32, bf16 or f16 with at least one dim")


def _check_decode(spec: Spec, buffers: list[Tensor], out: torch.dtype) -> tuple[int, ...]:
    if out not in COMPUTED:
        raise TypeError(f"decode got {out}; wanted f32, bf16, f16 or f64")
    return check(spec, buffers)


def _check_product(name: str, x: Tensor, buffers: Sequence[Tensor], spec: Spec) -> None:
    if len(spec.shape) != 2 or x.dtype not in COMPUTED or x.ndim < 2:
        got = f"x {x.dtype} {tuple(x.shape)} and a weight {spec.shape}"
        raise TypeError(f"{name} got {got}; wanted f[*stack m n], 2 dims")
    check(spec, buffers, tuple(x.shape[:-2]))
    inner = spec.shape[name == "matmul"]
    if x.shape[-1] != inner:
        raise ValueError(f"{name} got x {tuple(x.shape)} and a weight {spec.shape}; x's last dim must be {inner}")
    if x.device != buffers[0].device:
        raise ValueError(f"{name} got x on {x.device} and a weight on {buffers[0].device}; move one")


def _decode_vmap(info: Any, in_dims: Any, buffers: list[Tensor], *rest: Any) -> tuple[Tensor, int]:
    """Map decode: a mapped dim of a packed array becomes the first dim of a stack."""
    front = lambda b, at: b.expand(info.batch_size, *b.shape) if at is None else b.movedim(at, 0)
    return _OPS["decode"](list(map(front, buffers, in_dims[0])), *rest), 0


_FIX = (
    "a Packed is a constant: train a Lora beside it (fquant.lora.init, attach) or a dense weight, and multiply with "
    "fquant.linear, which has derivatives with respect to x"
)


def _register(name: str, schema: str, real: Any, fake: Any) -> Callable[..., Any]:
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, real, key)
    refuse_derivatives(name, _FIX)
    torch.library.register_fake(f"fquant::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.fquant, name).default


_PACKED = "Tensor[] buffers, str format, int[] shape, ScalarType dtype"
_OPS = {
    "encode": _register("encode", "(Tensor rows, str format) -> (Tensor codes, Tensor absmax)", _encode, _encode_fake),
    "decode": _register("decode", f"({_PACKED}, ScalarType out) -> Tensor", _decode, _decode_fake),
}
for _name, _x in (("matmul", "x"), ("matmul_t", "g")):
    _schema, _real = f"(Tensor {_x}, {_PACKED}) -> Tensor", partial(_product, _name)
    _OPS[_name] = _register(_name, _schema, _real, partial(_product_fake, _name))
    define_out(_name, _schema, _real)
torch.library.register_vmap("fquant::decode", _decode_vmap, lib=LIBRARY)
# those of the dense weight; torch's counter gives shapes for tensors
register_flop_formula([torch.ops.fquant.matmul, torch.ops.fquant.matmul_t])(
    lambda x, buffers, format, shape, *_, **__: 2 * math.prod(x[:-1]) * math.prod(shape)
)
