"""Where in somebody's own code an error comes from, and what it is about, read from the frames of its traceback.

Frames of torch and of the machinery that catches the error are nobody's own and are passed over.
"""

from __future__ import annotations

import os
from types import ModuleType, TracebackType

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor

from . import graph, tree

_OURS = tuple(os.path.join(os.path.dirname(__file__), name) for name in ("capture.py", "cost.py"))
_HERE = (os.path.dirname(torch.__file__) + os.sep, *_OURS)


def told(error: BaseException) -> TypeError | None:
    """What an error of tracing means, with the place it came from; None where it is not about tracing."""
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return TypeError(_DATA.format(where(error), error.func))
    if isinstance(error, RuntimeError):
        mixed = "FakeTensor" in repr(error) or "devices" in str(error)
        return TypeError(_MAPPED.format(where(error))) if mixed and "meta" in str(error) else None
    outside = "convert all Tensors to FakeTensors" in str(error)
    return TypeError(_CLOSED.format(closed_over(error))) if outside else None


def where(error: BaseException) -> str:
    """The innermost place, as ``name (file:line)``."""
    places = _places(error)
    if not places:
        return "the function"
    code = places[-1].tb_frame.f_code
    return f"{code.co_name} ({code.co_filename}:{places[-1].tb_lineno})"


def closed_over(error: BaseException) -> str:
    """The outermost tensor that is real where others are fake: what it is called, its dtype and shape, and where."""
    for place in _places(error):
        frame = place.tb_frame
        used = {name: frame.f_globals[name] for name in frame.f_code.co_names if name in frame.f_globals}
        for name, x in {**frame.f_locals, **used}.items():
            if isinstance(x, ModuleType):
                continue
            for path, leaf in tree.items(x):
                if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
                    full = f"{name}.{path}" if path else name
                    return f"{full} {graph.describe(leaf)} in {where(error)}"
    return f"a tensor in {where(error)}"


def _places(error: BaseException) -> list[TracebackType]:
    """Where the error came through, outermost first."""
    found, place = [], error.__traceback__
    while place is not None:
        if not place.tb_frame.f_code.co_filename.startswith(_HERE):
            found.append(place)
        place = place.tb_next
    return found


_MAPPED = (  # its zero tangents are of the device meta, where all else is fake
    "jit: {} maps a forward derivative, vmap(jvp), through a batched product, which torch cannot trace; "
    "differentiate the mapped function instead: jvp of vmap"
)
_CLOSED = "jit: the function uses a tensor that is no argument: {}; pass it as an argument"
_DATA = "jit: {} asks for the value of a tensor ({}), which a capture does not have; use torch.where, or pass it in"
