"""Loading of encoders from Hugging Face folders: trees of tensors, or of Lazy leaves that read one tensor each."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fquant import tree
from fquant.device import HOST
from fquant.io import safetensors
from fquant.io.files.reading import json_object
from fquant.lazy import Lazy

from ..encoder.config import EncoderConfig
from ..encoder.params import shapes
from ..hf.folder import CONFIG, first, headers
from ..hf.loading import FLOATS
from .config import HEADS, architecture_heads, from_hf
from .families import FAMILIES
from .names import copies, modern, module_name, tensor_name

Found = dict[str, tuple[safetensors.Header, str]]  # name today -> header of its file, and name there
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")  # numbers from 0, and zeros, in old files


def lazy(folder: str | Path, device: torch.device = HOST) -> tuple[EncoderConfig, Any]:
    """Return the config and a tree of Lazy leaves in the dtypes of the files; read no weights.

    Leaves read to ``device``. The config has the heads that the file has, and must have those of its architecture. A
    bare encoder may lack its pooler. Raises ValueError, by file and tensor, for anything that is missing, unknown, or
    of another shape.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder, want one with {CONFIG} and weights; check the path")
    raw = json_object(folder / CONFIG)
    with tree.at(str(folder / CONFIG)):
        cfg = from_hf(raw)
    family = FAMILIES[cfg.family]
    found = _modern(folder, headers(folder))
    prefix = family.prefix if any(name.startswith(family.prefix) for name in found) else ""
    has = lambda path: any(name.startswith(module_name(path, cfg, prefix) + ".") for name in found)
    weights = {head: f"heads.{weight}" for head, weight in HEADS.items() if weight in family.heads}
    if "pooler" in family.architectures["Model"]:
        weights["pooler"] = "heads.pooler"
    heads = {head for head, path in weights.items() if has(path)}
    if raw.get("architectures") not in (None, [f"{family.classes}Model"]):
        heads |= set(architecture_heads(cfg.family, raw["architectures"]))
    with tree.at(str(folder / CONFIG)):
        cfg = from_hf(raw, heads)
    names = {path: tensor_name(path, cfg, prefix) for path in tree.paths(shapes(cfg))}
    bias = f"{family.heads['decoder']}.bias"
    others = copies(family) if cfg.masked_lm else {}
    twice = {name: path for name, path in others.items() if name in found and name not in names.values()}
    if bias in twice and (family.bias not in found or not cfg.tied):  # untied, transformers 5 never reads the other
        names["heads.decoder_bias"] = bias
        twice.pop(bias)
    if missing := [name for name in names.values() if name not in found]:
        fix = f"want the {len(names)} that {CONFIG} asks for; correct the config or fetch the checkpoint again"
        raise ValueError(f"{folder}: tensor {first(missing)} is missing, {fix}")
    known = {*names.values(), *twice, *([family.bias] if cfg.masked_lm else []), *(prefix + name for name in BUFFERS)}
    if surplus := sorted(found.keys() - known):
        fault = f"tensor {first([found[name][1] for name in surplus])} is not part of what {CONFIG} describes"
        raise ValueError(f"{found[surplus[0]][0].path}: {fault}; correct the config or remove the tensor")

    def leaf(path: str, like: Tensor) -> Lazy:
        header, name = found[names[path]]
        entry = header.tensors[name]
        if entry.shape != tuple(like.shape):
            fix = f"want {tuple(like.shape)}; correct {CONFIG} or fetch the checkpoint again"
            raise ValueError(f"{name} in {header.path} has shape {entry.shape}, {fix}")
        if entry.dtype not in FLOATS:
            raise ValueError(f"{name} in {header.path} is {entry.dtype}, want floats; use the unquantised checkpoint")
        read = partial(safetensors.read, header, name, device=device)
        stamp = partial(safetensors.stamp, header, name)
        for other, of in twice.items():
            if of == path:
                read = partial(_read_twice, found[names[path]], found[other], device)
        return Lazy(read, like.to(entry.dtype), stamp, device=device)

    return cfg, tree.map_with_path(leaf, shapes(cfg))


def _modern(folder: Path, found: dict[str, safetensors.Header]) -> Found:
    """Map today's names to files and the names there; raise ValueError for a tensor under both names."""
    out: Found = {}
    for name, header in found.items():
        if (today := modern(name)) in out:
            raise ValueError(f"{folder}: there are both {out[today][1]} and {name}, want one of them; remove the other")
        out[today] = header, name
    return out


def _read_twice(
    one: tuple[safetensors.Header, str], other: tuple[safetensors.Header, str], device: torch.device
) -> Tensor:
    """Read a tensor that the folder holds twice; raise ValueError if the two differ."""
    ours, copy = (safetensors.read(header, name, device=device) for header, name in (one, other))
    if ours.dtype != copy.dtype or not ours.equal(copy):
        fix = "set tie_word_embeddings to false, or remove the tensor"
        raise ValueError(f"{other[1]} in {other[0].path} differs from {one[1]}, to which the config ties it; {fix}")
    return ours


def load(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device = HOST
) -> tuple[EncoderConfig, Any]:
    """Return the config and the tree of tensors on ``device``, in ``dtype`` or, by default, the dtypes of the files."""
    cfg, params = lazy(folder, device)
    return cfg, tree.map_with_path(lambda _, leaf: leaf.read().to(dtype=dtype), params)
