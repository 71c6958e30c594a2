"""torchao folders, as transformers writes them to safetensors: quant_method "torchao".

The weight ``M.weight`` is stored in parts, ``M._weight_qdata`` and its like. The class of a config says which:

    Int8Tensor                 qdata i8[out, in], scale f32[out, 1], zero_point i8[out, 1] of zeros
    IntxUnpackedToInt8Tensor   qdata i8[out, in], one code a byte, scale [out, in/G], zero_point i8[out, in/G]
    Float8Tensor               qdata float8_e4m3fn[out, in], scale f32[out, 1] or [1, 1]

A value is (qdata - zero_point) · scale, rounded to the dtype of the tensor, which is that of the model. Codes of Intx
of up to 4 bits are held in 4. Int4 tensors add a float zero point after the product, which is rounded, so
(code - zero) · scale is not bit-equal, and they are refused by name. So are NF4 tensors, which torchao does not write
to safetensors, and all of version 1, which are pickles. Activations stay in 16 bits.

Source: torchao 0.18, prototype/safetensors and quantization/quantize_/workflows.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...format import FP8, Format
from ...tree import at, expect
from ..tree_json import one_of
from .blocks import (
    E4M3,
    FLOATS,
    ROW,
    TENSOR,
    Entries,
    Grid,
    blocked,
    e4m3_codes,
    expect_entry,
    finite,
    integers,
    signed_codes,
    spread,
)
from .config import ANY, MOST, NAMES, OPTIONAL_FLAG, check, show
from .packing import pack

_CONFIG = {
    "quant_method": one_of("torchao"), "quant_type": ANY, "modules_to_not_convert": NAMES,
    "include_input_output_embeddings": OPTIONAL_FLAG, "untie_embedding_weights": OPTIONAL_FLAG,
}  # fmt: skip
_PLAIN = lambda *names: (lambda x: x in [{"_type": t, "_data": n} for t, n in names], " or ".join(n for _, n in names))
_UNPACKED = _PLAIN(("IntxPackingFormat", "UNPACKED_TO_INT8"))
_MAPPING = _PLAIN(("MappingType", "SYMMETRIC"), ("MappingType", "ASYMMETRIC"))
_WIDTH = _PLAIN(*(("torch.dtype", f"int{bits}") for bits in range(1, 9)))
_FLOAT8 = _PLAIN(("torch.dtype", "float8_e4m3fn"))
_CLASSES = {  # class -> the keys of its _data, and the keys of granularity and mapping
    "Int8WeightOnlyConfig": ({"group_size": one_of(None), "granularity": ANY, "set_inductor_config": ANY},
                             "granularity", None),
    "Int8DynamicActivationInt8WeightConfig": (
        {"granularity": ANY, "act_mapping_type": ANY, "weight_only_decode": ANY, "set_inductor_config": ANY,
         "reduce_range": ANY, "layout": one_of(None)}, "granularity", None),
    "IntxWeightOnlyConfig": (
        {"weight_dtype": _WIDTH, "granularity": ANY, "mapping_type": _MAPPING, "scale_dtype": ANY,
         "intx_packing_format": _UNPACKED, "intx_choose_qparams_algorithm": ANY}, "granularity", "mapping_type"),
    "Int8DynamicActivationIntxWeightConfig": (
        {"weight_dtype": _WIDTH, "weight_granularity": ANY, "weight_mapping_type": _MAPPING, "weight_scale_dtype": ANY,
         "act_mapping_type": ANY, "intx_packing_format": _UNPACKED, "intx_choose_qparams_algorithm": ANY},
        "weight_granularity", "weight_mapping_type"),
    "Float8WeightOnlyConfig": ({"weight_dtype": _FLOAT8, "granularity": ANY, "set_inductor_config": ANY},
                               "granularity", None),
    "Float8DynamicActivationFloat8WeightConfig": (
        {"activation_dtype": ANY, "weight_dtype": _FLOAT8, "granularity": ANY, "mm_config": ANY,
         "packing_format": _PLAIN(("Float8PackingFormat", "PLAIN")), "activation_value_lb": ANY,
         "activation_value_ub": ANY, "kernel_preference": ANY, "set_inductor_config": ANY, "alg_id": ANY},
        "granularity", None),
}  # fmt: skip
_REFUSED = {
    "Int4WeightOnlyConfig": "its zero point is a float that is added, and is not exact as (code - zero) · scale",
    "NF4WeightOnlyConfig": "torchao does not write NF4 tensors to safetensors",
    "FqnToConfig": "its weights have several configs", "ModuleFqnToConfig": "its weights have several configs",
}  # fmt: skip
_PARTS = ("qdata", "scale", "zero_point")
_OTHER_PARTS = ("scale_and_zero", "per_tensor_scale", "act_pre_scale", "act_quant_scale", "act_scale")


@dataclass(frozen=True)
class Torchao:
    """The options of "torchao": integers of ``bits`` or E4M3, blocks of the ``grid``, zero points or none."""

    bits: int | None
    grid: Grid
    zero: bool


def read(config: Mapping[str, Any]) -> Torchao:
    """Return the method of a ``quantization_config``; raise ValueError for a key that is not known."""
    where = "quantization_config.quant_type"
    kinds = check(config, _CONFIG, "quantization_config", ("quant_type",))["quant_type"]
    kind = check(kinds, {"default": ANY}, where, ("default",))["default"]
    where += ".default"
    kind = check(kind, {"_type": ANY, "_version": ANY, "_data": ANY}, where, ("_type", "_version", "_data"))
    name, version = kind["_type"], kind["_version"]
    fix = "dequantize it with torchao"
    refused = _REFUSED.get(name) if isinstance(name, str) else None
    expect(refused is None, f"{where}: key '_type' is {show(name)}: {refused}; {fix}")
    known = isinstance(name, str) and name in _CLASSES
    expect(known, f"{where}: key '_type' is {show(name)}, wanted {' or '.join(_CLASSES)}; {fix}")
    fault = f"{where}: key '_version' is {show(version)}, wanted 2, because others are pickled"
    expect(type(version) is int and version == 2, f"{fault}; save it with a current torchao")
    rules, granularity, mapping = _CLASSES[name]
    data = check(kind["_data"], rules, f"{where}._data", (granularity, *([mapping] if mapping else [])))
    with at(f"{where}._data.{granularity}"):
        grid = _grid(data[granularity])
    zero, bits = mapping is not None and data[mapping]["_data"] == "ASYMMETRIC", 8
    if mapping is not None and "weight_dtype" in data:
        bits = int(data["weight_dtype"]["_data"].removeprefix("int"))
    return Torchao(None if name.startswith("Float8") else bits, grid, zero)


def names(method: Torchao, weight: str, found: Collection[str]) -> tuple[str, ...]:
    """Return the tensors of a weight; none if it is dense."""
    known = (_part(weight, part) for part in (*_PARTS, *_OTHER_PARTS))
    return tuple(name for name in known if name in found)


def check_entries(method: Torchao, weight: str, entries: Entries, shape: tuple[int, ...]) -> Format:
    """Return the format of a weight [out in] after a check of its entries."""
    qdata, scale, zero = (_part(weight, part) for part in _PARTS)
    for part in _OTHER_PARTS:
        fault = f"{_part(weight, part)}: a part of another class of torchao, wanted {', '.join(_PARTS)}"
        expect(_part(weight, part) not in entries, f"{fault}; dequantize it with torchao")
    expect_entry(entries, qdata, (torch.int8 if method.bits else E4M3,), shape)
    wanted = method.grid.shape(shape)
    expect_entry(entries, scale, FLOATS, *({(), (1,), (1, 1)} if method.grid == TENSOR else {wanted}))
    expect(zero not in entries or method.bits, f"{zero}: got one, wanted none beside float8; check the config")
    if zero in entries or method.zero:
        expect_entry(entries, zero, (torch.int8,), wanted)
    if method.bits is None:
        return blocked(weight, FP8, method.grid.columns, shape[1])
    return integers(weight, method.bits, method.grid.columns, shape[1], method.zero)


def buffers(
    method: Torchao, weight: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...], format: Format
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the codes, the scale and the zero point of a weight whose entries are checked."""
    qdata, scale, zero = (_part(weight, part) for part in _PARTS)
    grid, bits = method.grid, method.bits
    if bits is None:
        codes = e4m3_codes(qdata, tensors[qdata])
    else:
        codes = pack(signed_codes(qdata, tensors[qdata], bits), format.bits)
    scales = spread(finite(scale, tensors[scale]).reshape(grid.shape(shape)), grid, format, shape)
    if bits is not None and method.zero:
        return codes, scales, spread(tensors[zero].float() + 2 ** (bits - 1), grid, format, shape)
    got = zero not in tensors or not tensors[zero].any()
    expect(got, f"{zero}: got a value that is not 0, wanted zeros of a symmetric mapping; check the config")
    return codes, scales, None


def _grid(granularity: Any) -> Grid:
    kinds = granularity[-1:] if isinstance(granularity, list) else [granularity]  # the last is of weights
    fault = f"got {show(granularity)}, wanted PerRow, PerTensor, PerAxis of axis 0 or PerGroup"
    is_size = lambda x: type(x) is int and 0 < x < MOST
    match kinds:
        case [{"_type": "PerRow", "_data": {"dim": -1}} | {"_type": "PerAxis", "_data": {"axis": 0}}]:
            return ROW
        case [{"_type": "PerTensor"}]:
            return TENSOR
        case [{"_type": "PerGroup", "_data": {"group_size": group}}] if is_size(group):
            return Grid(1, group)
    raise ValueError(f"{fault}; dequantize it with torchao")


def _part(weight: str, part: str) -> str:
    base, _, name = weight.rpartition(".")
    return f"{base}._{name}_{part}".lstrip(".")
