"""MXFP4 folders of gpt-oss: quant_method "mxfp4".

The weight ``X`` of shape (experts, out, in) is ``X_blocks`` u8[experts, out, in/32, 16] and ``X_scales`` u8[experts,
out, in/32]. A byte holds two E2M1 codes, the first in its low half. A scale s is 2**(s - 127), and 255 is NaN.

transformers transposes to [experts, in, out] as it decodes, because its products are x @ w; ours are not transposed.
The rows of ``gate_up_proj`` alternate: gate 0, up 0, gate 1, ... Source: transformers/integrations/mxfp4.py.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...format import MXFP4, Format
from ...tree import expect
from ..tree_json import one_of
from .blocks import Entries, expect_entry, finite, module
from .config import ANY, NAMES, check
from .packing import swap_nibbles

BLOCK = 32
_RULES = {"quant_method": one_of("mxfp4"), "modules_to_not_convert": NAMES, "dequantize": ANY}


@dataclass(frozen=True)
class Mxfp4:
    """The method "mxfp4"; it has no options."""


def read(config: Mapping[str, Any]) -> Mxfp4:
    """Return the method of a ``quantization_config``; raise ValueError for a key that is not known."""
    check(config, _RULES, "quantization_config")
    return Mxfp4()


def names(method: Mxfp4, weight: str, found: Collection[str]) -> tuple[str, ...]:
    """Return the tensors of a weight; none if it is dense."""
    return tuple(name for name in _names(weight) if name in found)


def check_entries(method: Mxfp4, weight: str, entries: Entries, shape: tuple[int, ...]) -> Format:
    """Return the format of a weight [... out in] after a check of its entries."""
    blocks, scales = _names(weight)
    expect(shape[-1] % BLOCK == 0, f"{blocks}: rows of {shape[-1]} elements, wanted whole blocks of {BLOCK}")
    scaled = (*shape[:-1], shape[-1] // BLOCK)
    expect_entry(entries, blocks, (torch.uint8,), (*scaled, BLOCK // 2))
    expect_entry(entries, scales, (torch.uint8,), scaled)
    return MXFP4.plain


def buffers(
    method: Mxfp4, weight: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...], format: Format
) -> tuple[Tensor, Tensor, None]:
    """Return the codes, the scale and no zero point of a weight whose entries are checked."""
    blocks, scales = _names(weight)
    return swap_nibbles(tensors[blocks]).flatten(-2), finite(scales, tensors[scales]), None


def _names(weight: str) -> tuple[str, str]:
    return f"{module(weight)}_blocks", f"{module(weight)}_scales"
