"""Rules: which named dims lie along which axes of the mesh.

Tensors have dims, a mesh has axes. A model names the dims of its tensors (``decoder.dims``); a strategy is one table
from these names to axes. Here a batch may be split, and the bytes of a block:

    Rules()                                     # dp and fsdp split the batch, fsdp splits the blocks
    Rules(block=None)                           # every rank holds every block whole
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from fquant import tree

Dims = dict[str, dict[str, str]]  # block path -> path in the block -> names of the dims, separated by spaces


@dataclass(frozen=True)
class Rules:
    """Axes that the ``batch`` is split over, and the axis that the bytes of a ``block`` are split over."""

    batch: tuple[str, ...] = ("dp", "fsdp")
    block: str | None = "fsdp"


def check(rules: Rules, mesh: DeviceMesh) -> None:
    """Raise ValueError for a rule that names an axis the mesh lacks, or one axis twice."""
    names = mesh.mesh_dim_names or ()
    for rule, axes in (("batch", rules.batch), ("block", (rules.block,) if rules.block else ())):
        for axis in axes:
            if axis not in names:
                raise ValueError(f"rule {rule}: the mesh has no axis {axis!r}; wanted some of {', '.join(names)}")
        if len(set(axes)) != len(axes):
            raise ValueError(f"rule {rule}: an axis stands twice in {axes}; wanted each once")


def check_dims(dims: Dims, params: Any) -> None:
    """Raise ValueError, by path, unless ``dims`` names the dims of every weight in ``params`` and nothing else."""
    named = {_join(block, path): names.split() for block, inner in dims.items() for path, names in inner.items()}
    for path, names in named.items():
        try:
            weight = tree.get(params, path)
        except KeyError as error:
            raise ValueError(f"dims name a weight that is not there: {error.args[0]}") from None
        if not hasattr(weight, "shape"):
            raise ValueError(f"{path}: dims name a {type(weight).__name__}; wanted the weights inside, one by one")
        shape = tuple(weight.shape)
        if len(shape) != len(names):
            raise ValueError(f"{path}: shape {shape} has {len(shape)} dims, and {names} names {len(names)}")
    for path in tree.paths(params):
        if not any(path == weight or path.startswith(weight + ".") for weight in named):
            raise ValueError(f"{path}: its dims have no names; the named weights are {', '.join(list(named)[:8])} ...")


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
