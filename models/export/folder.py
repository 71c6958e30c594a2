"""A folder of safetensors in Hugging Face's layout, written one tensor at a time.

Shards have the names that transformers gives them, and ``config.json`` comes last, so a folder without one is not
finished. Files beside the weights (tokenizer, generation config) are copied from the folder that the model came from.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fquant.io import safetensors
from fquant.lazy import Lazy
from fquant.tree import expect

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


def write(
    folder: str | Path,
    tensors: Mapping[str, Tensor | Lazy],
    config: Mapping[str, Any],
    max_shard_bytes: int = 5 << 30,
    done: Callable[[str], None] = lambda file: None,
) -> None:
    """Write ``tensors`` and ``config.json``; ``done(file)`` is called after each shard.

    A shard has at most ``max_shard_bytes``, or one tensor. Raises ValueError for a folder that holds a model.
    """
    folder = Path(folder)
    refuse_a_model(folder)
    like = lambda t: t.like if isinstance(t, Lazy) else t
    nbytes = {name: math.prod(like(t).shape) * like(t).itemsize for name, t in tensors.items()}
    files = shards(nbytes, max_shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    for file, names in files.items():
        safetensors.write(folder / file, {name: tensors[name] for name in names}, {"format": "pt"})
        done(file)
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX, index)
    write_json(folder / CONFIG, config)


def refuse_a_model(folder: Path) -> None:
    """Raise ValueError if ``folder`` holds a model."""
    taken = [name for name in (CONFIG, SINGLE, INDEX) if (folder / name).exists()]
    fault = f"{folder}: there is a {' and a '.join(taken)} already"
    expect(not taken, f"{fault}, want a folder without a model; choose another")


def shards(nbytes: Mapping[str, int], max_shard_bytes: int) -> dict[str, list[str]]:
    """Distribute tensors of ``nbytes``, in their order, over files of at most ``max_shard_bytes``."""
    parts: list[list[str]] = [[]]
    used = 0
    for name, size in nbytes.items():
        if parts[-1] and used + size > max_shard_bytes:
            parts.append([])
            used = 0
        parts[-1].append(name)
        used += size
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{i + 1:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts)}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as transformers does: two spaces, keys in order."""
    with safetensors.replacing(path) as file:
        file.write((json.dumps(content, indent=2, sort_keys=True) + "\n").encode())


def copy_companions(source: str | Path, folder: str | Path) -> list[str]:
    """Copy tokenizer and generation config from ``source`` to ``folder``; return their names."""
    found = [name for name in COMPANIONS if (Path(source) / name).is_file()]
    for name in found:
        shutil.copyfile(Path(source) / name, Path(folder) / name)
    return found
