"""jit: a pure step becomes one graph, which is then replayed.

    @jit(donate=("adapters", "state"))
    def step(adapters, state, base, tokens):
        grads, value   = grad_and_value(loss)(adapters, base, tokens)
        updates, state = opt.update(grads, state, adapters)
        return optim.apply(adapters, updates), state, value

``torch.func.grad`` runs its backward so that it could be differentiated again: it keeps four times what autograd keeps,
and Python runs at every op. Traced once on fake tensors and replayed, the same step holds a tensor until its last use
and not longer, and Python runs once. What is traced is everything that happens to tensors: transforms, recomputation,
collectives, the optimiser, dropout. Results are those of the function itself, to the bit.

Arguments and results are trees. Tensors are what a replay is given; everything else (structure, static fields, numbers,
configurations, functions) is part of what is traced and has to be hashable. A call whose structure, static parts,
shapes, dtypes, strides or devices were not seen before is traced again, up to a number of times, and so is one under
another default dtype or autocast (see fquant.key). One thread traces at a time, whoever comes meanwhile waits.

So the function must be pure: it may not use a tensor that is not an argument, nor ask for a tensor's value, and what it
does beside computing happens when it is traced only.

*Donated* arguments are written over: results take the memory of the old values, and the caller's old tree then holds
the new ones. Nothing is freed, and what shares its memory with another tensor, an argument or a view that somebody
keeps, is not written. (That somebody keeps the tensor itself, or lent it to numpy, cannot be seen.)

On CPUs results lie where they were laid out before (fquant.arena), in memory that stays for the next replay
(fquant.heap). Under a mode of torch that sees every op, a counter of FLOPs for instance, they are tensors of their own.
The first replay is node by node, and holds every op to what the trace said that it gives (fquant.first).

*Passes* are functions that change the graph, called once it is traced: shard.schedule has some that move collectives.

Inside another capture or transform, and where autograd looks for anomalies, a captured function is the function itself.

A captured function that communicates is called by every rank, in the same order; ranks compare what they are about to
run before each replay, and raise rather than wait for each other (see fquant.order).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import _disable_current_modes

from . import arena, blame, first, given, graph, heap, order, tree
from .donate import donate as donated
from .donate import written_over
from .fake import Fake
from .forward import is_dual
from .fuse import fuse as fused
from .kernels.direct import is_lazy
from .key import Key, key_of
from .recompute import recompute as recomputed
from .reuse import reuse
from .tidy import tidy, without_ones

MOST = 8  # traces of one function, unless it is told otherwise
_TRACING = threading.RLock()  # torch's tracer is one for all threads


@dataclasses.dataclass(frozen=True)
class Captured:
    """A traced call: its graph, the paths of the tensors that it takes, and how its result is put together."""

    module: GraphModule
    paths: tuple[str, ...]
    structure: tree.Structure
    leaves: tuple[Any, ...]  # of the result: what is no tensor as it is, and _TENSOR where a tensor goes
    collectives: tuple[str, ...]  # what ranks have to have in common
    placed: arena.Placed | None = None  # the graph once more, its results in memory that is laid out

    def __call__(self, *tensors: Tensor) -> Any:
        """What it gives of ``tensors``."""
        return self.result(arena.run(self.placed, self.module, tensors) if self.placed else self.module(*tensors))

    def first(self, *tensors: Tensor) -> tuple[Any, Captured]:
        """What it gives of ``tensors``, held to what was traced, and itself, put right where that was wrong."""
        out, right = first.run(self.module, self.placed, tensors)
        return self.result(out), self if right or self.placed is None else self.laid_out()

    def laid_out(self) -> Captured:
        """Itself with memory in which it is to be replayed, on CPUs."""
        with _disable_current_modes():
            return dataclasses.replace(self, placed=arena.place(self.module.graph))

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """The tree of what its graph gives."""
        found = iter(tensors)
        return tree.unflatten(self.structure, [next(found) if leaf is _TENSOR else leaf for leaf in self.leaves])


class _Tensor:
    """Where a tensor goes."""


_TENSOR = _Tensor()


def jit(
    fn: Callable[..., Any] | None = None,
    *,
    donate: Sequence[str] = (),
    passes: Sequence[graph.Pass] = (),
    compile: bool | str = False,
    recompute: bool = True,
    fuse: bool = True,
    most: int = MOST,
) -> Any:
    """``fn`` captured: traced at its first call, replayed at later ones; a decorator too, with or without options.

    donate    names of parameters that results may be written over
    passes    functions of a torch.fx graph that change it in place, called in order before donation
    compile   hand the graph to torch.compile: True is Inductor, a string another backend
    recompute make cheap tensors again rather than holding them over the peak (see fquant.recompute)
    fuse      run chains of elementwise operations as one (see fquant.fuse), where Inductor does not
    most      traces to make before giving up

    A call raises TypeError for a tensor that ``fn`` uses and is not given (naming it), for a value of a tensor that
    decides what is computed (naming the line), for an argument that is neither a dense tensor nor hashable or that
    requires a gradient, for a result that is no tree, for a torch.Generator, for a collective in place; ValueError for
    a donated tensor that no result can take the place of; RuntimeError for more than ``most`` traces, saying what
    changed, or for ranks that are about to run different functions, saying which, or an op that gives what torch does
    not say it does.
    """
    if fn is None:
        options = {"donate": donate, "passes": passes, "compile": compile, "recompute": recompute}
        options |= {"fuse": fuse, "most": most}
        return functools.partial(jit, **options)
    signature = signature_of(fn)
    if unknown := [name for name in donate if name not in signature.parameters]:
        raise ValueError(f"jit: donate names {', '.join(unknown)}; {fn_name(fn)} has {', '.join(signature.parameters)}")
    graph.check(passes)
    traced: dict[Key, Captured] = {}

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        leaves, structure = tree.flatten(bound)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if _is_inside(tensors):
            return fn(*args, **kwargs)
        if not all(map(given.is_plain, tensors)):
            given.check(fn_name(fn), bound)
        if any(map(is_lazy, tensors)):
            plain = [leaf.clone() if isinstance(leaf, Tensor) and is_lazy(leaf) else leaf for leaf in leaves]
            again = inspect.BoundArguments(signature, tree.unflatten(structure, plain))  # type: ignore[arg-type]
            return call(*again.args, **again.kwargs)
        over = written_over(dict(zip(bound, tree.parts(structure, leaves), strict=True)), donate)
        key = key_of(structure, leaves, tuple(id(t) in over for t in tensors) if donate else ())
        try:
            found = traced.get(key)
        except TypeError:
            raise given.unhashable(fn_name(fn), bound) from None
        if found is None:
            with _TRACING:
                if key not in traced:
                    return first_call(bound, tensors, over, key)
                found = traced[key]
        return replay(found, tensors)

    def replay(found: Captured, tensors: list[Tensor], by: Callable[..., Any] = Captured.__call__) -> Any:
        order.agree(fn_name(fn), found.collectives)
        with torch.no_grad(), torch._C._DisableAutocast():  # type: ignore[attr-defined]  # its casts are in the graph
            return by(found, *tensors)

    def first_call(bound: dict[str, Any], tensors: list[Tensor], over: Collection[int], key: Key) -> Any:
        given.check(fn_name(fn), bound)
        if len(traced) == most:
            raise RuntimeError(blame.too_many(fn_name(fn), most, tree.paths(bound), list(traced)[-1], key))
        captured = trace(functools.partial(apply, fn), bound, over, passes, recompute, fuse and not compile)
        if compile:
            traced[key] = _compiled(captured, "inductor" if compile is True else compile)
            return replay(traced[key], tensors)
        if heap.is_kept() and all(t.device.type == "cpu" for t in tensors):
            captured = captured.laid_out()
            heap.keep()
            heap.release()  # what tracing leaves behind
        result, traced[key] = replay(captured, tensors, Captured.first)
        return result

    call.traced = traced  # type: ignore[attr-defined]
    return call


def trace(
    f: Callable[[Any], Any],
    args: Any,
    donate: Collection[int] = (),
    passes: Sequence[graph.Pass] = (),
    recompute: bool = True,
    fuse: bool = True,
) -> Captured:
    """``f(args)`` as a graph of the tensors in the tree ``args``, which may be real, fake or of the device meta.

    ``donate`` holds the ids of those that results may be written over, which happens after ``passes``. Nothing is
    computed.
    """
    leaves, structure = tree.flatten(args)
    named = [(path, leaf) for path, leaf in tree.items(args) if isinstance(leaf, Tensor)]
    result: list[Any] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        left = iter(tensors)
        out = f(tree.unflatten(structure, [next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves]))
        blame.check_result(out)
        result[:] = tree.flatten(out)
        return [leaf for leaf in result[0] if isinstance(leaf, Tensor)]

    mode = next((t.fake_mode for _, t in named if isinstance(t, FakeTensor)), None) or Fake()
    # Who counts ops is not to count those of a trace, and in inference mode torch 2.11's gradients are zero.
    with _TRACING, blame.told(), _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        fakes = [_fake(t, mode) for _, t in named]
        with mode:
            module = make_fx(flat)(*fakes)
    blame.check_draws(module.graph)
    with _disable_current_modes():
        tidy(module.graph)
        graph.run(module.graph, passes)
        graph.run(module.graph, (recomputed,) if recompute else ())
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        over = {path: node for (path, t), node in zip(named, placeholders, strict=True) if id(t) in donate}
        donated(module.graph, over)
        graph.run(module.graph, (fused, reuse, without_ones) if fuse else (without_ones,))
        module.recompile()
    out, spec = result
    slots = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in out)
    return Captured(module, tuple(path for path, _ in named), spec, slots, order.collectives(module.graph))


def apply(fn: Callable[..., Any], bound: dict[str, Any]) -> Any:
    """``fn`` of arguments by the names of its parameters."""
    call = inspect.BoundArguments(signature_of(fn), bound)  # type: ignore[arg-type]
    return fn(*call.args, **call.kwargs)


def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    """The parameters of ``fn``; of functions that do not tell, as some of torch's, any."""
    try:
        return inspect.signature(fn)
    except ValueError:
        return inspect.signature(lambda *args, **kwargs: None)


def _fake(t: Tensor, mode: FakeTensorMode) -> Tensor:
    if isinstance(t, FakeTensor):
        return t
    if t.is_meta:
        with mode:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
    return mode.from_tensor(t.detach())


def _compiled(captured: Captured, backend: str) -> Captured:
    return dataclasses.replace(captured, module=torch.compile(captured.module, backend=backend, fullgraph=True))


def _is_inside(tensors: list[Tensor]) -> bool:
    """Whether a transform or another capture is at work, of which this call is a part, or a search for anomalies."""
    return bool(
        torch.compiler.is_dynamo_compiling()
        or torch._C._are_functorch_transforms_active()
        or get_proxy_mode() is not None
        or torch.is_anomaly_enabled()
        or any(isinstance(t, FakeTensor) or is_dual(t) for t in tensors)
    )


def fn_name(fn: Any) -> str:
    """What a function is called."""
    return getattr(fn, "__name__", None) or fn_name(getattr(fn, "func", type(fn)))
