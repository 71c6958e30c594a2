"""FP8 folders: quant_method "fp8" (DeepSeek V3, Qwen3, MiniMax) and "fbgemm_fp8" (Meta's Llama).

    X.weight            float8_e4m3fn[out, in]
    X.weight_scale_inv  f32 or bf16 [ceil(out/128), ceil(in/128)]     also named X.scale or X.qscale_weight
    X.weight_scale      f32[out, 1], of fbgemm_fp8

All scales multiply, ``weight_scale_inv`` too. With ``weight_block_size`` null there is one scale for the weight, and
without the key too if its name is ``X.weight_scale``, as AutoFP8 writes it. With
``scale_fmt`` "ue8m0" a scale is the exponent of a power of two, as E8M0 or u8. With ``expert_dtype`` "fp4" a weight i8
[out, in/2] holds two E2M1 codes a byte, the first in the low half, in blocks of 1 by 32.

A block begins at each multiple of its size, as in DeepSeek's kernels. transformers 5.23 divides rows by the number of
scales instead, which is another grid where a size does not divide. Scales of activations (``X.input_scale``) are
claimed and not used: activations stay in 16 bits. Source: transformers/integrations/finegrained_fp8.py.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...format import FP8, MXFP4, Format
from ...tree import expect
from ..tree_json import one_of
from .blocks import E4M3, E8M0, ROW, TENSOR, Entries, Grid, blocked, e4m3_codes, expect_entry, finite, module, spread
from .config import ANY, BLOCK_SHAPE, NAMES, check, is_in
from .packing import swap_nibbles

FP4_GRID = Grid(1, 32)
_SCALES = ("weight_scale_inv", "scale", "qscale_weight", "weight_scale")
_ACTIVATIONS = ("input_scale", "activation_scale", "qscale_act", "input_scale_ub")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_RULES = {
    "quant_method": one_of("fp8"), "fmt": one_of("e4m3", "float8_e4m3fn"), "scale_fmt": is_in("float", "ue8m0"),
    "weight_block_size": BLOCK_SHAPE, "expert_dtype": is_in("fp8", "fp4"), "activation_scheme": is_in(
        "dynamic", "static"
    ), "modules_to_not_convert": NAMES, "ignored_layers": NAMES, "modules_to_convert": NAMES, "dequantize": ANY,
}  # fmt: skip
_FBGEMM = {"quant_method": one_of("fbgemm_fp8"), "activation_scale_ub": ANY, "modules_to_not_convert": NAMES}


@dataclass(frozen=True)
class Fp8:
    """The options of "fp8": the ``grid`` of scales, None if not stated; exponents as scales; FP4 weights besides."""

    grid: Grid | None
    exponents: bool
    fp4: bool


@dataclass(frozen=True)
class FbgemmFp8:
    """The method "fbgemm_fp8"; it has no options."""


def read(config: Mapping[str, Any]) -> Fp8:
    """Return the method "fp8" of a ``quantization_config``; raise ValueError for a key that is not known."""
    raw = check(config, _RULES, "quantization_config")
    block = raw.get("weight_block_size")
    grid = Grid(*block) if block else TENSOR if "weight_block_size" in raw else None
    exponents = raw.get("scale_fmt", "float").lower() == "ue8m0"
    return Fp8(grid, exponents, raw.get("expert_dtype", "fp8").lower() == "fp4")


def read_fbgemm(config: Mapping[str, Any]) -> FbgemmFp8:
    """Return the method "fbgemm_fp8" of a ``quantization_config``; raise ValueError for a key that is not known."""
    check(config, _FBGEMM, "quantization_config")
    return FbgemmFp8()


def names(method: Fp8 | FbgemmFp8, weight: str, found: Collection[str]) -> tuple[str, ...]:
    """Return the tensors of a weight; none if it has no scale, because it is dense then."""
    scale = _scale(method, weight, found)
    wanted = (weight, scale, *(f"{module(weight)}.{part}" for part in _ACTIVATIONS))
    return tuple(name for name in wanted if name in found) if scale in found else ()


def check_entries(method: Fp8 | FbgemmFp8, weight: str, entries: Entries, shape: tuple[int, ...]) -> Format:
    """Return the format of a weight [out in] after a check of its entries."""
    scale, (out, width) = _scale(method, weight, entries), shape
    grid, is_fp4 = _grid(method, weight, entries), _is_fp4(method, weight, entries)
    expect(not is_fp4 or width % 2 == 0, f"{weight}: rows of {width} elements, wanted whole bytes of 2")
    dtypes = (torch.int8,) if is_fp4 else (E4M3,)
    expect_entry(entries, weight, dtypes, (out, width // 2) if is_fp4 else (out, width))
    exponents = isinstance(method, Fp8) and method.exponents
    wanted = grid.shape(shape)
    shapes = {TENSOR: ((), (1,), (1, 1)), ROW: ((out, 1), (out,))}.get(grid, (wanted,))
    expect_entry(entries, scale, (E8M0, torch.uint8) if exponents else _FLOATS, *shapes)
    return blocked(weight, MXFP4.plain if is_fp4 else FP8, grid.columns, width)


def buffers(
    method: Fp8 | FbgemmFp8, weight: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...], format: Format
) -> tuple[Tensor, Tensor, None]:
    """Return the codes, the scale and no zero point of a weight whose entries are checked."""
    name, grid = _scale(method, weight, tensors), _grid(method, weight, tensors)
    scale = finite(name, tensors[name]).reshape(grid.shape(shape))
    if _is_fp4(method, weight, tensors):
        codes = swap_nibbles(tensors[weight].contiguous().view(torch.uint8))
    else:
        codes = e4m3_codes(weight, tensors[weight])
    return codes, spread(scale, grid, format, shape), None


def _scale(method: Fp8 | FbgemmFp8, weight: str, found: Collection[str] | Entries) -> str:
    if isinstance(method, FbgemmFp8):
        return f"{weight}_scale"
    known = [f"{module(weight)}.{part}" for part in _SCALES]
    return next((name for name in known if name in found), known[0])


def _is_fp4(method: Fp8 | FbgemmFp8, weight: str, entries: Entries) -> bool:
    is_allowed = isinstance(method, Fp8) and method.fp4 and weight in entries
    return is_allowed and entries[weight].dtype == torch.int8


def _grid(method: Fp8 | FbgemmFp8, weight: str, entries: Entries) -> Grid:
    if isinstance(method, FbgemmFp8):
        return ROW
    if _is_fp4(method, weight, entries):
        return FP4_GRID
    unstated = TENSOR if _scale(method, weight, entries).endswith(".weight_scale") else Grid(128, 128)
    return method.grid or unstated
