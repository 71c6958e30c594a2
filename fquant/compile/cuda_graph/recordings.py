"""Recordings of one trace: a captured step that is replayed as one CUDA graph.

A recording has the addresses of its arguments. An argument is one of two kinds:

    static    read and written where it is: weights, donated state, all that had one address at the call before
    copied    to a slot of the recordings at each replay: what moves, and all else of up to ``SMALL`` bytes, e.g. tokens

The first call runs node by node and warms up. The second records: it knows which arguments have moved. If a static
argument moves later, e.g. because weights were loaded, the step is recorded again. The last ``MOST_KEPT`` recordings
stay. An argument that has moved ``MOST_MOVES`` times is copied from then on, with one warning if it is large. What
moves more often than that in pinned memory of the host ends recording, because the host cannot wait for a copy.

Results are pure. One that takes a donated argument's memory has that of this call's argument: in place if it is static,
copied back from its slot if not. A result that is a view of an argument views the argument of this call. All others are
copied out of the pool, which the next replay overwrites.

Recordings keep no argument alive, so that donation sees who shares its memory. An argument that is freed is not read:
its recording is replayed only for arguments at the same addresses.
"""

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from .. import graph as graphs
from .. import liveness
from .recorder import Recorder

SMALL = 1 << 20  # bytes
LARGE = 64 << 20  # bytes, of which a copy at each call is worth a warning
MOST_KEPT, MOST_MOVES = 4, 2
Run = Callable[[], Sequence[Tensor]]


class _Of(NamedTuple):
    """A result in the memory of an argument: itself, or a view with an offset in bytes from the argument's start."""

    argument: int
    view: Tensor | None = None
    offset: int = 0


@dataclass(frozen=True)
class _Recording:
    """A recorded step: the addresses of static arguments, slots of the others, and results by place."""

    static: Mapping[int, int]
    slots: Mapping[int, Tensor]
    replay: Callable[[], None]
    results: Sequence[Tensor]


class Recordings:
    """The recordings of one trace. ``module`` runs ``graph``, whose inputs have ``paths``."""

    def __init__(
        self, module: Any, graph: Graph, paths: Sequence[str], recorder: Recorder, name: str, required: bool
    ) -> None:
        self._module, self._graph, self._paths, self._recorder = module, graph, paths, recorder
        self._name, self._required = name, required
        self._seen: Sequence[int] | None = None  # the addresses at the first call
        self._slots, self._moves = dict[int, Tensor](), dict[int, int]()
        self._made, self._lock, self._is_off = list[_Recording](), threading.RLock(), False

    def _read_graph(self) -> None:
        """Find what is written and returned, once the first replay has corrected the graph."""
        graph = self._graph
        given, memory = graph.find_nodes(op="placeholder"), graphs.storages_on_device(graph)
        written, holders = graphs.all_written_storages(graph), [graphs.storages(node) for node in given]
        shared = lambda i: any(holders[i] & other for j, other in enumerate(holders) if j != i)
        self._written = {i for i, held in enumerate(holders) if held & written}
        self._fixed = {  # these cannot be copied
            i for i, held in enumerate(holders) if not held <= memory or (i in self._written and shared(i))
        }
        self._results = _results_of(graph)
        inside = memory - graphs.all_storages(given)
        self._nbytes = liveness.peak(graph, inside).nbytes if isinstance(self._module, GraphModule) else 0

    def __len__(self) -> int:
        """Return the number of recordings that are kept."""
        return len(self._made)

    def ready(self, tensors: Sequence[Tensor], run: Run) -> Run:
        """Return what replays the step for ``tensors``: a recording, made if need be, or ``run``, which does not.

        Raises RuntimeError if the step cannot be recorded and must be; if it need not, warns once.
        """
        if self._is_off or torch._C._len_torch_dispatch_stack() or self._recorder.is_recording():
            return run
        with self._lock:
            places = [t.data_ptr() for t in tensors]
            if self._seen is None:
                self._seen = places
                return partial(self._recorder.warm_up, run)
            found = next((made for made in self._made if all(places[i] == at for i, at in made.static.items())), None)
            if found is None:
                found = self._record(tensors, places)
        return run if found is None else partial(self._replay, found, tensors)

    def _record(self, tensors: Sequence[Tensor], places: Sequence[int]) -> _Recording | None:
        """Record the step; return None, with a warning, if it cannot be."""
        if not self._made:
            self._read_graph()
        error = self._choose_slots(tensors, places)
        at = [self._slots.get(i, t) for i, t in enumerate(tensors)]
        if error is None:
            try:
                # Inference tensors could not be written outside of the mode.
                with torch.inference_mode(False), torch.no_grad():
                    replay, results = self._recorder.record(self._run, at, self._nbytes)
            except Exception as failed:
                error = f"{type(failed).__name__}: {failed}"
            else:
                static = {i: place for i, place in enumerate(places) if i not in self._slots}
                made = _Recording(static, dict(self._slots), replay, list(results))
                self._made = [*self._made, made][-MOST_KEPT:]
                return made
        refuse(self._name, str(error), self._required)
        self._is_off, self._made, self._slots = True, [], {}
        return None

    def _choose_slots(self, tensors: Sequence[Tensor], places: Sequence[int]) -> str | None:
        """Give slots to arguments that are to be copied; return why the step cannot be recorded, if so."""
        assert self._seen is not None
        before = self._made[-1].static if self._made else dict(enumerate(self._seen))
        copied = set[int]()
        for i in (i for i in before if i not in self._slots):
            moved, large = places[i] != before[i], tensors[i].nbytes > SMALL
            self._moves[i] = self._moves.get(i, 0) + (moved and bool(self._made))
            if i in self._fixed:
                if self._moves[i] > MOST_MOVES:
                    return f"{self._paths[i]} has another address at every call, and cannot be copied; keep it in place"
            elif (moved and not self._made) or not (large or i in self._written) or self._moves[i] > MOST_MOVES:
                copied.add(i)
        self._slots |= {i: _slot(tensors[i]) for i in copied}
        _copy((self._slots[i], tensors[i]) for i in copied)  # values that an op may check while it is recorded
        huge = [i for i in copied if tensors[i].nbytes > LARGE]
        if huge and self._made:
            text = ", ".join(f"{self._paths[i]} ({tensors[i].nbytes / 2**30:.2f} GiB)" for i in huge)
            why = "has another address at every call and is copied at each; pass the same tensor"
            warnings.warn(f"jit({self._name}): {text} {why}, or cuda_graph=False", RuntimeWarning, stacklevel=2)
        return None

    def _run(self, *tensors: Tensor) -> Sequence[Tensor]:
        named = isinstance(self._module, GraphModule)
        return _Named(self._module).run(*tensors) if named else self._module(*tensors)

    def _replay(self, made: _Recording, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        slots = made.slots
        with self._recorder.turn():
            _copy((slot, tensors[i]) for i, slot in slots.items())
            made.replay()
            _copy((tensors[i], slots[i]) for i in self._written & slots.keys())
            return self._take(made, tensors)

    def _take(self, made: _Recording, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the results of a replay, outside of the pool."""
        new, out = dict[int, Tensor](), list[Tensor]()
        for of, t in zip(self._results, made.results, strict=True):
            if isinstance(of, _Of):
                out.append(_in_memory_of(tensors[of.argument], of))
            else:  # one tensor returned twice is one
                if of not in new:
                    new[of] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
                out.append(new[of])
        inside = {of: t for of, t in zip(self._results, made.results, strict=True) if not isinstance(of, _Of)}
        _copy((new[of], inside[of]) for of in new)
        return out


class _Named(Interpreter):
    """Run a graph node by node, and name the node that fails."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False

    def run_node(self, n: Node) -> Any:
        try:
            return super().run_node(n)
        except Exception as error:
            raise RuntimeError(f"{n.name} ({n.target}) fails with {type(error).__name__}: {error}") from error


def refuse(name: str, why: str, required: bool) -> None:
    """Raise RuntimeError if recording ``name`` is required, else warn: it cannot be recorded, and ``why``."""
    text = f"jit({name}) cannot be recorded as a CUDA graph: {why}"
    if required:
        raise RuntimeError(f"{text}; change it, or let cuda_graph be 'auto'")
    warnings.warn(f"{text}; every call launches its ops one by one", RuntimeWarning, stacklevel=2)


def _results_of(graph: Graph) -> list[_Of | int]:
    """Return for each result the argument in whose memory it is, or the number of a tensor of the pool."""
    given = graph.find_nodes(op="placeholder")
    owner = {storage: i for i, node in reversed([*enumerate(given)]) for storage in graphs.storages(node)}
    numbers, found = dict[Node, int](), list[_Of | int]()
    for node in graphs.outputs(graph):
        (t,), (storage,) = graphs.tensors(node), graphs.storages(node)
        same = _returned_argument(node)
        if same.op == "placeholder":
            found.append(_Of(given.index(same)))
        elif storage in owner:
            (of,) = graphs.tensors(given[owner[storage]])
            found.append(_Of(owner[storage], t, _start(t) - _start(of)))
        else:
            found.append(numbers.setdefault(same, len(numbers)))
    return found


def _returned_argument(node: Node) -> Node:
    """Return the node whose tensor a node returns: its first argument's if the op writes there, as ``copy_`` does."""
    while isinstance(node.target, torch._ops.OpOverload):
        returns, first = node.target._schema.returns, node.args[0] if node.args else None
        written = len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write
        if not (written and isinstance(first, Node)):
            break
        node = first
    return node


def _in_memory_of(argument: Tensor, of: _Of) -> Tensor:
    if of.view is None:
        return argument
    offset = (_start(argument) + of.offset) // of.view.element_size()
    with torch.no_grad():
        empty = torch.empty(0, dtype=of.view.dtype, device=argument.device)
        return empty.set_(argument.untyped_storage(), offset, of.view.shape, of.view.stride())


def _start(t: Tensor) -> int:
    return int(t.storage_offset()) * t.element_size()


def _slot(t: Tensor) -> Tensor:
    """Return memory for tensors like ``t``, at an address that is as aligned: kernels are compiled for that."""
    with torch.inference_mode(False):
        extent = 1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
        raw = torch.empty(max(extent, 0) + 16, dtype=t.dtype, device=t.device)
        return raw.as_strided(t.shape, t.stride(), t.data_ptr() % 16 // t.element_size())


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair, which has the strides of the first, to the first."""
    by_dtype = dict[torch.dtype, tuple[list[Tensor], list[Tensor]]]()
    for to, t in pairs:
        if t.numel():
            targets, sources = by_dtype.setdefault(t.dtype, ([], []))
            targets.append(_once(to))
            sources.append(_once(t))
    with torch.no_grad():
        for targets, sources in by_dtype.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)


def _once(t: Tensor) -> Tensor:
    """Return a view of ``t`` that has every element of its memory once, which an expanded tensor has not."""
    dims, extent = sorted((step, size) for size, step in zip(t.shape, t.stride(), strict=True) if step and size > 1), 1
    for step, size in dims:
        if step < extent:  # dims overlap
            whole = 1 + sum(step * (size - 1) for step, size in dims)
            return t.as_strided((whole,), (1,), t.storage_offset())
        extent += step * (size - 1)
    if any(size > 1 and not step for size, step in zip(t.shape, t.stride(), strict=True)):
        sizes = [size if step else 1 for size, step in zip(t.shape, t.stride(), strict=True)]
        return t.as_strided(sizes, t.stride(), t.storage_offset())
    return t
