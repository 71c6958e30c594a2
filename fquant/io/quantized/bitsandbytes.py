"""bitsandbytes folders, as transformers writes them: quant_method "bitsandbytes"; tensors as in :mod:`fquant.io.bnb`.

The state of a 4-bit weight is JSON in a tensor, and an entry of a header does not show it. So :func:`check_entries`
takes the block size from the number of absmax, and :func:`buffers` checks it against the state.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...format import BLOCKS, DYNAMIC8, FP4, INT8, NF4, NF4_DQ, Format, num_blocks
from ...packed import Packed
from ...tree import expect
from .. import bnb
from ..tree_json import one_of
from .blocks import Entries, expect_entry, module
from .config import ANY, FLAG, NAMES, check

_STATE = "quant_state.bitsandbytes__"
_STORAGE = ("uint8", "int8", "float16", "bfloat16", "float32", "float64")
_KINDS = {"nf4": (NF4, NF4_DQ), "fp4": (FP4, replace(FP4, name="fp4_dq", scale=DYNAMIC8))}
_HARMLESS = (
    "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant", "llm_int8_threshold",
    "llm_int8_enable_fp32_cpu_offload",
)  # fmt: skip
_RULES = {
    **dict.fromkeys(_HARMLESS, ANY),
    "quant_method": one_of("bitsandbytes"), "load_in_4bit": FLAG, "load_in_8bit": FLAG,
    "bnb_4bit_quant_type": one_of("nf4", "fp4"), "bnb_4bit_quant_storage": one_of(*_STORAGE),
    "llm_int8_skip_modules": NAMES, "llm_int8_has_fp16_weight": one_of(False), "modules_to_not_convert": NAMES,
}  # fmt: skip


@dataclass(frozen=True)
class BitsAndBytes:
    """The method "bitsandbytes": the tensors of a weight tell the rest."""


def read(config: Mapping[str, Any]) -> BitsAndBytes:
    """Return the method of a ``quantization_config``; raise ValueError for a key that is not known."""
    check(config, _RULES, "quantization_config")
    return BitsAndBytes()


def names(method: BitsAndBytes, weight: str, found: Collection[str]) -> tuple[str, ...]:
    """Return the tensors of a weight; none if it is dense."""
    known = ["absmax", "quant_map", "nested_absmax", "nested_quant_map", *(_STATE + kind for kind in _KINDS)]
    beside = [f"{weight}.{part}" for part in known]
    beside += [f"{module(weight)}.{part}" for part in ("SCB", "weight_format")]
    parts = tuple(name for name in beside if name in found)
    return (weight, *parts) if parts and weight in found else parts


def check_entries(method: BitsAndBytes, weight: str, entries: Entries, shape: tuple[int, ...]) -> Format:
    """Return the format of a weight after a check of its entries."""
    scb = f"{module(weight)}.SCB"
    if scb in entries:
        expect_entry(entries, weight, (torch.int8,), shape)
        expect_entry(entries, scb, (torch.float32,), (shape[0],))
        expect_entry(entries, f"{module(weight)}.weight_format", (torch.uint8,), ())
        return INT8
    count, nested = math.prod(shape), f"{weight}.nested_absmax" in entries
    kinds = [kind for kind in _KINDS if f"{weight}.{_STATE}{kind}" in entries]
    fault = f"{weight}: {len(kinds)} tensors {_STATE}nf4 or fp4, wanted one; fetch the checkpoint again"
    expect(len(kinds) == 1, fault)
    expect(weight in entries, f"{weight}: missing, wanted its codes; fetch the checkpoint again")
    size = -(-count // 2)
    dtype = entries[weight].dtype
    expect(dtype in bnb.STORAGE, f"{weight}: got {dtype}, wanted codes in a storage dtype of bitsandbytes")
    expect_entry(entries, weight, (dtype,), (-(-size // dtype.itemsize), 1))
    absmax = f"{weight}.absmax"
    by_count = {-(-count // block): block for block in reversed(BLOCKS)} | {-(-count // 64): 64}
    expect_entry(entries, absmax, (torch.uint8 if nested else torch.float32,), *((n,) for n in by_count))
    block = by_count[entries[absmax].shape[0]]
    return replace(_KINDS[kinds[0]][nested], block=block, flat=bool(shape[-1] % block))


def buffers(
    method: BitsAndBytes, weight: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...], format: Format
) -> tuple[Tensor, Tensor | Packed, None]:
    """Return the codes, the scale and no zero point of a weight whose entries are checked."""
    packed = bnb.load(tensors, weight)
    expect(packed.shape == shape, f"{weight}: its state says shape {packed.shape}, wanted {shape}; check the config")
    if packed.format != format:  # a weight of one block has the same bytes for any larger block size
        fault = f"{weight}: its state says block {packed.format.block}, wanted {format.block} by its absmax"
        alone = packed.format.flat and format.flat and num_blocks(packed.format, math.prod(shape)) == 1
        expect(alone, f"{fault}; fetch the checkpoint again")
    return packed.codes, packed.scale, None
