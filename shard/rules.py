"""Sharding rules: the mesh axes that split a batch, and the one that splits the bytes of a block.

Tensors have dims, a mesh has axes. A model names the dims of its weights (``decoder.dims``), and a Rules is a sharding
strategy for all models:

    Rules()                                     # dp and fsdp split the batch, fsdp splits the blocks
    Rules("dp")                                 # dp alone splits the batch
    Rules(block=None)                           # every rank holds every block whole
    Rules(offload="block", resident="embed")    # blocks are in the host's memory, but the embedding

A block that is *offloaded* is in the host's pinned memory at rest. A step fetches it, uses it and forgets it, as it
does with bytes of other ranks. Blocks that match ``resident`` stay on the device: a table that is fetched whole for a
few rows costs the link more than its memory is worth.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed.device_mesh import DeviceMesh

from fquant import tree

from .device_mesh import Axes, as_axes

Dims = dict[str, dict[str, str]]  # path of a block -> path in it -> names of the dims, separated by spaces


@dataclass(frozen=True)
class Rules:
    """The axes that split the ``batch``, kept as a tuple, and the axis that splits the bytes of each ``block``.

    With ``offload`` "block" the host has the blocks, except those whose whole path matches ``resident``.
    """

    batch: Axes = ("dp", "fsdp")
    block: str | None = "fsdp"
    offload: Literal["block"] | None = None
    resident: str | None = None  # a regular expression

    def __post_init__(self) -> None:
        with tree.at("rule batch"):
            object.__setattr__(self, "batch", as_axes(self.batch))
        if self.block is not None and not isinstance(self.block, str):
            raise TypeError(f"rule block: got {self.block!r}; wanted one axis, such as 'fsdp', or None")
        if self.offload not in ("block", None):
            raise ValueError(f"rule offload: got {self.offload!r}; wanted 'block', or None to keep all on the device")
        if self.resident is not None and self.offload is None:
            raise ValueError(f"rule resident: got {self.resident!r}, and offload is None; add offload='block'")
        tree.compiled("rule resident", "" if self.resident is None else self.resident)


def check_rules(rules: Rules, mesh: DeviceMesh) -> None:
    """Raise ValueError for a rule that names an axis which ``mesh`` does not have."""
    for rule, axes in (("batch", rules.batch), ("block", () if rules.block is None else rules.block)):
        with tree.at(f"rule {rule}"):
            as_axes(axes, mesh)


def offloaded(rules: Rules, blocks: Collection[str]) -> set[str]:
    """Return those of ``blocks``, which are paths, that the host has; raise ValueError if ``resident`` matches none."""
    if rules.offload is None:
        return set()
    kept = set() if rules.resident is None else {path for path in blocks if re.fullmatch(rules.resident, path)}
    if rules.resident is not None and not kept:
        raise ValueError(f"rule resident: no block matches {rules.resident!r}; the blocks are {_some(blocks)}")
    return set(blocks) - kept


def check_dims(dims: Dims, params: Any) -> None:
    """Check that ``dims`` puts every weight of ``params`` into one block and names each of its dims.

    Raises ValueError, by path, for a missing or unknown block or weight, for a block inside another, and for a wrong
    number of names; TypeError for a table of another form.
    """
    named: set[str] = set()
    is_table = isinstance(dims, Mapping) and all(isinstance(block, str) for block in dims)
    wanted = "names by path of a block, such as {'head': {'': 'out in'}}"
    tree.expect(is_table, f"dims: got {dims!r:.200}; wanted {wanted}", TypeError)
    for block, inner in dims.items():
        entry = f"dims[{block!r}]"
        if not isinstance(inner, Mapping) or not all(isinstance(x, str) for pair in inner.items() for x in pair):
            raise TypeError(f"{entry}: got {inner!r}; wanted names by path in the block, such as {{'w': 'out in'}}")
        if outer := [name for name in dims if name != block and _is_inside(block, name)]:
            raise ValueError(f"{entry}: is inside the block {outer[0]!r}; wanted separate blocks; name its dims there")
        _find(params, block, f"{entry}: the tree has no such block; correct its path or remove the entry")
        for path, names in inner.items():
            at = join(block, path)
            weight = _find(params, at, f"{at}: {entry} names {path!r}, which is not there; correct or remove it")
            if not hasattr(weight, "shape"):
                raise ValueError(f"{at}: got dims of a {type(weight).__name__}; wanted those of each weight inside")
            shape = tuple(weight.shape)
            ndim = max(len(shape), *(leaf.ndim for leaf in tree.leaves(weight)))  # a stack's shape is of one member
            if ndim != len(names.split()):
                raise ValueError(f"{at}: got {len(names.split())} names, {names!r}; wanted {ndim} for {shape}")
            named.add(at)
    for path in tree.paths(params):
        if not any(_is_inside(path, weight) for weight in named):
            if (block := next((block for block in dims if _is_inside(path, block)), None)) is None:
                raise ValueError(f"{path}: no block of dims has it; the blocks are {_some(dims)}; add its block")
            raise ValueError(f"{path}: dims[{block!r}] does not name its dims; it names {_some(dims[block])}; add it")


def _find(params: Any, path: str, otherwise: str) -> Any:
    try:
        return tree.get(params, path)
    except KeyError as error:
        raise ValueError(f"{otherwise} ({error.args[0]})") from None


def _is_inside(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def join(*parts: str) -> str:
    """Return the path of a weight from that of its block and that in the block, either of which may be empty."""
    return ".".join(part for part in parts if part)


def _some(names: Iterable[str]) -> str:
    found = [name or "(the whole)" for name in names]
    return (", ".join(found[:8]) + (", ..." if len(found) > 8 else "")) or "nothing"
