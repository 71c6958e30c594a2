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

*Pinned memory* of an argument on the host is read by every replay, when the device gets there. So a value that the host
writes is seen by the next replay. It may be written only once the device has finished the replays before.

*Ranks* that communicate record at the same calls, and replay the same recording. NCCL requires it: a collective is part
of a graph on all ranks or on none, and a graph is launched by all ranks that recorded it. Addresses may differ between
ranks. So before each call they exchange the numbers of the recordings that fit, counted over all that ranks have made
together. One that fits on every rank is replayed, or all ranks record. If one rank cannot, none does.
"""

import itertools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from .. import graph as graphs
from .. import liveness
from .addresses import Of, copy, in_memory_of, results_of, slot, usual
from .recorder import Recorder

SMALL = 1 << 20  # bytes
LARGE = 64 << 20  # bytes, of which a copy at each call is worth a warning
MOST_KEPT, MOST_MOVES = 4, 2
RUN, WARM_UP, REPLAY = range(3)
Run = Callable[[], Sequence[Tensor]]
Agree = Callable[[list[int]], list[list[int]]]  # exchange numbers with all ranks

_SHARED = itertools.count()  # of recordings that all ranks have made together, of any trace


@dataclass(frozen=True)
class _Recording:
    """A recorded step: the addresses of static arguments, slots of the others, and results by place."""

    number: int
    static: Mapping[int, int]
    slots: Mapping[int, Tensor]
    replay: Callable[[], None]
    results: Sequence[Tensor]


class Recordings:
    """The recordings of one trace. ``module`` runs ``graph``, whose inputs have ``paths``.

    Ranks that communicate ``agree`` which recording they replay. ``scratch`` gives the bytes of a node's kernels while
    they run, for which the pool has room too.
    """

    def __init__(
        self,
        module: Any,
        graph: Graph,
        paths: Sequence[str],
        recorder: Recorder,
        name: str,
        required: bool,
        agree: Agree | None = None,
        scratch: Callable[[Node], int] = lambda node: 0,
    ) -> None:
        self._agree: Agree = (lambda mine: [mine]) if agree is None else agree
        self._numbers = itertools.count() if agree is None else _SHARED
        self._module, self._graph, self._paths, self._recorder = module, graph, paths, recorder
        self._name, self._required, self._scratch = name, required, scratch
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
        self._results = results_of(graph)
        inside = memory - graphs.all_storages(given)
        planned = isinstance(self._module, GraphModule)
        self._nbytes = liveness.peak(graph, inside, self._scratch).nbytes if planned else 0

    def __len__(self) -> int:
        """Return the number of recordings that are kept."""
        return len(self._made)

    def ready(self, tensors: Sequence[Tensor], run: Run) -> Run:
        """Return what replays the step for ``tensors``: a recording, made if need be, or ``run``, which does not.

        Raises RuntimeError if the step cannot be recorded and must be; if it need not, warns once.
        """
        if self._is_off:
            return run
        is_seen = torch._C._len_torch_dispatch_stack() or self._recorder.is_recording()
        with self._lock:
            places = [t.data_ptr() for t in tensors]
            fits = {r.number: r for r in self._made if all(places[i] == at for i, at in r.static.items())}
            mine = RUN if is_seen else WARM_UP if self._seen is None else REPLAY
            everywhere = self._agree([mine, *fits, *[-1] * (MOST_KEPT - len(fits))])
            first = min(what for what, *_ in everywhere)
            if first == RUN:
                return run
            if first == WARM_UP:
                self._seen = places if self._seen is None else self._seen
                is_compiled = not isinstance(self._module, GraphModule)
                return partial(self._recorder.warm_up, partial(self._first, tensors) if is_compiled else run)
            common = fits.keys() & set[int].intersection(*(set(numbers) for _, *numbers in everywhere))
            found = fits[max(common)] if common else self._record(tensors, places)
        return run if found is None else partial(self._replay, found, tensors)

    def _first(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run a compiled module as it will be recorded; torch would compile it again for tensors of another kind."""
        self._read_graph()
        with torch.inference_mode(False), torch.no_grad():
            results = self._run(*map(usual, tensors))
        pairs = zip(self._results, results, strict=True)
        return [in_memory_of(tensors[of.argument], of) if isinstance(of, Of) else t for of, t in pairs]

    def _record(self, tensors: Sequence[Tensor], places: Sequence[int]) -> _Recording | None:
        """Record the step; return None, with a warning, if it cannot be."""
        if not self._made:
            self._read_graph()
        error = self._on_any_rank(self._choose_slots(tensors, places))
        at = [self._slots.get(i, usual(t)) for i, t in enumerate(tensors)]
        if error is None:
            made: _Recording | None = None
            try:
                # Inference tensors could not be written outside of the mode.
                with torch.inference_mode(False), torch.no_grad():
                    replay, results = self._recorder.record(self._run, at, self._nbytes)
            except Exception as failed:
                error = f"{type(failed).__name__}: {failed}"
            else:
                static = {i: place for i, place in enumerate(places) if i not in self._slots}
                made = _Recording(-1, static, dict(self._slots), replay, list(results))
            if (error := self._on_any_rank(error)) is None and made is not None:
                made = replace(made, number=next(self._numbers))
                self._made = [*self._made, made][-MOST_KEPT:]
                return made
        refuse(self._name, str(error), self._required)
        self._is_off, self._made, self._slots = True, [], {}
        return None

    def _on_any_rank(self, error: str | None) -> str | None:
        """Return the error of this rank, else that another has one, else None."""
        failed = [rank for rank, (fine,) in enumerate(self._agree([int(error is None)])) if not fine]
        return error or (f"rank {failed[0]} cannot record it" if failed else None)

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
        self._slots |= {i: slot(tensors[i]) for i in copied}
        copy((self._slots[i], tensors[i]) for i in copied)  # values that an op may check while it is recorded
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
            copy((to, tensors[i]) for i, to in slots.items())
            made.replay()
            copy((tensors[i], slots[i]) for i in self._written & slots.keys())
            return self._take(made, tensors)

    def _take(self, made: _Recording, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the results of a replay, outside of the pool."""
        new, out = dict[int, Tensor](), list[Tensor]()
        for of, t in zip(self._results, made.results, strict=True):
            if isinstance(of, Of):
                out.append(in_memory_of(tensors[of.argument], of))
            else:  # one tensor returned twice is one
                if of not in new:
                    new[of] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
                out.append(new[of])
        inside = {of: t for of, t in zip(self._results, made.results, strict=True) if not isinstance(of, Of)}
        copy((new[of], inside[of]) for of in new)
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
