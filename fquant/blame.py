"""What to tell about a capture that fails: why, and where in somebody's own code, read from the frames of a traceback.

Frames of torch and of the machinery that catches the error are nobody's own and are passed over.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Hashable, Iterator, Sequence
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.fx import Graph

from . import graph, tree
from .key import Key, changes

_OURS = tuple(
    os.path.join(os.path.dirname(__file__), name) for name in ("blame.py", "capture.py", "cost.py", "fake.py")
)
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined]
_unwrapped = torch._C._functorch.get_unwrapped  # type: ignore[attr-defined]
_HERE = (os.path.dirname(torch.__file__) + os.sep, *_OURS)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Raise what an error of tracing means, with the place it came from; an error that is not about tracing as it is.

    Torch leaves its dispatcher as it was in the middle of a trace once the frames of such an error are gone, and every
    jvp of the process fails from then on. So they go here, and the dispatcher is as it was before.
    """
    with torch._C._PreserveDispatchKeyGuard():  # type: ignore[attr-defined]
        try:
            yield
        except (AssertionError, RuntimeError) as error:
            meant = _meant(error)
            if meant is None:
                raise
            at: BaseException | None = error
            while at is not None:
                traceback.clear_frames(at.__traceback__)
                at = at.__context__
            raise meant from error


def _meant(error: BaseException) -> TypeError | None:
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        return TypeError(_DATA.format(where(error), error.func))
    if "torch._C.Generator" in str(error):  # before torch 2.13, which has it in graphs
        return TypeError(_DRAWS.format(where(error)))
    if ".numpy() is not supported" in str(error):
        return TypeError(_DATA.format(where(error), "numpy"))
    outside = "convert all Tensors to FakeTensors" in str(error) or _DUAL in str(error)
    if isinstance(error, RuntimeError) and not outside:
        mixed = "FakeTensor" in repr(error) or "devices" in str(error)
        return TypeError(_MAPPED.format(where(error))) if mixed and "meta" in str(error) else None
    return TypeError(_CLOSED.format(closed_over(error))) if outside else None


def check_result(x: Any) -> None:
    """Raise TypeError for what a captured function returns and no replay can: tensors that it was not given, and what
    is no tree, but may hold tensors."""
    for path, leaf in tree.items(x):
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
            raise TypeError(_CLOSED.format(f"{graph.describe(leaf)}, its result" + f".{path}" * bool(path)))
        holds = any(isinstance(one, Tensor) for one in getattr(leaf, "__dict__", {}).values())
        frozen = isinstance(leaf, Hashable) and not isinstance(leaf, Iterator)
        if not isinstance(leaf, Tensor) and (holds or not frozen):
            raise TypeError(
                f"jit: {path or 'the result'} is a {type(leaf).__name__}, which is no tree, and not a frozen value "
                "without tensors; return tuples, lists, dicts, or a node (fquant.tree.node)"
            )


def check_draws(draws: Graph) -> None:
    """Raise TypeError for a graph that draws from a generator, whose state is no argument and goes on at replays."""
    for node in draws.nodes:
        if node.kwargs.get("generator") is not None:
            raise TypeError(_DRAWS.format(node.target))


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
                if isinstance(leaf, Tensor) and not isinstance(_inner(leaf), FakeTensor):
                    full = f"{name}.{path}" if path else name
                    return f"{full} {graph.describe(leaf)} in {where(error)}"
    return f"a tensor in {where(error)}"


def _inner(t: Tensor) -> Tensor:
    """What transforms have wrapped."""
    while _is_wrapped(t):
        t = _unwrapped(t)
    return t


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
_DUAL = "is_inference() INTERNAL ASSERT"  # what a real tensor meets inside of a jvp of fake ones
_CLOSED = "jit: the function uses a tensor that is no argument: {}; pass it as an argument"
_DRAWS = "jit: {} draws from a torch.Generator; use fquant.random, and pass a key"
_DATA = "jit: {} asks for the value of a tensor ({}), which a capture does not have; use torch.where, or pass it in"


def too_many(name: str, most: int, paths: Sequence[str], before: Key, now: Key) -> str:
    """Why a function would be traced more than ``most`` times: what the keys of the last two traces differ in."""
    return (
        f"jit({name}) would be traced more than {most} times: {changes(before, now, paths)}; "
        "pass what changes from call to call as a tensor, or raise most"
    )
