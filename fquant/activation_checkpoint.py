"""Activation checkpointing (rematerialisation) under torch.func: recompute a function in its backward.

    block = remat(block)                # gradients of first order
    block = remat(block, order=2)       # of any order

Only the arguments are saved. ``torch.utils.checkpoint`` uses saved-tensor hooks, which torch.func rejects; this is an
autograd Function whose backward is the vjp of the recomputation. ``torch.func.grad`` runs every backward with
create_graph=True, which keeps all that the recomputation computes. At first order this backward records nothing, which
saves the memory. Differentiating it again would give silent zeros, so it raises. The recomputation runs in the autocast
and the function modes of the call. It would see other values if the function drew from torch's generators or wrote to
its arguments, so that raises as well.

A tensor that the function reads and is not given would have a gradient of zero. So each call checks every tensor that
is read, wherever the function holds it: one that a transform or autograd follows raises, and a constant does not.

torch differentiates ``silu``, ``mish`` and ``group_norm`` by another formula where a backward is recorded. So at first
order their gradients are those of plain autograd in every bit, and at order 2 those of ``torch.func.grad``.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from . import tree
from .autodiff import (
    check_floats,
    current_modes,
    has_tangent,
    in_modes,
    layers,
    pull_back,
    push_forward,
    replace_at,
    unwrap_dead,
)
from .compile.tracing.reads import DRAW, Around, Reads, checked, without_reads
from .compile.tracing.tracer import draws, recorder
from .device import HOST, META
from .tree import expect


def remat(f: Callable[..., Any], order: int = 1) -> Callable[..., Any]:
    """Return ``f`` with its intermediate results recomputed in the backward; arguments and results are trees.

    ``order`` 1 allows one reverse derivative, after any number of forward ones; 2 allows any. A call raises TypeError
    if ``f`` reads a tensor that is no argument and is differentiated or mapped. It raises TypeError too if ``f`` draws
    from a generator, writes to an argument or returns anything but float tensors. Raises RuntimeError if order 1 is
    differentiated twice.
    """
    expect(order in (1, 2), f"remat: order is {order}; wanted 1 (first derivatives only) or 2 (any)")

    @wraps(f)
    def call(*args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            fix = "capture the step, and Inductor compiles its graph: jit(step, compile=True)"
            raise RuntimeError(f"remat({_name(f)}) cannot be traced by torch.compile; {fix}")
        leaves, structure = tree.flatten(args)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            (path, *_) = [path for path, leaf in tree.items(args) if isinstance(leaf, torch.Generator)]
            raise TypeError(f"remat({_name(f)}): {path} is a generator; {DRAW}")
        given, static = [leaves[i] for i in places], replace_at(leaves, places, [None] * len(places))
        structure_of_result, modes, around = [], without_reads(current_modes(given)), Around.here()

        def run(*tensors: Tensor, reads: Reads | None = None) -> tuple[Tensor, ...]:
            with in_modes(modes), reads or nullcontext():
                result = f(*tree.unflatten(structure, replace_at(static, places, tensors)))
            with tree.at(f"remat({_name(f)}) returned"):
                check_floats(result, "return the rest from outside")
            structure_of_result[:] = [tree.structure(result)]
            return tuple(tree.leaves(result))

        versions, drawn = _versions(given), _drawn(given)
        out = _Remat.apply(run, order, _name(f), around, *given)
        _check_pure(f, args, run, versions, drawn)
        return tree.unflatten(structure_of_result[0], out)

    return call


class _Remat(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        run: Callable[..., tuple[Tensor, ...]], _order: int, name: str, around: "Around", *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        with torch.no_grad():
            # f cannot hold these aliases, so a tensor that f holds differs from every argument.
            given = [t.detach() if t.requires_grad or has_tangent(t) else t for t in tensors]
            out = checked(run, f"remat({name})", around, given)
            return tuple(t.view_as(t) if any(t is x for x in given) else t for t in out)  # torch saves no other

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.run, ctx.order, ctx.name, _, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)  # so that constants have no tangents, of zeros

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        tensors = unwrap_dead(ctx.saved_tensors)
        wanted = [i for i, need in enumerate(ctx.needs_input_grad[4:]) if need]
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
        return None, None, None, None, *replace_at([None] * len(tensors), wanted, found)

    @staticmethod
    def jvp(ctx: Any, _run: Any, _order: Any, _name: Any, _around: Any, *tangents: Any) -> Any:
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


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return how often each tensor was written to; -1 for one of inference mode, which torch does not count."""
    inner = [[*layers(t)][-1] for t in tensors]
    return [-1 if t.is_inference() else t._version for t in inner]


def _drawn(tensors: Sequence[Tensor]) -> tuple[list[bytes], int]:
    """Return the states of torch's generators for the host and the devices of ``tensors``, and a capture's draws."""
    modules = {d: torch.get_device_module(d) for d in {t.device for t in tensors} - {HOST, META}}
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        states = [torch.get_rng_state()]
        states += [module.get_rng_state(device) for device, module in modules.items() if module.is_available()]
        return [state.numpy().tobytes() for state in states], len(found.drawn) if (found := recorder()) else 0


class _Draws(TorchDispatchMode):
    """Notes the ops that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = list[Any]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``op``."""
        self.drawn += [op] if draws(op, args, kwargs or {}) else []
        return op(*args, **(kwargs or {}))


def _check_pure(
    f: Any, args: Any, run: Callable[..., Any], versions: list[int], drawn: tuple[list[bytes], int]
) -> None:
    """Raise TypeError if a call of ``f`` wrote to a tensor in ``args`` or drew numbers, given what was so before it."""
    given, (states, count) = [leaf for leaf in tree.leaves(args) if isinstance(leaf, Tensor)], drawn
    if (now := _versions(given)) != versions:
        paths = [path for path, leaf in tree.items(args) if isinstance(leaf, Tensor)]
        path = next(path for path, a, b in zip(paths, versions, now, strict=True) if a != b)
        fix = "its recomputation would read what it wrote: compute a new tensor"
        raise TypeError(f"remat({_name(f)}) writes to its argument {path}, and {fix}")
    ops = list[Any]() if (found := recorder()) is None else found.drawn[count:]
    if not ops and _drawn(given)[0] != states:
        with torch.no_grad(), _Draws() as mode:  # of this function or of another thread
            run(*given)
        ops = mode.drawn
    for op in ops:
        raise TypeError(f"remat({_name(f)}) draws by {op} of torch, and again when it recomputes; {DRAW}")


def _twice(name: str) -> RuntimeError:
    return RuntimeError(
        f"remat({name}) gives first derivatives only and was differentiated twice; use remat(f, order=2)"
    )


def _name(f: Any) -> str:
    return _name(f.func) if isinstance(f, partial) else getattr(f, "__name__", type(f).__name__)
