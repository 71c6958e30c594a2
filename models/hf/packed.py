"""Folders of packed decoders: ``config.json``, and all parameters as one tree in ``packed.safetensors``.

    packed.save(folder, cfg, tree.map_at(r"layers\\..*", quantise, params))      # leaves: tensors, Packed, or Lazy
    cfg, params = hf.lazy(folder)                                               # the same leaves, Lazy

Other programs read neither the file nor a part of it: its names are paths of ours, and codes are in our layout. So
``config.json`` is that of the dense model, and the tree says how each weight is packed.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fquant import tree
from fquant.device import HOST
from fquant.grouped_products import full_shape
from fquant.io import lazy_tree
from fquant.io.files.reading import inside
from fquant.lazy import Lazy
from fquant.packed import Packed

from .. import decoder
from ..config import Config
from .config import from_hf, to_hf
from .folder import CONFIG, INDEX, SINGLE, read_config, write_json

PACKED = "packed.safetensors"
_is_leaf = lambda x: isinstance(x, Packed | Lazy)


def save(
    folder: str | Path,
    cfg: Config,
    params: Any,
    extra: Mapping[str, Any] | None = None,
    done: Callable[[str], None] = lambda path: None,
    resume: bool = False,
) -> None:
    """Write a folder that ``hf.lazy`` and ``hf.load`` read; ``config.json`` comes last.

    A Lazy is read once, when its turn comes, and not kept. ``extra`` are keys of ``config.json`` that do not change the
    model; ``done(path)`` is called after each leaf. ``resume`` continues an interrupted call, and reads a few of the
    leaves that it has written to compare them. Raises ValueError, before anything is written, for a folder that holds a
    model. So it does for a leaf that is missing, of another shape than the config's, or not part of it.
    """
    folder = Path(folder)
    if taken := [name for name in (CONFIG, SINGLE, INDEX, PACKED) if (folder / name).exists()]:
        raise ValueError(f"{folder}: there is a {taken[0]} already, want a folder without a model; choose another")
    check(cfg, params)
    dtype = content(tree.get(params, "embed")).dtype
    config = to_hf(cfg) | {"torch_dtype": str(dtype).removeprefix("torch.")} | dict(extra or {})
    if from_hf(config) != cfg:
        raise ValueError(f"extra keys {', '.join(extra or {})} change the model; change the Config instead")
    folder.mkdir(parents=True, exist_ok=True)
    lazy_tree.save(folder / PACKED, params, done, resume)
    write_json(folder / CONFIG, config)


def lazy(folder: str | Path, device: torch.device = HOST) -> tuple[Config, Any]:
    """Return the config and the tree of Lazy leaves of a folder that :func:`save` wrote; read no weights.

    Leaves read to ``device``.
    """
    folder = Path(folder)
    cfg, params = read_config(folder), lazy_tree.lazy(inside(folder / PACKED), device)
    with tree.at(str(folder / PACKED)):
        check(cfg, params)
    return cfg, params


def check(cfg: Config, params: Any) -> None:
    """Raise ValueError unless ``params`` has a tensor or Packed, or a Lazy of one, of every shape that ``cfg`` asks."""
    leaves = dict(tree.items(params, is_leaf=_is_leaf))
    for path, like in tree.items(decoder.shapes(cfg)):
        if path not in leaves:
            raise ValueError(f"{path}: missing from the parameters, but the config asks for it; add it")
        got = content(leaves.pop(path))
        if not isinstance(got, Tensor | Packed) or not got.dtype.is_floating_point:
            raise ValueError(f"{path}: got {type(got).__name__}, want floats or a Packed; merge adapters first")
        shape = full_shape(got) if isinstance(got, Packed) else tuple(got.shape)
        if shape != tuple(like.shape):
            raise ValueError(f"{path}: got shape {shape}, want {tuple(like.shape)}; check the config")
    if leaves:
        raise ValueError(f"{min(leaves)}: not a parameter of this config; remove it or correct the config")


def content(leaf: Any) -> Any:
    """Return the ``like`` of a Lazy, and any other leaf itself."""
    return leaf.like if isinstance(leaf, Lazy) else leaf
