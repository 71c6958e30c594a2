"""A decoder as a folder that transformers loads with bitsandbytes: NF4 or FP4, doubly quantised or not, or LLM.int8.

    bitsandbytes.save("out", cfg, params, NF4_DQ)          # AutoModelForCausalLM.from_pretrained("out")

Linears of layers are quantised, as transformers does by default: embeddings, norms, biases and the head stay dense.
The tensors of a weight are those of ``fquant.io.bnb``; ``quantization_config`` is what BitsAndBytesConfig writes. Files
equal those of ``save_pretrained`` in every byte, for the same weights and formats.

A weight that is already packed is written as it is. Other weights are read, quantised and written one at a time. A
file has its tensors in the order of their dtypes. So such a weight is read and quantised for each of two dtypes, and a
doubly quantised one once more for its size. This costs time, and saves the memory of all weights but one.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fquant import tree
from fquant.format import INT8, NF4, Format
from fquant.io import bnb
from fquant.lazy import Lazy
from fquant.packed import Packed, quantize
from fquant.tree import expect

from .. import hf
from ..config import Config
from ..hf.config import to_hf
from . import folder as folders
from .leaves import checked, is_linear, refuse_experts


def save(
    folder: str | Path,
    cfg: Config,
    params: Any,
    format: Format = NF4,
    compute_dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 << 30,
    extra: Mapping[str, Any] | None = None,
    resume: bool = False,
    done: folders.Done = lambda finished, total: None,
) -> None:
    """Write the decoder with its linears in ``format``: NF4, NF4_DQ, FP4, its doubly quantised variant, or INT8.

    Leaves are tensors, Lazy, or Packed of that format. ``compute_dtype`` is that of 4-bit products; the default is the
    embedding's. ``extra`` are further keys of ``config.json``; ``resume`` and ``done`` are those of ``folder.write``.
    Raises ValueError for a packed weight of another format, and for a packed embedding or head. Raises the errors of
    ``folder.write``, ``leaves.checked`` and ``fquant.io.bnb.save``.
    """
    folders.refuse_a_model(Path(folder), resume)
    refuse_experts(cfg, "bitsandbytes folders")
    dtype = checked(cfg, params)["embed"].like.dtype
    keys = {"torch_dtype": _name(dtype), "quantization_config": quantization_config(format, compute_dtype or dtype)}
    config = to_hf(cfg) | dict(extra or {}) | keys
    folders.write(folder, tensors(cfg, params, format), config, max_shard_bytes, resume, done)


def quantization_config(format: Format, compute_dtype: torch.dtype) -> dict[str, Any]:
    """Return what BitsAndBytesConfig of transformers 5 writes for ``format``."""
    eight = format.bits == 8
    kind = format.name.removesuffix("_dq")
    expect(eight or kind in ("nf4", "fp4"), f"bitsandbytes has no {format.name}; wanted nf4, fp4 or int8")
    expect(not eight or format == INT8, f"bitsandbytes has no {format.name}; wanted nf4, fp4 or int8")
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": not eight, "_load_in_4bit": not eight, "load_in_8bit": eight, "_load_in_8bit": eight,
        "bnb_4bit_compute_dtype": "float32" if eight else _name(compute_dtype),
        "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "fp4" if eight else kind,
        "bnb_4bit_use_double_quant": format.scale is not None,
        "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": None, "llm_int8_threshold": 6.0,
    }  # fmt: skip


def tensors(cfg: Config, params: Any, format: Format) -> dict[str, Lazy]:
    """Return the tensors of the folder by name."""
    leaves = checked(cfg, params)

    @lru_cache(maxsize=1)
    def parts(path: str) -> dict[str, Tensor]:
        with tree.at(path):
            return bnb.save(_packed(leaves[path].read(), format), hf.tensor_name(path, cfg))

    out: dict[str, Lazy] = {}
    for path, leaf in leaves.items():
        if is_linear(path, leaf):
            # A nested offset is text of any length, so only its weight has to be read for the sizes.
            known = format.scale is None and isinstance(leaf.like, Tensor)
            likes = bnb.save(_packed(leaf.like, format), hf.tensor_name(path, cfg)) if known else parts(path)
            for name, t in likes.items():
                out[name] = Lazy(lambda path=path, name=name: parts(path)[name], t.to("meta"))
        else:
            fault = f"{path}: got a Packed, but bitsandbytes folders keep it dense; dequantize it first"
            expect(not isinstance(leaf.like, Packed), fault)
            out[hf.tensor_name(path, cfg)] = leaf
    return out


def _packed(leaf: Tensor | Packed, format: Format) -> Packed:
    """Quantise a dense weight; return a packed one as it is, if it is of that format."""
    width = leaf.shape[-1]
    if format.block and width % format.block:
        format = replace(format, flat=True)  # bitsandbytes' blocks straddle rows then
    if isinstance(leaf, Tensor):
        return quantize(leaf, format)
    if format.flat and leaf.format == replace(format, flat=False):
        fault = f"got blocks of {format.block} that end with each row of {width}, wanted blocks that straddle rows"
        raise ValueError(f"{fault}, as bitsandbytes has; dequantize it first")
    fix = f"dequantize it first, or export to {leaf.format.name}"
    expect(leaf.format == format, f"got a Packed of {leaf.format}, wanted {format}; {fix}")
    return leaf


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
