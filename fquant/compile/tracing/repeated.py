"""Functions that a trace calls again and again: traced once for each kind of arguments, then repeated as graph nodes.

    f = repeated(block)
    for layer in layers:                # a trace runs the Python of block once, and once more for its backward
        x = f(x, layer)

Two calls are of one kind if their trees, static leaves, layouts of tensors, differentiated tensors, and the vmaps
around them are equal. The nodes of the graph, and so its bits, are those of the plain calls.

Under a transform for gradients, a call is an autograd Function. Its forward repeats the nodes of the forward of ``f``,
recorded under ``vjp``. Its backward repeats those of the pullback, which read the results of that forward: nothing is
computed twice. The pullback is recorded for the cotangents that arrive first, behind another forward, whose nodes
must be equal and are dropped. Vmaps within the transform are part of what it differentiates. Those around it map
forward and pullback, each as they are.

Forward mode, two transforms for gradients around each other, and torch.compile trace every call.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._functorch.vmap import restore_vmap
from torch.fx import Node
from torch.utils._device import DeviceContext

from ... import tree
from ...autodiff import current_modes, in_modes, is_dual, layers, pull_back, push_forward, replace_at, unwrap_dead
from ..closure import freeze
from ..graph import describe, tensors
from ..user_code import held
from .template import Template, differing, layout_of, record_template, repeat, unwrap
from .tracer import Recorder, recorder


def repeated(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``f``, which a capture traces once for each kind of arguments; ``f`` must be pure.

    Arguments and results are trees. The gradients of an argument that ``f`` uses several times are added within each
    call first. Raises RuntimeError if ``f`` runs other ops when it is traced again.
    """
    traces: list[_Trace] = []  # not list[_Trace](), which Dynamo cannot trace

    def call(*args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or (recorder() is None and not torch.is_grad_enabled()):
            return f(*args)
        flat, structure = tree.flatten(args)
        places = [i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
        given, static = [flat[i] for i in places], replace_at(flat, places, [None] * len(places))
        tracked = [i for i, t in enumerate(given) if _is_tracked(t)] if torch.is_grad_enabled() else []
        found, level = recorder(), _level(given)
        if found is None or level is None:
            for i in reversed(tracked):  # so that autograd adds gradients in the order of arguments, as a Function does
                given[i] = given[i].view_as(given[i])
            return f(*tree.unflatten(structure, replace_at(static, places, given)))

        def run(*some: Tensor) -> tuple[Tensor, ...]:
            out, made.result.structure = tree.flatten(f(*tree.unflatten(structure, replace_at(static, places, some))))
            made.result.places = [i for i, leaf in enumerate(out) if isinstance(leaf, Tensor)]
            results = tuple(out[i] for i in made.result.places)
            made.result.static = replace_at(out, made.result.places, [None] * len(results))
            return results

        made = _Call(run, (structure, [freeze(x) for x in static]), tracked, level, found, traces)
        results = made.forward(*given) if level == _OUTSIDE else _Forward.apply(made, *given)
        result = made.result
        return tree.unflatten(result.structure, replace_at(result.static, result.places, results))

    return call


_PASS = "its gradient would silently be zero: pass it as an argument"
_OUTSIDE = -1  # the level of a call without a transform for gradients


def _is_tracked(t: Tensor) -> bool:
    return any(inner.requires_grad for inner in layers(t))


def _level(tensors: Sequence[Tensor]) -> int | None:
    """Return the level of the transform for gradients, 0 for autograd itself; None if calls have to be plain."""
    levels = get_interpreter_stack() or []
    found = [each.level() for each in levels if each.key() == TransformType.Grad]
    found += [0] if any([*layers(t)][-1].requires_grad for t in tensors) else []
    known = all(each.key() in (TransformType.Grad, TransformType.Vmap) for each in levels)
    if not known or len(found) > 1 or any(map(is_dual, tensors)):
        return None
    return found[0] if found else _OUTSIDE


@dataclass
class _Result:
    """A result without its tensors: structure, static leaves, the places of tensors, and how vmaps map them.

    ``tracked`` is True for those that depend on what is differentiated.
    """

    structure: Any = None
    static: list[Any] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    out_dims: dict[int, Any] = field(default_factory=dict)  # by the number of vmaps within
    tracked: list[bool] = field(default_factory=list)


@dataclass
class _Trace:
    """The forward for arguments of the kind ``key``, and pullbacks by their cotangents, each with its own forward."""

    key: Any
    forward: Template
    result: _Result
    pullbacks: list[tuple[Any, list[Node], Template]] = field(default_factory=list)


class _Call:
    """One call: ``run`` of flat tensors, of which those at ``tracked`` are differentiated at ``level``."""

    def __init__(
        self, run: Callable[..., tuple[Tensor, ...]], key: Any, tracked: Sequence[int], level: int, recorder: Recorder,
        traces: list[_Trace],
    ) -> None:  # fmt: skip
        self.run, self.tracked, self.level, self.recorder, self.traces = run, tracked, level, recorder, traces
        self.enabled, self.modes = torch.is_grad_enabled(), current_modes([])
        functions = [mode.device if isinstance(mode, DeviceContext) else mode for mode in self.modes.functions]
        self.key = (key, tracked, self.enabled, self.modes.autocast, functions)
        self.result, self.root, self.depth = _Result(), self, 0
        self.trace: _Trace | None = None
        self.nodes = list[Node]()  # of the forward

    def mapped(self, size: int, randomness: str, in_dims: tuple[int | None, ...]) -> "_Call":
        """Return this call under one more vmap, which the transform for gradients is to differentiate."""
        made, inner = copy(self), restore_vmap(self.run, in_dims, size, randomness)

        def run(*some: Tensor) -> tuple[Tensor, ...]:
            results, made.root.result.out_dims[made.depth] = inner(*some)
            return results

        made.run, made.depth, made.key = run, self.depth + 1, (self.key, size, randomness, in_dims)
        return made

    def differentiated(self, given: Sequence[Tensor], at: Sequence[int] | None = None) -> tuple[Any, Any]:
        """Return the results of ``run``, or those ``at`` places, and their pullback to the tracked tensors."""

        def of_tracked(*some: Tensor) -> tuple[Tensor, ...]:
            results = self.run(*replace_at(given, self.tracked, some))
            self.root.result.tracked = [*map(_is_tracked, results)]
            return results if at is None else tuple(results[i] for i in at)

        with torch.set_grad_enabled(self.enabled), in_modes(self.modes):
            if not self.tracked:
                return of_tracked(), None
            return torch.func.vjp(of_tracked, *[given[i] for i in self.tracked])[:2]

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Return the results; ``given`` are wrapped by the vmaps around the transform alone."""
        if (kind := _kind(given)) is None:
            return self.differentiated(given)[0]
        key = (self.key, kind)
        found = next((trace for trace in self.traces if trace.key == key), None)
        if found is None:
            try:
                template = record_template(self.recorder, lambda *some: self.differentiated(some)[0], given)
            except RuntimeError as error:  # torch's, for a tensor of a transform that the recording has left
                if self.level == _OUTSIDE or "INTERNAL ASSERT" not in str(error):
                    raise
                raise TypeError(f"jit: a repeated function reads a tensor that it is not given; {_PASS}") from error
            if template is None:
                return self.differentiated(given)[0]
            if template.closed_over and self.level != _OUTSIDE:
                (t, *_) = tensors(template.closed_over[0])
                known, (node, *_) = self.recorder.known, template.closed_over
                paths = [path for path, x in held(self.root.run) if any(known(each) is node for each in layers(x))]
                what = " ".join([*(repr(path.removeprefix("f.")) for path in paths[:1]), describe(t)])
                raise TypeError(f"jit: a repeated function reads {what} and is not given it; {_PASS}")
            found = _Trace(key, template, self.root.result)
            self.traces.append(found)
        self.trace, self.root.result = found, found.result
        results, self.nodes = repeat(self.recorder, self._inputs(found.forward.inputs, given), found.forward)
        return tuple(results)

    def pullback(self, at: tuple[int, ...], enabled: bool, *given: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the tracked tensors: ``given`` has the tensors, and cotangents of results ``at``.

        By the mode of gradients, ``enabled`` in the plain backward or not, torch picks one of two formulas of silu.
        """
        count = 0

        def pulled(*some: Tensor) -> tuple[Tensor, ...]:
            nonlocal count
            inputs, cotangents = some[: len(some) - len(at)], some[len(some) - len(at) :]
            pull = self.differentiated(inputs, at)[1]
            count = len(self.recorder.graph.nodes) - len(some)  # of the forward, if this is recorded
            with torch.set_grad_enabled(enabled):
                return pull(cotangents)

        kind, trace = _kind(given), self.trace
        if kind is None or trace is None:
            return pulled(*given)
        found = next((each for each in trace.pullbacks if each[0] == (at, enabled, kind)), None)
        if found is None:
            whole = record_template(self.recorder, pulled, given)
            if whole is None:
                return pulled(*given)
            again, calls = whole.calls[:count], whole.calls[count:]
            if other := differing(self.recorder, trace.forward, whole._replace(calls=again)):
                raise RuntimeError(f"jit: a repeated function ran {other} when it was traced again; make it pure")
            found = ((at, enabled, kind), [call.node for call in again], whole._replace(calls=calls))
            trace.pullbacks.append(found)
        _, again, template = found
        inputs = [*self._inputs(template.inputs, given), *zip(again, self.nodes, strict=True)]
        return tuple(repeat(self.recorder, inputs, template)[0])

    def _inputs(self, nodes: Sequence[Node], given: Sequence[Tensor]) -> list[tuple[Node, Node]]:
        inner = [self.recorder.node_of([*layers(t)][-1]) for t in given]
        return [*zip(nodes, inner, strict=True)]


def _kind(given: Sequence[Tensor]) -> Any:
    """Return the vmaps and layouts of tensors; None if one is lazy or another transform wraps it."""
    found = [unwrap(t) for t in given]
    return None if None in found else [(dims, layout_of(t)._replace(offset=0)) for t, dims in filter(None, found)]


class _Forward(torch.autograd.Function):
    """The forward of a call, whose backward is its pullback."""

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        return call.forward(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        tracked = ctx.call.root.result.tracked
        ctx.mark_non_differentiable(*(t for t, is_tracked in zip(output, tracked, strict=True) if not is_tracked))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        tensors, call = unwrap_dead(ctx.saved_tensors), ctx.call
        at = tuple(i for i, g in enumerate(grads) if g is not None)
        found = _Pullback.apply(call, at, torch.is_grad_enabled(), *tensors, *[g for g in grads if g is not None])
        return None, *replace_at([None] * len(tensors), call.tracked, found)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, *tensors: Tensor) -> Any:
        if len(get_interpreter_stack() or []) < call.level:  # around the transform for gradients
            return restore_vmap(call.forward, in_dims[1:], info.batch_size, info.randomness)(*tensors)
        made = call.mapped(info.batch_size, info.randomness, in_dims[1:])
        results = _Forward.apply(made, *tensors)
        return results, made.root.result.out_dims[made.depth]


class _Pullback(torch.autograd.Function):
    """The pullback of a call; its own derivatives are computed without a template."""

    @staticmethod
    def forward(call: _Call, at: tuple[int, ...], enabled: bool, *given: Tensor) -> tuple[Tensor, ...]:
        return call.pullback(at, enabled, *given)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call, ctx.at, _, *given = inputs
        ctx.save_for_backward(*given)
        ctx.save_for_forward(*given)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        given = unwrap_dead(ctx.saved_tensors)
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[3:]) if need]
        found = pull_back(_whole(ctx), given, wanted, grads)
        return None, None, None, *replace_at([None] * len(given), wanted, found)

    @staticmethod
    def jvp(ctx: Any, _call: Any, _at: Any, _enabled: Any, *tangents: Any) -> Any:
        return push_forward(_whole(ctx), ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info: Any, in_dims: Any, call: _Call, at: tuple[int, ...], enabled: bool, *given: Tensor) -> Any:
        mapped = restore_vmap(partial(call.pullback, at, enabled), in_dims[3:], info.batch_size, info.randomness)
        return mapped(*given)


def _whole(ctx: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Return the pullback with its own forward, as a function of tensors and cotangents."""
    n = len(ctx.at)

    def whole(*given: Tensor) -> tuple[Tensor, ...]:
        return ctx.call.differentiated(given[: len(given) - n], ctx.at)[1](given[len(given) - n :])

    return whole
