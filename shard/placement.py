"""place: a tree of parameters laid out over the mesh; collect: back again.

    base = shard.place(params, decoder.dims(cfg), rules, mesh)
    base, adapters = shard.place((params, adapters), decoder.dims(cfg), rules, mesh)

Each block becomes a Bundle whose bytes are a uint8 DTensor, split over the fsdp axis and the same along dp. That is how
parameters rest; a step takes the bytes of its own rank (``local``), since torch.func cannot trace through a DTensor.

Parameters come from one of two places, and the bytes are the same either way:

* tensors: those of rank 0 count and are sent to all, one broadcast a block. Other ranks may hold meta tensors; what
  real tensors they hold must be the same.
* Lazy leaves, opened on every rank from the same files: each is read, and quantised, by exactly one rank, and its
  packed bytes are sent, a piece of 16 MiB at a time. A rank holds its part of the model and one tensor, never more.

What is trained beside the model is small and replicated: rank 0's values are sent in one broadcast.

Before any of it all ranks compare what they were given (see shard.agree).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fquant import lazy, tree
from fquant.lazy import Lazy

from . import agree, bundle
from .bundle import Buffer, Bundle, Layout
from .collectives import all_gather
from .device_mesh import position
from .rules import Dims, Rules, check_dims, check_rules

PIECE = 16 << 20  # bytes sent at a time, which is what receiving needs beside the part that is kept

Keep = Callable[[str, int, Tensor], None]  # (block, offset, bytes) that arrived


def place(params: Any, dims: Dims, rules: Rules, mesh: DeviceMesh, config: Any = None) -> Any:
    """``params`` with every block of ``dims`` made a Bundle over ``mesh``; a pair's second tree is replicated.

    ``config`` is anything with a repr that all ranks must share; of a dataclass the field that differs is named.

    Raises ValueError on every rank when ranks were given different things, naming the first difference; when a weight
    is in no block; when only some leaves of a tree are Lazy; or when a rank fails to read.
    """
    base, *beside = params if isinstance(params, tuple) else (params,)

    def given() -> dict[str, str]:
        facts = {"rules": repr(rules), "mesh": repr(tuple(mesh.shape))} | agree.fields("config", config)
        facts |= agree.fingerprint(base)
        for i, tree_ in enumerate(beside):
            facts |= {f"{path} of tree {i + 2}": text for path, text in agree.fingerprint(tree_).items()}
        return facts | {f"dims of {path}": repr(names) for path, names in dims.items()}

    agree.same("place", agree.attempt("place", given))
    layouts, ranks = _layouts(base, dims, rules, mesh)
    part, _ = position(mesh, rules.block or ())
    parts = {
        path: torch.zeros(layout.size // ranks, dtype=torch.uint8, device="cpu") for path, layout in layouts.items()
    }
    fill = _read if any(isinstance(leaf, Lazy) for leaf in tree.leaves(base)) else _send
    fill(base, layouts, lambda path, offset, sent: _keep(parts[path], part * parts[path].numel(), offset, sent))
    axes = mesh.mesh_dim_names or ()
    placements: list[Placement] = [Shard(0) if axis == rules.block else Replicate() for axis in axes]
    placed = {
        path: Bundle(DTensor.from_local(parts[path], mesh, placements, run_check=False), layout)
        for path, layout in layouts.items()
    }
    out = _with(base, placed)
    return (out, *map(replicate, beside)) if isinstance(params, tuple) else out


def abstract_local(params: Any, dims: Dims, rules: Rules, mesh: DeviceMesh) -> Any:
    """``local(place(params, dims, rules, mesh))`` in meta tensors: no rank is asked, nothing is read.

    ``params`` are tensors, meta tensors, or Lazy. Raises ValueError when a weight is in no block.
    """
    layouts, ranks = _layouts(params, dims, rules, mesh)
    parts = {path: torch.empty(it.size // ranks, dtype=torch.uint8, device="meta") for path, it in layouts.items()}
    return _with(params, {path: Bundle(parts[path], layout) for path, layout in layouts.items()})


def _layouts(params: Any, dims: Dims, rules: Rules, mesh: DeviceMesh) -> tuple[dict[str, Layout], int]:
    """How every block will lie, and over how many ranks."""
    check_rules(rules, mesh)
    like = lazy.like(params)
    check_dims(dims, like)
    _, ranks = position(mesh, rules.block or ())
    return {path: bundle.plan(tree.get(like, path), ranks) for path in sorted(dims)}, ranks


def _with(params: Any, blocks: dict[str, Bundle]) -> Any:
    """``params`` with ``blocks`` in place of what lies at their paths."""
    chosen = {id(tree.get(params, path)) for path in blocks}
    return tree.map_with_path(lambda path, _: blocks[path], params, is_leaf=lambda x: id(x) in chosen)


def replicate(x: Any) -> Any:
    """The tree ``x`` as rank 0 has it, on every rank: all tensors in one broadcast. Elsewhere meta tensors will do.

    Raises ValueError on every rank when the trees differ in more than their values.
    """
    agree.same("replicate", agree.attempt("replicate", lambda: agree.fingerprint(x, content=False)))
    layout = bundle.plan(x, 1)
    whole = agree.attempt("replicate", lambda: _first(x, "", layout))
    if layout.size:
        dist.broadcast(whole, 0)
    return tree.map(torch.clone, bundle.read(whole, layout))  # views of one buffer could not be donated


def local(x: Any) -> Any:
    """Return ``x`` with the bytes of its bundles as plain tensors, this rank's part of each: the argument of a step.

    Raises RuntimeError inside a transform of torch.func, which cannot trace through a DTensor.
    """

    def one(b: Bundle) -> Bundle:
        if not isinstance(b.bytes, DTensor):
            return b
        if (active := torch._C._functorch.peek_interpreter_stack()) is not None:
            raise RuntimeError(
                f"shard.local(base) was called inside torch.func.{active.key().name.lower()}; "
                "call it once outside and pass its result as an argument"
            )
        return replace(b, bytes=b.bytes.to_local())

    return _map_bundles(one, x)


def collect(x: Any) -> Any:
    """The tree that was placed, whole, on every rank."""

    def one(b: Bundle) -> Any:
        if not isinstance(b.bytes, DTensor):
            raise ValueError("collect got a local bundle; wanted the placed tree, before shard.local")
        mesh, whole = b.bytes.device_mesh, b.bytes.to_local()
        for axis, placement in enumerate(b.bytes.placements):
            if isinstance(placement, Shard) and mesh.size(axis) > 1:
                whole = all_gather(whole, mesh.get_group(axis))
        return bundle.read(whole, b.layout)

    return _map_bundles(one, x)


def _send(base: Any, layouts: dict[str, Layout], keep: Keep) -> None:
    """Rank 0's bytes to all, a block at a time."""
    for path, layout in layouts.items():
        block = agree.attempt("place", lambda path=path, layout=layout: _first(tree.get(base, path), path, layout))
        if layout.size:
            dist.broadcast(block, 0)
        keep(path, 0, block)


def _first(x: Any, path: str, layout: Layout) -> Tensor:
    """The bytes of ``x`` on rank 0, and room for them on the others."""
    if dist.get_rank():
        return torch.empty(layout.size, dtype=torch.uint8, device="cpu")
    for name, leaf in tree.items(x):
        if leaf.is_meta:
            where = ".".join(part for part in (path, name) if part)
            raise ValueError(f"{where} is a meta tensor on rank 0, whose values are the ones that count; read it there")
    return bundle.write(x, layout)


def _read(base: Any, layouts: dict[str, Layout], keep: Keep) -> None:
    """Lazy leaves to all, each read by one rank, as many at a time as there are ranks."""
    world = dist.get_world_size()
    work = [item for path, layout in layouts.items() for item in _leaves(path, tree.get(base, path), layout)]
    for start in range(0, len(work), world):
        _turn(work[start : start + world], keep)  # a call of its own, so that nothing it held is held by the next


def _turn(turn: list[tuple[str, str, Any, tuple[Buffer, ...]]], keep: Keep) -> None:
    rank = dist.get_rank()

    def mine() -> Tensor | None:
        if rank >= len(turn):
            return None
        _, path, leaf, buffers = turn[rank]
        if not isinstance(leaf, Lazy):
            raise ValueError(f"{path}: a tensor among Lazy leaves; make it Lazy, or read all (fquant.lazy.read)")
        with tree.at(path):
            try:
                return _span(leaf.read(), buffers)
            except OSError as error:
                raise ValueError(f"cannot be read: {error}") from error

    own = agree.attempt("place", mine)
    for owner, (block, _, _, buffers) in enumerate(turn):
        begin, end = buffers[0].offset, buffers[-1].offset + buffers[-1].nbytes
        for offset in range(begin, end, PIECE):
            size = min(PIECE, end - offset)
            if owner == rank and own is not None:
                piece = own[offset - begin : offset - begin + size]
            else:
                piece = torch.empty(size, dtype=torch.uint8, device="cpu")
            dist.broadcast(piece, owner)
            keep(block, offset, piece)


def _leaves(block: str, x: Any, layout: Layout) -> list[tuple[str, str, Any, tuple[Buffer, ...]]]:
    """(block, path, leaf, its buffers) for every leaf, a Lazy one having as many buffers as it will have tensors."""
    buffers, out = iter(layout.buffers), []
    for name, leaf in tree.items(x):
        count = len(tree.leaves(leaf.like)) if isinstance(leaf, Lazy) else 1
        path = ".".join(part for part in (block, name) if part)
        out.append((block, path, leaf, tuple(next(buffers) for _ in range(count))))
    return out


def _span(x: Any, buffers: tuple[Buffer, ...]) -> Tensor:
    """The bytes of ``x`` from the begin of its first buffer to the end of its last."""
    leaves, first = tree.leaves(x), buffers[0].offset
    got = [(t.dtype, tuple(t.shape)) for t in leaves]
    wanted = [(buffer.dtype, buffer.shape) for buffer in buffers]
    if got != wanted:
        raise ValueError(f"read {got}; wanted {wanted} as announced")
    if len(leaves) == 1:
        return bundle.raw(leaves[0])  # as it is: a copy would be a second tensor
    out = torch.zeros(buffers[-1].offset + buffers[-1].nbytes - first, dtype=torch.uint8, device="cpu")
    for buffer, t in zip(buffers, leaves, strict=True):
        out[buffer.offset - first : buffer.offset - first + buffer.nbytes] = bundle.raw(t)
    return out


def _keep(part: Tensor, begin: int, offset: int, sent: Tensor) -> None:
    """Copy into ``part``, which lies at ``begin`` of its block, what of ``sent``, at ``offset`` of it, falls there."""
    low, high = max(begin, offset), min(begin + part.numel(), offset + sent.numel())
    if low < high:
        part[low - begin : high - begin] = sent[low - offset : high - offset]


def _map_bundles(f: Any, x: Any) -> Any:
    bundled = lambda y: isinstance(y, Bundle)
    return tree.map(lambda leaf: f(leaf) if bundled(leaf) else leaf, x, is_leaf=bundled)
