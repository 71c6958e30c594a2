"""Placement of parameters on the mesh: ``place`` shards a tree, ``collect`` makes it whole again.

    base = shard.place(params, decoder.dims(cfg), rules, mesh)
    base, adapters = shard.place((params, adapters), decoder.dims(cfg), rules, mesh)

    params = shard.place(params, decoder.dims(cfg), rules, mesh, train=shard.Precision(torch.bfloat16))

Each block becomes a Bundle. Its bytes are a uint8 DTensor, sharded over the fsdp axis and replicated over dp. The
second tree of a pair, what is trained, is small and replicated. With ``train`` the blocks themselves are trained: they
become FloatBundles, whose values are a float DTensor, or RowBundles if their weights are packed, and stay so. All are
on the device of the mesh from then on. Only an offloaded block is in the host's memory, and no step has it on the
device for longer than it uses it. All ranks first compare their arguments (agree.py). Parameters come from one of two
sources, and the bytes are the same:

* Tensors, on the host or on the mesh's device: those of rank 0 count, and are sent to all, with one broadcast for each
  block. Other ranks may hold meta tensors; if they hold real ones, these must be equal.
* Lazy leaves, opened on every rank from the same files: exactly one rank reads, and quantises, each. Its packed bytes
  are sent in pieces of 16 MiB. A rank holds its part of the model and one tensor, never more. Lazy leaves that are
  opened for the mesh's device are quantised there (``hf.lazy(folder, device=shard.device_of(mesh))``).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fquant import lazy, tree
from fquant.device import HOST
from fquant.lazy import Lazy

from . import agree, bundle, host_memory, pieces
from .bundle import Bundle, Layout
from .collectives import collective
from .device_mesh import device_of, position
from .rules import Dims, Rules, check_dims, check_rules, offloaded
from .trained import FloatBundle, Precision, RowBundle, float_bundle, row_bundle, row_layout
from .trained.row_layout import RowLayout


def place(
    params: Any, dims: Dims, rules: Rules, mesh: DeviceMesh, config: Any = None, train: Precision | None = None
) -> Any:
    """Return ``params`` with every block of ``dims`` as a Bundle over ``mesh``; replicate the second tree of a pair.

        rank 0  {"w": w}  ->  {"w": Bundle(first half of the bytes of w)}       cut along the axis ``rules.block``
        rank 1  {"w": w}  ->  {"w": Bundle(second half)}

    There is no backward: placing is done outside of steps. ``config`` is an object that all ranks must share, compared
    by repr, and of a dataclass field by field. With ``train`` each block is a FloatBundle of float32 master weights, or
    float64 if any weight is, and steps may differentiate it. One with packed weights is a RowBundle (trained/weights).

    Raises ValueError on every rank: if arguments differ, naming the first difference; if a weight is in no block; if
    only some leaves of a tree are Lazy; or if a rank fails to read. So it does for a tree with tensors on several
    devices, or on one that is neither the host nor the mesh's. With ``train`` it raises TypeError for integers that are
    no codes, ValueError for packed weights or rules with which blocks cannot be trained.
    """
    base, *beside = params if isinstance(params, tuple) else (params,)
    device = device_of(mesh)

    def arguments() -> dict[str, str]:
        for tree_ in (base, *beside):
            _check_devices(tree_, device)
        facts = {"rules": repr(rules), "mesh": repr(tuple(mesh.shape)), "train": repr(train)}
        facts |= agree.fields("config", config)
        facts |= agree.fingerprint(base)
        for i, tree_ in enumerate(beside):
            facts |= {f"{path} of tree {i + 2}": text for path, text in agree.fingerprint(tree_).items()}
        return facts | {f"dims of {path}": repr(names) for path, names in dims.items()}

    agree.same("place", agree.attempt("place", arguments))
    layouts, part, ranks = _layouts(base, dims, rules, mesh, train)
    on_host = offloaded(rules, layouts)
    if train is not None:  # a tensor is cast where it is written, and a Lazy one where it is read
        dtype = float_bundle.master(_floats(lazy.like(base), layouts), train)
        cast = lambda x: isinstance(x, Lazy) and isinstance(x.like, Tensor)
        source = tree.map(lambda x: lazy.map(partial(_cast, dtype), x) if cast(x) else x, base)
    else:
        source = base
    agree.attempt("place", lambda: host_memory.check_room(sum(layouts[path].size // ranks for path in on_host)))
    parts = agree.attempt("place", lambda: _empty(layouts, ranks, on_host, mesh))
    for path, offset, sent in pieces.of(source, layouts, device):
        for begin, end, to in row_layout.held(layouts[path], part, ranks):
            low, high = max(begin, offset), min(end, offset + sent.numel())
            if low < high:
                parts[path][to + low - begin : to + high - begin] = sent[low - offset : high - offset]
    axes = mesh.mesh_dim_names or ()
    placements: list[Placement] = [Shard(0) if axis == rules.block else Replicate() for axis in axes]
    parts = _as_master(parts, layouts, train)
    ends = {path: layouts[path].size // t.itemsize for path, t in parts.items()}
    placed = {path: _dtensor(t, mesh, placements, (ends[path],)) for path, t in parts.items()}
    out = _with_bundles(base, placed, layouts, on_host, train)
    return (out, *(replicate(each, mesh) for each in beside)) if isinstance(params, tuple) else out


def abstract_local(params: Any, dims: Dims, rules: Rules, mesh: DeviceMesh, train: Precision | None = None) -> Any:
    """Return :func:`local` of the placed tree in meta tensors, without communication or reading.

    ``params`` are tensors, meta tensors, or Lazy. Raises the errors of :func:`place` for weights and rules.
    """
    layouts, _, ranks = _layouts(params, dims, rules, mesh, train)
    parts = {path: torch.empty(it.size // ranks, dtype=torch.uint8, device="meta") for path, it in layouts.items()}
    return _with_bundles(params, _as_master(parts, layouts, train), layouts, offloaded(rules, layouts), train)


def on_host(x: Any) -> set[int]:
    """Return the ids of the bytes of offloaded bundles in the tree ``x``, for a trace of meta tensors for a device."""
    found = set[int]()
    _map_bundles(lambda b: found.update({id(b.bytes)} if isinstance(b, Bundle) and b.offloaded else ()), x)
    return found


def _layouts(
    params: Any, dims: Dims, rules: Rules, mesh: DeviceMesh, train: Precision | None = None
) -> tuple[dict[str, Layout], int, int]:
    """Return the layout of every block, this rank's part of it, and the number of parts."""
    check_rules(rules, mesh)
    like = lazy.like(params)
    check_dims(dims, like)
    part, ranks = position(mesh, rules.block or ())
    if train is None:
        return {path: bundle.plan(tree.get(like, path), ranks) for path in sorted(dims)}, part, ranks
    if rules.offload is not None:
        raise ValueError(f"rule offload: got {rules.offload!r}, and trained blocks stay on the device; use None")
    if rules.block is not None and rules.block not in rules.batch:
        fault = f"rule block: {rules.block!r} does not split the batch, so every rank would add the same gradient"
        raise ValueError(f"{fault}; add it to batch, {rules.batch!r}, or use block=None")
    layouts = dict[str, Layout]()
    for path in sorted(dims):
        if row_bundle.is_quantized(block := tree.get(like, path)):
            layouts[path] = row_layout.plan(block, ranks, path)
    dtype = float_bundle.master(_floats(like, layouts), train)
    for path in sorted(set(dims) - set(layouts)):
        layouts[path] = float_bundle.plan(tree.get(like, path), ranks, dtype)
    if train.dense is not None and not any(re.fullmatch(train.dense, path) for path in layouts):
        raise ValueError(f"precision dense: no block matches {train.dense!r}; the blocks are {', '.join(layouts)}")
    return layouts, part, ranks


def _floats(like: Any, layouts: Mapping[str, Layout]) -> Any:
    """Return the tree ``like`` without the blocks that are RowBundles."""
    rows = {id(tree.get(like, path)) for path, layout in layouts.items() if isinstance(layout, RowLayout)}
    return tree.map(lambda x: () if id(x) in rows else x, like, is_leaf=lambda x: id(x) in rows)


def _cast(dtype: torch.dtype, t: Tensor) -> Tensor:
    return t.to(dtype)


def _as_master(parts: dict[str, Tensor], layouts: dict[str, Layout], train: Precision | None) -> dict[str, Tensor]:
    """Return the bytes ``parts`` as floats, if the blocks are to be trained; a block without tensors is float32."""
    if train is None:
        return parts
    dtype = lambda layout: layout.buffers[0].dtype if layout.buffers else torch.float32
    is_bytes = lambda path: isinstance(layouts[path], RowLayout)
    return {path: t if is_bytes(path) else t.view(dtype(layouts[path])) for path, t in parts.items()}


def _empty(layouts: dict[str, Layout], ranks: int, on_host: set[str], mesh: DeviceMesh) -> dict[str, Tensor]:
    """Return memory of zeros for this rank's part of every block; that of offloaded blocks is pinned for a device."""
    device = device_of(mesh)
    pins = on_host if device != HOST else set()

    def new(path: str, nbytes: int) -> Tensor:
        if path in pins:
            return host_memory.pinned(nbytes).zero_()
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    return {path: new(path, it.size // ranks) for path, it in layouts.items()}


def _dtensor(part: Tensor, mesh: DeviceMesh, placements: list[Placement], shape: tuple[int, ...]) -> DTensor:
    """Return the DTensor of ``shape`` with this rank's ``part``, which stays where it is, unlike in ``from_local``."""
    meta = TensorMeta(torch.Size(shape), part.stride(), part.dtype)
    return DTensor(part, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def _with_bundles(
    params: Any, parts: Mapping[str, Tensor], layouts: dict[str, Layout], on_host: set[str], train: Precision | None
) -> Any:
    """Return ``params`` with a Bundle, or one that is trained, in place of every block."""
    chosen = {id(tree.get(params, path)) for path in layouts}

    def bundled(path: str, _: Any) -> Any:
        layout = layouts[path]
        if train is None:
            return Bundle(parts[path], layout, path in on_host)
        if isinstance(layout, RowLayout):
            return RowBundle(parts[path], None, layout, replace(train, wire=None, dense=None))
        return FloatBundle(parts[path], layout, float_bundle.precision_of(path, layout, train))

    return tree.map_with_path(bundled, params, is_leaf=lambda x: id(x) in chosen)


def replicate(x: Any, mesh: DeviceMesh) -> Any:
    """Return rank 0's tree ``x`` on the mesh's device of every rank, with one broadcast of all tensors.

    Other ranks may hold meta tensors. It is called outside of steps and has no backward. On one device: a copy.

    Raises ValueError on every rank if the trees differ in more than their values, or hold tensors of several devices.
    """

    def arguments() -> dict[str, str]:
        _check_devices(x, device_of(mesh))
        return agree.fingerprint(x, content=False)

    agree.same("replicate", agree.attempt("replicate", arguments))
    layout = bundle.plan(x, 1)
    whole = pieces.of_root("replicate", x, "", layout, device_of(mesh))
    return tree.map(torch.clone, bundle.read(whole, layout))  # views of one buffer could not be donated


def local(x: Any) -> Any:
    """Return ``x`` with this rank's part of each bundle as a plain tensor, for a step; no copy.

    Raises RuntimeError inside a transform of torch.func, which cannot trace through a DTensor.
    """

    def one(t: Any) -> Any:
        if not isinstance(t, DTensor):
            return t
        if (active := peek_interpreter_stack()) is not None:
            fault = f"shard.local(base) was called inside torch.func.{active.key().name.lower()}"
            raise RuntimeError(f"{fault}; call it once outside and pass its result as an argument")
        return t.to_local()

    return _map_bundles(lambda b: tree.map(one, b), x)


def at_rest(x: Any, mesh: DeviceMesh, rules: Rules) -> Any:
    """Return the local tree ``x`` of what is trained with its bundles as DTensors, as :func:`place` made them; no copy.

    So torch.distributed.checkpoint reads and writes them, on meshes of as many ranks. Of a moment in codes each tensor
    is sharded along dim 0.
    """
    _, ranks = position(mesh, rules.block or ())
    axes = mesh.mesh_dim_names or ()
    placements: list[Placement] = [Shard(0) if axis == rules.block else Replicate() for axis in axes]

    def one(t: Tensor) -> Tensor:
        return _dtensor(t, mesh, placements, (t.shape[0] * ranks, *t.shape[1:]))

    return _map_bundles(lambda b: b if isinstance(b, Bundle) else tree.map(one, b), x)


def collect(x: Any) -> Any:
    """Return the placed tree ``x`` whole, on every rank, by one all-gather for each block.

    It is called outside of steps and has no backward; a trained block has its master weights. Raises ValueError for the
    result of :func:`local`; of a trained tree, :func:`whole` collects that.
    """

    def one(path: str, b: Any) -> Any:
        (t,) = tree.leaves(b)
        if not isinstance(t, DTensor):
            raise ValueError("collect got a local bundle; wanted the placed tree, before shard.local")
        mesh = t.device_mesh
        whole = t.to_local().to(device_of(mesh))
        for axis, placement in enumerate(t.placements):
            if isinstance(placement, Shard) and mesh.size(axis) > 1:
                whole = collective(whole, "all_gather", mesh.get_group(axis), [path])
        whole = whole.view(torch.uint8)
        return row_layout.read(whole, b.layout) if isinstance(b, RowBundle) else bundle.read(whole, b.layout)

    return tree.map_with_path(lambda path, y: one(path, y) if _is_bundle(y) else y, x, is_leaf=_is_bundle)


def _check_devices(x: Any, wanted: torch.device) -> None:
    """Raise ValueError unless the tensors of ``x`` are all on the host, or all on the device ``wanted``.

    Meta tensors and Lazy leaves have no place yet.
    """
    found: dict[torch.device, str] = {}
    for path, t in tree.items(x):
        if isinstance(t, Tensor) and not t.is_meta:
            found.setdefault(t.device, path or "(root)")
    fix = f"move the tree by tree.map(lambda t: t.to({str(wanted)!r}), x)"
    if len(found) > 1:
        (one, at), (other, there), *_ = found.items()
        raise ValueError(f"{there}: got a tensor on {other} beside {at} on {one}; wanted one device in a tree; {fix}")
    for device, at in found.items():
        if device not in (HOST, wanted):
            places = " or ".join(dict.fromkeys([str(wanted), str(HOST)]))
            raise ValueError(f"{at}: got a tensor on {device}; wanted {places}; {fix}")


def _map_bundles(f: Any, x: Any) -> Any:
    return tree.map(lambda leaf: f(leaf) if _is_bundle(leaf) else leaf, x, is_leaf=_is_bundle)


def _is_bundle(x: Any) -> bool:
    return isinstance(x, Bundle | FloatBundle | RowBundle)
