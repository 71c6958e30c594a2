"""Activation checkpointing (rematerialisation) under torch.func: recompute a function in its backward.

    block = remat(block)                # gradients of first order
    block = remat(block, order=2)       # of any order

Only the arguments are saved. ``torch.utils.checkpoint`` uses saved-tensor hooks, which torch.func rejects; this is an
autograd Function whose backward is the vjp of the recomputation. ``torch.func.grad`` runs every backward with
create_graph=True, which keeps all that the recomputation computes. At first order this backward records nothing, which
saves the memory. Differentiating it again would give silent zeros, so it raises; so does a tensor in the closure.
"""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from . import tree
from .autodiff import pull_back, push_forward, replace_at, unwrap_dead


def remat(f: Callable[..., Any], order: int = 1) -> Callable[..., Any]:
    """Return ``f`` with its intermediate results recomputed in the backward; arguments and results are trees.

    ``order`` 1 allows one reverse derivative, and any number of forward ones before it; 2 allows any. Raises TypeError
    if ``f`` closes over a tensor or returns anything but float tensors, RuntimeError if order 1 is differentiated
    twice.
    """
    if order not in (1, 2):
        raise ValueError(f"remat: order is {order}; wanted 1 (first derivatives only) or 2 (any)")
    _check_closure(f)

    @wraps(f)
    def call(*args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            fix = "compile the graph that make_fx captures: torch.compile(make_fx(step)(*args))"
            raise RuntimeError(f"remat({_name(f)}) cannot be traced by torch.compile; {fix}")
        leaves, structure = tree.flatten(args)
        slots = tuple(isinstance(leaf, Tensor) for leaf in leaves)
        static = tuple(leaf for leaf, is_tensor in zip(leaves, slots, strict=True) if not is_tensor)
        spec = _Spec(f, structure, slots, static, order)
        out = _Remat.apply(spec, *[leaf for leaf in leaves if isinstance(leaf, Tensor)])
        return tree.unflatten(spec.result[0], out)

    return call


class _Spec:
    """The static half of a call: the function, and the structures of its arguments and of its result."""

    def __init__(self, f: Any, structure: Any, slots: tuple[bool, ...], static: tuple[Any, ...], order: int) -> None:
        self.f, self.structure, self.slots, self.static, self.order = f, structure, slots, static, order
        self.result: list[Any] = []

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        dynamic, static = iter(tensors), iter(self.static)
        args = tree.unflatten(self.structure, [next(dynamic if is_tensor else static) for is_tensor in self.slots])
        result = self.f(*args)
        for path, leaf in tree.items(result):
            if not (isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())):
                got = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
                where = f" at {path}" if path else ""
                fix = "wanted tensors of floats only, return the rest from outside"
                raise TypeError(f"remat({_name(self.f)}) returned{where} {got}; {fix}")
        leaves, structure = tree.flatten(result)
        self.result[:] = [structure]
        return tuple(leaves)


class _Remat(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(spec: _Spec, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return spec.run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.spec, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)  # so that constants have no tangents, of zeros

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        spec, tensors = ctx.spec, unwrap_dead(ctx.saved_tensors)
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[1:]) if need]
        first = spec.order == 1
        with torch.no_grad() if first else nullcontext():
            found = pull_back(spec.run, tensors, wanted, grads)
        if first:
            inputs = [tensors[i] for i in wanted] + [g for g in grads if g is not None]
            found = _FirstOrderOnly.apply(_name(spec.f), len(found), *found, *inputs)
        return None, *replace_at([None] * len(tensors), wanted, found)

    @staticmethod
    def jvp(ctx: Any, _: Any, *tangents: Any) -> Any:
        return push_forward(ctx.spec.run, ctx.saved_tensors, tangents)


class _FirstOrderOnly(torch.autograd.Function):
    """The identity on gradients that were computed without a graph; its derivatives raise."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        fault = "gives first derivatives only and was differentiated twice"
        raise RuntimeError(f"remat({ctx.name}) {fault}; use remat(f, order=2)")

    jvp = backward


def _name(f: Any) -> str:
    return _name(f.func) if isinstance(f, partial) else getattr(f, "__name__", repr(f))


def _check_closure(f: Any) -> None:
    if isinstance(f, partial):
        bound = {f"argument {i}": x for i, x in enumerate(f.args)} | f.keywords
        _check_closure(f.func)
    else:
        bound = dict(inspect.getclosurevars(f).nonlocals) if inspect.isfunction(f) else {}
    for name, x in bound.items():
        if any(isinstance(leaf, Tensor) for leaf in tree.leaves(x)):
            fault = f"closes over the tensor {name!r}, whose gradient would silently be zero"
            raise TypeError(f"remat({_name(f)}) {fault}; pass it as an argument")
