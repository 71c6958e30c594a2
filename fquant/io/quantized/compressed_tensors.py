"""compressed-tensors folders (llm-compressor, vLLM): quant_method "compressed-tensors".

``config_groups`` hold one scheme a group; the format of the folder, or of a group, says how codes are stored:

    pack-quantized            X.weight_packed i32[out, ceil(in·b/32)], X.weight_scale, X.weight_shape i64[2]
                              X.weight_zero_point i32[ceil(out·b/32), groups], packed along out
    int-, naive-quantized     X.weight i8[out, in], X.weight_scale, X.weight_zero_point i8
    float-, naive-quantized   X.weight float8_e4m3fn[out, in], X.weight_scale
    mxfp8-quantized           X.weight float8_e4m3fn[out, in], X.weight_scale u8[out, in/32]
    mxfp4-pack-quantized      X.weight_packed u8[out, in/2], X.weight_scale u8[out, in/32]
    nvfp4-pack-quantized      X.weight_packed u8[out, in/2], X.weight_scale e4m3[out, in/16],
                              X.weight_global_scale f32[1]

Packed integers are stored plus 2**(b-1), and so are packed zero points. Releases before 0.10 pack 32 // b whole
integers into a word, and later ones pack without gaps; the count of words tells which, because b = 3, 5, 6, 7 differ.
A value is (code - zero) · scale in the dtype of the scale. The global scale of NVFP4 divides, in f32.

The scheme of a weight is the one that fits its tensors; ``targets`` and ``ignore`` are not read. Two schemes that
fit in different ways are an error. Activations and key-value caches are not quantised: their scales are claimed and
not used. Source: compressed-tensors 0.20, compressors/ and quantization/lifecycle/forward_helpers.py.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...format import FP8, MXFP4, Format
from ...tree import at, expect
from ..tree_json import one_of
from . import config as rules
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
    module,
    signed_codes,
    spread,
)
from .config import ABSENT, ANY, FLAG, check, integer_in, is_in
from .packing import WORD, code_bits, fields, gapped_fields, num_words, pack, swap_nibbles, words_to_codes

INTEGERS, PACKED, FLOAT8, MX8, MX4, NV4 = "integers", "packed", "float8", "mxfp8", "mxfp4", "nvfp4"
_FORMATS = {  # format -> how codes of integers and of floats are stored
    "pack-quantized": (PACKED, None), "int-quantized": (INTEGERS, None), "float-quantized": (None, FLOAT8),
    "naive-quantized": (INTEGERS, FLOAT8), "mxfp8-quantized": (None, MX8), "mxfp4-pack-quantized": (None, MX4),
    "nvfp4-pack-quantized": (None, NV4),
}  # fmt: skip
_FORMAT = is_in(*_FORMATS)
_IN = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")
_PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_global_scale", "weight_g_idx")
_is_dense_config = lambda x: not x or (isinstance(x, dict) and x.get("format") == "dense")
_CONFIG = {
    "quant_method": one_of("compressed-tensors"), "format": is_in(*_FORMATS, "mixed-precision"),
    "config_groups": (lambda x: isinstance(x, dict) and x, "a table of groups"), "ignore": rules.NAMES,
    "kv_cache_scheme": ABSENT, "quantization_status": is_in("compressed", "frozen"), "global_compression_ratio": ANY,
    "version": ANY, "run_compressed": ANY,
    "sparsity_config": (_is_dense_config, "nothing, or of format dense"), "transform_config": ABSENT,
    "moe_sparsity_config": ABSENT,
}  # fmt: skip
_GROUP = {
    "targets": rules.NAMES, "weights": ANY, "input_activations": ANY, "output_activations": ANY,
    "format": (lambda x: x is None or _FORMAT[0](x), f"null or {_FORMAT[1]}"),
}  # fmt: skip
_WEIGHTS = {
    "num_bits": integer_in(*range(1, 9)), "type": is_in("int", "float"), "symmetric": FLAG, "dynamic": one_of(False),
    "strategy": is_in("tensor", "channel", "group", "block", "tensor_group"), "observer": ANY, "observer_kwargs": ANY,
    "group_size": (lambda x: x is None or rules.GROUP[0](x), "null, -1 or a positive integer"),
    "block_structure": rules.BLOCK_SHAPE, "scale_dtype": ANY, "zp_dtype": ANY,
    "actorder": one_of(None, False, "weight", "static", "group", "dynamic"),
}  # fmt: skip


@dataclass(frozen=True)
class Scheme:
    """One group's storage of weights: its ``kind``, ``bits``, blocks of the ``grid``, zero points or none."""

    kind: str
    bits: int
    grid: Grid
    zero: bool


@dataclass(frozen=True)
class CompressedTensors:
    """The schemes of the groups of "compressed-tensors"."""

    schemes: tuple[Scheme, ...]


def read(config: Mapping[str, Any]) -> CompressedTensors:
    """Return the method of a ``quantization_config``; raise ValueError for a key that is not known."""
    where = "quantization_config"
    raw = check(config, _CONFIG, where, ("config_groups", "format"))
    schemes = []
    for name, group in raw["config_groups"].items():
        inside = f"{where}.config_groups.{name}"
        group = check(group, _GROUP, inside)
        if group.get("weights") is not None:
            stored = (group.get("format") or raw["format"]).lower()
            with at(inside):
                expect(stored in _FORMATS, f"key 'format' is {stored!r}, wanted {_FORMAT[1]} for each group")
            schemes.append(_scheme(check(group["weights"], _WEIGHTS, f"{inside}.weights"), stored, inside))
    expect(schemes, f"{where}: key 'config_groups' quantises no weights, wanted at least one scheme; remove the config")
    return CompressedTensors(tuple(dict.fromkeys(schemes)))


def names(method: CompressedTensors, weight: str, found: Collection[str]) -> tuple[str, ...]:
    """Return the tensors of a weight; none if it has no scale and no packed codes, because it is dense then."""
    base = module(weight)
    if not {f"{base}.weight_packed", f"{base}.weight_scale"} & {name for name in _all(base) if name in found}:
        return ()
    known = _all(base) if f"{base}.weight_packed" in found else [weight, *_all(base)]
    return tuple(name for name in known if name in found)


def check_entries(method: CompressedTensors, weight: str, entries: Entries, shape: tuple[int, ...]) -> Format:
    """Return the format of a weight [out in] after a check of its entries."""
    return _fitting(method, weight, entries, shape)[1]


def buffers(
    method: CompressedTensors, weight: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...], format: Format
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the codes, the scale and the zero point of a weight whose entries are checked."""
    scheme, base = _fitting(method, weight, tensors, shape)[0], module(weight)
    kind, grid, part = scheme.kind, scheme.grid, lambda name: tensors[f"{base}.{name}"]
    if kind == PACKED:
        codes, zero = _packed(scheme, base, tensors, shape)
    elif kind == INTEGERS:
        codes, zero = signed_codes(weight, tensors[weight]), None
        if scheme.zero:
            zero = part("weight_zero_point").float().reshape(grid.shape(shape)) + 128
    else:
        is_8_bit = kind in (FLOAT8, MX8)
        codes = e4m3_codes(weight, tensors[weight]) if is_8_bit else swap_nibbles(part("weight_packed"))
        zero = None
    scale = finite(f"{base}.weight_scale", part("weight_scale")).reshape(grid.shape(shape))
    if kind == NV4:
        name = f"{base}.weight_global_scale"
        scale = finite(name, scale / finite(name, tensors[name]))
    zero = None if zero is None else spread(zero.float(), grid, format, shape)
    return codes, spread(scale, grid, format, shape), zero


def _scheme(weights: Mapping[str, Any], stored: str, where: str) -> Scheme:
    bits, group, block = weights.get("num_bits", 8), weights.get("group_size"), weights.get("block_structure")
    is_float, zero = weights.get("type", "int").lower() == "float", not weights.get("symmetric", True)
    with at(where):
        kind = _FORMATS[stored][is_float]
        fault = f"weights of type {'float' if is_float else 'int'} and {bits} bits in format {stored}"
        floats = {FLOAT8: 8, MX8: 8, MX4: 4, NV4: 4}
        expect(kind and floats.get(kind, bits) == bits, f"{fault}, wanted the format of that type and width")
        expect(not (is_float and zero), f"{fault} with zero points, wanted key 'symmetric' true")
        inferred = "tensor" if group is None else "channel" if group == -1 else "group"
        strategy = (weights.get("strategy") or inferred).lower()
        fault = f"key 'strategy' is {strategy!r} with group_size {group} and block_structure {block}"
        if strategy in ("group", "tensor_group"):
            expect(group is not None and group > 0 and not block, f"{fault}, wanted a group_size")
        elif strategy == "block":
            expect(block and group is None, f"{fault}, wanted a block_structure")
        else:
            expect(group in (None, -1) and not block, f"{fault}, wanted neither")
        width = {MX4: 32, MX8: 32, NV4: 16}.get(str(kind), group)
        expect(width == group, f"{fault}, wanted group_size {width} of format {stored}")
    known = {"tensor": TENSOR, "channel": ROW, "block": Grid(*block or (1, 1))}
    return Scheme(str(kind), bits, known.get(strategy, Grid(1, group)), zero)


def _all(base: str) -> list[str]:
    return [f"{base}.{part}" for part in (*_PARTS, *_IN)]


def _fitting(method: CompressedTensors, weight: str, entries: Entries, shape: tuple[int, ...]) -> tuple[Scheme, Format]:
    """Return the scheme that fits the entries of a weight, and its format."""
    fitting, fault = [], ValueError()
    for scheme in method.schemes:
        try:
            fitting.append((scheme, _check(scheme, weight, entries, shape)))
        except ValueError as error:
            fault = error
    if not fitting:
        raise fault
    expect(len(fitting) == 1, f"{weight}: fits {len(fitting)} of the config_groups, wanted one; remove the other")
    return fitting[0]


def _check(scheme: Scheme, weight: str, entries: Entries, shape: tuple[int, ...]) -> Format:
    base, kind, grid, (out, width) = module(weight), scheme.kind, scheme.grid, shape
    with_scale = grid.shape(shape)
    shapes = {TENSOR: ((1,), (), (1, 1)), ROW: ((out, 1), (out,))}.get(grid, (with_scale,))
    scale = lambda *dtypes: expect_entry(entries, f"{base}.weight_scale", dtypes, *shapes)
    zero, packed = f"{base}.weight_zero_point", f"{base}.weight_packed"
    expect(zero not in entries or scheme.zero, f"{zero}: got one, wanted none by symmetric true; correct the config")
    g_idx = f"{base}.weight_g_idx"
    expect(g_idx not in entries or kind == PACKED, f"{g_idx}: got one, wanted none in this format")
    if g_idx in entries:
        expect_entry(entries, g_idx, (torch.int32, torch.int64), (width,))
    if kind in (INTEGERS, FLOAT8, MX8):
        expect_entry(entries, weight, (torch.int8 if kind == INTEGERS else E4M3,), shape)
        scale(torch.uint8) if kind == MX8 else scale(*FLOATS)
        if scheme.zero:
            expect_entry(entries, zero, (torch.int8,), *shapes)
        if kind == INTEGERS:
            return integers(weight, 8, grid.columns, width, scheme.zero)
        return blocked(weight, FP8, grid.columns, width)
    if kind == PACKED:
        dense, gapped = num_words(width, scheme.bits), _num_gapped(width, scheme.bits)
        expect_entry(entries, packed, (torch.int32,), *((out, count) for count in sorted({dense, gapped})))
        is_clear = dense != gapped or dense == 1 or WORD % scheme.bits == 0
        fault = f"{packed}: rows of {width} fields of {scheme.bits} bits may have gaps or not, by their count of words"
        expect(is_clear, f"{fault}; dequantize it with the release that wrote it")
        scale(*FLOATS)
        expect_entry(entries, f"{base}.weight_shape", (torch.int64, torch.int32), (2,))
        if scheme.zero:
            rows = (num_words if _is_dense(scheme.bits, entries[packed], shape) else _num_gapped)(out, scheme.bits)
            is_packed = grid.rows == 1
            wanted = ((rows, with_scale[1]),) if is_packed else shapes
            expect_entry(entries, zero, (torch.int32,) if is_packed else (torch.int8,), *wanted)
        return integers(weight, scheme.bits, grid.columns, width, scheme.zero)
    expect(width % 2 == 0, f"{packed}: rows of {width} elements, wanted whole bytes of 2")
    expect_entry(entries, packed, (torch.uint8,), (out, width // 2))
    scale(torch.uint8 if kind == MX4 else E4M3)
    if kind == NV4:
        expect_entry(entries, f"{base}.weight_global_scale", (torch.float32,), (1,), ())
    return blocked(weight, MXFP4.plain, grid.columns, width)


def _packed(
    scheme: Scheme, base: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    """Return the codes and the zero points of integers that are packed into words."""
    bits, (out, width), words = scheme.bits, shape, tensors[f"{base}.weight_packed"]
    stated = tensors[f"{base}.weight_shape"].tolist()
    expect(stated == [out, width], f"{base}.weight_shape: got {stated}, wanted {[out, width]}; check the config")
    g_idx, groups = tensors.get(f"{base}.weight_g_idx"), torch.arange(width, device=words.device)
    fault = f"{base}.weight_g_idx: inputs of a group are scattered (actorder group), which a Packed cannot hold"
    expect(
        g_idx is None or g_idx.long().equal(groups // (scheme.grid.columns or width)),
        f"{fault}; use a checkpoint of actorder weight",
    )
    dense = _is_dense(bits, words, shape)
    codes = words_to_codes(words, bits, width) if dense else pack(gapped_fields(words, bits, width), code_bits(bits))
    if not scheme.zero:
        return codes, None
    zero = tensors[f"{base}.weight_zero_point"]
    if zero.dtype == torch.int8:
        return codes, zero.float().reshape(scheme.grid.shape(shape)) + 2 ** (bits - 1)
    return codes, (fields if dense else gapped_fields)(zero.T, bits, out).T.float()


def _num_gapped(count: int, bits: int) -> int:
    return -(-count // (WORD // bits))


def _is_dense(bits: int, packed: Any, shape: tuple[int, ...]) -> bool:
    """Return True for words without gaps; both layouts are the same within one word."""
    return packed.shape[1] == num_words(shape[1], bits)
