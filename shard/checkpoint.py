"""Checkpoints of a sharded tree: each rank writes what it has, and any mesh reads it.

    shard.checkpoint.save("run/step-40", state, mesh, rules)             # every rank; on disk when it returns
    state = shard.checkpoint.load("run/step-40", state, mesh, rules)     # on any mesh; the form and devices of `state`

    writing = shard.checkpoint.begin("run/step-41", state, mesh, rules)  # copied to the host, written by a thread
    ...                                                                  # steps, which may overwrite `state`
    shard.checkpoint.finish(writing)

A checkpoint is a folder:

    rank-2-of-4.safetensors    the ranges (local_ranges.py) that a rank writes, flat
    manifest.json              the tree, its tensors, and each file's size and digest; a digest of all that

Ranks that have the same tensors share the work: each is written once. The folder has a temporary name until its files
and then the manifest are on disk. A folder with its final name is therefore whole, and a killed run leaves none that is
not, only temporary ones, which ``clean`` removes. Nothing is pickled. The files are those of torch's
HuggingFaceStorageReader, so ``torch.distributed.checkpoint.load`` reads the flat tensors.

``load`` believes nothing: files have the size and the header of the manifest, data have the digests of the header, and
ranges cover each tensor once. Every fault is a ValueError on every rank, with the name of the file.

The folder must be on a file system that all ranks see. Ranks communicate before they write and in ``finish``, not in
between: rank 0 sees in the folder that all have written.
"""

import hashlib
import json
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fquant import tree
from fquant.compile import all_gather_text
from fquant.device import HOST
from fquant.io import safetensors, tree_json
from fquant.tree import at, expect

from . import agree
from .host_memory import moved
from .local_ranges import Range, local_ranges, outline
from .rules import Rules

MANIFEST, VERSION = "manifest.json", 1
SHARDING = "DCP_SHARDING_INFO"  # the key of torch's storage reader
PATIENCE = 600.0  # seconds that rank 0 waits for the files of others
_KEYS = {"version", "tree", "tensors", "files", "digest"}


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
    manifest = {"version": VERSION, "tree": text, "tensors": {it.name: _described(it) for it in ranges}}
    names = [_file(i, dist.get_world_size()) for i in range(dist.get_world_size())]

    def write() -> None:
        try:
            _write(temporary / names[rank], staged, starts)
            if rank == 0:
                _commit(temporary, folder, names, manifest)
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


def load(folder: str | Path, like: Any, mesh: DeviceMesh, rules: Rules) -> Any:
    """Return the tree in ``folder`` in the form and on the devices of ``like``, which is placed or local on ``mesh``.

    Every rank calls it, and reads what it needs. Raises ValueError on every rank for a checkpoint that is not whole or
    whose bytes have changed, and for one of another tree.
    """
    return agree.attempt("load", lambda: _load(Path(folder), like, mesh, rules))


def steps(root: str | Path) -> list[int]:
    """Return the numbers of the checkpoints step-N in ``root``, in order."""
    found = (path.parent.name.removeprefix("step-") for path in Path(root).glob(f"step-*/{MANIFEST}"))
    return sorted(int(name) for name in found if name.isdecimal())


def keep(root: str | Path, last: int, others: tuple[int, ...] = ()) -> None:
    """Remove the checkpoints step-N in ``root`` but the ``last`` ones and those of ``others``, such as the best."""
    expect(last > 0, f"keep: got last {last}, wanted at least 1")
    for step in steps(root)[:-last]:
        if step not in others:
            doomed = Path(root) / f"step-{step}"
            shutil.rmtree(doomed.rename(doomed.with_name(f".{doomed.name}.{secrets.token_hex(4)}.tmp")))


def clean(root: str | Path) -> None:
    """Remove the temporary folders that killed runs have left in ``root``, where no other run writes."""
    for path in Path(root).glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path)


def _file(rank: int, ranks: int) -> str:
    return f"rank-{rank}-of-{ranks}.safetensors"


def _described(it: Range) -> dict[str, Any]:
    return {"dtype": safetensors.NAMES[it.values.dtype], "shape": list(it.shape)}


def _write(path: Path, tensors: Mapping[str, Tensor], starts: Mapping[str, int]) -> None:
    offsets = {name: {"saved_offsets": [start]} for name, start in starts.items()}
    safetensors.write(path, tensors, {"format": "pt", SHARDING: json.dumps(offsets)})


def _commit(temporary: Path, folder: Path, names: list[str], manifest: dict[str, Any]) -> None:
    """Wait for the files of all ranks, write the manifest, and give the folder its name."""
    for name in names:
        path, failed, began = temporary / name, temporary / f"{name}.failed", time.monotonic()
        while not path.exists():
            expect(not failed.exists(), f"{name}: {failed.read_text() if failed.exists() else ''}")
            expect(time.monotonic() - began < PATIENCE, f"{name}: not written in {PATIENCE:.0f} s; is its rank alive?")
            time.sleep(0.002)
    files = {
        name: {"bytes": (temporary / name).stat().st_size, "header": _header_digest(temporary / name)} for name in names
    }
    content = {**manifest, "files": files}
    with safetensors.replacing(temporary / MANIFEST) as file:
        file.write((json.dumps({**content, "digest": _digest_of(content)}, indent=1) + "\n").encode())
    temporary.rename(folder)
    safetensors.sync_folder(folder.parent)


def _header_digest(path: Path) -> str:
    with path.open("rb") as file:
        length = file.read(8)
        return hashlib.blake2b(length + file.read(int.from_bytes(length, "little")), digest_size=16).hexdigest()


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


class _Chunk(NamedTuple):
    start: int
    stop: int
    header: safetensors.Header


def _load(folder: Path, like: Any, mesh: DeviceMesh, rules: Rules) -> Any:
    manifest = _manifest(folder)
    with at(str(folder / MANIFEST)):
        structure = tree.structure(tree_json.decode(manifest["tree"], lambda _: torch.empty(0)))
        expect(structure == tree.structure(outline(like)), "holds another tree; load it with the release that wrote it")
    chunks = _chunks(folder, manifest)
    out = tree.map(_zeros, like)
    for it in local_ranges(out, mesh, rules):
        known, wanted = manifest["tensors"].get(it.name, {}), _described(it)
        rows = 1 if it.is_padded else 0  # of which the number depends on the mesh
        same = known and known["dtype"] == wanted["dtype"] and known["shape"][rows:] == wanted["shape"][rows:]
        expect(same, f"{folder / MANIFEST}: {it.name}: got {known}, wanted {wanted}")
        _fill(it, chunks.get(it.name, []))
    return tree.map(lambda t, like: t if like.is_meta else moved(t, like), out, like)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, device=HOST if like.is_meta else like.device, memory_format=torch.contiguous_format)


def _fill(it: Range, chunks: list[_Chunk]) -> None:
    stop = it.start + len(it.values)
    for chunk in chunks:
        low, high = max(it.start, chunk.start), min(stop, chunk.stop)
        if low < high:
            rows = slice(low - chunk.start, high - chunk.start)
            it.values[low - it.start : high - it.start] = safetensors.read(chunk.header, it.name, rows)


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    expect(path.is_file(), f"{folder}: got no {MANIFEST} there, wanted a checkpoint that is whole; take an earlier one")
    with at(str(path)):
        content = tree_json.parse(path.read_bytes(), "a manifest")
        digest = content.pop("digest", None)
        expect(
            digest == _digest_of(content), "its content has changed since it was written; take an earlier checkpoint"
        )
        tree_json.check_keys("manifest", content, _KEYS - {"digest"})
        expect(
            content["version"] == VERSION, f"got version {content['version']!r}, wanted {VERSION}; use another release"
        )
    return content


def _chunks(folder: Path, manifest: Mapping[str, Any]) -> dict[str, list[_Chunk]]:
    """Return the ranges of each tensor in order, after a check of all headers and that nothing is missing."""
    out: dict[str, list[_Chunk]] = {name: [] for name in manifest["tensors"]}
    for name, known in manifest["files"].items():
        path = folder / name
        header = safetensors.header(path)  # raises for a file that is not there
        found = {"bytes": path.stat().st_size, "header": _header_digest(path)}
        expect(found == known, f"{path}: its size or header is not that of {MANIFEST}; take an earlier checkpoint")
        starts = json.loads(header.metadata[SHARDING])
        for tensor, entry in header.tensors.items():
            start = starts[tensor]["saved_offsets"][0]
            out[tensor].append(_Chunk(start, start + entry.shape[0], header))
    for name, it in manifest["tensors"].items():
        out[name].sort(key=lambda chunk: chunk.start)
        end = 0
        for chunk in out[name]:
            expect(
                chunk.start == end, f"{folder}: {name}: its files lack elements {end} to {chunk.start}, or repeat some"
            )
            end = chunk.stop
        size = torch.Size(it["shape"]).numel()
        expect(
            end == size, f"{folder}: {name}: got {end} elements in its files, wanted {size}; take an earlier checkpoint"
        )
    return out
