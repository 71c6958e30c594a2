"""The leaves of a decoder, checked against its config and read one at a time."""

import re
from typing import Any

import torch
from torch import Tensor

from fquant import lazy, packed, tree
from fquant.grouped_products import full_shape
from fquant.lazy import Lazy
from fquant.packed import Packed

from .. import decoder
from ..config import Config

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LINEARS = re.compile(r"layers\.\d+\.(q|k|v|qkv|o|gate|up|gate_up|down)")  # the paths of what folders quantise
_is_leaf = lambda x: isinstance(x, Packed | Lazy)


def checked(cfg: Config, params: Any) -> dict[str, Lazy]:
    """Return every leaf of ``params`` by its path, as a Lazy that reads a tensor or a Packed.

    Raises ValueError for a leaf that is missing, of another shape than the config's, or not part of it. Raises
    TypeError for a leaf that is no tensor, Packed or Lazy of floats.
    """
    out: dict[str, Lazy] = {}
    for path, like in tree.items(decoder.shapes(cfg)):
        try:
            leaf = tree.get(params, path)
        except KeyError:
            raise ValueError(f"{path}: missing from the parameters, but the config asks for it; add it") from None
        content = leaf.like if isinstance(leaf, Lazy) else leaf
        if not isinstance(content, Tensor | Packed):
            raise TypeError(
                f"{path}: got a {type(content).__name__}, wanted a tensor or a Packed; merge adapters first"
            )
        if content.dtype not in FLOATS:
            raise TypeError(f"{path}: got {content.dtype}, wanted floats; cast it first")
        shape = full_shape(content) if isinstance(content, Packed) else tuple(content.shape)
        if shape != tuple(like.shape):
            raise ValueError(f"{path}: got shape {shape}, wanted {tuple(like.shape)}; check the config")
        out[path] = leaf if isinstance(leaf, Lazy) else Lazy(lambda leaf=leaf: leaf, tree.map(_meta, leaf))
    if surplus := set(tree.paths(params, is_leaf=_is_leaf)) - out.keys():
        raise ValueError(f"{min(surplus)}: not a parameter of this config; remove it or correct the config")
    return out


def refuse_experts(cfg: Config, kind: str) -> None:
    """Raise ValueError for a config with experts, whose stacked weights a folder or file of this ``kind`` has not."""
    fix = "export a plain folder (models.export.dense)"
    tree.expect(not cfg.num_experts, f"num_experts = {cfg.num_experts}: {kind} of experts are not implemented; {fix}")


def is_linear(path: str, leaf: Lazy) -> bool:
    """Return True for a weight that folders quantise; raise ValueError for a matrix that is not known here."""
    if LINEARS.fullmatch(path):
        return True
    known = path in ("embed", "final.head") or len(leaf.like.shape) < 2
    tree.expect(known, f"{path}: a matrix that is not known here; export a plain folder or a GGUF instead")
    return False


def dense(leaf: Lazy) -> Lazy:
    """Return a Lazy that reads a tensor: a Packed is dequantised to its dtype."""
    return lazy.map(packed.dequantize, leaf) if isinstance(leaf.like, Packed) else leaf


def _meta(t: Tensor) -> Tensor:
    return t.to("meta")
