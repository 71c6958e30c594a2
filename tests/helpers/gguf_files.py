"""Weights of GGUF files as llama.cpp's own Python package reads them."""

import gguf as package
import torch
from gguf import quants

from fquant import tree
from fquant.lazy import Lazy
from models.export import gguf


def undo(path, w, cfg):
    """Undo llama.cpp's order of rows, as transformers' LlamaTensorProcessor does."""
    if not gguf.architecture(cfg).rotates_neighbours or path.removesuffix("_bias")[-2:] not in (".q", ".k"):
        return w
    heads = cfg.num_kv_heads if path.removesuffix("_bias").endswith("k") else cfg.num_heads
    return w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).swapaxes(2, 1).reshape(w.shape)


def back(path, cfg, params):
    """The parameters that the package reads."""
    found = {t.name: t for t in package.GGUFReader(path).tensors}

    def leaf(at, _):
        t = found[gguf.tensor_name(at)]
        w = quants.dequantize(t.data, t.tensor_type).reshape([int(n) for n in t.shape[::-1]])
        return torch.from_numpy(undo(at, w, cfg).copy())

    return tree.map_with_path(leaf, params, is_leaf=lambda x: hasattr(x, "format") or isinstance(x, Lazy)), found
