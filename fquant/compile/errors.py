"""What to tell about a capture that fails: why, and where in somebody's own code, read from the frames of a traceback.

Frames of torch and of the machinery that catches the error are nobody's own and are passed over, but for those of a
module, whose tensors have names.
"""

from __future__ import annotations

import contextlib
import dis
import os
import traceback
from collections.abc import Awaitable, Hashable, Iterator, Sequence
from types import CodeType, FrameType, ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.fx import Graph

from .. import tree
from . import graph
from .closure import Closure
from .guards import Key, changes

_COMPILE = os.path.dirname(__file__) + os.sep
_TRACE = _COMPILE + "trace.py"
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # type: ignore[attr-defined]
_unwrapped = torch._C._functorch.get_unwrapped  # type: ignore[attr-defined]
_HERE = (os.path.dirname(torch.__file__) + os.sep, _COMPILE)


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
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
                for frame, _ in traceback.walk_tb(at.__traceback__):
                    _known(frame)  # which lets go of what was known of it
                at = at.__context__
            raise meant from error


def _meant(error: BaseException) -> TypeError | None:
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        called = _called(error)
        if called.startswith("__") or called in (*_ASKS, str(error.func).split(".")[1].strip("_0123456789")):
            return TypeError(_DATA.format(where(error), error.func))
        return TypeError(_INSIDE.format(where(error), called, error.func, _INSTEAD.get(called, "tensor ops")))
    if "torch._C.Generator" in str(error):  # before torch 2.13, which has it in graphs
        return TypeError(_DRAWS.format(where(error)))
    if ".numpy() is not supported" in str(error):
        return TypeError(_DATA.format(where(error), "numpy"))
    outside = "convert all Tensors to FakeTensors" in str(error) or _DUAL in str(error)
    if isinstance(error, RuntimeError) and not outside:
        mixed = "FakeTensor" in repr(error) or "devices" in str(error)
        return TypeError(_MAPPED.format(where(error))) if mixed and "meta" in str(error) else None
    return TypeError(_CLOSED.format(closed_over(error))) if outside else None


def _called(error: BaseException) -> str:
    """Return the name of the torch function that the innermost place calls; "item" if it cannot be found."""
    places = _places(error)
    inner = places[-1].tb_next if places else None
    if inner is None or inner.tb_frame.f_code.co_name == "__torch_dispatch__":
        return _ASKS[0]
    frame = inner.tb_frame
    if frame.f_code.co_name != "__torch_function__":
        return frame.f_code.co_name
    return getattr(frame.f_locals.get("func"), "__name__", _ASKS[0])


def check_result(x: Any) -> None:
    """Raise TypeError for what a captured function returns and no replay can: tensors that it was not given, and what
    is no tree, but may hold tensors."""
    for path, leaf in tree.items(x):
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
            raise TypeError(_CLOSED.format(f"{graph.describe(leaf)}, its result" + f".{path}" * bool(path)))
        frozen = isinstance(leaf, Hashable) and not isinstance(leaf, Iterator | Awaitable)
        if not isinstance(leaf, Tensor) and (not frozen or any(_held(leaf))):
            raise TypeError(
                f"jit: {path or 'the result'} is a {type(leaf).__name__}, which is no tree, and not a frozen value "
                "without tensors; return tuples, lists, dicts, or a node (fquant.tree.node)"
            )


def _held(x: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that an object has as attributes, or a function closes over, by their names."""
    if isinstance(x, torch.nn.Module):
        yield from (*x.named_parameters(), *x.named_buffers())
        return
    own = dict(getattr(x, "__dict__", {}))
    if isinstance(code := getattr(x, "__code__", None), CodeType):
        for name, cell in zip(code.co_freevars, x.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # of a cell that is empty
                own[name] = cell.cell_contents
    for path, leaf in tree.items(own):
        if isinstance(leaf, Tensor):
            yield path, leaf


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
    known = [_known(place.tb_frame) for place in _places(error, modules=True)]
    plain = [item for names in known for item in tree.items(names)]
    held = [(f"{path}.{name}", t) for path, x in plain for name, t in _held(x)]
    for path, t in plain + held:
        if isinstance(t, Tensor) and not isinstance(_inner(t), FakeTensor):
            return f"{path} {graph.describe(t)} in {where(error)}"
    return f"a tensor in {where(error)}"


def _known(frame: FrameType) -> dict[str, Any]:
    """What a frame has by name: its own, and what it reads of its module's."""
    read = {one.argval for one in dis.get_instructions(frame.f_code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    known = frame.f_locals | {name: frame.f_globals[name] for name in read if name in frame.f_globals}
    return {name: x for name, x in known.items() if not isinstance(x, ModuleType)}


def _inner(t: Tensor) -> Tensor:
    """What transforms have wrapped."""
    while _is_wrapped(t):
        t = _unwrapped(t)
    return t


def _places(error: BaseException, modules: bool = False) -> list[TracebackType]:
    """Where in the captured function the error came through, outermost first; in torch's ``modules`` if these count."""
    found, place = [], error.__traceback__
    while place is not None:
        frame = place.tb_frame
        file = frame.f_code.co_filename
        if (file, frame.f_code.co_name) == (_TRACE, "apply"):
            found.clear()  # what is outside of it
        if not file.startswith(_HERE) or modules and isinstance(frame.f_locals.get("self"), torch.nn.Module):
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
_ASKS = ("item", "tolist", "is_nonzero", "numpy")  # methods that a user calls for a value
_INSTEAD = {
    "cov": "d = x - x.mean(1, keepdim=True); d @ d.mT / (x.shape[1] - 1)",
    "corrcoef": "d = torch.nn.functional.normalize(x - x.mean(1, keepdim=True)); d @ d.mT",
    "one_hot": "(x[..., None] == torch.arange(num_classes)).long()",
}
_INSIDE = (
    "jit: {} calls {}, which itself asks for the value of a tensor ({}) that a capture does not have; "
    "write it as {}, or compute it before the call and pass it in"
)
_DATA = "jit: {} asks for the value of a tensor ({}), which a capture does not have; use torch.where, or pass it in"


def too_many(name: str, max_traces: int, paths: Sequence[str], before: Key, now: Key, closure: Closure) -> str:
    """Why a function would be traced more than ``max_traces`` times: what the keys of the last two traces differ in."""
    return (
        f"jit({name}) would be traced more than {max_traces} times: {changes(before, now, paths, closure)}; "
        "pass what changes from call to call as a tensor argument, or raise max_traces"
    )
