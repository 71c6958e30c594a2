"""jit: a pure step becomes one graph, which is then replayed.

    @jit(donate=("adapters", "state"))
    def step(adapters, state, base, tokens):
        grads, value   = grad_and_value(loss)(adapters, base, tokens)
        updates, state = opt.update(grads, state, adapters)
        return optim.apply_updates(adapters, updates), state, value

``torch.func.grad`` runs its backward so that it could be differentiated again: it keeps four times what autograd keeps,
and Python runs at every op. Traced once on fake tensors and replayed, the same step holds a tensor until its last use
and not longer, and Python runs once. What is traced is everything that happens to tensors: transforms, recomputation,
collectives, the optimiser, dropout. Results are those of the function itself, to the bit.

Arguments and results are trees. Tensors are what a replay is given; everything else (structure, static fields, numbers,
configurations, functions) is part of what is traced and has to be hashable. A call whose structure, static parts,
shapes, dtypes, strides or devices were not seen before is traced again, up to a number of times, and so is one under
another default dtype or autocast (see fquant.compile.guards). One thread traces at a time, whoever comes meanwhile waits.

So the function must be pure: it may not use a tensor that is not an argument, nor ask for a tensor's value, and what it
does beside computing happens when it is traced only.

*Donated* arguments are written over: results take the memory of the old values, and the caller's old tree then holds
the new ones. Nothing is freed, and what shares its memory with another tensor, an argument or a view that somebody
keeps, is not written. (That somebody keeps the tensor itself, or lent it to numpy, cannot be seen.)

On CPUs results lie where they were laid out before (fquant.compile.memory.plan), in memory that stays for the next replay
(fquant.compile.memory.allocator). Under a mode of torch that sees every op, a counter of FLOPs for instance, they are tensors of their own.
The first replay is node by node, and holds every op to what the trace said that it gives (fquant.compile.validate).

*Passes* are functions that change the graph, called once it is traced: shard.schedule has some that move collectives.

Inside another capture or transform, and where autograd looks for anomalies, a captured function is the function itself.

A captured function that communicates is called by every rank, in the same order; ranks compare what they are about to
run before each replay, and raise rather than wait for each other (see fquant.compile.collective_check).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .. import tree
from ..autodiff import is_dual
from ..kernels.dispatch_bypass import is_lazy
from . import collective_check, errors, graph, guards
from .closure import Closure, may_change
from .guards import Key, key_of
from .memory import allocator
from .passes.donate import written_over
from .trace import _TRACING, Captured, apply, fn_name, signature_of, trace

MAX_TRACES = 8  # traces of one function, unless it is told otherwise


P = ParamSpec("P")
R = TypeVar("R")


class Options(TypedDict, total=False):
    """The options of :func:`jit`."""

    donate: Sequence[str]
    passes: Sequence[graph.Pass]
    compile: bool | str
    recompute: bool
    fuse: bool
    max_traces: int


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
    max_traces: int = MAX_TRACES,
) -> Callable[..., Any]:
    """``fn`` captured: traced at its first call, replayed at later ones; a decorator too, with or without options.

    donate    names of parameters that results may be written over
    passes    functions of a torch.fx graph that change it in place, called in order before donation
    compile   hand the graph to torch.compile: True is Inductor, a string another backend
    recompute make cheap tensors again rather than holding them over the peak (see fquant.compile.passes.rematerialize)
    fuse      run chains of elementwise operations as one (see fquant.compile.passes.fuse_pointwise), where Inductor does not
    max_traces  traces to make before giving up

    A call raises TypeError for a tensor that ``fn`` uses and is not given (naming it), for a value of a tensor that
    decides what is computed (naming the line), for an argument that is neither a dense tensor nor hashable or that
    requires a gradient, for a result that is no tree, for a torch.Generator, for a collective in place; ValueError for
    a donated tensor that no result can take the place of; RuntimeError for more than ``max_traces`` traces, saying what
    changed, or for ranks that are about to run different functions, saying which, or an op that gives what torch does
    not say it does.
    """
    if fn is None:
        return functools.partial(
            jit, donate=donate, passes=passes, compile=compile, recompute=recompute, fuse=fuse, max_traces=max_traces
        )
    signature = signature_of(fn)
    if unknown := [name for name in donate if name not in signature.parameters]:
        raise ValueError(f"jit: donate names {', '.join(unknown)}; {fn_name(fn)} has {', '.join(signature.parameters)}")
    graph.check(passes)
    traced: dict[Key, Captured] = {}
    closure = Closure(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        leaves, structure = tree.flatten(bound)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if _is_inside(tensors):
            return fn(*args, **kwargs)
        if not all(map(guards.is_plain, tensors)):
            guards.check(fn_name(fn), bound)
        if any(map(is_lazy, tensors)):
            plain = [leaf.clone() if isinstance(leaf, Tensor) and is_lazy(leaf) else leaf for leaf in leaves]
            again = inspect.BoundArguments(signature, tree.unflatten(structure, plain))  # type: ignore[arg-type]
            return call(*again.args, **again.kwargs)
        over = written_over(dict(zip(bound, tree.parts(structure, leaves), strict=True)), donate)
        objects = () if len(tensors) == len(leaves) else _objects(bound, leaves)
        version = closure.version(objects)
        key = key_of(structure, leaves, tuple(id(t) in over for t in tensors) if donate else (), version)
        try:
            found = traced.get(key)
        except TypeError:
            raise guards.unhashable(fn_name(fn), bound) from None
        if found is None:
            with _TRACING:
                if key not in traced:
                    return first_call(bound, tensors, over, key, objects)
                found = traced[key]
        return replay(found, tensors)

    def replay(found: Captured, tensors: list[Tensor], by: Callable[..., Any] = Captured.__call__) -> Any:
        collective_check.check_ranks_agree(fn_name(fn), found.collectives)
        with torch.no_grad(), torch._C._DisableAutocast():  # type: ignore[attr-defined]  # its casts are in the graph
            return by(found, *tensors)

    def first_call(
        bound: dict[str, Any],
        tensors: list[Tensor],
        over: Collection[int],
        key: Key,
        objects: Sequence[tuple[str, Any]],
    ) -> Any:
        guards.check(fn_name(fn), bound)
        if len(traced) == max_traces:
            raise RuntimeError(
                errors.too_many(fn_name(fn), max_traces, tree.paths(bound), list(traced)[-1], key, closure)
            )
        captured = trace(
            functools.partial(apply, fn), bound, over, passes, recompute, fuse and not compile, fn_name(fn)
        )
        key = key._replace(closure=closure.ignore_changes(key.closure, objects))
        if compile:
            traced[key] = _compiled(captured, "inductor" if compile is True else compile)
            return replay(traced[key], tensors)
        if allocator.is_kept() and all(t.device.type == "cpu" for t in tensors):
            captured = captured.laid_out()
            allocator.keep()
            allocator.release()  # what tracing leaves behind
        result, traced[key] = replay(captured, tensors, Captured.first)
        return result

    call.traced = traced  # type: ignore[attr-defined]
    return call


def _compiled(captured: Captured, backend: str) -> Captured:
    return dataclasses.replace(captured, module=torch.compile(captured.module, backend=backend, fullgraph=True))


def _objects(bound: dict[str, Any], leaves: list[Any]) -> list[tuple[str, Any]]:
    """Return the paths and values of the arguments whose attributes a trace would freeze."""
    if not any(may_change(leaf) for leaf in leaves if not isinstance(leaf, Tensor)):
        return []
    return [(path, leaf) for path, leaf in tree.items(bound) if not isinstance(leaf, Tensor) and may_change(leaf)]


def _is_inside(tensors: list[Tensor]) -> bool:
    """Whether a transform or another capture is at work, of which this call is a part, or a search for anomalies."""
    return bool(
        torch.compiler.is_dynamo_compiling()
        or torch._C._are_functorch_transforms_active()
        or get_proxy_mode() is not None
        or torch.is_anomaly_enabled()
        or any(isinstance(t, FakeTensor) or is_dual(t) for t in tensors)
    )
