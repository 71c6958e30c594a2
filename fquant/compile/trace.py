"""Trace a function of trees into one torch.fx graph on fake tensors, and run the passes on the graph.

The tensors of the argument tree are the inputs of the graph, in the order of :func:`fquant.tree.flatten`. Structure and
static leaves are constants of the trace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from .. import tree
from ..device import HOST, META
from . import collective_check, donation, errors, graph, validate
from .arguments import builder
from .cuda_graph import Recordings
from .memory import allocator, plan
from .passes.decompose import decompose
from .passes.donate import donate as write_over_donated
from .passes.fuse_pointwise import fuse_pointwise
from .passes.gate_steps import gate_steps
from .passes.reinplace import reinplace
from .passes.rematerialize import rematerialize
from .passes.simplify import remove_products_with_one, remove_unused_views, simplify
from .tracing.collector import uncollected
from .tracing.fake_tensor import Fake
from .tracing.retarget import Constants, check_autocast, retarget, stand_ins, with_index
from .tracing.tracer import record

_TRACING = threading.RLock()  # torch's tracer is one for all threads


@dataclasses.dataclass(frozen=True)
class Captured:
    """A traced call: its graph, the paths of its input tensors, and what builds its result."""

    module: GraphModule
    paths: tuple[str, ...]
    build: Callable[[Iterable[Any]], Any]  # the result, of its leaves
    leaves: tuple[Any, ...]  # of the result: _TENSOR for a tensor, any other leaf as it is
    collectives: tuple[str, ...]  # which every rank must have
    donations: donation.Donations
    device: torch.device = HOST  # of its tensors
    placed: plan.MemoryPlan | None = None  # the graph with a memory plan
    recordings: Recordings | None = None  # on devices that can record
    compiled: Callable[..., Any] | None = None  # the graph as a backend of torch.compile runs it

    def __call__(self, *tensors: Tensor, interpret: allocator.Interpret = lambda module: module) -> Any:
        """Replay the graph, and retire the donated tensors; ``interpret`` returns the function that runs a module."""
        module = self.compiled or self.module
        run: Callable[[], Any] = functools.partial(allocator.run_planned, self.placed, module, tensors, interpret)
        if self.recordings is not None:
            run = self.recordings.ready(tensors, run)  # before anything is donated, because it may raise
        modules = [self.module, self.placed.module] if self.placed else [self.module]
        found = iter(donation.retire_after(run, self.donations, tensors, modules))
        return self.build([next(found) if leaf is _TENSOR else leaf for leaf in self.leaves])

    def first(self, *tensors: Tensor) -> tuple[Any, Captured]:
        """Replay with every node checked against the trace; return the result, and this capture corrected."""
        wrong, origin = list[Node](), self.placed.origin if self.placed else {}
        result = self(*tensors, interpret=lambda module: validate.Checked(module, origin, wrong).run)
        validate.correct(self.module, wrong)
        return result, self.laid_out() if wrong and self.placed else self

    def laid_out(self) -> Captured:
        """Return this capture with a memory plan, for replays on CPUs."""
        with uncollected(), _disable_current_modes():
            return dataclasses.replace(self, placed=plan.plan_memory(self.module.graph))


_TENSOR = object()  # the place of a tensor among the leaves of a result


@uncollected()
def trace(
    f: Callable[[Any], Any],
    args: Any,
    donate: Collection[int] = (),
    passes: Sequence[graph.Pass] = (),
    recompute: bool = True,
    fuse: bool = True,
    name: str = "a captured function",
    device: torch.device = HOST,
    host: Collection[int] = (),
    lines: bool = False,
) -> Captured:
    """Trace ``f(args)`` into a graph of the tensors in the tree ``args`` on ``device``; nothing is computed.

    The tensors may be real, fake or of the device meta, and on any device. ``donate`` holds the ids of those that
    results may be written over, which happens after ``passes``. ``name`` is the function's in later errors. ``host``
    holds the ids of tensors that stay on the host if the device is another (``tracing/retarget.py``). With ``lines``
    the nodes have the place in the user's code that made them.
    """
    leaves, structure = tree.flatten(args)
    named = [(path, leaf) for path, leaf in tree.items(args) if isinstance(leaf, Tensor)]
    result: list[Any] = []

    def flat(*tensors: Tensor) -> list[Tensor]:
        left = iter(tensors)
        out = f(tree.unflatten(structure, [next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves]))
        errors.check_result(out)
        result[:] = tree.leaves(out), builder(out)
        return [leaf for leaf in result[0] if isinstance(leaf, Tensor)]

    device = with_index(device)
    with _TRACING, graph.noting() as leaves_sent:
        module, sent = _recorded(flat, [t for _, t in named], device, host, lines), tuple(leaves_sent)
    with _disable_current_modes():
        graph.run(module.graph, passes)
        graph.run(module.graph, (decompose, gate_steps, *([rematerialize] if recompute else [])))
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        donated = {path: node for (path, t), node in zip(named, placeholders, strict=True) if id(t) in donate}
        taken = set(write_over_donated(module.graph, donated))
        fusion = (fuse_pointwise, reinplace) if fuse else ()
        graph.run(module.graph, (*fusion, remove_products_with_one, remove_unused_views))
        module.recompile()
    out, build = result
    slots = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in out)
    paths = tuple(path for path, _ in named)
    donations = {i: f"{paths[i]} was donated to {name}(...)" for i, node in enumerate(placeholders) if node in taken}
    communicates = sent + collective_check.collectives(module.graph)
    return Captured(module, paths, build, slots, communicates, donations, device)


def _recorded(
    flat: Callable[..., list[Tensor]], given: Sequence[Tensor], device: torch.device, host: Collection[int], lines: bool
) -> GraphModule:
    """Record ``flat`` of tensors on ``device``.

    A trace for the host is made there. But if a forward derivative is mapped, vmap(jvp), torch makes tangents on the
    device meta. Then, and for any other device, all is on meta and is moved to the device.
    """
    if device == HOST:
        mode = next((t.fake_mode for t in given if isinstance(t, FakeTensor)), None) or Fake()
        with contextlib.suppress(errors.MappedForward):
            with _tracing(device, lines, False):
                module = record(flat, [_fake(t, mode) for t in given], mode)
            _simplify(module)
            with _disable_current_modes():
                if not any(t.is_meta for node in module.graph.nodes for t in graph.tensors(node)):
                    return module
    check_autocast(device)
    mode, default = Fake(replaced=device.type), META if device == HOST else contextlib.nullcontext()
    with _tracing(device, lines, True), Constants(device), default:
        module = record(flat, stand_ins(given, META, mode, host), mode)
    _simplify(module)
    with _disable_current_modes():
        retarget(module, device)
    return module


def _simplify(module: GraphModule) -> None:
    errors.check_draws(module.graph)
    with _disable_current_modes():
        simplify(module.graph)


@contextlib.contextmanager
def _tracing(device: torch.device, lines: bool, on_meta: bool) -> Iterator[None]:
    """Let a function be traced inside: one at a time, with gradients, and outside of the caller's modes."""
    # A mode that counts ops must not count those of a trace; in inference mode torch 2.11's gradients are zero.
    with _TRACING, errors.translate_errors(device, on_meta), _disable_current_modes():
        with torch.inference_mode(False), torch.enable_grad(), errors.Lines() if lines else contextlib.nullcontext():
            yield


def apply(fn: Callable[..., Any], bound: dict[str, Any]) -> Any:
    """Call ``fn`` with arguments by the names of its parameters."""
    call = inspect.BoundArguments(signature_of(fn), bound)  # type: ignore[arg-type]
    return fn(*call.args, **call.kwargs)


def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    """Return the parameters of ``fn``; any, for a function of torch that has no signature."""
    try:
        return inspect.signature(fn)
    except ValueError:
        return inspect.signature(lambda *args, **kwargs: None)


def _fake(t: Tensor, mode: FakeTensorMode) -> Tensor:
    if t.is_meta and not isinstance(t, FakeTensor):
        with mode:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=HOST)
    return t if isinstance(t, FakeTensor) else mode.from_tensor(t.detach())


def fn_name(fn: Any) -> str:
    """Return the name of a function, or of the function in a ``functools.partial``."""
    return getattr(fn, "__name__", None) or fn_name(getattr(fn, "func", type(fn)))
