"""Stacked weights of experts, and the tensors of a folder that hold them.

A leaf of our tree holds a weight of all experts of a layer: ``gate_up`` [experts 2·width dim], ``down`` [experts dim
width]. A folder has one of two layouts, and both are read:

    by expert    a tensor for each expert and weight, gate and up apart: what transformers writes for Mixtral and Qwen3
    stacked      one tensor for all experts, as in the memory of transformers; gpt-oss' are transposed

Folders are written by expert if the family has such names, else stacked. A Lazy of a layout by expert has ``parts``:
quantising it packs one expert at a time.
"""

from collections.abc import Container

import torch
from torch import Tensor

from fquant import lazy
from fquant.grouped_products import dequantize_matrix, full_shape
from fquant.lazy import Lazy
from fquant.packed import Packed, concatenate, dequantize

from ..config import Config
from .names import tensor_name

Names = str | list[tuple[str, ...]]  # of one tensor; or for each expert of those whose rows follow one another
BY_EXPERT = {  # family -> the module of experts, and the names of the parts of each weight
    "mixtral": ("block_sparse_moe.experts", {"gate_up": ("w1", "w3"), "down": ("w2",)}),
    "qwen3_moe": ("mlp.experts", {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}),
}
ROUTERS = {"mixtral": "block_sparse_moe.gate"}  # where a folder has another name than transformers' memory


def stored_names(path: str, cfg: Config, present: Container[str] = ()) -> Names:
    """Name the tensors of the leaf at ``path``: those that are written, or the stacked ones if ``present`` has them."""
    whole = tensor_name(path, cfg)
    match path.split("."):
        case ["layers", n, field] if cfg.has_experts(int(n)) and whole not in present:
            module, parts = BY_EXPERT.get(cfg.family, ("", {}))
            if field in parts:
                name = f"model.layers.{n}.{module}.{{}}.{{}}.weight".format
                return [tuple(name(e, part) for part in parts[field]) for e in range(cfg.num_experts)]
            if field == "router" and cfg.family in ROUTERS:
                return f"model.layers.{n}.{ROUTERS[cfg.family]}.weight"
    return whole


def flat(names: Names) -> list[str]:
    """Return the names in one list."""
    return [names] if isinstance(names, str) else [name for group in names for name in group]


def is_transposed(path: str, cfg: Config) -> bool:
    """Return True if a folder holds the weight of experts at ``path`` as [experts in out]."""
    match path.split("."):
        case ["layers", n, "gate_up" | "down"]:
            return cfg.has_experts(int(n)) and cfg.family not in BY_EXPERT
    return False


def tensors(path: str, cfg: Config, leaf: Lazy, dtype: torch.dtype | None = None) -> dict[str, Lazy]:
    """Return the tensors that a folder has for a leaf, by name, each a Lazy that reads or decodes it alone.

    ``leaf`` reads a tensor, or a Packed, which is decoded to ``dtype``; None is its own.
    """
    names, like = stored_names(path, cfg), leaf.like
    out = dtype if dtype is not None and isinstance(like, Packed) else like.dtype
    shape = full_shape(like) if isinstance(like, Packed) else tuple(like.shape)
    empty = lambda shape: torch.empty(shape, dtype=out, device="meta")
    if isinstance(names, str):
        turn = (lambda t: t.mT.contiguous()) if is_transposed(path, cfg) else (lambda t: t)
        return {names: Lazy(lambda: turn(_dense(leaf.read(), out)), turn(empty(shape)), device=leaf.device)}

    def rows(e: int, part: slice) -> Tensor:
        if leaf.parts:
            return _dense(leaf.parts[e].read(), out)[part]
        w = leaf.read()
        return dequantize_matrix(w, e, out)[part] if isinstance(w, Packed) else w[e, part]

    found = {}
    for e, group in enumerate(names):
        size = shape[1] // len(group)
        for i, name in enumerate(group):
            part = slice(i * size, (i + 1) * size)
            read = lambda e=e, part=part: rows(e, part)
            found[name] = Lazy(read, empty((size, shape[2])), device=leaf.device)
    return found


def joined(names: list[tuple[str, ...]], parts: dict[str, Lazy]) -> Lazy:
    """Return the Lazy of a stack whose experts are the rows of the tensors of a group, one below the other."""
    return lazy.stack([lazy.concatenate([parts[name] for name in group], _rows) for group in names])


def _rows(parts: list[Tensor | Packed]) -> Tensor | Packed:
    packed = [p for p in parts if isinstance(p, Packed)]
    dense = [p for p in parts if isinstance(p, Tensor)]
    if packed and dense:
        raise ValueError("gate and up of an expert are packed and dense, want both alike; quantise both")
    return concatenate(packed) if packed else torch.cat(dense)


def _dense(x: Tensor | Packed, dtype: torch.dtype) -> Tensor:
    return dequantize(x, dtype) if isinstance(x, Packed) else x
