"""Weights of quantised checkpoints as Packed, without dequantising: one file a method of quantisation.

    method = quantized.method(config["quantization_config"])               # a frozen value, such as Gptq(bits=4, ...)
    parts  = quantized.names(method, weight, found)                        # () if this weight is dense
    dtype  = quantized.dtype(method, weight, header.tensors, model)        # to which the library decodes
    like   = quantized.like(method, weight, header.tensors, shape, dtype)  # a Packed of meta tensors
    packed = quantized.load(method, weight, {name: read(name) for name in parts}, shape, dtype)

A reader of folders knows the model's shapes and calls these for each weight; only this package knows layouts. Names
decide what is quantised: lists of modules to skip are not read, because programs that wrote them differ in their rules.

Codes are rearranged and never requantised. Integers without a zero point are INT4 or its like of another width; those
with one have ``Packed.zero``. Scales become f32, which holds f16, bf16, E4M3 and E8M0. Where one foreign scale covers
more than one of our blocks, it is repeated. A decoded value is rounded once, from f32 to ``dtype``. It is equal to that
of the library, bit for bit, if ``dtype`` is the one to which the library decodes:

    method                        dtype of the library
    bitsandbytes 4-bit            of the state beside the weight, which is the dtype before quantisation
    bitsandbytes int8             float32
    gptq, awq                     of the scales, float16
    compressed-tensors            of the scales; NVFP4 and MXFP4 bfloat16
    fp8, fbgemm_fp8, mxfp4        of the model (torch_dtype of config.json)
    torchao                       of the model

Activations are never quantised here, even if the config asks for it, so products are closer to those of 16 bits than
the library's. Every fault is a ValueError that names the key or the tensor.
"""

import math
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...format import Format
from ...kernels.spec import FLOATS, Spec, layout, scales
from ...packed import Packed
from ...tree import expect
from . import awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4, torchao
from .awq import Awq
from .bitsandbytes import BitsAndBytes
from .blocks import Entries
from .compressed_tensors import CompressedTensors
from .config import show
from .fp8 import FbgemmFp8, Fp8
from .gptq import Gptq
from .mxfp4 import Mxfp4
from .torchao import Torchao

Method: TypeAlias = Awq | BitsAndBytes | CompressedTensors | FbgemmFp8 | Fp8 | Gptq | Mxfp4 | Torchao

_READ = {
    "awq": awq.read, "bitsandbytes": bitsandbytes.read, "compressed-tensors": compressed_tensors.read,
    "fbgemm_fp8": fp8.read_fbgemm, "fp8": fp8.read, "gptq": gptq.read, "mxfp4": mxfp4.read, "torchao": torchao.read,
}  # fmt: skip
_MODULES: dict[type, ModuleType] = {
    Awq: awq, BitsAndBytes: bitsandbytes, CompressedTensors: compressed_tensors, FbgemmFp8: fp8, Fp8: fp8, Gptq: gptq,
    Mxfp4: mxfp4, Torchao: torchao,
}  # fmt: skip


def method(config: Mapping[str, Any]) -> Method:
    """Return the method of the dict ``quantization_config`` of a config.json.

    Raises ValueError, with the key, for a method, key or value that is not supported.
    """
    expect(isinstance(config, Mapping), f"quantization_config: got {type(config).__name__}, wanted an object")
    name = config.get("quant_method")
    if name is None and (config.get("load_in_4bit") is True or config.get("load_in_8bit") is True):
        name = "bitsandbytes"  # as of transformers before 4.31
    fault = f"quantization_config: key 'quant_method' is {show(name)}, wanted one of {', '.join(_READ)}"
    read = _READ.get(name) if isinstance(name, str) else None
    if read is None:
        raise ValueError(f"{fault}; use the unquantised checkpoint")
    return read(config)


def names(method: Method, weight: str, found: Collection[str]) -> tuple[str, ...]:
    """Return the names of the tensors that make up ``weight``, "X.weight", among ``found``; () if it is dense."""
    return _MODULES[type(method)].names(method, weight, found)


def dtype(method: Method, weight: str, entries: Entries, model: torch.dtype) -> torch.dtype:
    """Return the dtype to which the library decodes ``weight``: that of its scales, or that of the model.

    The state of bitsandbytes has a dtype too, which is the model's.
    """
    if isinstance(method, Gptq | Awq | CompressedTensors):
        for name in names(method, weight, entries):
            if name.endswith("scales") or name.endswith("weight_scale"):
                return entries[name].dtype if entries[name].dtype in FLOATS else model
    return model


def like(method: Method, weight: str, entries: Entries, shape: tuple[int, ...], dtype: torch.dtype) -> Packed:
    """Return ``weight`` of ``shape`` [out in], or [experts out in] of MXFP4, as a Packed of meta tensors.

    ``entries`` maps names to objects with ``shape`` and ``dtype``. Raises ValueError, with the name of the tensor, for
    one that is missing or has another shape or dtype.
    """
    return _meta(_check(method, weight, entries, shape, dtype), shape, dtype)


def load(
    method: Method, weight: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> Packed:
    """Return ``weight`` as a Packed that decodes to ``dtype``, on the device of ``tensors`` by name.

    Raises ValueError as :func:`like`, and for values that no file of the method holds: scales or codes that are not
    finite, groups out of range, a state that contradicts the shape.
    """
    format = _check(method, weight, tensors, shape, dtype)
    codes, scale, zero = _MODULES[type(method)].buffers(method, weight, tensors, shape, format)
    return Packed(codes, scale, format, shape, dtype, zero=zero)


def _check(method: Method, weight: str, entries: Entries, shape: tuple[int, ...], dtype: torch.dtype) -> Format:
    expect(dtype in FLOATS, f"{weight}: got dtype {dtype}, wanted {' or '.join(map(str, FLOATS))}")
    dims = (2, 3) if isinstance(method, Mxfp4) else (2,)
    got = f"{weight}: got shape {shape}"
    fault = f"{got}, wanted {' or '.join(f'{n} dims' for n in dims)} of {type(method).__name__}; leave it dense"
    expect(len(shape) in dims and math.prod(shape) > 0, fault)
    return _MODULES[type(method)].check_entries(method, weight, entries, shape)


def _meta(format: Format, shape: tuple[int, ...], dtype: torch.dtype) -> Packed:
    spec = Spec(format, shape, dtype)
    empty = lambda size, dtype: torch.empty(size, dtype=dtype, device="meta")
    codes, blocks = layout(spec)[0], scales(spec).shape
    scale = empty(blocks, torch.float32) if format.scale is None else _meta(format.scale, blocks, torch.float32)
    offset = empty((), torch.float32) if format.center else None
    zero = empty(blocks, torch.float32) if format.zero else None
    return Packed(empty(codes.shape, codes.dtype), scale, format, shape, dtype, offset, zero=zero)
