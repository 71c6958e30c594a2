"""Profiles: a replay that is timed node by node, and the same from a prediction.

A measured replay is the one that ``jit`` runs on the host: fused, in planned memory. On a device its ops are launched
one by one, between events of the device. So an op that is shorter than its launch takes as long as that there, and a
CUDA graph is faster. Times are medians.

On a mesh every rank calls :func:`profile`, as it calls a captured function, and gets the profile of its own replay. The
time that a wait takes is that of the slowest rank.
"""

import functools
import time
from collections.abc import Callable, Collection, Sequence
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Interpreter, Node

from .. import tree
from ..compile import cost as costs
from ..compile import graph as graphs
from ..compile import roofline, trace
from ..compile.passes.donate import written_over
from ..compile.tracing.retarget import device_of
from ..device import HOST
from .record import COLLECTIVES, COMPUTE, COPIES, Event, Profile, buffers, line_of, op_of

TRACKS = {"collective": COLLECTIVES, "copy": COPIES}  # by the kind of a node's work


def profile(
    fn: Callable[..., Any],
    *args: Any,
    donate: Collection[str] = (),
    passes: Sequence[graphs.Pass] = (),
    recompute: bool = True,
    fuse: bool = True,
    repeats: int = 5,
    **kwargs: Any,
) -> Profile:
    """Run ``fn(*args, **kwargs)`` as :func:`fquant.jit` does with these options, and return the time of each node.

    ``fn`` is a pure function; one that ``jit`` has captured is captured anew with the options here. It runs
    ``2 * repeats + 1`` times, on copies of the tensors that it writes, so the arguments stay as they are. Raises the
    errors of a capture, and ValueError for ``repeats`` below 1 and for tensors without values.
    """
    if repeats < 1:
        raise ValueError(f"profile: repeats is {repeats}; wanted at least 1")
    bound = trace.signature_of(fn).bind(*args, **kwargs).arguments
    named = [(path, leaf) for path, leaf in tree.items(bound) if isinstance(leaf, Tensor)]
    if shapes := [path for path, t in named if t.is_meta or isinstance(t, FakeTensor)]:
        raise ValueError(f"profile: {shapes[0]} has no values, and the step is run; see fquant.cost for shapes alone")
    (device, far), given = device_of(named), [t for _, t in named]
    call, donated = functools.partial(trace.apply, fn), written_over(bound, donate)
    found = trace.trace(call, bound, donated, passes, recompute, fuse, trace.fn_name(fn), device, host=far, lines=True)
    if device == HOST:
        found = found.laid_out()
    fresh = lambda: [t.clone() if id(t) in donated else t for t in given]
    _, found = found.first(*fresh())
    clock = Host() if device == HOST else Cuda(device)
    whole, each = list[float](), list[dict[Node, float]]()
    for _ in range(repeats):
        tensors = fresh()
        clock.wait()
        began = time.perf_counter()
        found(*tensors)
        clock.wait()
        whole.append(time.perf_counter() - began)
    for _ in range(repeats):
        timed = list[Timed]()

        def interpret(module: GraphModule, timed: list[Timed] = timed) -> Callable[..., Any]:
            timed.append(Timed(module, clock))
            return timed[0].run

        found(*fresh(), interpret=interpret)
        each.append(_of_graph(timed[0].seconds(), found))
    taken = {node: median(times[node] for times in each) for node in each[0]}
    return _profile(found, trace.fn_name(fn), roofline.of(device), median(whole), taken)


def predicted(captured: trace.Captured, device: roofline.Device, name: str = "a step") -> Profile:
    """Return the profile of a capture with ``lines`` that is predicted for ``device``; nothing runs."""
    taken = dict[Node, float]()
    for spent in roofline.walk(captured.module.graph, device):
        taken[spent.node] = taken.get(spent.node, 0.0) + (spent.seconds or spent.serial)
    seconds = roofline.predict(captured.module.graph, device).seconds
    return _profile(captured, name, device, seconds, taken, is_measured=False)


def _of_graph(taken: dict[Node, float], captured: trace.Captured) -> dict[Node, float]:
    """Return the seconds of the nodes of a capture's graph, of those of the graph that ran.

    In planned memory an op may take several calls, of which the last is known as the node's.
    """
    origin = captured.placed.origin if captured.placed else {}
    found, before, own = dict[Node, float](), 0.0, set(captured.module.graph.nodes)
    for node, seconds in taken.items():
        before += seconds
        if (made := origin.get(node, node)) in own:
            found[made], before = found.get(made, 0.0) + before, 0.0
    return found


def _profile(
    captured: trace.Captured, name: str, device: roofline.Device, seconds: float, taken: dict[Node, float],
    is_measured: bool = True,
) -> Profile:  # fmt: skip
    """Return the profile of a capture of whose nodes the seconds are known."""
    graph = captured.module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return Profile(
        name, device.name, is_measured, seconds, tuple(_events(captured, device, taken, is_measured)),
        buffers(graph, dict(zip(placeholders, captured.paths, strict=True))), costs.of(captured),
    )  # fmt: skip


def _events(
    captured: trace.Captured, device: roofline.Device, taken: dict[Node, float], is_measured: bool
) -> list[Event]:
    """Return the events of the nodes with times, in the order of the graph.

    What runs beside the computation begins at its issue, behind what its track did before. A measured one ends with its
    wait, and a predicted one after the seconds that it takes.
    """
    now, free, found = 0.0, dict[str, float](), list[Event]()
    waits = {graphs.issue_of(n): n for n in captured.module.graph.nodes if graphs.is_wait(n)}
    ends, begins = dict[Node, float](), list[tuple[int, Node, str, float]]()
    for place, node in enumerate(captured.module.graph.nodes):
        work = roofline.work(node, device)
        kind = work[0].kind if work else "wait" if graphs.is_wait(node) else ""
        track, seconds = TRACKS.get(kind, COMPUTE), taken.get(node, 0.0)
        if track != COMPUTE:
            begins.append((place, node, track, now))
            now += seconds if is_measured else 0.0
        elif node in taken and kind:
            limit = sum(part.seconds(device) for part in work)
            found.append(_event(place, node, kind, COMPUTE, now, seconds, limit))
            now += seconds
        ends[node] = now
    for place, node, track, start in begins:
        start = max(start, free.get(track, 0.0))
        end = ends[waits[node]] if is_measured and node in waits else start + taken.get(node, 0.0)
        free[track] = end
        limit = sum(part.seconds(device) for part in roofline.work(node, device))
        found.append(_event(place, node, track, track, start, max(0.0, end - start), limit))
    return sorted(found, key=lambda event: event.place)


def _event(place: int, node: Node, kind: str, track: str, start: float, seconds: float, limit: float) -> Event:
    where, backward = line_of(node), bool(node.meta.get("backward"))
    return Event(place, node.name, op_of(node), kind, where, backward, track, start, seconds, limit)


class Clock(Protocol):
    """Times calls on a device."""

    def wait(self) -> None:
        """Wait for the device."""
        ...

    def call(self, f: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """Return the result of ``f`` and what gives its seconds after :meth:`wait`."""
        ...


class Host:
    """The clock of the host."""

    def wait(self) -> None:
        """Do nothing: calls end when their work does."""

    def call(self, f: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """See :class:`Clock`."""
        began = time.perf_counter()
        result = f()
        seconds = time.perf_counter() - began
        return result, lambda: seconds


class Cuda:
    """The clock of a CUDA device: events before and behind each call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self.device)

    def call(self, f: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """See :class:`Clock`."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(torch.cuda.current_stream(self.device))
        result = f()
        stop.record(torch.cuda.current_stream(self.device))
        return result, lambda: start.elapsed_time(stop) / 1e3


class Timed(Interpreter):
    """Runs a graph node by node, and times its calls."""

    def __init__(self, module: GraphModule, clock: Clock) -> None:
        super().__init__(module)
        self.extra_traceback = False  # errors stay as ops raise them
        self._clock, self._taken, self._node = clock, dict[Node, Callable[[], float]](), next(iter(module.graph.nodes))

    def run_node(self, n: Node) -> Any:
        """Run a node."""
        self._node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an op, and time it."""
        result, self._taken[self._node] = self._clock.call(lambda: target(*args, **kwargs))
        return result

    def seconds(self) -> dict[Node, float]:
        """Return the seconds of each call."""
        self._clock.wait()
        return {node: seconds() for node, seconds in self._taken.items()}
