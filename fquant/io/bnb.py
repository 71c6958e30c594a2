"""bitsandbytes' serialised weights: the tensors of one weight in a checkpoint, converted to a Packed and back.

A 4-bit weight ``X.weight`` of the module ``X`` has these tensors, nested ones for double quantisation only:

    X.weight                                u8[bytes, 1]     codes of the flattened weight, or other dtypes' bytes
    X.weight.absmax                         f32[blocks]      u8[blocks] if nested
    X.weight.quant_map                      f32[16]          the table
    X.weight.nested_absmax                  f32[blocks/256]
    X.weight.nested_quant_map               f32[256]
    X.weight.quant_state.bitsandbytes__nf4  u8[...]          JSON: quant_type, blocksize, dtype, shape, nested_...

An 8-bit weight has ``X.weight`` i8[out, in], ``X.SCB`` f32[out] and ``X.weight_format`` u8[], which is 0.

bitsandbytes' blocks run over the flattened weight. If the block size divides the width, these are blocks along rows,
and the buffers are reshaped only. Otherwise blocks straddle rows, and the result is flat: its rows cannot be sharded.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..format import DYNAMIC8, FP4, INT8, NF4, NF4_DQ, Format, num_blocks
from ..packed import FLOATS, Packed
from .safetensors import unique

_STATE = "quant_state.bitsandbytes__"
_PLAIN = {"nf4": NF4, "fp4": FP4}
_NESTED = {"nf4": NF4_DQ, "fp4": replace(FP4, name="fp4_dq", scale=DYNAMIC8)}
_BESIDE = ("SCB", "weight_format")
_STORAGE = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}


def load(tensors: Mapping[str, Tensor], name: str) -> Packed:
    """Return the weight ``name`` (``"model.layers.0.self_attn.q_proj.weight"``) of the ``tensors`` of a checkpoint.

    The file of an 8-bit weight does not hold its dtype; the result's is float32, which loses nothing. Raises
    ValueError, with the name in front, for anything that bitsandbytes does not write.
    """
    inside = {key[len(name) + 1 :]: t for key, t in tensors.items() if key.startswith(name + ".")}
    with tree.at(name):
        if name not in tensors:
            raise ValueError("there is no such tensor; check the name")
        beside = {part: tensors[key] for part in _BESIDE if (key := _sibling(name, part)) in tensors}
        if not inside and not beside:
            raise ValueError(f"no {_STATE}nf4, {_STATE}fp4 or SCB beside it, so it is not quantised; load it as it is")
        if not inside:
            return _load8(tensors[name], beside)
        _check_keys("tensors beside it", {*inside, *beside}, _wanted(inside))
        return _load4(tensors[name], inside)


def save(packed: Packed, name: str) -> dict[str, Tensor]:
    """Return the tensors that bitsandbytes writes for ``packed`` under ``name``, byte for byte, stored as uint8.

    Raises ValueError for arrays that its format cannot hold: stacks, and short blocks at the ends of rows.
    """
    with tree.at(name):
        format, shape = packed.format, packed.shape
        if format.table is None:
            return _save8(packed, name)
        kinds = [kind for kind, known in _PLAIN.items() if format.table == known.table]
        if not kinds or format.scale not in (None, DYNAMIC8):
            raise ValueError(f"bitsandbytes has no {format.name}; wanted nf4 or fp4, with scales in f32 or dynamic8")
        assert format.block is not None  # 4-bit formats have one
        if not format.flat and shape[-1] % format.block:
            fault = "bitsandbytes has no short block at the end of a row"
            fix = "dequantize it and quantize it with replace(format, flat=True)"
            raise ValueError(f"width {shape[-1]} is not a multiple of the block {format.block}, and {fault}; {fix}")
        _check_size("codes", packed.codes, -(-math.prod(shape) // 2))
        state: dict[str, Any] = {"quant_type": kinds[0], "blocksize": format.block}
        state |= {"dtype": str(packed.dtype).removeprefix("torch."), "shape": list(shape)}
        out = {"": packed.codes.reshape(-1, 1), "absmax": packed.scale, "quant_map": _table(format)}
        if isinstance(packed.scale, Packed):
            nested, offset = packed.scale, packed.scale.offset
            assert isinstance(nested.scale, Tensor) and offset is not None
            out |= {"absmax": nested.codes, "nested_absmax": nested.scale, "nested_quant_map": _table(DYNAMIC8)}
            state |= {"nested_blocksize": DYNAMIC8.block, "nested_dtype": "float32", "nested_offset": offset.item()}
        out["absmax"] = out["absmax"].reshape(-1)
        out[_STATE + kinds[0]] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8, device="cpu")
        return {f"{name}.{part}".rstrip("."): t for part, t in out.items()}


def _wanted(inside: Mapping[str, Tensor]) -> set[str]:
    """Return all keys that a weight with those ``inside`` must have; check the key of the JSON."""
    states = [key for key in inside if key.startswith("quant_state.")]
    if len(states) != 1 or states[0].removeprefix(_STATE) not in _PLAIN:
        got = ", ".join(states) or "none"
        raise ValueError(f"got quant_state {got}; wanted exactly one of {_STATE}nf4 and {_STATE}fp4")
    nested = {"nested_absmax", "nested_quant_map"}
    return {states[0], "absmax", "quant_map"} | (nested if nested & inside.keys() else set())


def _load4(weight: Tensor, inside: Mapping[str, Tensor]) -> Packed:
    key, nested = next(key for key in inside if key.startswith(_STATE)), "nested_absmax" in inside
    with tree.at(key):
        state = _parse(inside[key], key.removeprefix(_STATE), nested)
    format = replace((_NESTED if nested else _PLAIN)[state["quant_type"]], block=state["blocksize"])
    shape = tuple(state["shape"])
    count = math.prod(shape)
    format = replace(format, flat=bool(shape[-1] % state["blocksize"]))
    blocks = num_blocks(format, count)
    if weight.dtype not in _STORAGE:
        raise ValueError(f"got {weight.dtype} for the codes; wanted one of {', '.join(map(str, _STORAGE))}")
    if weight.ndim != 2 or weight.shape[1] != 1:
        got = tuple(weight.shape)
        raise ValueError(f"got codes of shape {got}; wanted [bytes 1], not the [1 bytes] of old releases")
    codes = weight.contiguous().view(torch.uint8).reshape(-1)  # codes are bytes in any storage dtype
    _check_size("codes", codes, -(-count // 2))
    _check_table(inside, "quant_map", format)
    absmax = _take(inside, "absmax", torch.uint8 if nested else torch.float32, (blocks,))
    if not format.flat:
        codes, absmax = (t.reshape(*shape[:-1], -1) for t in (codes, absmax))
    scale: Tensor | Packed = absmax
    if nested:
        _check_table(inside, "nested_quant_map", DYNAMIC8)
        second = _take(inside, "nested_absmax", torch.float32, (num_blocks(DYNAMIC8, blocks),))
        offset = torch.tensor(state["nested_offset"], dtype=torch.float32, device=second.device)
        scale = Packed(absmax, second, DYNAMIC8, tuple(absmax.shape), torch.float32, offset)
    return Packed(codes, scale, format, shape, _DTYPES[state["dtype"]])


def _load8(weight: Tensor, beside: Mapping[str, Tensor]) -> Packed:
    _check_keys("tensors beside it", set(beside), set(_BESIDE))
    if weight.dtype != torch.int8 or weight.ndim != 2:
        raise ValueError(f"got {weight.dtype} {tuple(weight.shape)} beside an SCB; wanted int8 [out in]")
    kind = _take(beside, "weight_format", torch.uint8, ())
    if kind.item() != 0:
        raise ValueError(f"weight_format is {kind.item()}; wanted 0 (rows); save it with a current bitsandbytes")
    absmax = _take(beside, "SCB", torch.float32, (weight.shape[0],))
    return Packed(weight, absmax[:, None], INT8, tuple(weight.shape), torch.float32)


def _save8(packed: Packed, name: str) -> dict[str, Tensor]:
    if packed.format != INT8 or len(packed.shape) != 2 or packed.codes.ndim != 2:
        got = f"{packed.format} of codes {tuple(packed.codes.shape)}"
        raise ValueError(f"bitsandbytes keeps 8-bit weights as int8 [out in] with one scale a row; got {got}")
    assert isinstance(packed.scale, Tensor)
    kind = torch.tensor(0, dtype=torch.uint8, device="cpu")
    return {name: packed.codes, _sibling(name, "SCB"): packed.scale.reshape(-1), _sibling(name, "weight_format"): kind}


def _parse(blob: Tensor, kind: str, nested: bool) -> dict[str, Any]:
    """Return the JSON of a 4-bit weight, with every value checked."""
    if blob.dtype != torch.uint8 or blob.ndim != 1:
        raise ValueError(f"got {blob.dtype} {tuple(blob.shape)}; wanted JSON as uint8 [bytes]")
    try:
        state = json.loads(bytes(blob.tolist()).decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); the file is damaged, fetch it again") from error
    if not isinstance(state, dict):
        raise ValueError(f"got a JSON {type(state).__name__}; wanted an object")
    wanted = {"quant_type": (kind,), "dtype": tuple(_DTYPES)}
    if nested:
        wanted |= {"nested_blocksize": (DYNAMIC8.block,), "nested_dtype": ("float32",)}
    _check_keys("keys", set(state), {*wanted, "blocksize", "shape", *({"nested_offset"} if nested else ())})
    for key, values in wanted.items():
        if state[key] not in values or isinstance(state[key], bool):
            raise ValueError(f"{key} is {state[key]!r}; wanted {' or '.join(map(repr, values))}")
    if type(state["blocksize"]) is not int:
        raise ValueError(f"blocksize is {state['blocksize']!r}; wanted an integer")
    shape = state["shape"]
    if not isinstance(shape, list) or not shape or any(type(n) is not int or n < 1 for n in shape):
        raise ValueError(f"shape is {shape!r}; wanted a list of positive integers")
    if nested and (type(state["nested_offset"]) is not float or not math.isfinite(state["nested_offset"])):
        raise ValueError(f"nested_offset is {state['nested_offset']!r}; wanted a finite number")
    return state


def _take(parts: Mapping[str, Tensor], key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    got = parts[key]
    if got.dtype != dtype or tuple(got.shape) != shape:
        raise ValueError(f"{key}: got {got.dtype} {tuple(got.shape)}; wanted {dtype} {shape}")
    if got.is_floating_point() and not got.isfinite().all():
        raise ValueError(f"{key}: got values that are NaN or infinite; the file is damaged, fetch it again")
    return got


def _check_table(parts: Mapping[str, Tensor], key: str, format: Format) -> None:
    table = _table(format)
    got = _take(parts, key, torch.float32, tuple(table.shape))
    if not torch.equal(got.cpu(), table):
        raise ValueError(f"{key}: got another table than {format.name}'s; wanted bitsandbytes' own")


def _table(format: Format) -> Tensor:
    return torch.tensor(format.table, dtype=torch.float32, device="cpu")


def _check_size(name: str, got: Tensor, wanted: int) -> None:
    if got.numel() != wanted:
        raise ValueError(f"got {got.numel()} bytes of {name}; wanted {wanted} for the shape")


def _check_keys(name: str, got: set[str], wanted: set[str]) -> None:
    if got != wanted:
        missing, unknown = (", ".join(sorted(x)) or "none" for x in (wanted - got, got - wanted))
        raise ValueError(f"{name}: missing {missing}, unknown {unknown}; wanted {', '.join(sorted(wanted))}")


def _sibling(name: str, part: str) -> str:
    """Replace the last part of a name: ``X.weight`` -> ``X.SCB``."""
    return ".".join([*name.split(".")[:-1], part])
