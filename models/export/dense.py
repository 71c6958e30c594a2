"""A decoder as a plain Hugging Face folder, one tensor at a time: packed weights decoded, in one dtype."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fquant import lazy
from fquant.lazy import Lazy

from ..config import Config
from ..hf import stacks
from ..hf.config import to_hf
from . import folder as folders
from .leaves import FLOATS, checked


def save(
    folder: str | Path,
    cfg: Config,
    params: Any,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = 5 << 30,
    extra: Mapping[str, Any] | None = None,
    resume: bool = False,
    done: folders.Done = lambda finished, total: None,
) -> None:
    """Write the decoder in ``dtype``; leaves are tensors, Packed or Lazy, each rounded once.

    ``extra`` are further keys of ``config.json``; ``resume`` and ``done`` are those of ``folder.write``. Raises
    TypeError for a dtype that is no float, and the errors of ``folder.write`` and ``leaves.checked``.
    """
    if dtype not in FLOATS:
        raise TypeError(f"dtype = {dtype}, want one of {', '.join(map(str, FLOATS))}")
    config = to_hf(cfg) | dict(extra or {}) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    folders.write(folder, tensors(cfg, params, dtype), config, max_shard_bytes, resume, done)


def tensors(cfg: Config, params: Any, dtype: torch.dtype) -> dict[str, Lazy]:
    """Return the tensors of the folder by name."""
    cast = lambda t: t.to(dtype)
    parts = [stacks.tensors(path, cfg, leaf) for path, leaf in checked(cfg, params).items()]
    return {name: lazy.map(cast, part) for named in parts for name, part in named.items()}
