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

A Packed that :func:`fquant.quantize` made has the bytes that bitsandbytes makes on the CPU, but for 8-bit rows below
float16's normal range (``fquant.quantizers.tiny_blocks``). Decoded values are equal to the bit, with two exceptions,
both of bitsandbytes' CPU kernels. bf16 values below 1.2e-38 become 0 there. FP4's second zero has either sign there, by
the width, and is +0 here. In eval mode its layer multiplies with scales in bfloat16, which is another product.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..device import HOST
from ..format import BLOCKS, DYNAMIC8, FP4, INT8, NF4, NF4_DQ, Format, num_blocks
from ..packed import FLOATS, Packed
from ..tree import at, expect
from .tree_json import Rule, check_keys, check_values, one_of, parse

_STATE = "quant_state.bitsandbytes__"
_PLAIN = {"nf4": NF4, "fp4": FP4}
_NESTED = {"nf4": NF4_DQ, "fp4": replace(FP4, name="fp4_dq", scale=DYNAMIC8)}
_BESIDE = ("SCB", "weight_format")
STORAGE = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
_sibling = lambda name, part: f"{name.rpartition('.')[0]}.{part}".lstrip(".")  # X.weight -> X.SCB
_table = lambda format: torch.tensor(format.table, dtype=torch.float32, device=HOST)
_is_size = lambda x: type(x) is int and x > 0
_RULES: dict[str, Rule] = {  # of the JSON beside quant_type
    "dtype": one_of(*_DTYPES),
    "blocksize": (_is_size, "a positive integer"),
    "shape": (lambda x: isinstance(x, list) and x and all(map(_is_size, x)), "a list of positive integers"),
}
_NESTED_RULES: dict[str, Rule] = {
    "nested_blocksize": one_of(DYNAMIC8.block),
    "nested_dtype": one_of("float32"),
    "nested_offset": (lambda x: type(x) is float and math.isfinite(x), "a finite number"),
}


def load(tensors: Mapping[str, Tensor], name: str) -> Packed:
    """Return the weight ``name`` (``"model.layers.0.self_attn.q_proj.weight"``) of the ``tensors`` of a checkpoint.

    The file of an 8-bit weight does not hold its dtype; the result's is float32, which loses nothing. Raises
    ValueError, with the name in front, for anything that bitsandbytes does not write.
    """
    inside = {key[len(name) + 1 :]: t for key, t in tensors.items() if key.startswith(name + ".")}
    with at(name):
        expect(name in tensors, "there is no such tensor; check the name")
        beside = {part: tensors[key] for part in _BESIDE if (key := _sibling(name, part)) in tensors}
        fault = f"no {_STATE}nf4, {_STATE}fp4 or SCB beside it, so it is not quantised; load it as it is"
        expect(inside or beside, fault)
        return _load4(tensors[name], inside, beside) if inside else _load8(tensors[name], beside)


def save(packed: Packed, name: str) -> dict[str, Tensor]:
    """Return the tensors that bitsandbytes writes for ``packed`` under ``name``, byte for byte, stored as uint8.

    Raises ValueError for arrays that its format cannot hold: stacks, and short blocks at the ends of rows.
    """
    with at(name):
        format, shape = packed.format, packed.shape
        if format.table is None:
            return _save8(packed, name)
        kinds = [kind for kind, known in _PLAIN.items() if format.table == known.table]
        fault = f"bitsandbytes has no {format.name}; wanted nf4 or fp4, with scales in f32 or dynamic8"
        expect(kinds and format.scale in (None, DYNAMIC8), fault)
        fault = f"bitsandbytes has no block {format.block}; wanted one of {', '.join(map(str, BLOCKS[1:]))}"
        expect(format.block in BLOCKS[1:], fault)
        assert format.block is not None
        fault = f"width {shape[-1]} is not a multiple of the block {format.block}, and bitsandbytes has no short block"
        fix = "dequantize it and quantize it with replace(format, flat=True)"
        expect(format.flat or shape[-1] % format.block == 0, f"{fault} at the end of a row; {fix}")
        _check_size(packed.codes, math.prod(shape))
        state: dict[str, Any] = {"quant_type": kinds[0], "blocksize": format.block}
        state |= {"dtype": str(packed.dtype).removeprefix("torch."), "shape": list(shape)}
        out = {"": packed.codes.reshape(-1, 1), "absmax": packed.scale, "quant_map": _table(format)}
        if isinstance(packed.scale, Packed):
            nested, offset = packed.scale, packed.scale.offset
            assert isinstance(nested.scale, Tensor) and offset is not None
            out |= {"absmax": nested.codes, "nested_absmax": nested.scale, "nested_quant_map": _table(DYNAMIC8)}
            state |= {"nested_blocksize": DYNAMIC8.block, "nested_dtype": "float32", "nested_offset": offset.item()}
        out["absmax"] = out["absmax"].reshape(-1)
        out[_STATE + kinds[0]] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8, device=HOST)
        return {f"{name}.{part}".rstrip("."): t for part, t in out.items()}


def _load4(weight: Tensor, inside: Mapping[str, Tensor], beside: Mapping[str, Tensor]) -> Packed:
    states, of_nested = [key for key in inside if key.startswith("quant_state.")], {"nested_absmax", "nested_quant_map"}
    nested = bool(of_nested & inside.keys())
    kind = states[0].removeprefix(_STATE) if len(states) == 1 else ""
    got = f"got quant_state {', '.join(states) or 'none'}"
    expect(kind in _PLAIN, f"{got}; wanted exactly one of {_STATE}nf4 and {_STATE}fp4")
    wanted = {*states, "absmax", "quant_map", *(of_nested if nested else ())}
    check_keys("tensors beside it", {*inside, *beside}, wanted)
    with at(states[0]):
        state = _parse(inside[states[0]], kind, nested)
    shape, block = tuple(state["shape"]), state["blocksize"]
    count = math.prod(shape)
    format = (_NESTED if nested else _PLAIN)[state["quant_type"]]
    format = replace(format, block=block, flat=bool(shape[-1] % block))
    blocks = num_blocks(format, count)
    fault = f"got {weight.dtype} for the codes; wanted one of {', '.join(map(str, STORAGE))}"
    expect(weight.dtype in STORAGE, fault)
    fault = f"got codes of shape {tuple(weight.shape)}; wanted [bytes 1], not the [1 bytes] of old releases"
    expect(weight.ndim == 2 and weight.shape[1] == 1, fault)
    codes = weight.contiguous().view(torch.uint8).reshape(-1)  # codes are bytes in any storage dtype
    _check_size(codes, count)
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
    check_keys("tensors beside it", beside, _BESIDE)
    got = f"got {weight.dtype} {tuple(weight.shape)} beside an SCB"
    expect(weight.dtype == torch.int8 and weight.ndim == 2, f"{got}; wanted int8 [out in]")
    kind = _take(beside, "weight_format", torch.uint8, ()).item()
    expect(kind == 0, f"weight_format is {kind}; wanted 0 (rows); save it with a current bitsandbytes")
    absmax = _take(beside, "SCB", torch.float32, (weight.shape[0],))
    return Packed(weight, absmax[:, None], INT8, tuple(weight.shape), torch.float32)


def _save8(packed: Packed, name: str) -> dict[str, Tensor]:
    got = f"{packed.format} of codes {tuple(packed.codes.shape)}"
    wanted = "bitsandbytes keeps 8-bit weights as int8 [out in] with one scale a row"
    expect(packed.format == INT8 and len(packed.shape) == packed.codes.ndim == 2, f"{wanted}; got {got}")
    assert isinstance(packed.scale, Tensor)
    kind = torch.tensor(0, dtype=torch.uint8, device=HOST)
    return {name: packed.codes, _sibling(name, "SCB"): packed.scale.reshape(-1), _sibling(name, "weight_format"): kind}


def _parse(blob: Tensor, kind: str, nested: bool) -> dict[str, Any]:
    """Return the JSON of a 4-bit weight, with every value checked."""
    got = f"got {blob.dtype} {tuple(blob.shape)}"
    expect(blob.dtype == torch.uint8 and blob.ndim == 1, f"{got}; wanted JSON as uint8 [bytes]")
    state = parse(bytes(blob.tolist()), "the state of a weight")
    rules = _RULES | {"quant_type": one_of(kind)} | (_NESTED_RULES if nested else {})
    check_keys("keys", state, rules)
    check_values(state, rules)
    return state


def _take(parts: Mapping[str, Tensor], key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    t = parts[key]
    fits = t.dtype == dtype and tuple(t.shape) == shape
    expect(fits, f"{key}: got {t.dtype} {tuple(t.shape)}; wanted {dtype} {shape}")
    fault = f"{key}: got values that are NaN or infinite; the file is damaged, fetch it again"
    expect(not t.is_floating_point() or t.isfinite().all(), fault)
    return t


def _check_table(parts: Mapping[str, Tensor], key: str, format: Format) -> None:
    table = _table(format)
    got = _take(parts, key, torch.float32, tuple(table.shape)).cpu()
    expect(got.equal(table), f"{key}: got another table than {format.name}'s; wanted bitsandbytes' own")


def _check_size(codes: Tensor, count: int) -> None:
    got, wanted = codes.numel(), -(-count // 2)
    expect(got == wanted, f"got {got} bytes of codes; wanted {wanted} for the shape")
