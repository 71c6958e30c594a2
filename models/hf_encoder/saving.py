"""Saving of encoders as Hugging Face folders that transformers loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..encoder.config import EncoderConfig
from ..encoder.params import shapes
from ..hf import saving
from .config import from_hf, heads_of, to_hf
from .families import FAMILIES
from .names import tensor_name


def save(
    folder: str | Path,
    cfg: EncoderConfig,
    params: Any,
    max_shard_bytes: int = 5 << 30,
    extra: Mapping[str, Any] | None = None,
    dequantize: torch.dtype | None = None,
) -> None:
    """Write a folder that :func:`load` and transformers read; arguments and errors are those of ``models.hf.save``."""
    folder = Path(folder)
    saving.check_target(folder, dequantize)
    leaves = saving.named(shapes(cfg), params, lambda path: tensor_name(path, cfg), dequantize)
    if cfg.masked_lm and not cfg.tied:  # transformers then reads the bias under this name
        family = FAMILIES[cfg.family]
        leaves[f"{family.heads['decoder']}.bias"] = leaves[family.bias]
    config = to_hf(cfg) | {"torch_dtype": saving.dtype_name(params.embed.tokens, dequantize)} | dict(extra or {})
    if from_hf(config, heads_of(cfg)) != cfg:
        raise ValueError(f"extra keys {', '.join(extra or {})} change the model; change the EncoderConfig instead")
    saving.write(folder, config, leaves, max_shard_bytes, dequantize)
