"""Write a checkpoint: a copy on the host, a file a rank, and at last the manifest and the folder's name."""

import json
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fquant.compile import all_gather_text
from fquant.device import HOST
from fquant.io import safetensors, tree_json
from fquant.io.files.replacing import sync_folder
from fquant.tree import expect

from .. import agree
from ..rules import Rules
from . import manifest
from .local_ranges import local_ranges, outline
from .manifest import SHARDING, VERSION, described, header_digest

PATIENCE = 600.0  # seconds that rank 0 waits for the files of others


@dataclass
class Writing:
    """A checkpoint that is being written."""

    folder: Path
    thread: threading.Thread
    errors: list[Exception] = field(default_factory=list)


def save(folder: str | Path, state: Any, mesh: DeviceMesh, rules: Rules) -> None:
    """Write the tree ``state``, placed or local, to the new ``folder``; every rank calls it.

    Raises ValueError on every rank if their trees differ, if the folder exists, or if a rank cannot write.
    """
    finish(begin(folder, state, mesh, rules))


def begin(folder: str | Path, state: Any, mesh: DeviceMesh, rules: Rules) -> Writing:
    """Copy what this rank writes of ``state`` to the host, and start to write it; raises as :func:`save`."""
    folder, rank = Path(folder), dist.get_rank()
    ranges = local_ranges(state, mesh, rules)
    text, _ = tree_json.encode(outline(state))
    facts = {
        "folder": str(folder),
        "tree": text,
        "tensors": repr([(it.name, it.shape, it.values.dtype) for it in ranges]),
    }
    agree.same("checkpoint", facts)
    temporary = folder.with_name(f".{folder.name}.{all_gather_text(secrets.token_hex(4))[0]}.tmp")

    def make() -> None:
        expect(not folder.exists(), f"{folder}: exists, wanted a new folder; a checkpoint is never written over")
        temporary.mkdir(parents=True, exist_ok=True)

    agree.attempt("checkpoint", make)
    mine = {it.name: it for i, it in enumerate(ranges) if i % it.copies == it.copy and len(it.values)}
    staged = {name: it.values.to(HOST, copy=True) for name, it in mine.items()}
    starts = {name: it.start for name, it in mine.items()}
    content = {"version": VERSION, "tree": text, "tensors": {it.name: described(it) for it in ranges}}
    names = [_file(i, dist.get_world_size()) for i in range(dist.get_world_size())]

    def write() -> None:
        try:
            _write(temporary / names[rank], staged, starts)
            if rank == 0:
                _commit(temporary, folder, names, content)
        except Exception as error:  # raised by finish
            writing.errors.append(error)
            if rank:
                (temporary / f"{names[rank]}.failed").write_text(f"{type(error).__name__}: {error}")

    writing = Writing(folder, threading.Thread(target=write, name=f"checkpoint {folder.name}"))
    writing.thread.start()
    return writing


def finish(writing: Writing) -> None:
    """Wait until a checkpoint is on disk; every rank calls it. Raises ValueError on every rank if it is not."""
    writing.thread.join()

    def check() -> None:
        if writing.errors:
            raise ValueError(f"{writing.folder}: {writing.errors[0]}") from writing.errors[0]

    agree.attempt("checkpoint", check)


def _file(rank: int, ranks: int) -> str:
    return f"rank-{rank}-of-{ranks}.safetensors"


def _write(path: Path, tensors: Mapping[str, Tensor], starts: Mapping[str, int]) -> None:
    offsets = {name: {"saved_offsets": [start]} for name, start in starts.items()}
    safetensors.write(path, tensors, {"format": "pt", SHARDING: json.dumps(offsets)})


def _commit(temporary: Path, folder: Path, names: list[str], content: dict[str, Any]) -> None:
    """Wait for the files of all ranks, write the manifest, and give the folder its name."""
    for name in names:
        path, failed, began = temporary / name, temporary / f"{name}.failed", time.monotonic()
        while not path.exists():
            expect(not failed.exists(), f"{name}: {failed.read_text() if failed.exists() else ''}")
            expect(time.monotonic() - began < PATIENCE, f"{name}: not written in {PATIENCE:.0f} s; is its rank alive?")
            time.sleep(0.002)
    files = {
        name: {"bytes": (temporary / name).stat().st_size, "header": header_digest(temporary / name)} for name in names
    }
    manifest.write(temporary, {**content, "files": files})
    temporary.rename(folder)
    sync_folder(folder.parent)
