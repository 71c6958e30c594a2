"""A profile: the events of a step in time, and the buffers that it holds from one event to another.

An event is a node of the captured graph. Nodes that compute follow one another on one *track*; collectives and copies
between device and host have a track each, beside it, from their issue to their end. A *buffer* is a tensor's memory: an
argument is held throughout, a result from the event that makes it to the last that reads it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.fx import Graph, Node

from ..compile import graph as graphs
from ..compile import liveness
from ..compile.cost import Cost

COMPUTE, COLLECTIVES, COPIES = "compute", "collectives", "copies"  # tracks
UNKNOWN = "(no line)"


@dataclass(frozen=True)
class Event:
    """A node of a step. ``start`` and ``seconds`` are of the step; ``place`` is the node's index in the graph."""

    place: int
    node: str
    op: str
    kind: str  # of its work, see fquant.compile.roofline
    line: str  # ``name (file:line)`` in the source
    backward: bool  # of the forward on that line
    track: str
    start: float
    seconds: float
    roofline: float  # seconds that arithmetic or memory traffic takes at least


def share(roofline: float, seconds: float) -> float | None:
    """Return the share of the roofline that ``seconds`` reach, or None if it is unknown.

    A share above 1 cannot be right: small operands come from caches, or the rates of a host were measured beside other
    processes.
    """
    return roofline / seconds if 0 < seconds and roofline <= seconds else None


@dataclass(frozen=True)
class Buffer:
    """Memory that is held from the node at ``first`` to that at ``last``."""

    by: str  # the path of an argument, or the op that made it
    line: str  # where, or "" for an argument
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Profile:
    """The profile of a step on a device.

    ``seconds`` are those of a whole replay. The events of a measured profile add up to less or more: a replay has
    Python between its nodes, and timing them costs some.
    """

    name: str
    device: str
    is_measured: bool
    seconds: float
    events: tuple[Event, ...]
    buffers: tuple[Buffer, ...]
    cost: Cost

    def __str__(self) -> str:
        """Return the table of report.py as text."""
        from .report import text

        return text(self)

    def save(self, folder: str | Path) -> tuple[Path, Path]:
        """Write ``memory.png`` and ``trace.json`` into ``folder``, which is made, and return their paths."""
        from .pictures import memory, trace

        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        return memory(self, where / "memory.png"), trace(self, where / "trace.json")


def line_of(node: Node) -> str:
    """Return the place in the source that made a node."""
    return node.meta.get("stack_trace") or UNKNOWN


def op_of(node: Node) -> str:
    """Return the name of a node's op."""
    return str(getattr(node.target, "overloadpacket", node.target))


def buffers(graph: Graph, paths: Mapping[Node, str]) -> tuple[Buffer, ...]:
    """Return the buffers of a graph on its device; ``paths`` are those of its arguments."""
    last, among, end = liveness.last_uses(graph), graphs.storages_on_device(graph), len(graph.nodes) - 1
    found, seen = [], set[int]()
    for place, node in enumerate(graph.nodes):
        for storage, nbytes in graphs.sizes(node).items():
            if storage in seen or storage not in among or not nbytes:
                continue
            seen.add(storage)
            if node.op == "placeholder":
                found.append(Buffer(paths[node], "", nbytes, 0, end))
            else:
                found.append(Buffer(op_of(node), line_of(node), nbytes, place, last[storage]))
    return tuple(found)


def live(found: Profile) -> list[int]:
    """Return the bytes that are live at each node of the graph, by its index."""
    change = Counter[int]()
    for buffer in found.buffers:
        change[buffer.first] += buffer.nbytes
        change[buffer.last + 1] -= buffer.nbytes
    total, out = 0, list[int]()
    for place in range(max((b.last for b in found.buffers), default=-1) + 1):
        total += change[place]
        out.append(total)
    return out


def peak(found: Profile) -> int:
    """Return the index of the first node at which the most bytes are live; 0 without buffers."""
    held = live(found)
    return held.index(max(held)) if held else 0
