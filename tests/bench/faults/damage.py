"""Bits that flip, files that are cut, and torn writes: every reader refuses the file by its name.

    flip    one bit of a file is another
    cut     a file ends early
    torn    a file has its new bytes up to some place, and behind it zeros or those of an earlier version

Files are those of a checkpoint that two ranks wrote, which one rank loads, the tensors of an adapter that PEFT loads
too, and those of a base. Files of JSON that other programs define, adapter_config.json and config.json, have no digest
and are not damaged here.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shard
from fquant import NF4_DQ, lora, optim, quantize, tree
from fquant import random as keys
from fquant.device import HOST
from fquant.io import peft
from models import decoder, hf
from shard import checkpoint
from tests.helpers import ranks
from tests.helpers.model_folders import TINY

WAYS = ("flip", "cut", "torn")
PLACES = (
    "bytes", "header", "size", "data", "got dtype", "got unknown dtype", "got shape",
    checkpoint.MANIFEST,  # which is one piece
)  # fmt: skip
PROJECTIONS = r"layers\.\d+\.(q|k|v|o|gate|up|down)"


@dataclass
class Found:
    """Damages by kind of file, those refused by name, those refused with the place too, and those that were missed."""

    damages: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    placed: int = 0  # with the tensor, the bytes or the part of the file
    missed: list[str] = field(default_factory=list)


def measure(root: Path, count: int, seed: int) -> Found:
    """Damage files in ``root``, a new folder, ``count`` times, and read them; a base is of some MiB."""
    for version in (0, 1):
        ranks.run(2, _write, str(root), version)
    (found,) = ranks.run(1, _read, str(root), count, seed, timeout=60 + count)
    return found


def _state(version: int) -> Any:
    """Return a state of adapters, moments, codes and a counter, of which each version has other values."""
    params = decoder.init(TINY, keys.key(version))
    adapters = lora.init(params, r"layers\.\d+\.(q|v)", rank=4, key=version)
    _, moments = optim.adamw(1e-3).update(adapters, optim.adamw(1e-3).init(adapters), adapters)
    codes = tree.map_at(PROJECTIONS, lambda w: quantize(w, NF4_DQ), params).layers[0]
    return adapters, moments, codes, torch.tensor(version, dtype=torch.int64, device=HOST)


def _write(root: str, version: int) -> None:
    """Write a checkpoint, an adapter and a base."""
    mesh, rules, folder = shard.mesh(fsdp=dist.get_world_size()), shard.Rules(), Path(root) / str(version)
    checkpoint.save(folder / "step-1", _state(version), mesh, rules)
    if dist.get_rank() == 0:
        peft.save(folder / "adapter", _state(version)[0], partial(hf.module_name, cfg=TINY), base_model="tiny")
        hf.save(folder / "base", TINY, decoder.init(TINY, keys.key(version), torch.bfloat16))


def _read(root: str, count: int, seed: int) -> Found:
    """Damage each kind of file in turn and each way, and put it right again."""
    mesh, rules, folder, draw, found = shard.mesh(fsdp=1), shard.Rules(), Path(root) / "0", random.Random(seed), Found()
    like = tree.map(torch.zeros_like, _state(0))
    readers: dict[str, tuple[str, Callable[[], object]]] = {
        "checkpoint": ("step-1/*", lambda: checkpoint.load(folder / "step-1", like, mesh, rules)),
        "adapter": ("adapter/*.safetensors", lambda: peft.load(folder / "adapter", partial(hf.path_of, cfg=TINY))),
        "base": ("base/*.safetensors", lambda: hf.load(folder / "base")),
    }
    files = {kind: sorted(folder.glob(pattern)) for kind, (pattern, _) in readers.items()}
    for _, read in readers.values():
        read()
    turns = _turns(list(readers), draw)
    for _ in range(count):
        kind, way = next(turns)
        path = draw.choice(files[kind])
        good = path.read_bytes()
        bad, what = _damaged(way, good, (Path(root) / "1" / path.relative_to(folder)).read_bytes(), draw)
        found.damages[kind] = found.damages.get(kind, 0) + 1
        path.write_bytes(bad)
        try:
            readers[kind][1]()
            found.missed.append(f"{kind}: {path.name}: {what}: read without a word")
        except ValueError as error:
            named = path.name in str(error)
            found.refused += named
            found.placed += named and any(place in str(error) for place in PLACES)
            if not named:
                found.missed.append(f"{kind}: {path.name}: {what}: refused as {error}")
        except Exception as error:  # a reader that fails by chance does not refuse
            found.missed.append(f"{kind}: {path.name}: {what}: {type(error).__name__}: {error}")
        path.write_bytes(good)
    return found


def _turns(kinds: list[str], draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yield every kind of file with every way of damage, in another order in each round."""
    every = [(kind, way) for kind in kinds for way in WAYS]
    while True:
        draw.shuffle(every)
        yield from every


def _damaged(way: str, good: bytes, other: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Return the bytes of neither version of a file and what was done; ``other`` is the version that is not there."""
    while True:
        at = draw.randrange(len(good))
        if way == "flip":
            bit = draw.randrange(8)
            return good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :], f"bit {bit} of byte {at} flipped"
        if way == "cut":
            return good[:at], f"cut to {at} bytes"
        rest = other if draw.random() < 0.5 and len(other) == len(good) else bytes(len(good))
        if (torn := good[:at] + rest[at:]) not in (good, other):  # two versions may begin alike
            return torn, f"torn at byte {at}"
