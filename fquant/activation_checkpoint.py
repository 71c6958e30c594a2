"""Activation checkpointing (rematerialisation) under torch.func: recompute a function in its backward.

    block = remat(block)                # gradients of first order
    block = remat(block, order=2)       # of any order

Only the arguments are saved. ``torch.utils.checkpoint`` uses saved-tensor hooks, which torch.func rejects; this is an
autograd Function whose backward is the vjp of the recomputation. ``torch.func.grad`` runs every backward with
create_graph=True, which keeps all that the recomputation computes. At first order this backward records nothing, which
saves the memory. Differentiating it again would give silent zeros, so it raises; so does a tensor in the closure. The
recomputation runs in the autocast and the function modes of the call.

torch differentiates ``silu``, ``mish`` and ``group_norm`` by another formula where a backward is recorded. So at first
order their gradients are those of plain autograd in every bit, and at order 2 those of ``torch.func.grad``.
"""

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from . import tree
from .autodiff import current_modes, in_modes, pull_back, push_forward, replace_at, unwrap_dead
from .tree import expect


def remat(f: Callable[..., Any], order: int = 1) -> Callable[..., Any]:
    """Return ``f`` with its intermediate results recomputed in the backward; arguments and results are trees.

    ``order`` 1 allows one reverse derivative, after any number of forward ones; 2 allows any. Raises TypeError if ``f``
    closes over a tensor or returns anything but float tensors, RuntimeError if order 1 is differentiated twice.
    """
    expect(order in (1, 2), f"remat: order is {order}; wanted 1 (first derivatives only) or 2 (any)")
    check_closure("remat", f)

    @wraps(f)
    def call(*args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            fix = "capture the step, and Inductor compiles its graph: jit(step, compile=True)"
            raise RuntimeError(f"remat({_name(f)}) cannot be traced by torch.compile; {fix}")
        leaves, structure = tree.flatten(args)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        static, structure_of_result = replace_at(leaves, places, [None] * len(places)), []
        modes = current_modes([leaves[i] for i in places])

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            with in_modes(modes):
                result = f(*tree.unflatten(structure, replace_at(static, places, tensors)))
            with tree.at(f"remat({_name(f)}) returned"):
                tree.check_floats(result, "return the rest from outside")
            structure_of_result[:] = [tree.structure(result)]
            return tuple(tree.leaves(result))

        out = _Remat.apply(run, order, _name(f), *[leaves[i] for i in places])
        return tree.unflatten(structure_of_result[0], out)

    return call


class _Remat(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(run: Callable[..., tuple[Tensor, ...]], order: int, name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.run, ctx.order, ctx.name, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)  # so that constants have no tangents, of zeros

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        tensors = unwrap_dead(ctx.saved_tensors)
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[3:]) if need]
        if ctx.order == 2:
            found = pull_back(ctx.run, tensors, wanted, grads)
        else:
            try:
                with torch.no_grad():
                    found = pull_back(ctx.run, tensors, wanted, grads)
            except NotImplementedError as error:  # torch's: the backward of silu, for one, has no forward derivative
                if "forward AD" not in str(error):
                    raise
                raise _twice(ctx.name) from error
            inputs = [tensors[i] for i in wanted] + [g for g in grads if g is not None]
            found = _FirstOrderOnly.apply(ctx.name, len(found), *found, *inputs)
        return None, None, None, *replace_at([None] * len(tensors), wanted, found)

    @staticmethod
    def jvp(ctx: Any, _run: Any, _order: Any, _name: Any, *tangents: Any) -> Any:
        return push_forward(ctx.run, ctx.saved_tensors, tangents)


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
        raise _twice(ctx.name)

    jvp = backward


def _twice(name: str) -> RuntimeError:
    return RuntimeError(
        f"remat({name}) gives first derivatives only and was differentiated twice; use remat(f, order=2)"
    )


def _name(f: Any) -> str:
    return _name(f.func) if isinstance(f, partial) else getattr(f, "__name__", repr(f))


def check_closure(verb: str, f: Any) -> None:
    """Raise TypeError if ``f``, which is given to ``verb``, closes over a tensor."""
    bound = dict(inspect.getclosurevars(f).nonlocals) if inspect.isfunction(f) else {}
    if isinstance(f, partial):
        bound = {f"argument {i}": x for i, x in enumerate(f.args)} | f.keywords
        check_closure(verb, f.func)
    for name, x in bound.items():
        if any(isinstance(leaf, Tensor) for leaf in tree.leaves(x)):
            fault = f"closes over the tensor {name!r}, whose gradient would silently be zero"
            raise TypeError(f"{verb}({_name(f)}) {fault}; pass it as an argument")
