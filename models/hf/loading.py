"""Loading of Hugging Face folders: trees of tensors and Packed, or of Lazy leaves that read one of them each."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fquant import lazy as lazies
from fquant import tree
from fquant.device import HOST
from fquant.io import safetensors
from fquant.io.files.reading import inside
from fquant.lazy import Lazy
from fquant.packed import Packed

from .. import decoder
from ..config import Config
from . import packed, stacks
from .folder import CONFIG, first, headers, read_config
from .quantized import Quantized

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEAD = "lm_head.weight"  # some versions of transformers save it beside an embedding to which it is tied
CHUNK = 16 << 20  # bytes that are compared at a time


def lazy(folder: str | Path, device: torch.device = HOST) -> tuple[Config, Any]:
    """Return the config and a tree of Lazy leaves in the dtypes of the files; read no weights.

    Leaves read to ``device``, so ``quantize`` of a leaf quantises there, with memory of one tensor beside the results.
    A quantised weight of any method of ``fquant.io.quantized`` is a Lazy that reads a Packed.
    """
    folder = Path(folder)
    if inside(folder / packed.PACKED).exists():
        return packed.lazy(folder, device)
    cfg = read_config(folder)
    found = headers(folder)
    names = {path: stacks.stored_names(path, cfg, found) for path in tree.paths(decoder.shapes(cfg))}
    wanted = dict.fromkeys(name for of_leaf in names.values() for name in stacks.flat(of_leaf))
    its = Quantized.of(folder, found, device)
    parts = {name: its.names(name) if its else () for name in wanted}
    if missing := [name for name in wanted if not parts[name] and name not in found]:
        fix = f"want the {len(wanted)} that {CONFIG} asks for; correct the config or fetch the checkpoint again"
        raise ValueError(f"{folder}: tensor {first(missing)} is missing, {fix}")
    known = {name for name in wanted if not parts[name]}.union(*parts.values())
    unused = lambda name: (
        name.endswith(".rotary_emb.inv_freq") or (cfg.tied and name == HEAD) or (its and its.is_zero_bias(name))
    )
    if surplus := [name for name in sorted(found) if name not in known and not unused(name)]:
        fault = f"tensor {first(surplus)} is not part of what {CONFIG} describes"
        raise ValueError(f"{found[surplus[0]].path}: {fault}; correct the config or remove the tensor")

    def leaf(path: str, like: Tensor) -> Lazy:
        of_leaf, *shape = names[path], *like.shape
        if isinstance(of_leaf, str):
            turned = stacks.is_transposed(path, cfg) and not parts[of_leaf]  # packed weights are not
            part = one(path, of_leaf, like.mT if turned else like)
            return lazies.map(lambda t: t.mT.contiguous(), part) if turned else part
        rows = like.new_empty(shape[1] // len(of_leaf[0]), shape[2])
        return stacks.joined(of_leaf, {name: one(path, name, rows) for name in stacks.flat(of_leaf)})

    def one(path: str, name: str, like: Tensor) -> Lazy:
        if its and parts[name]:
            return its.leaf(name, tuple(like.shape))
        header = found[name]
        entry = header.tensors[name]
        if entry.shape != tuple(like.shape):
            fix = f"want {tuple(like.shape)}; correct {CONFIG} or fetch the checkpoint again"
            raise ValueError(f"{name} in {header.path} has shape {entry.shape}, {fix}")
        if entry.dtype not in FLOATS:
            fix = "want floats, or a quantization_config in the config that says what it is"
            raise ValueError(f"{name} in {header.path} is {entry.dtype}, {fix}")
        rows = partial(safetensors.read, header, name, device=device)
        stamp = partial(safetensors.stamp, header, name)
        read: Callable[[], Tensor] = rows
        if path == "embed" and cfg.tied and HEAD in found:
            read = partial(_read_tied, header, name, found[HEAD], device)
        return Lazy(read, like.to(entry.dtype), stamp, rows if read is rows else None, device=device)

    return cfg, tree.map_with_path(leaf, decoder.shapes(cfg))


def _read_tied(header: safetensors.Header, name: str, head: safetensors.Header, device: torch.device) -> Tensor:
    """Read the embedding; raise ValueError if the file has another head, which transformers would use."""
    embed = safetensors.read(header, name, device=device)
    rows, entry = max(1, CHUNK // max(1, embed.nbytes // len(embed))), head.tensors[HEAD]
    alike = (entry.shape, entry.dtype) == (tuple(embed.shape), embed.dtype)
    for start in range(0, len(embed), rows):
        part = slice(start, min(start + rows, len(embed)))
        if not alike or not safetensors.read(head, HEAD, part, device).equal(embed[part]):
            fix = "set tie_word_embeddings to false, or remove the tensor"
            raise ValueError(f"{HEAD} in {head.path} differs from {name}, to which the config ties it; {fix}")
    return embed


def load(folder: str | Path, dtype: torch.dtype | None = None, device: torch.device = HOST) -> tuple[Config, Any]:
    """Return the config and the tree of tensors on ``device``, in ``dtype`` or, by default, in the dtypes of the files.

    Quantised weights are Packed, which decode to that dtype.
    """
    cfg, params = lazy(folder, device)  # each tensor is cast as it is read, which halves the peak of memory
    cast = lambda x: replace(x, dtype=dtype or x.dtype) if isinstance(x, Packed) else x.to(dtype=dtype)
    return cfg, tree.map_with_path(lambda _, leaf: cast(leaf.read()), params)
