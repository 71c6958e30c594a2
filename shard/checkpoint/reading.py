"""Read a checkpoint on any mesh: the ranges that a rank has, from the files that have them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fquant import tree
from fquant.device import HOST
from fquant.io import safetensors, tree_json
from fquant.tree import at, expect

from .. import agree
from ..host_memory import moved
from ..rules import Rules
from . import manifest
from .local_ranges import NOTHING, Range, local_ranges, outline
from .manifest import MANIFEST, SHARDING, described, header_digest


def load(folder: str | Path, like: Any, mesh: DeviceMesh, rules: Rules, run: str = "") -> Any:
    """Return the tree in ``folder`` in the form and on the devices of ``like``, which is placed or local on ``mesh``.

    Every rank calls it, and reads what it needs. Raises ValueError on every rank for a checkpoint that is not whole or
    whose bytes have changed, and for one of another tree. With ``run`` it must have been saved with that name.
    """
    return agree.attempt("load", lambda: _load(Path(folder), like, mesh, rules, run))


def read(folder: str | Path) -> Any:
    """Return the whole tree in ``folder`` on the host, without a mesh; every byte is verified.

    A bundle is its block, as in :func:`shard.whole`. A moment in codes is a list of its tensors, in which one that has
    rows of several weights is a dict by name. Raises ValueError for a checkpoint that is not whole or has changed.
    """
    found = manifest.read(folder := Path(folder))
    chunks = _chunks(folder, found)

    def whole(name: str) -> Tensor:
        entry = found["tensors"][name]
        shape, dtype = tuple(entry["shape"]), safetensors.DTYPES[entry["dtype"]]
        flat = torch.empty(torch.Size(shape).numel(), dtype=dtype, device=HOST)
        _fill(Range(name, shape, 0, flat, 0, 1), chunks[name])
        return flat.view(shape)

    def leaf(path: str) -> Any:
        inner = f"{path}."
        among = [name for name in found["tensors"] if name.startswith(inner)]
        return whole(path) if path in chunks else {name.removeprefix(inner): whole(name) for name in among}

    with at(str(folder / MANIFEST)):
        return tree_json.decode(found["tree"], leaf)


class _Chunk(NamedTuple):
    start: int
    stop: int
    header: safetensors.Header


def _load(folder: Path, like: Any, mesh: DeviceMesh, rules: Rules, run: str) -> Any:
    found = manifest.read(folder)
    fault = f"{folder}: is a checkpoint of run {found.get('run')!r:.80}, wanted one of {run!r}"
    expect(not run or found.get("run") == run, f"{fault}; put back those of this run, or remove it to use earlier ones")
    with at(str(folder / MANIFEST)):
        structure = tree.structure(tree_json.decode(found["tree"], lambda _: NOTHING))
        expect(structure == tree.structure(outline(like)), "holds another tree; load it with the release that wrote it")
    chunks = _chunks(folder, found)
    out = tree.map(_zeros, like)
    for it in local_ranges(out, mesh, rules):
        known, wanted = found["tensors"].get(it.name, {}), described(it)
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


def _chunks(folder: Path, found: Mapping[str, Any]) -> dict[str, list[_Chunk]]:
    """Return the ranges of each tensor in order, after a check of all headers and that nothing is missing."""
    out: dict[str, list[_Chunk]] = {name: [] for name in found["tensors"]}
    for name, known in found["files"].items():
        path = folder / name
        header = safetensors.header(path)  # raises for a file that is not there
        there = {"bytes": path.stat().st_size, "header": header_digest(path)}
        expect(there == known, f"{path}: its size or header is not that of {MANIFEST}; take an earlier checkpoint")
        starts = json.loads(header.metadata[SHARDING])
        for tensor, entry in header.tensors.items():
            start = starts[tensor]["saved_offsets"][0]
            out[tensor].append(_Chunk(start, start + entry.shape[0], header))
    for name, it in found["tensors"].items():
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
