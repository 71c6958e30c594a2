"""Donated tensors: a result takes the memory of an argument, and the argument raises from then on.

As in JAX, a donated array is gone after the call. The tensor object that the caller passed exchanges its C++ tensor
with a fresh object: the fresh object is the result, and the old one becomes a ``Donated``. So every other reference to
the old object raises on use instead of changing its value. A ``Donated`` refuses Python calls and attributes by
``__torch_function__``, and ops inside transforms, which unwrap tensors in C++, by ``__torch_dispatch__``.

A replay that fails before it writes a donated tensor leaves all arguments as they were. If it fails later, the values
of the donated tensors are lost, and they raise as well. The traceback gives the node that failed.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from .. import tree
from ..device import HOST
from . import graph as graphs

Donations = Mapping[int, str]  # positions of the tensors that results take over, and "a.w was donated to step(...)"
_TAKEN = "and its memory holds a result now"
_FAILED = "which failed after it may have written a result there"
_FIX = "keep a copy (tree.map(torch.clone, x)) before the call, or do not donate it"
_EMPTY = torch.empty(0, dtype=torch.float32, device=HOST)


class Donated(Tensor):
    """A tensor whose memory was given to the result of a captured function; any use of it raises RuntimeError."""

    _message: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise the message of the first donated tensor among the arguments."""
        gone = [leaf for leaf in tree.leaves((args, kwargs)) if type(leaf) is Donated]
        raise RuntimeError(gone[0]._message if gone else "the tensor was donated to a captured function")

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]


def retire(t: Tensor, message: str) -> Tensor:
    """Return a new tensor object with the memory of ``t``; any later use of ``t`` itself raises ``message``."""
    new: Any = Tensor._make_subclass(Donated, _EMPTY)
    torch._C._swap_tensor_impl(t, new)  # type: ignore[attr-defined]
    gone: Any = t
    gone._message, gone.__class__, new.__class__ = message, Donated, Tensor
    return new.requires_grad_(False) if new.requires_grad else new


def retire_after(
    run: Callable[[], Sequence[Tensor]], donations: Donations, tensors: Sequence[Tensor], modules: Sequence[GraphModule]
) -> Sequence[Tensor]:
    """Return the results of ``run``, with new objects for the donated ones of ``tensors``, which are retired.

    ``run`` replays one of ``modules``, which compute the same by nodes of the same names. If it fails, the donated
    tensors are retired unless none of them has been written.
    """
    try:
        out = run()
    except BaseException as error:
        if donations and _may_have_written(error, donations, modules):
            for i, text in donations.items():
                retire(tensors[i], f"{text}, {_FAILED}; {_FIX}")
        raise
    new = {id(t := tensors[i]): retire(t, f"{text}, {_TAKEN}; {_FIX}") for i, text in donations.items()}
    return [new.get(id(t), t) for t in out] if donations else out


def _may_have_written(error: BaseException, donations: Donations, modules: Sequence[GraphModule]) -> bool:
    """Return False if the traceback shows that no node has run, or failed, that writes a donated tensor."""
    nodes = list(modules[0].graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    memory = graphs.all_storages(given[i] for i in donations)
    writers = {node.name for node in nodes if graphs.written_storages(node) & memory}
    ran = [module for module in modules if not getattr(module, "_needs_recompile", bool)()]  # else it has no code yet
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code is Interpreter.run.__code__ and isinstance(node := frame.f_locals.get("node"), Node):
            return not writers.isdisjoint(each.name for each in node.graph.nodes if each <= node)
        for module in ran:
            if frame.f_code is getattr(type(module).forward, "__code__", None):
                lines = module.code.splitlines()[:line]  # a line assigns the result of one node
                return not writers.isdisjoint(text.partition("=")[0].strip() for text in lines)
    return True
