"""AWQ folders, as autoawq writes them: quant_method "awq", 4 bits.

The linear module ``X`` [out in] of groups of G inputs, with zero points that are stored as they are:

    version "gemm"  X.qweight i32[in, out/8]   X.qzeros i32[in/G, out/8]  X.scales f16[in/G, out]
    version "gemv"  X.qweight i32[out, in/8]   X.qzeros i32[out, z]       X.scales f16[out, 8·z]

In "gemm" the 4-bit field i of word c is output 8·c + (0, 2, 4, 6, 1, 3, 5, 7)[i]. In "gemv" fields are in order along
in. There z is ceil(in/G/8), rounded up to a multiple of 2 for G = 64 and of 4 for G = 32. A value is scale · (code -
zero), rounded to f16. "gemv_fast" interleaves words for one kernel, and is refused, as are other versions.

Source: autoawq 0.2.9, awq/utils/packing_utils.py and awq/modules/linear (gemm.py, gemv.py).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...format import Format
from ...tree import expect
from ..tree_json import one_of
from . import gptq
from .blocks import FLOATS, Entries, Grid, expect_entry, finite, integers, module, spread
from .config import ANY, GROUP, NAMES, OPTIONAL_FLAG, check, integer_in, is_in
from .packing import fields, pack, words_to_codes

PARTS = ("qweight", "qzeros", "scales")
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the field of each output of a word, of version gemm
_HARMLESS = (*gptq.HARMLESS, "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "meta", "dataset")
_VERSION = is_in("gemm", "gemv")
_RULES = {
    **dict.fromkeys(_HARMLESS, ANY),
    "quant_method": one_of("awq"), "bits": integer_in(4), "w_bit": integer_in(4), "group_size": GROUP,
    "q_group_size": GROUP, "zero_point": one_of(True), "version": _VERSION, "format": _VERSION,
    "modules_to_not_convert": NAMES, "desc_act": one_of(False), "sym": OPTIONAL_FLAG, "lm_head": OPTIONAL_FLAG,
    "backend": (lambda x: x != "llm-awq", "another than llm-awq"),
}  # fmt: skip


@dataclass(frozen=True)
class Awq:
    """The options of "awq": ``group`` inputs share a scale, None for all; ``version`` "gemm" or "gemv"."""

    group: int | None
    version: str


def read(config: Mapping[str, Any]) -> Awq:
    """Return the method of a ``quantization_config``; raise ValueError for a key that is not known."""
    raw = check(config, _RULES, "quantization_config")
    for one, other in (("group_size", "q_group_size"), ("bits", "w_bit"), ("version", "format")):
        both = one in raw and other in raw and raw[one] != raw[other]
        expect(not both, f"quantization_config: keys {one!r} and {other!r} differ; remove the wrong one")
    group = raw.get("group_size", raw.get("q_group_size", 128))
    return Awq(None if group == -1 else group, raw.get("version", raw.get("format", "gemm")).lower())


def names(method: Awq, weight: str, found: Collection[str]) -> tuple[str, ...]:
    """Return the tensors of a weight; none if it is dense."""
    base = module(weight)
    return tuple(name for part in PARTS if (name := f"{base}.{part}") in found) if f"{base}.qweight" in found else ()


def check_entries(method: Awq, weight: str, entries: Entries, shape: tuple[int, ...]) -> Format:
    """Return the format of a weight [out in] after a check of its entries."""
    qweight, qzeros, scales = (f"{module(weight)}.{part}" for part in PARTS)
    out, width = shape
    group = method.group or width
    fault = f"{qweight}: {out} outputs of {width} inputs, wanted multiples of 8 and of the group {group}"
    expect(out % 8 == 0 and width % group == 0 and width % 8 == 0, f"{fault}; check the config")
    if method.version == "gemm":
        shapes = (width, out // 8), (width // group, out // 8), (width // group, out)
    else:
        words = _gemv_words(width // group, group)
        shapes = (out, width // 8), (out, words), (out, 8 * words)
    expect_entry(entries, qweight, (torch.int32,), shapes[0])
    expect_entry(entries, qzeros, (torch.int32,), shapes[1])
    expect_entry(entries, scales, FLOATS, shapes[2])
    return integers(weight, 4, method.group, width, zero=True)


def buffers(
    method: Awq, weight: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...], format: Format
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes, the scale and the zero point of a weight whose entries are checked."""
    qweight, qzeros, scales = (f"{module(weight)}.{part}" for part in PARTS)
    out, width = shape
    count = width // (method.group or width)
    scale = finite(scales, tensors[scales])
    if method.version == "gemm":
        codes, zero, scale = pack(_gemm(tensors[qweight], out).T, 4), _gemm(tensors[qzeros], out).T, scale.T
    else:
        codes, zero = words_to_codes(tensors[qweight], 4, width), fields(tensors[qzeros], 4, count)
        scale = scale[:, :count]
    grid = Grid(1, method.group)
    return codes, spread(scale, grid, format, shape), spread(zero.float(), grid, format, shape)


def _gemm(words: Tensor, out: int) -> Tensor:
    return fields(words, 4, out).unflatten(-1, (-1, 8))[..., list(ORDER)].flatten(-2)


def _gemv_words(groups: int, group: int) -> int:
    multiple = {64: 2, 32: 4}.get(group, 1)
    return -((-groups // 8) // multiple) * multiple
