"""Trace: split from fquant.compile.jit."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from .. import tree
from . import collective_check, donation, errors, graph, validate
from .fake_tensor import Fake
from .memory import executor, plan
from .passes.donate import donate as donated
from .passes.fuse_pointwise import fuse_pointwise as fused
from .passes.reinplace import reinplace
from .passes.rematerialize import rematerialize as recomputed
from .passes.simplify import simplify, without_ones

_TRACING = threading.RLock()  # torch's tracer is one for all threads


@dataclasses.dataclass(frozen=True)
class Captured:
    """A traced call: its graph, the paths of the tensors that it takes, and how its result is put together."""

    module: GraphModule
    paths: tuple[str, ...]
    structure: tree.Structure
    leaves: tuple[Any, ...]  # of the result: what is no tensor as it is, and _TENSOR where a tensor goes
    collectives: tuple[str, ...]  # what ranks have to have in common
    donated: dict[int, str]  # positions of the tensors that results are written over, and what a later use raises
    placed: plan.Placed | None = None  # the graph once more, its results in memory that is laid out

    def __call__(self, *tensors: Tensor) -> Any:
        """Replay the graph, and retire the donated tensors."""
        with self._marked(tensors):
            out = executor.run(self.placed, self.module, tensors) if self.placed else self.module(*tensors)
        return self.result(self._retired(tensors, out))

    def first(self, *tensors: Tensor) -> tuple[Any, Captured]:
        """What it gives of ``tensors``, held to what was traced, and itself, put right where that was wrong."""
        with self._marked(tensors):
            out, right = validate.run(self.module, self.placed, tensors)
        return self.result(self._retired(tensors, out)), self if right or self.placed is None else self.laid_out()

    def laid_out(self) -> Captured:
        """Itself with memory in which it is to be replayed, on CPUs."""
        with _disable_current_modes():
            return dataclasses.replace(self, placed=plan.place(self.module.graph))

    def _retired(self, tensors: Sequence[Tensor], out: Sequence[Tensor]) -> Sequence[Tensor]:
        """Retire the donated tensors, and return the results with new tensor objects in their place."""
        if not self.donated:
            return out
        new = {id(t := tensors[i]): donation.retire(t, message) for i, message in self.donated.items()}
        return [new.get(id(t), t) for t in out]

    @contextlib.contextmanager
    def _marked(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Retire the donated tensors if the replay fails after it may have written one of them."""
        try:
            yield
        except BaseException as error:
            modules = [self.module, *([self.placed.module] if self.placed else [])]
            if self.donated and donation.may_have_written(error, modules, self.writers()):
                for i, message in self.donated.items():
                    donation.retire(tensors[i], message.replace(_HOLDS, _FAILED))
            raise

    def writers(self) -> set[str]:
        """Return the names of the nodes that write donated tensors."""
        given = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        memory = {storage for i in self.donated for storage in graph.storages(given[i])}
        return {node.name for node in self.module.graph.nodes if graph.written_storages(node) & memory}

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """The tree of what its graph gives."""
        found = iter(tensors)
        return tree.unflatten(self.structure, [next(found) if leaf is _TENSOR else leaf for leaf in self.leaves])


class _Tensor:
    """Where a tensor goes."""


_TENSOR = _Tensor()
_HOLDS = "and its memory holds a result now"
_FAILED = "which failed after it may have written a result there"
_DONATED = (
    "{} was donated to {}(...), " + _HOLDS + "; keep a copy (tree.map(torch.clone, x)) before the call, "
    "or do not donate it"
)


def trace(
    f: Callable[[Any], Any],
    args: Any,
    donate: Collection[int] = (),
    passes: Sequence[graph.Pass] = (),
    recompute: bool = True,
    fuse: bool = True,
    name: str = "a captured function",
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
        errors.check_result(out)
        result[:] = tree.flatten(out)
        return [leaf for leaf in result[0] if isinstance(leaf, Tensor)]

    mode = next((t.fake_mode for _, t in named if isinstance(t, FakeTensor)), None) or Fake()
    # Who counts ops is not to count those of a trace, and in inference mode torch 2.11's gradients are zero.
    with (
        _TRACING,
        errors.translate_errors(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        fakes = [_fake(t, mode) for _, t in named]
        with mode:
            module = make_fx(flat)(*fakes)
    errors.check_draws(module.graph)
    with _disable_current_modes():
        simplify(module.graph)
        graph.run(module.graph, passes)
        graph.run(module.graph, (recomputed,) if recompute else ())
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        over = {path: node for (path, t), node in zip(named, placeholders, strict=True) if id(t) in donate}
        taken = donated(module.graph, over)
        graph.run(module.graph, (fused, reinplace, without_ones) if fuse else (without_ones,))
        module.recompile()
    out, spec = result
    slots = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in out)
    paths = tuple(path for path, _ in named)
    messages = {i: _DONATED.format(paths[i], name) for i, node in enumerate(placeholders) if node in taken}
    return Captured(module, paths, spec, slots, collective_check.collectives(module.graph), messages)


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


def fn_name(fn: Any) -> str:
    """What a function is called."""
    return getattr(fn, "__name__", None) or fn_name(getattr(fn, "func", type(fn)))
