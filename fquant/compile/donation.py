"""Donated tensors: a result takes the memory of an argument, and the argument raises from then on.

As in JAX, a donated array is gone after the call. The tensor object that the caller passed exchanges its C++ tensor
with a fresh object: the fresh object is the result, and the old object becomes a ``Donated``. So every other reference
to the old object, in ``best = adapters`` for instance, raises on use instead of changing its value.

A ``Donated`` refuses Python calls and attributes by ``__torch_function__``. It refuses ops of transforms, which unwrap
tensors in C++, by ``__torch_dispatch__``.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from .. import tree


class Donated(Tensor):
    """A tensor whose memory holds the result of a captured function; any use of it raises RuntimeError."""

    _message: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise the message of the first donated tensor among the arguments."""
        gone = [leaf for leaf in tree.leaves((args, kwargs)) if type(leaf) is Donated]
        raise RuntimeError(gone[0]._message if gone else "the tensor was donated to a captured function")

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]


_EMPTY = torch.empty(0)


def retire(t: Tensor, message: str) -> Tensor:
    """Return a new tensor object with the memory of ``t``; any later use of ``t`` itself raises ``message``."""
    new: Any = Tensor._make_subclass(Donated, _EMPTY)
    torch._C._swap_tensor_impl(t, new)  # type: ignore[attr-defined]
    gone: Any = t
    gone._message, gone.__class__, new.__class__ = message, Donated, Tensor
    return new.requires_grad_(False) if new.requires_grad else new


def may_have_written(error: BaseException, modules: Sequence[GraphModule], writers: Collection[str]) -> bool:
    """Return False if the traceback of a failed replay shows that no node of the names ``writers`` has run.

    The node that raised counts as run.
    """
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code is Interpreter.run.__code__ and isinstance(node := frame.f_locals.get("node"), Node):
            return any(each.name in writers and each <= node for each in node.graph.nodes)
        for module in modules:
            if frame.f_code is getattr(type(module).forward, "__code__", None):
                lines = module.code.splitlines()[:line]  # a line assigns the result of one node
                return any(text.partition("=")[0].strip() in writers for text in lines)
    return True
