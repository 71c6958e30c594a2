"""The plan of a rank's file: which bytes of which leaves it has, in which order, and the manifest's fixed part.

A plan depends on the structure of a tree, on its shapes and on the mesh, and not on values. To make one takes longer
than to copy the values. So a run makes it once, and its later checkpoints take that of the one before.

    head of the file | bytes of each tensor, as in ``pieces`` | ...
"""

import ctypes
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fquant import tree
from fquant.device import HOST, memory_of
from fquant.io import safetensors, tree_json

from ..rules import Rules
from .local_ranges import Range, local_ranges, outline
from .manifest import SHARDING, VERSION, described


@dataclass(frozen=True)
class Piece:
    """The bytes that a rank writes of a tensor: from ``start`` of the memory of a leaf, to ``at`` behind the head."""

    leaf: int
    start: int
    at: int
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """See the module; ``facts`` are the same on every rank, and so is their ``digest``."""

    key: tuple[Any, ...]
    pieces: tuple[Piece, ...]  # in the order of the file
    head: bytes  # with zeros for digests
    nbytes: int  # behind the head
    content: dict[str, Any]  # of the manifest
    facts: dict[str, str]
    digest: str


def plan(state: Any, mesh: DeviceMesh, rules: Rules, former: Plan | None) -> tuple[Plan, list[Tensor]]:
    """Return the plan of ``state``, which is ``former`` if that fits, and the local leaves; no collective.

    Raises ValueError for a tensor that is not contiguous, and TypeError for a tree that a file cannot hold.
    """
    leaves, structure = tree.flatten(state)
    local = [t.to_local() if isinstance(t, DTensor) else t for t in leaves]
    key = structure, [(t.shape, t.dtype, t.is_contiguous()) for t in local], mesh, rules
    if former is not None and former.key == key:
        return former, local
    ranges = local_ranges(state, mesh, rules)
    mine = {it.name: it for i, it in enumerate(ranges) if i % it.copies == it.copy and len(it.values)}
    likes = {name: torch.empty(it.values.shape, dtype=it.values.dtype, device="meta") for name, it in mine.items()}
    for name, like in likes.items():
        safetensors.check_writable(name, like, may_be_meta=True)
    offsets = {name: {"saved_offsets": [it.start]} for name, it in mine.items()}
    head, starts = safetensors.layout(likes, {"format": "pt", SHARDING: json.dumps(offsets)})
    pieces = tuple(_piece(mine[name], local, at - len(head)) for name, at in starts.items())
    text, _ = tree_json.encode(outline(state))
    content = {"version": VERSION, "tree": text, "tensors": {it.name: described(it) for it in ranges}}
    facts = {"tree": text, "tensors": repr([(it.name, it.shape, it.values.dtype) for it in ranges])}
    digest = hashlib.blake2b(json.dumps([*facts.items(), dist.get_world_size()]).encode(), digest_size=16).hexdigest()
    return Plan(key, pieces, head, sum(p.nbytes for p in pieces), content, facts, digest), local


def copy(plan: Plan, local: list[Tensor], memory: Tensor | None) -> Tensor:
    """Return the bytes behind the head, u8[n] on the host, in ``memory`` if it has that size."""
    if memory is None or memory.nbytes != plan.nbytes:
        memory = torch.empty(plan.nbytes, dtype=torch.uint8, device=HOST)
    for piece in plan.pieces:
        leaf = local[piece.leaf]
        if leaf.device == HOST and not leaf.is_neg():
            # on one thread, as torch's threads wait for more work longer than the copy takes
            ctypes.memmove(memory.data_ptr() + piece.at, leaf.data_ptr() + piece.start, piece.nbytes)
        else:
            values = memory_of(leaf.detach())[piece.start : piece.start + piece.nbytes]
            memory[piece.at : piece.at + piece.nbytes].copy_(values)
    return memory


def _piece(it: Range, local: list[Tensor], at: int) -> Piece:
    leaf = local[it.leaf]
    start = it.values.storage_offset() * it.values.itemsize - leaf.storage_offset() * leaf.itemsize
    return Piece(it.leaf, int(start), at, it.values.nbytes)
