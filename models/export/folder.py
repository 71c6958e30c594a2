"""A folder of safetensors in Hugging Face's layout, written one tensor at a time.

Shards have the names that transformers gives them, and ``config.json`` comes last, so a folder without one is not
finished. Files beside the weights (tokenizer, generation config) are copied from the folder that the model came from.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fquant import tree
from fquant.device import HOST
from fquant.io import safetensors
from fquant.io.files.reading import inside
from fquant.lazy import Lazy
from fquant.tree import expect

from .leaves import FLOATS

Done: TypeAlias = Callable[[int, int], None]  # is called with the finished tensors and all
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
    resume: bool = False,
    done: Done = lambda finished, total: None,
) -> None:
    """Write ``tensors`` and ``config.json``; ``done(finished, total)`` is called after each tensor.

    A shard has at most ``max_shard_bytes``, or one tensor. With ``resume`` the shards that an interrupted call has
    written are kept, once :func:`verify` has compared a sample of them. Raises ValueError for a folder that holds a
    model, or with ``resume`` a whole one, or a shard of something else. Raises ValueError for a number that is not
    finite.
    """
    folder, total, finished = Path(folder), len(tensors), 0
    refuse_a_model(folder, resume)
    nbytes = {name: math.prod(_like(t).shape) * _like(t).itemsize for name, t in tensors.items()}
    files = shards(nbytes, max_shard_bytes)
    folder.mkdir(parents=True, exist_ok=True)

    def counted(name: str, t: Tensor | Lazy) -> Any:
        nonlocal finished
        out = check_finite(name, t.read() if isinstance(t, Lazy) else t)
        finished += 1
        done(finished, total)
        return out

    for file, names in files.items():
        if resume and (folder / file).exists():
            verify(folder / file, {name: tensors[name] for name in names})
            finished += len(names)
            done(finished, total)
            continue
        lazy = {name: Lazy(partial(counted, name, t), _like(t)) for name in names for t in [tensors[name]]}
        safetensors.write(folder / file, lazy, {"format": "pt"})
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX, index)
    write_json(folder / CONFIG, config)


def check_finite(name: str, x: Any) -> Any:
    """Return a tensor or a Packed; raise ValueError, with the place, if a number of a float tensor is not finite."""
    for t in tree.leaves(x):
        if t.dtype in FLOATS and (found := not_finite(t)):
            raise ValueError(f"{name}: got {found}, wanted finite weights; use another copy or dtype")
    return x


def not_finite(t: Tensor) -> str | None:
    """Return the first number of a float tensor that is not finite, with its place; None if there is none."""
    if not t.numel() or all(map(math.isfinite, torch.aminmax(t))):
        return None
    first = tuple(int(i) for i in (~t.isfinite()).nonzero()[0])
    return f"{float(t[first])} at {list(first)}"


def verify(file: Path, tensors: Mapping[str, Tensor | Lazy], count: int = 4, rows: int = 16) -> int:
    """Compare up to ``rows`` rows of ``count`` tensors of a file with their sources; return the number of rows.

    The file must hold exactly ``tensors``, in their dtypes and shapes. Raises ValueError that names the tensor.
    """
    header = safetensors.header(file)
    found = {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()}
    wanted = {name: (_like(t).dtype, tuple(_like(t).shape)) for name, t in tensors.items()}
    other = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    fault = f"{file}: {''.join(other[:1])} is not what this export writes"
    expect(not other, f"{fault}; use the options of the interrupted run, or another folder")
    compared = 0
    for name in list(wanted)[:: -(-len(wanted) // count)]:
        source = tensors[name]
        t = source.read() if isinstance(source, Lazy) else source
        got = safetensors.read(header, name)
        t, got = t.reshape(max(1, t.shape[0] if t.dim() else 1), -1), got.reshape(max(1, len(t) if t.dim() else 1), -1)
        some = torch.arange(0, len(t), -(-len(t) // rows), device=HOST)
        same = t.cpu()[some].contiguous().view(torch.uint8).equal(got[some].contiguous().view(torch.uint8))
        expect(same, f"{file}: {name} has other values than its source; remove the file and export again")
        compared += len(some)
    return compared


def verify_all(folder: str | Path, tensors: Mapping[str, Tensor | Lazy], max_shard_bytes: int = 5 << 30) -> int:
    """Call :func:`verify` for every shard of a folder that :func:`write` has written; return the number of rows."""
    nbytes = {name: math.prod(_like(t).shape) * _like(t).itemsize for name, t in tensors.items()}
    files = shards(nbytes, max_shard_bytes)
    return sum(verify(Path(folder) / file, {name: tensors[name] for name in names}) for file, names in files.items())


def refuse_a_model(folder: Path, resume: bool = False) -> None:
    """Raise ValueError if ``folder`` holds a model, or with ``resume`` a whole one."""
    taken = [name for name in (CONFIG, *(() if resume else (SINGLE, INDEX))) if (folder / name).exists()]
    taken += [] if resume else sorted(path.name for path in folder.glob("model-*-of-*.safetensors"))[:1]
    fault = f"{folder}: there is a {' and a '.join(taken)} already"
    expect(not taken, f"{fault}, want a folder without a model; choose another")


def _like(t: Tensor | Lazy) -> Tensor:
    return t.like if isinstance(t, Lazy) else t


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
    """Copy tokenizer and generation config from ``source`` to ``folder``; return their names.

    A copy can be read by no more people than its source. Raises ValueError for a link that leaves ``source``.
    """
    found = {name: path for name in COMPANIONS if (path := inside(Path(source) / name)).exists()}
    for name, path in found.items():
        with path.open("rb") as original, safetensors.replacing(Path(folder) / name) as copy:
            shutil.copyfileobj(original, copy)
            modes = [os.fstat(file.fileno()).st_mode for file in (original, copy)]
            os.fchmod(copy.fileno(), modes[1] & (modes[0] | 0o600) & 0o777)
    return list(found)
