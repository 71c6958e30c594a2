"""Llama and Qwen3 folders in Hugging Face's layout: one table of names, lazy opening, loading and saving.

    cfg, params = hf.lazy(folder)      # every leaf a fquant.lazy.Lazy; config and headers read, no weights
    cfg, params = hf.load(folder)      # every leaf a tensor
    hf.save(folder, cfg, params)
    hf.save(folder, cfg, lora.merge(base, adapters), dequantize=torch.bfloat16)

A folder holds ``config.json`` and either ``model.safetensors`` or ``model.safetensors.index.json`` with its shards. It
is read strictly: it must hold every tensor of the config in its shape, and no other. Every fault of a folder is a
ValueError that names the file and the tensor.
"""

import json
import math
from collections import UserDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fquant import packed, tree
from fquant.io import safetensors
from fquant.lazy import Lazy
from fquant.packed import Packed

from . import decoder
from .config import Config
from .hf_config import from_hf, to_hf

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Our path -> the name of Hugging Face's module. A tensor's name is its module's, then ``.weight`` or ``.bias``.
MODEL = {"embed": "model.embed_tokens", "final.norm": "model.norm", "final.head": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
}  # fmt: skip
MODEL_PATHS = {name: path for path, name in MODEL.items()}
LAYER_PATHS = {name: path for path, name in LAYER.items()}


def module_name(path: str) -> str:
    """Name the module that holds the weight at ``path``: "layers.0.q" -> "model.layers.0.self_attn.q_proj".

    Raises ValueError for a path that is no weight of a decoder.
    """
    if path in MODEL:
        return MODEL[path]
    match path.split("."):
        case ["layers", n, field] if n.isdecimal() and field in LAYER:
            return f"model.layers.{n}.{LAYER[field]}"
    raise ValueError(f"{path!r} is no weight of a decoder; want one of {', '.join(MODEL)}, layers.N.{'|'.join(LAYER)}")


def path_of(module_name: str) -> str | None:
    """Invert :func:`module_name`; None for a module without a weight of ours."""
    if module_name in MODEL_PATHS:
        return MODEL_PATHS[module_name]
    match module_name.split(".", 3):
        case ["model", "layers", n, field] if n.isdecimal() and field in LAYER_PATHS:
            return f"layers.{n}.{LAYER_PATHS[field]}"
    return None


def tensor_name(path: str) -> str:
    """Name the tensor at ``path`` in a file: "layers.0.q_bias" -> "model.layers.0.self_attn.q_proj.bias"."""
    weight = path.removesuffix("_bias")
    return module_name(weight) + (".weight" if weight == path else ".bias")


def lazy(folder: str | Path) -> tuple[Config, Any]:
    """Return the config and a tree of Lazy leaves in the dtypes of the files; read no weights."""
    folder = Path(folder)
    cfg = read_config(folder)
    wanted = {tensor_name(path): path for path in tree.paths(decoder.shapes(cfg))}
    found = _headers(folder)
    if missing := [name for name in wanted if name not in found]:
        fix = f"want the {len(wanted)} that {CONFIG} asks for; correct the config or fetch the checkpoint again"
        raise ValueError(f"{folder}: tensor {_first(missing)} is missing, {fix}")
    # Some versions of transformers have saved these tensors, and none uses them.
    unused = lambda name: name.endswith(".rotary_emb.inv_freq") or (cfg.tied and name == "lm_head.weight")
    if surplus := [name for name in sorted(found) if name not in wanted and not unused(name)]:
        fault = f"tensor {_first(surplus)} is not part of what {CONFIG} describes"
        raise ValueError(f"{found[surplus[0]].path}: {fault}; correct the config or remove the tensor")

    def leaf(path: str, like: Tensor) -> Lazy:
        header = found[name := tensor_name(path)]
        entry = header.tensors[name]
        if entry.shape != tuple(like.shape):
            fix = f"want {tuple(like.shape)}; correct {CONFIG} or fetch the checkpoint again"
            raise ValueError(f"{name} in {header.path} has shape {entry.shape}, {fix}")
        if entry.dtype not in FLOATS:
            raise ValueError(f"{name} in {header.path} is {entry.dtype}, want floats; use the unquantised checkpoint")
        read, stamp = partial(safetensors.read, header, name), partial(safetensors.stamp, header, name)
        return Lazy(read, like.to(entry.dtype), stamp)

    return cfg, tree.map_with_path(leaf, decoder.shapes(cfg))


def load(folder: str | Path, dtype: torch.dtype | None = None) -> tuple[Config, Any]:
    """Return the config and the tree of tensors, in ``dtype`` or, by default, in the dtypes of the files."""
    cfg, params = lazy(folder)  # each tensor is cast as it is read, which halves the peak of memory
    return cfg, tree.map_with_path(lambda _, leaf: leaf.read().to(dtype=dtype), params)


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
    if taken := [name for name in (CONFIG, SINGLE, INDEX) if (folder / name).exists()]:
        raise ValueError(f"{folder}: there is a {taken[0]} already, want a folder without a model; choose another")
    if dequantize not in (None, *FLOATS):
        raise TypeError(f"dequantize = {dequantize}, want one of {', '.join(map(str, FLOATS))}")
    leaves = _named(cfg, params, dequantize)
    written = lambda leaf: dequantize if dequantize and isinstance(leaf, Packed) else leaf.dtype
    config = to_hf(cfg) | {"torch_dtype": str(written(params.embed)).removeprefix("torch.")} | dict(extra or {})
    if from_hf(config) != cfg:
        raise ValueError(f"extra keys {', '.join(extra or {})} change the model; change the Config instead")
    nbytes = {name: math.prod(leaf.shape) * written(leaf).itemsize for name, leaf in leaves.items()}
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
        _write_json(folder / INDEX, {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": weight_map})
    _write_json(folder / CONFIG, config)


class _Dequantized(UserDict[str, Any]):
    """Tensors by name; a packed one is dequantised each time it is read, to its ``dtype``, and not kept."""

    dtype: torch.dtype | None = None

    def __getitem__(self, name: str) -> Tensor:
        leaf = self.data[name]
        return packed.dequantize(leaf, self.dtype) if isinstance(leaf, Packed) else leaf


def _named(cfg: Config, params: Any, dequantize: torch.dtype | None) -> dict[str, Tensor | Packed]:
    """Return the leaves of ``params`` by their names in a file, checked against the config."""
    out = {}
    for path, like in tree.items(decoder.shapes(cfg)):
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
        if tuple(leaf.shape) != tuple(like.shape):
            raise ValueError(f"{path} has shape {tuple(leaf.shape)}, want {tuple(like.shape)}; check the config")
        out[tensor_name(path)] = leaf
    paths = {path for path, _ in tree.items(params, is_leaf=lambda x: isinstance(x, Packed))}
    if surplus := paths - set(tree.paths(decoder.shapes(cfg))):
        raise ValueError(f"{min(surplus)}: not a parameter of this config; remove it or correct the config")
    return out


def _headers(folder: Path) -> dict[str, safetensors.Header]:
    """Map the name of each tensor to the header of its file."""
    if (folder / SINGLE).exists():
        if (folder / INDEX).exists():
            raise ValueError(f"{folder}: both {SINGLE} and {INDEX} are there, want one of them; remove the other")
        header = safetensors.header(folder / SINGLE)
        return dict.fromkeys(header.tensors, header)
    if not (folder / INDEX).exists():
        raise ValueError(f"{folder}: neither {SINGLE} nor {INDEX}; fetch one, or convert the weights to safetensors")
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{folder / INDEX}: want a table weight_map of tensor names to file names; fetch it again")
    headers = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise ValueError(f"{folder / INDEX}: {file!r} is no plain file name; shards are beside their index")
        if not (folder / file).is_file():
            count = sum(named == file for named in weight_map.values())
            raise ValueError(f"{folder / file} is missing, {INDEX} says it holds {count} tensors; fetch it again")
        headers[file] = safetensors.header(folder / file)
    found = [(name, file) for file, header in headers.items() for name in header.tensors]
    for name, file in weight_map.items():
        if name not in headers[file].tensors:
            got = f"it is in {dict(found)[name]}" if name in dict(found) else "no shard has it"
            raise ValueError(f"{folder / INDEX}: {name} should be in {file}, but {got}; fetch the checkpoint again")
    for name, file in found:
        if weight_map.get(name) != file:
            raise ValueError(f"{folder / file}: tensor {name} is not where {INDEX} says; fetch them again")
    return {name: headers[file] for name, file in weight_map.items()}


def read_config(folder: str | Path) -> Config:
    """Read the config of a folder that holds at least ``config.json``."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder, want one with {CONFIG} and weights; check the path")
    raw = _read_json(folder / CONFIG)
    with tree.at(str(folder / CONFIG)):
        return from_hf(raw)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file; fetch the checkpoint again")
    try:
        out = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON ({error}); fetch it again") from error
    if not isinstance(out, dict):
        raise ValueError(f"{path}: JSON {type(out).__name__}, want an object; fetch it again")
    return out


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with safetensors.replacing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def _first(names: list[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
