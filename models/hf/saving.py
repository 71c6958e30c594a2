"""Saving of decoders as Hugging Face folders that transformers loads."""

import math
from collections import UserDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fquant import packed, tree
from fquant.grouped_products import full_shape
from fquant.io import safetensors
from fquant.lazy import Lazy
from fquant.packed import Packed

from .. import decoder
from ..config import Config
from . import stacks
from .config import from_hf, to_hf
from .folder import CONFIG, INDEX, SINGLE, write_json
from .loading import FLOATS


def save(
    folder: str | Path,
    cfg: Config,
    params: Any,
    max_shard_bytes: int = 5 << 30,
    extra: Mapping[str, Any] | None = None,
    dequantize: torch.dtype | None = None,
) -> None:
    """Write a folder that :func:`load` and transformers read; ``config.json`` comes last.

    Tensors go to shards of at most ``max_shard_bytes`` (one tensor may be larger). ``extra`` are keys to add to
    ``config.json`` that do not change the model, such as ``eos_token_id``. ``dequantize`` is the dtype in which packed
    weights are written, one at a time. Before anything is written, raises ValueError for a folder that holds a model,
    another shape than the config's, or an extra key that matters. Raises TypeError for a leaf that is no float tensor.
    """
    folder = Path(folder)
    check_target(folder, dequantize)
    leaves: dict[str, Lazy] = {}
    for path, leaf in named(decoder.shapes(cfg), params, lambda path: path, dequantize).items():
        reads = Lazy(lambda leaf=leaf: leaf, tree.map(lambda t: t.to("meta"), leaf))
        leaves |= stacks.tensors(path, cfg, reads, dequantize)
    config = to_hf(cfg) | {"torch_dtype": dtype_name(params.embed, dequantize)} | dict(extra or {})
    if from_hf(config) != cfg:
        raise ValueError(f"extra keys {', '.join(extra or {})} change the model; change the Config instead")
    write(folder, config, leaves, max_shard_bytes, dequantize)


def check_target(folder: Path, dequantize: torch.dtype | None) -> None:
    """Raise ValueError for a folder that holds a model, and TypeError for a dtype that no folder has."""
    if taken := [name for name in (CONFIG, SINGLE, INDEX) if (folder / name).exists()]:
        raise ValueError(f"{folder}: there is a {taken[0]} already, want a folder without a model; choose another")
    if dequantize not in (None, *FLOATS):
        raise TypeError(f"dequantize = {dequantize}, want one of {', '.join(map(str, FLOATS))}")


def _written(leaf: Tensor | Packed | Lazy, dequantize: torch.dtype | None) -> torch.dtype:
    if isinstance(leaf, Lazy):
        return leaf.like.dtype
    return dequantize if dequantize and isinstance(leaf, Packed) else leaf.dtype


def dtype_name(leaf: Tensor | Packed, dequantize: torch.dtype | None) -> str:
    """Return the ``torch_dtype`` of a config, by the dtype in which ``leaf`` is written."""
    return str(_written(leaf, dequantize)).removeprefix("torch.")


def write(
    folder: Path, config: dict[str, Any], leaves: Mapping[str, Tensor | Packed | Lazy], max_shard_bytes: int,
    dequantize: torch.dtype | None,
) -> None:  # fmt: skip
    """Write tensors by name, in shards if they are large, and then ``config.json``."""
    written = lambda leaf: _written(leaf, dequantize)
    shape = lambda leaf: leaf.like.shape if isinstance(leaf, Lazy) else leaf.shape
    nbytes = {name: math.prod(shape(leaf)) * written(leaf).itemsize for name, leaf in leaves.items()}
    shards: list[list[str]] = [[]]
    for name in leaves:
        if shards[-1] and sum(nbytes[other] for other in shards[-1]) + nbytes[name] > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    files = files if len(shards) > 1 else [SINGLE]
    folder.mkdir(parents=True, exist_ok=True)
    for file, names in zip(files, shards, strict=True):
        shard: Any = _Dequantized({name: leaves[name] for name in names})
        shard.dtype = dequantize
        safetensors.write(folder / file, shard, {"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": weight_map})
    write_json(folder / CONFIG, config)


class _Dequantized(UserDict[str, Any]):
    """Tensors by name; a packed one is dequantised each time it is read, to its ``dtype``, and not kept."""

    dtype: torch.dtype | None = None

    def __getitem__(self, name: str) -> Tensor:
        leaf = self.data[name]
        return packed.dequantize(leaf, self.dtype) if isinstance(leaf, Packed) else leaf


def named(
    wanted: Any, params: Any, name: Callable[[str], str], dequantize: torch.dtype | None
) -> dict[str, Tensor | Packed]:
    """Return the leaves of ``params`` by their names in a file, checked against a tree of meta tensors."""
    out = {}
    for path, like in tree.items(wanted):
        try:
            leaf = tree.get(params, path)
        except KeyError as error:
            raise ValueError(f"{path}: missing from the parameters, but the config asks for it") from error
        if isinstance(leaf, Packed) and dequantize is None:
            fix = "pass dequantize=torch.bfloat16 to write it in that dtype"
            raise TypeError(f"{path} is packed ({leaf.format.name}), want a float tensor; {fix}")
        if not isinstance(leaf, Tensor | Packed):
            raise TypeError(f"{path} is of type {type(leaf).__name__}, want a tensor; merge or read it first")
        if leaf.dtype not in FLOATS:
            raise TypeError(f"{path} is {leaf.dtype}, want floats; cast it first")
        shape = full_shape(leaf) if isinstance(leaf, Packed) else tuple(leaf.shape)
        if shape != tuple(like.shape):
            raise ValueError(f"{path} has shape {shape}, want {tuple(like.shape)}; check the config")
        out[name(path)] = leaf
    paths = {path for path, _ in tree.items(params, is_leaf=lambda x: isinstance(x, Packed))}
    if surplus := paths - set(tree.paths(wanted)):
        raise ValueError(f"{min(surplus)}: not a parameter of this config; remove it or correct the config")
    return out
