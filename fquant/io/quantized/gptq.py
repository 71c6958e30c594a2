"""GPTQ folders, as gptqmodel, auto-gptq and auto-round write them: quant_method "gptq".

The linear module ``X`` [out in] of groups of G inputs, b bits, and g = ceil(in/G) groups:

    X.qweight  i32[in·b/32, out]   packed along in, the first in the lowest bits
    X.qzeros   i32[g, out·b/32]    packed along out
    X.scales   f16[g, out]
    X.g_idx    i32[in]             the group of each input; a file may lack it

A value is scale · (code - zero), rounded to f16. Format ``gptq_v2`` stores the zero point z, and ``gptq`` (version 1)
stores z - 1. gptqmodel subtracts from whole words, so a z of 0 borrows from the next field, and the same addition
restores it. Fields of 3 bits straddle words, and 1 is added to each. With ``sym`` all zero points are 2**(b-1), and
the Packed has none.

Act-order (``desc_act``) scatters the inputs of a group. A Packed has no permutation of inputs, so ``g_idx`` must be
constant over each of our blocks, which permits groups in any order. Codes of 2 and 3 bits are held in 4.

Source: gptqmodel 7.7, utils/model.py (versions), nn_modules/qlinear (packing), quantization/config.py (keys).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...format import Format, num_blocks
from ...tree import expect
from ..tree_json import one_of
from .blocks import FLOATS, Entries, expect_entry, finite, integers, module
from .config import ABSENT, ANY, FLAG, GROUP, NAMES, check, integer_in, is_in, show
from .packing import fields, num_words, words_to_codes

PARTS = ("qweight", "qzeros", "scales", "g_idx")
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # 1 in each field of a word
HARMLESS = (  # how the codes were found, and which program multiplies them
    "model_name_or_path", "model_file_base_name", "static_groups", "true_sequential", "damp_percent",
    "damp_auto_increment", "mse", "act_group_aware", "tokenizer", "dataset", "batch_size", "pad_token_id",
    "max_input_length", "cache_block_outputs", "block_name_to_quantize", "module_name_preceding_first_block",
    "model_seqlen", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "backend", "meta", "lm_head",
    "modules_in_block_to_quantize", "offload_to_disk", "offload_to_disk_path", "pack_impl", "process", "iters", "lr",
    "minmax_lr", "nsamples", "seqlen", "amp", "gradient_accumulate_steps", "low_gpu_mem_usage", "autoround_version",
    "enable_minmax_tuning", "enable_quanted_input", "scale_dtype", "quant_block_list", "to_quant_block_names",
    "enable_norm_bias_tuning", "provider", "supported_types", "not_use_best_mse", "dataset_split", "packing_format",
)  # fmt: skip
_is_skip = lambda x: not x or (isinstance(x, dict) and all(isinstance(k, str) and k.startswith("-:") for k in x))
_RULES = {
    **dict.fromkeys(HARMLESS, ANY),
    "quant_method": one_of("gptq"), "method": is_in("gptq"), "bits": integer_in(2, 3, 4, 8), "group_size": GROUP,
    "desc_act": FLAG, "sym": FLAG, "checkpoint_format": is_in("gptq", "gptq_v2"),
    "format": is_in("gptq", "gptq_v2"), "pack_dtype": one_of("int32", "torch.int32"), "data_type": one_of("int"),
    "dynamic": (_is_skip, "null or names to skip, which begin with '-:'"),
    "modules_to_not_convert": NAMES, "is_marlin_format": one_of(False, None), "adapter": ABSENT, "rotation": ABSENT,
}  # fmt: skip


@dataclass(frozen=True)
class Gptq:
    """The options of "gptq": ``group`` inputs share a scale, None for all; ``version`` of zero points 1 or 2."""

    bits: int
    group: int | None
    sym: bool
    version: int


def read(config: Mapping[str, Any]) -> Gptq:
    """Return the method of a ``quantization_config``; raise ValueError for a key that is not known."""
    raw = check(config, _RULES, "quantization_config", ("bits", "group_size"))
    stated = {raw[key].lower() for key in ("checkpoint_format", "format") if key in raw}
    expect(len(stated) < 2, "quantization_config: keys 'checkpoint_format' and 'format' differ; remove the wrong one")
    bits, group, sym, version = raw["bits"], raw["group_size"], raw.get("sym", True), 2 if "gptq_v2" in stated else 1
    if bits == 3 and version == 1 and not sym:
        meta = raw.get("meta")
        writer = meta.get("quantizer") if isinstance(meta, dict) else None
        text = show(writer)
        fault = f"quantization_config: key 'meta': quantizer {text} shifts 3-bit zero points by wrong amounts"
        expect("gptqmodel" not in text or "gptqmodel:7" in text, f"{fault}; dequantize it with that release")
    return Gptq(bits, None if group == -1 else group, sym, version)


def names(method: Gptq, weight: str, found: Collection[str]) -> tuple[str, ...]:
    """Return the tensors of a weight; none if it is dense."""
    base = module(weight)
    return tuple(name for part in PARTS if (name := f"{base}.{part}") in found) if f"{base}.qweight" in found else ()


def check_entries(method: Gptq, weight: str, entries: Entries, shape: tuple[int, ...]) -> Format:
    """Return the format of a weight [out in] after a check of its entries."""
    qweight, qzeros, scales, g_idx = (f"{module(weight)}.{part}" for part in PARTS)
    bits, (out, width) = method.bits, shape
    fault = f"{qweight}: {width} inputs of {bits} bits, wanted whole words of 32 bits; check the config"
    expect(width * bits % 32 == 0, fault)
    count = -(-width // (method.group or width))
    expect_entry(entries, qweight, (torch.int32,), (num_words(width, bits), out))
    expect_entry(entries, qzeros, (torch.int32,), (count, num_words(out, bits)))
    expect_entry(entries, scales, FLOATS, (count, out))
    if g_idx in entries:
        expect_entry(entries, g_idx, (torch.int32,), (width,))
    return integers(weight, bits, method.group, width, zero=not method.sym)


def buffers(
    method: Gptq, weight: str, tensors: Mapping[str, Tensor], shape: tuple[int, ...], format: Format
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the codes, the scale and the zero point of a weight whose entries are checked."""
    qweight, qzeros, scales, g_idx = (f"{module(weight)}.{part}" for part in PARTS)
    bits, (out, width) = method.bits, shape
    zero = _zeros(tensors[qzeros], bits, out, method.version)
    if method.sym:
        wrong = zero != 2 ** (bits - 1)
        fault = f"{qzeros}: zero point {int(zero[wrong][0]) if wrong.any() else 0}, wanted {2 ** (bits - 1)} by sym"
        fix = f"set checkpoint_format to gptq{'_v2' if method.version == 1 else ''}, or sym to false"
        expect(not wrong.any(), f"{fault}; {fix}")
    device = tensors[scales].device
    groups = _groups(g_idx, tensors.get(g_idx), method.group or width, format, width, device)
    codes = words_to_codes(tensors[qweight].T, bits, width)
    scale = finite(scales, tensors[scales]).T[:, groups].contiguous()
    return codes, scale, None if method.sym else zero.float().T[:, groups].contiguous()


def _zeros(words: Tensor, bits: int, out: int, version: int) -> Tensor:
    """Return the zero points u8[groups out] of i32[groups words]."""
    if version == 2:
        return fields(words, bits, out)
    if bits in _ONES:
        return fields(words + _ONES[bits], bits, out)
    return (fields(words, bits, out) + 1) & (2**bits - 1)


def _groups(name: str, g_idx: Tensor | None, group: int, format: Format, width: int, device: torch.device) -> Tensor:
    """Return the group of each of our blocks, i64[blocks]."""
    block, count = format.block or width, num_blocks(format, width)
    starts = torch.arange(count, device=device) * block
    if g_idx is None:
        return starts // group
    most = -(-width // group) - 1
    low, high = int(g_idx.min()), int(g_idx.max())
    expect(0 <= low and high <= most, f"{name}: groups {low} to {high}, wanted 0 to {most}; fetch it again")
    groups = g_idx.long()[starts]
    fault = f"{name}: inputs of a group are scattered (act-order), wanted runs of {block}, because a Packed has no "
    fix = "permutation; use a checkpoint with desc_act false, or dequantize it with gptqmodel"
    expect(groups.repeat_interleave(block)[:width].equal(g_idx.long()), fault + fix)
    return groups
