"""What to tell about a capture that fails: why, and where in somebody's own code, read from the frames of a traceback.

Frames of torch and of the machinery that catches the error are nobody's own and are passed over.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import Any

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


def too_many(name: str, most: int, paths: Sequence[str], before: Any, now: Any) -> str:
    """Why a function would be traced more than ``most`` times: what the keys of the last two traces differ in."""
    if now[0] != before[0]:
        change = f"the structure of the arguments is {now[0]}, and was {before[0]}"
    else:
        pairs = zip(paths, before[1], now[1], strict=True)
        told = [f"{path} is {_told(new)}, and was {_told(old)}" for path, old, new in pairs if old != new]
        change = "; ".join(told[:3]) or "what shares memory with what was donated"
    return (
        f"jit({name}) would be traced more than {most} times: {change}; "
        "pass what changes from call to call as a tensor, or raise most"
    )


def _told(kind: Any) -> str:
    if issubclass(kind[0], Tensor):
        return f"{str(kind[1]).removeprefix('torch.')}{list(kind[2])} with strides {list(kind[3])} on {kind[4]}"
    return repr(float.fromhex(kind[1]) if kind[0] is float else kind[1])
