"""Errors of tracing: the cause in the user's terms, and the place in the user's code, read from the traceback.

Frames of torch and of this package are passed over. Frames of an ``nn.Module`` count in the search for a tensor's name.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Awaitable, Hashable, Iterator
from types import FrameType, TracebackType
from typing import Any

import einops
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.fx import Graph
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode

from .. import tree
from ..autodiff import layers
from ..device import HOST
from . import graph
from .user_code import held, is_users, name_of

_COMPILE = os.path.dirname(__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_EINOPS = os.path.dirname(einops.__file__) + os.sep
_TRACE = _COMPILE + "trace.py"
_TRACER = os.path.join(_COMPILE, "tracing", "tracer.py")
_PLACE = "fquant.place"  # in the metadata of an autograd node
HIDDEN = (os.path.dirname(torch.__file__) + os.sep, _COMPILE)


class MappedForward(TypeError):
    """An error of a forward derivative that is mapped, vmap(jvp), or of its results, in a trace made on the host."""


@contextlib.contextmanager
def translate_errors(device: torch.device, on_meta: bool) -> Iterator[None]:
    """Raise an error of tracing for ``device`` as a TypeError that names cause and place; raise any other as it is.

    ``on_meta`` says that the trace is made on the device meta. If it is not, vmap(jvp) raises MappedForward.

    When the frames of such an error are freed, torch sets its dispatcher to the state within the trace, in which every
    later jvp fails. So the frames are cleared here, and the dispatcher's state is restored.
    """
    with torch._C._PreserveDispatchKeyGuard():  # type: ignore[attr-defined]
        try:
            yield
        except (AssertionError, RuntimeError) as error:
            translated = _translated(error, device, on_meta)
            if translated is None:
                raise
            cause: BaseException | None = error
            while cause is not None:
                traceback.clear_frames(cause.__traceback__)
                for frame, _ in traceback.walk_tb(cause.__traceback__):
                    dict(frame.f_locals)  # a cache, which this empties
                cause = cause.__context__
            raise translated from error


def _translated(error: BaseException, device: torch.device, on_meta: bool) -> TypeError | None:
    text, place = str(error), _where(error)
    if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        called = _called(error)
        if called.startswith("__") or called in (*_ASKS, str(error.func).split(".")[1].strip("_0123456789")):
            return TypeError(_DATA.format(place, error.func))
        why = f"calls {called}, which itself asks for the value of a tensor ({error.func}) that a capture does not have"
        fix = f"write it as {_INSTEAD.get(called, 'tensor ops')}, or compute it before the call and pass it in"
        return TypeError(f"jit: {place} {why}; {fix}")
    if "torch._C.Generator" in text:  # before torch 2.13, which has it in graphs
        return TypeError(_DRAWS.format(place))
    if ".numpy() is not supported" in text:
        return TypeError(_DATA.format(place, "numpy"))
    mixed = isinstance(error, RuntimeError) and ("FakeTensor" in repr(error) or "devices" in text) and "meta" in text
    if not on_meta and (mixed or _maps_forward(error)):
        return MappedForward(_MAPPED.format(place))
    if "convert all Tensors to FakeTensors" in text or "is_inference() INTERNAL ASSERT" in text:  # inside a jvp
        return TypeError(_CLOSED.format(_closed_over(error)))
    return TypeError((_MAPPED if device == HOST else _HOST).format(place, device)) if mixed else None


def _maps_forward(error: BaseException) -> bool:
    """Return True if an error was raised within a jvp within a vmap."""
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    return "_flat_vmap" in frames and "_jvp_with_argnums" in frames[frames.index("_flat_vmap") :]


def _called(error: BaseException) -> str:
    """Return the name of the torch function that the innermost place calls; "item" if it cannot be found."""
    places = _places(error)
    inner = places[-1].tb_next if places else None
    name = inner.tb_frame.f_code.co_name if inner else "__torch_dispatch__"
    if inner and name == "__torch_function__":
        return getattr(inner.tb_frame.f_locals.get("func"), "__name__", _ASKS[0])
    return _ASKS[0] if name == "__torch_dispatch__" else name


class Lines(TorchFunctionMode):
    """Give the nodes of a trace the innermost place in the user's code as ``stack_trace``: ``name (file:line)``.

    That is outside of torch, einops and this package, or outside of torch and the compiler if there is no such frame.
    A backward has the place of the forward that it belongs to, or else of the call that differentiates (:func:`place`).
    torch itself records frames of ``nn.Module.forward`` alone.
    """

    def __enter__(self) -> Any:
        self._keeps = fx_traceback.preserve_node_meta()
        self._keeps.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._keeps.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the place of a call."""
        frame = _first(sys._getframe(1), (HIDDEN[0], _PACKAGE, _EINOPS)) or _first(sys._getframe(1), HIDDEN)
        if frame is None:
            return func(*args, **(kwargs or {}))
        place = f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
        fx_traceback.get_current_meta()["stack_trace"] = place
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, list | tuple) else [result]:
            if isinstance(t, Tensor):
                _mark(t.grad_fn, place)
        return result


def _first(frame: FrameType | None, hidden: tuple[str, ...]) -> FrameType | None:
    """Return the innermost frame that is not in a file whose path begins with one of ``hidden``, within a capture."""
    while frame is not None and frame.f_code.co_filename.startswith(hidden):
        frame = frame.f_back
    return frame


def _mark(made: Any, place: str) -> None:
    """Note the place of a call in the autograd nodes that it made."""
    left = [made]
    while left:
        if (node := left.pop()) is not None and _PLACE not in node.metadata:
            node.metadata[_PLACE] = place
            left += [before for before, _ in node.next_functions]


def place() -> tuple[str | None, bool]:
    """Return the place in the user's code of the op that is traced, and True if it is one of a backward."""
    node = torch._C._current_autograd_node()
    here = fx_traceback.get_current_meta().get("stack_trace")
    if node is None:
        return here, False
    known: dict[str, str] = node.metadata  # type: ignore[assignment]
    return known.get(_PLACE, here), True


def check_result(x: Any) -> None:
    """Raise TypeError for a result with a tensor that is no argument, or with an object that may hold tensors."""
    for path, leaf in tree.items(x):
        if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor):
            raise TypeError(_CLOSED.format(f"{graph.describe(leaf)}, its result" + f".{path}" * bool(path)))
        frozen = isinstance(leaf, Hashable) and not isinstance(leaf, Iterator | Awaitable)
        if not isinstance(leaf, Tensor) and (not frozen or any(held(leaf))):
            raise TypeError(
                f"jit: {path or 'the result'} is a {type(leaf).__name__}, which is no tree, and not a frozen value "
                "without tensors; return tuples, lists, dicts, or a node (fquant.tree.node)"
            )


def check_draws(draws: Graph) -> None:
    """Raise TypeError for a graph that draws from a generator, because its state is no argument of a replay."""
    if found := [node.target for node in draws.nodes if node.kwargs.get("generator") is not None]:
        raise TypeError(_DRAWS.format(found[0]))


def _where(error: BaseException) -> str:
    """Return the innermost place in the user's code, as ``name (file:line)``."""
    if not (places := _places(error)):
        return "the function"
    code = places[-1].tb_frame.f_code
    return f"{code.co_name} ({code.co_filename}:{places[-1].tb_lineno})"


def _closed_over(error: BaseException) -> str:
    """Return the name, dtype, shape and place of the real tensor that an op in a trace of fake ones was given."""
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        if (frame.f_code.co_filename, frame.f_code.co_name) == (_TRACER, "__torch_function__"):
            for t in tree.leaves((frame.f_locals["args"], frame.f_locals["kwargs"])):
                if isinstance(t, Tensor) and not isinstance([*layers(t)][-1], FakeTensor):
                    places = [(place.tb_frame, place.tb_lasti) for place in _places(error, modules=True)]
                    names = [name_of(x, reversed(places)) for x in layers(t)]
                    name = next((f"{name} " for name in names if name), "")
                    return f"{name}{graph.describe(t)} in {_where(error)}"
    return f"a tensor in {_where(error)}"


def _places(error: BaseException, modules: bool = False) -> list[TracebackType]:
    """Return the captured function's frames in the traceback, outermost first; ``modules`` adds those of modules.

    Frames of libraries are left out unless there are no others.
    """
    found, place = [], error.__traceback__
    while place is not None:
        frame = place.tb_frame
        file = frame.f_code.co_filename
        if (file, frame.f_code.co_name) == (_TRACE, "apply"):
            found.clear()  # callers of the captured function
        if not file.startswith(HIDDEN) or modules and isinstance(frame.f_locals.get("self"), torch.nn.Module):
            found.append(place)
        place = place.tb_next
    users = [place for place in found if is_users(place.tb_frame.f_code.co_filename)]
    return found if modules else users or found


_MAPPED = (
    "jit: {} maps a forward derivative, vmap(jvp), with a tensor that a capture cannot follow there; pass that as an "
    "argument, or differentiate the mapped function instead: jvp of vmap"
)
_HOST = "jit: {} uses a tensor on the host beside those on {}; make it there, as in torch.arange(n, device=x.device)"
_CLOSED = "jit: the function uses a tensor that is no argument: {}; pass it as an argument"
_DRAWS = "jit: {} draws from a torch.Generator; use fquant.random, and pass a key"
_ASKS = ("item", "tolist", "is_nonzero", "numpy")  # methods that a user calls for a value
_INSTEAD = {
    "cov": "d = x - x.mean(1, keepdim=True); d @ d.mT / (x.shape[1] - 1)",
    "corrcoef": "d = torch.nn.functional.normalize(x - x.mean(1, keepdim=True)); d @ d.mT",
    "one_hot": "(x[..., None] == torch.arange(num_classes)).long()",
}
_DATA = "jit: {} asks for the value of a tensor ({}), which a capture does not have; use torch.where, or pass it in"
