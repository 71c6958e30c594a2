"""Capture a pure step as one graph, and replay the graph.

    @jit(donate=("adapters", "state"))
    def step(adapters, state, base, tokens):
        grads, value   = grad_and_value(loss)(adapters, base, tokens)
        updates, state = opt.update(grads, state, adapters)
        return optim.apply_updates(adapters, updates), state, value

``torch.func.grad`` runs its backward so that it could be differentiated again. It keeps four times what autograd keeps,
and Python runs at every op. Traced once on fake tensors and replayed, the same step holds a tensor until its last use,
and Python runs once. The graph has everything that happens to tensors: transforms, recomputation, collectives, the
optimiser, dropout. Results equal those of the function in every bit. Only a NaN may have another sign and payload.

Arguments and results are trees. Tensors are the inputs of a replay. Everything else (structure, static fields, numbers,
configurations, functions) is frozen in the trace. A trace is valid for one key (guards.py), which has these, layouts,
torch's state, and the Python values that the function closes over (closure.py). A call with a new key is traced again.
One thread traces at a time; others wait.

The function must be pure. It may not use a tensor that is not an argument, nor ask for a tensor's value. Its side
effects happen only while it is traced. Inside another capture or transform, and while autograd detects anomalies, it is
called as it is.

*Donated* arguments give their memory to results, and raise on any later use (donation.py). Memory that another tensor,
an argument, a view or an array from ``t.numpy()`` shares is not taken. An array that lends its memory to
``torch.from_numpy`` is not seen.

On CUDA, the second call records the step as one CUDA graph, and later calls launch that (cuda_graph/). On CPUs, results
of ops share one planned piece of memory (memory/), which stays for the next replay. The first replay checks every op
against the trace (validate.py). Every rank calls a captured function that communicates, in the same order
(collective_check.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor

from .. import tree
from ..device import HOST
from ..kernels.batch_invariant import is_batch_invariant
from ..kernels.dispatch import is_lazy
from . import collective_check, graph, guards, roofline
from .arguments import Structure, binder, flatten
from .closure import Closure, may_change
from .cuda_graph import Recordings, describe, recorder_of, refuse, synchronises
from .dynamic_sizes import Jit, Padded, Padding, Prepared
from .guards import Key, key_of
from .memory import allocator
from .passes.donate import written_over
from .retraces import Retraces
from .torch_compile import compiled
from .trace import _TRACING, Captured, apply, fn_name, signature_of, trace
from .tracing.retarget import device_of

P = ParamSpec("P")
R = TypeVar("R")


class Options(TypedDict, total=False):
    """The options of :func:`jit`."""

    donate: Sequence[str]
    passes: Sequence[graph.Pass]
    compile: bool | str
    recompute: bool
    fuse: bool
    max_traces: int | None
    cuda_graph: bool | str
    dynamic: Mapping[str, Padded]


@overload
def jit(fn: Callable[P, R], **options: Unpack[Options]) -> Callable[P, R]: ...
@overload
def jit(**options: Unpack[Options]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def jit(
    fn: Callable[..., Any] | None = None,
    *,
    donate: Sequence[str] = (),
    passes: Sequence[graph.Pass] = (),
    compile: bool | str = False,
    recompute: bool = True,
    fuse: bool = True,
    max_traces: int | None = None,
    cuda_graph: bool | str = "auto",
    dynamic: Mapping[str, Padded] = MappingProxyType({}),
) -> Callable[..., Any]:
    """Capture ``fn``: trace it at its first call and replay the graph at later ones.

    The result has the signature of ``fn``. ``jit`` is a decorator too, with or without options.

        donate      names of parameters whose memory results may take; their tensors are unusable after the call
        passes      functions of a torch.fx graph that change it in place, called in order before donation
        compile     hand the graph to torch.compile: True is Inductor, a string another backend
        recompute   recompute cheap tensors instead of holding them over the peak (passes/rematerialize.py)
        fuse        run chains of elementwise operations as one (passes/fuse_pointwise.py), unless Inductor does
        max_traces  the traces that you expect: more raise; by default a warning names what changes again and again
        cuda_graph  replay as one CUDA graph (cuda_graph/recordings.py): "auto" does on CUDA if all ops can be recorded,
                    and warns of those that cannot; True raises for them, and on other devices
        dynamic     arguments by path that are padded to a few sizes, so that others cause no trace (dynamic_sizes/)

    A change of a Python value that ``fn`` closes over retraces (see :mod:`fquant.compile.closure`). A call raises

    * TypeError for a tensor that ``fn`` is not given (naming it), or whose value it asks for (naming the line);
    * TypeError for an argument that is neither a dense tensor nor hashable, or that requires a gradient;
    * TypeError for a result that is no tree, a torch.Generator, or a collective in place;
    * ValueError for a donated tensor that no result fits, dynamic sizes that differ, or a result that they change;
    * RuntimeError for more than ``max_traces`` traces (naming what changed), or a tensor that was donated before;
    * RuntimeError for ranks that are about to run different functions, or an op that contradicts its trace;
    * RuntimeError inside ``batch_invariant()``, which belongs inside ``fn``;
    * RuntimeError for an op that ``cuda_graph=True`` cannot record (naming its line), TypeError on other devices.
    """
    if fn is None:
        return functools.partial(
            jit, donate=donate, passes=passes, compile=compile, recompute=recompute, fuse=fuse, max_traces=max_traces,
            cuda_graph=cuda_graph, dynamic=dynamic,
        )  # fmt: skip
    if cuda_graph not in ("auto", True, False):
        raise ValueError(f"jit: cuda_graph is {cuda_graph!r}; wanted 'auto', True or False")
    signature, name = signature_of(fn), fn_name(fn)
    by_name = binder(signature)
    if unknown := [parameter for parameter in donate if parameter not in signature.parameters]:
        raise ValueError(f"jit: donate names {', '.join(unknown)}; {name} has {', '.join(signature.parameters)}")
    graph.check(passes)
    traced: dict[Key, Captured] = {}
    repeats, closure, retraces = guards.Repeats(), Closure(fn), Retraces(name, max_traces)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = by_name(args, kwargs)
        leaves, structure = flatten(bound)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if (found := repeated(bound, leaves, structure, tensors)) is not None:
            return replay(found, tensors)
        if guards.is_inside(tensors):
            return fn(*args, **kwargs)
        if torch._C._len_torch_dispatch_stack() and is_batch_invariant():
            fix = "enter it inside the function"
            raise RuntimeError(f"jit: {name} is called inside batch_invariant(), which its graph would not see; {fix}")
        return padding(bound, leaves, structure) if padding else run(prepare(bound, leaves, structure))

    def repeated(bound: Any, leaves: Any, structure: Structure, tensors: list[Tensor]) -> Captured | None:
        for key, found in () if padding else repeats.find(structure, leaves, tensors):
            _, flags, version, _ = state_of(leaves, structure, tensors, bound)
            if (flags, version) == (key.donated, key.closure):
                return found
        return None

    def prepare(bound: Any, leaves: Any, structure: Any, sizes: tuple[int, ...] = ()) -> Prepared:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not all(map(guards.is_plain, tensors)):
            guards.check(name, bound)
        if any(map(is_lazy, tensors)):
            bound = tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and is_lazy(leaf) else leaf, bound)
            leaves, structure = flatten(bound)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        donated, flags, version, objects = state_of(leaves, structure, tensors, bound)
        key = key_of(structure, leaves, flags, version)
        return Prepared(bound, tensors, donated, key._replace(sizes=sizes) if sizes else key, objects)

    def run(given: Prepared) -> Any:
        try:
            found = traced.get(given.key)
        except TypeError:
            raise guards.unhashable(name, given.bound) from None
        if found is None:
            with _TRACING:
                if given.key not in traced:
                    return first_call(*given)
                found = traced[given.key]
        if not padding:  # which compares sizes first, and finds no repeats
            repeats.add(given.key, given.tensors, found)
        return replay(found, given.tensors)

    def state_of(
        leaves: list[Any], structure: Structure, tensors: list[Tensor], bound: Any
    ) -> tuple[Collection[int], tuple[bool, ...], int, Any]:
        donated = written_over(structure.parts(leaves), donate) if donate else ()
        opens = len(tensors) < len(leaves) and any(map(may_change, leaves))
        objects = [item for item in tree.items(bound) if may_change(item[1])] if opens else ()
        flags = tuple(id(t) in donated for t in tensors) if donate else ()
        return donated, flags, closure.version(objects), objects

    def bind(**fixed: Any) -> Callable[..., Any]:
        if wrong := [each for each in fixed if each not in signature.parameters or each in donate]:
            wanted = [each for each in signature.parameters if each not in donate]
            raise ValueError(f"bind({name}): cannot fix {', '.join(wrong)}; wanted some of {', '.join(wanted)}")
        if padding:
            return functools.partial(call, **fixed)
        held = {each: [t for t in tree.leaves(x) if isinstance(t, Tensor)] for each, x in fixed.items()}
        ids = {id(t) for each in held.values() for t in each}
        objects = [item for item in tree.items(fixed) if may_change(item[1])]
        known: dict[Key, Captured] = {}

        def run_rest(**rest: Any) -> Any:
            tensors, structure = flatten(rest)
            usual = all(isinstance(t, Tensor) and guards.is_plain(t) and not is_lazy(t) for t in tensors)
            if not usual or guards.is_inside(tensors):
                return call(**fixed, **rest)
            parts = structure.parts(tensors)
            donated = written_over(parts, donate) - ids if donate else ()
            flags = tuple(id(t) in donated for t in tensors)
            key = key_of(structure, tensors, flags, closure.version(objects))
            bound = signature.bind(**fixed, **rest).arguments
            if (found := known.get(key)) is None:
                leaves, whole = flatten(bound)
                _, flags, version, _ = state_of(leaves, whole, [t for t in leaves if isinstance(t, Tensor)], bound)
                found = traced.get(key_of(whole, leaves, flags, version))
                if found is None:
                    return call(**fixed, **rest)
                known[key] = found
            return replay(found, [t for each in bound for t in (held if each in held else parts)[each]])

        return run_rest

    def replay(found: Captured, tensors: Any, called: str = name, run: Callable[..., Any] = Captured.__call__) -> Any:
        collective_check.check_ranks_agree(called, found.collectives)
        records = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # torch.no_grad takes five calls in Python
        try:
            with torch._C._DisableAutocast():  # type: ignore[attr-defined]  # its casts are in the graph
                with collective_check.watched(found.collectives):
                    return run(found, *tensors)
        finally:
            torch._C._set_grad_enabled(records)

    def trace_of(bound: Any, donated: Collection[int] = (), lines: bool = False) -> Captured:
        device, host = device_of((path, x) for path, x in tree.items(bound) if isinstance(x, Tensor))
        f, fuses = functools.partial(apply, fn), fuse and not compile
        return trace(f, bound, donated, passes, recompute, fuses, name, device, host, lines)

    def first_call(bound: Any, tensors: list[Tensor], donated: Collection[int], key: Key, objects: Any) -> Any:
        guards.check(name, bound)
        if traced:
            same = [each for each in traced if each.sizes == key.sizes]
            changes = guards.differences(tree.paths(bound), same or traced, key, closure)
            retraces.note(changes, len(traced), expected=not same)
        traces = functools.partial(trace_of, bound, donated)
        captured = traces()
        records = functools.partial(_with_recordings, name=name, cuda_graph=cuda_graph, traces=traces)
        key = key._replace(closure=closure.ignore_changes(key.closure, objects))
        if compile:
            run = compiled(captured.module, "inductor" if compile is True else compile)
            traced[key] = records(dataclasses.replace(captured, compiled=run))
            return replay(traced[key], tensors)
        captured = records(captured)
        if captured.recordings is None and allocator.reuses_memory() and captured.device == HOST:
            captured = captured.laid_out()
            allocator.enable_reuse()
            if captured.placed:  # now rather than at the second call, when results would lie between what it frees
                captured.placed.module.real_recompile()  # type: ignore[operator]
            allocator.release()  # what the trace has freed
        result, traced[key] = replay(captured, tensors, run=Captured.first)
        return result

    inner = Jit(prepare, run, trace_of, replay)
    padding = Padding(name, list(signature.parameters), dynamic, donate, inner) if dynamic else None
    call.traced, call.bind = traced, bind  # type: ignore[attr-defined]
    return call


def bind(captured: Callable[..., R], **fixed: Any) -> Callable[..., R]:
    """Return ``captured``, a result of :func:`jit`, with arguments ``fixed``; it takes the rest by keyword.

    Guards of fixed arguments are checked once, not at every call, which takes milliseconds for a model's parameters.
    Lists and dicts in them may not change from then on. Any other function gets the arguments as ``functools.partial``
    gives them. Raises ValueError for a donated or an unknown argument.
    """
    own = getattr(captured, "bind", None)
    return functools.partial(captured, **fixed) if own is None else own(**fixed)


def _with_recordings(
    captured: Captured, name: str, cuda_graph: bool | str, traces: Callable[..., Captured]
) -> Captured:
    """Return ``captured`` with recordings if its device can record and every op can be recorded.

    ``traces`` traces again, to find the lines of ops that cannot be recorded.
    """
    g, recorder = captured.module.graph, recorder_of(captured.device) if cuda_graph else None
    if recorder is None and cuda_graph is True:
        fix = "wanted those of CUDA; move them, or let cuda_graph be 'auto'"
        raise TypeError(f"jit({name}): cuda_graph is True, and its tensors are on {captured.device}; {fix}")
    if recorder is not None and synchronises(g):
        refuse(name, "; ".join(map(describe, synchronises(traces(lines=True).module.graph)[:3])), cuda_graph is True)
    elif recorder is not None:
        agree = collective_check.all_gather_numbers if captured.collectives else None
        scratch = functools.partial(roofline.scratch, device=roofline.of(captured.device))
        run = captured.compiled or captured.module
        recordings = Recordings(run, g, captured.paths, recorder, name, cuda_graph is True, agree, scratch)
        return dataclasses.replace(captured, recordings=recordings)
    return captured
