"""The files of a Hugging Face folder: its config, its index, the headers of its shards."""

import json
from pathlib import Path
from typing import Any

import torch

from fquant import tree
from fquant.io import quantized, safetensors
from fquant.io.files.reading import inside, json_object

from ..config import Config
from .config import from_hf

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def headers(folder: Path) -> dict[str, safetensors.Header]:
    """Map the name of each tensor to the header of its file."""
    single, index = inside(folder / SINGLE), inside(folder / INDEX)
    if single.exists():
        if index.exists():
            raise ValueError(f"{folder}: both {SINGLE} and {INDEX} are there, want one of them; remove the other")
        header = safetensors.header(single)
        return dict.fromkeys(header.tensors, header)
    if not index.exists():
        raise ValueError(f"{folder}: neither {SINGLE} nor {INDEX}; fetch one, or convert the weights to safetensors")
    weight_map = json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(f"{folder / INDEX}: want a table weight_map of tensor names to file names; fetch it again")
    headers = {}
    for file in sorted(set(weight_map.values())):
        if file in ("", "..") or Path(file).name != file or not file.isprintable() or len(file.encode()) > 255:
            raise ValueError(f"{folder / INDEX}: {file!r:.80} is no plain file name; shards are beside their index")
        if not inside(folder / file).is_file():
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
    raw = json_object(folder / CONFIG)
    with tree.at(str(folder / CONFIG)):
        return from_hf(raw)


def read_method(folder: Path) -> tuple[quantized.Method, torch.dtype | None] | None:
    """Return the method by which the weights of a folder are quantised, and the model's dtype; None if they are not.

    The dtype is None if the config does not say it.
    """
    raw = json_object(folder / CONFIG)
    if raw.get("quantization_config") is None:
        return None
    with tree.at(str(folder / CONFIG)):
        named = raw.get("dtype", raw.get("torch_dtype"))
        dtype = DTYPES.get(str(named).removeprefix("torch."))
        fault = f"torch_dtype = {named!r:.80}, want one of {', '.join(DTYPES)}"
        tree.expect(named is None or dtype is not None, f"{fault}, because the weights are quantised")
        return quantized.method(raw["quantization_config"]), dtype


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON object atomically."""
    with safetensors.replacing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def first(names: list[str]) -> str:
    """Return the first of some names, and the count of the others, for a message."""
    return f"{names[0]:.200}" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
