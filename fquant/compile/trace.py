"""Trace: split from fquant.compile.jit."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from .. import tree
from . import collective_check, errors, graph, validate
from .fake_tensor import Fake
from .memory import executor, plan
from .passes.donate import donate as donated
from .passes.fuse_pointwise import fuse_pointwise as fused
from .passes.reinplace import reinplace
from .passes.rematerialize import rematerialize as recomputed
from .passes.simplify import remove_products_with_one, simplify

_TRACING = threading.RLock()  # torch's tracer is one for all threads


@dataclasses.dataclass(frozen=True)
class Captured:
    """A traced call: its graph, the paths of the tensors that it takes, and how its result is put together."""

    module: GraphModule
    paths: tuple[str, ...]
    structure: tree.Structure
    leaves: tuple[Any, ...]  # of the result: what is no tensor as it is, and _TENSOR where a tensor goes
    collectives: tuple[str, ...]  # what ranks have to have in common
    placed: plan.MemoryPlan | None = None  # the graph once more, its results in memory that is laid out

    def __call__(self, *tensors: Tensor) -> Any:
        """What it gives of ``tensors``."""
        run = executor.run_planned
        return self.result(run(self.placed, self.module, tensors) if self.placed else self.module(*tensors))

    def first(self, *tensors: Tensor) -> tuple[Any, Captured]:
        """What it gives of ``tensors``, held to what was traced, and itself, put right where that was wrong."""
        out, right = validate.run(self.module, self.placed, tensors)
        return self.result(out), self if right or self.placed is None else self.laid_out()

    def laid_out(self) -> Captured:
        """Itself with memory in which it is to be replayed, on CPUs."""
        with _disable_current_modes():
            return dataclasses.replace(self, placed=plan.plan_memory(self.module.graph))

    def result(self, tensors: Sequence[Tensor]) -> Any:
        """The tree of what its graph gives."""
        found = iter(tensors)
        return tree.unflatten(self.structure, [next(found) if leaf is _TENSOR else leaf for leaf in self.leaves])


class _Tensor:
    """Where a tensor goes."""


_TENSOR = _Tensor()


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
        donated(module.graph, over)
        graph.run(module.graph, (fused, reinplace, remove_products_with_one) if fuse else (remove_products_with_one,))
        module.recompile()
    out, spec = result
    slots = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in out)
    return Captured(module, tuple(path for path, _ in named), spec, slots, collective_check.collectives(module.graph))


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
