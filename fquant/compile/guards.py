"""Guards: the arguments that a captured function takes, and the key for which a trace is valid.

A captured function takes plain tensors: dense, without scales of their own, of no subclass, and without a gradient to
record. A tensor that is not plain may look like one that is (a sparse tensor like an expanded number), so every call
checks for it. Any other argument must be hashable. The key has

* of each tensor: type, dtype, shape, strides, device, and whether it records a gradient, but not its values;
* every other argument itself, and the structure of the arguments;
* the tensors that results are written over (fquant.compile.donation);
* the version of the Python values that the function closes over (fquant.compile.closure);
* torch's default dtype and device, autocast, determinism, and the kinds of attention that are allowed.

Gradient recording and inference mode are not part of it, because a captured function has its gradients inside.

A call like an earlier one is found without a key (``Repeats``). Inside a transform or another capture there is none.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch._subclasses.fake_tensor import FakeTensor

from .. import tree
from ..autodiff import in_dual_level, is_dual
from ..device import HOST
from . import closure as closures
from .arguments import Structure
from .closure import Closure, Value, freeze
from .retraces import SHOWN, Change
from .tracing.tracer import is_traced

_AUTOCAST_DEVICES = (HOST.type, "cuda", "xpu", "mps")
_ATTENTION = [getattr(torch._C, f"_get_{kind}_sdp_enabled") for kind in ("math", "flash", "mem_efficient", "cudnn")]
_MOST = 8  # traces that a call is compared with before it makes a key
AMBIENT = (  # what of torch's state decides
    "torch's default dtype",
    "torch's default device",
    "autocast",
    "whether torch's algorithms are deterministic",
    "the kinds of attention that torch may use",
)


def is_plain(t: Tensor) -> bool:
    """Return True for a dense tensor without scales, which its shape and strides describe."""
    return t.layout is torch.strided and not (t.is_nested or t.is_quantized)


def is_inside(tensors: Sequence[Tensor]) -> bool:
    """Return True if the call is part of a transform or of another capture, or autograd detects anomalies."""
    fakes = (type(t) is not Tensor and isinstance(t, FakeTensor) for t in tensors)
    return _is_transformed() or any(fakes) or any(map(is_dual, tensors))


def _is_transformed() -> bool:
    return bool(
        torch.compiler.is_dynamo_compiling()
        or torch._C._are_functorch_transforms_active()
        or is_traced()
        or torch.is_anomaly_enabled()
    )


def check(name: str, bound: Any) -> None:
    """Raise TypeError for a tensor in the tree ``bound`` that the captured function ``name`` does not take."""
    for path, leaf in tree.items(bound):
        if not isinstance(leaf, Tensor):
            continue
        if type(leaf) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{path} is a {type(leaf).__name__}; pass plain tensors, of a mesh shard.local(base)")
        if not is_plain(leaf):
            kind = "nested" if leaf.is_nested else "quantised by torch"
            kind = kind if leaf.layout is torch.strided else str(leaf.layout).removeprefix("torch.")
            raise TypeError(f"{path} is a tensor that is {kind}; pass a dense one")
        if _wants_gradient(leaf):
            fix = f"capture the gradient: jit(grad({name}))"
            raise TypeError(f"{path} requires a gradient, which a captured function has none of; {fix}")


def unhashable(name: str, bound: Any) -> TypeError:
    """Return the error for a leaf of the tree ``bound`` that is neither a tensor nor hashable."""
    for path, leaf in tree.items(bound):
        try:
            hash(leaf)
        except TypeError:
            return TypeError(f"{path} is a {type(leaf).__name__}, neither a tensor nor hashable; use a frozen value")
    return TypeError(f"{name}: an argument is not hashable")


class Key(NamedTuple):
    """The guards of a trace; hashable if the leaves are."""

    structure: Structure
    kinds: tuple[Any, ...]  # of the leaves
    donated: tuple[bool, ...]  # for each tensor
    ambient: tuple[Any, ...]  # the values of AMBIENT
    closure: int  # version of the values that the function closes over
    sizes: tuple[int, ...] = ()  # that dynamic arguments are padded to


def key_of(structure: Structure, leaves: Sequence[Any], donated: tuple[bool, ...], closure: int) -> Key:
    """Return the key of a call in torch's present state."""
    return Key(structure, tuple(map(_kind, leaves)), donated, _ambient(), closure)


class Repeats:
    """The traces of earlier calls, found again without the key of a call, which takes 5 to 10 times as long to make.

    Dynamo's guards compare the tensors, in C++. They are stricter than a key: a tensor that is passed twice, for
    instance, never matches. So a call that is not found here may have a trace.
    """

    def __init__(self) -> None:
        self._known = dict[Key, tuple[TensorGuards, list[Value | None], Any]]()

    def add(self, key: Key, tensors: Sequence[Tensor], found: Any) -> None:
        """Let calls of ``key``, such as one of ``tensors``, find ``found``."""
        if tensors and len(self._known) < _MOST and key not in self._known:
            others = [None if issubclass(kind[0], Tensor) else kind for kind in key.kinds]
            check = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            self._known[key] = check, others, found

    def find(self, structure: Structure, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> Iterator[tuple[Key, Any]]:
        """Yield what was added for such arguments; ``donated`` and ``closure`` of the key are still to be compared.

        Nothing is found inside a transform or a ``dual_level``, nor in a mode that sees every op, which Dynamo notices.
        """
        if _is_transformed() or in_dual_level():
            return
        for key, (check, others, found) in self._known.items():
            if structure != key.structure or len(leaves) - len(tensors) != len(others) - others.count(None):
                continue
            same = len(tensors) == len(leaves) or others == [
                None if isinstance(leaf, Tensor) else freeze(leaf) for leaf in leaves
            ]
            if same and check.check(*tensors) and _ambient() == key.ambient:
                yield key, found


def _ambient() -> tuple[Any, ...]:
    devices = _AUTOCAST_DEVICES if torch._C._is_any_autocast_enabled() else ()  # type: ignore[attr-defined]
    autocast = tuple((kind, torch.get_autocast_dtype(kind)) for kind in devices if torch.is_autocast_enabled(kind))
    device = torch.get_default_device() if torch._C._is_torch_function_mode_enabled() else None  # it is such a mode
    attention = tuple([is_allowed() for is_allowed in _ATTENTION])
    return torch.get_default_dtype(), device, autocast, torch.are_deterministic_algorithms_enabled(), attention


def differences(paths: Sequence[str], before: Iterable[Key], now: Key, closure: Closure) -> list[Change]:
    """Return how a call's key differs from the most alike, and newest, of ``before``; ``paths`` are those of leaves."""
    newest = list(before)[::-1]
    alike = [key for key in newest if key.structure == now.structure] or newest[:1]
    return min((_differences(paths, key, now, closure) for key in alike), key=len)


def _differences(paths: Sequence[str], before: Key, now: Key, closure: Closure) -> list[Change]:
    if now.structure != before.structure:
        changed = now.structure.changes(before.structure)
        return [Change(f"the structure of {name}", "; ".join(texts[:SHOWN])) for name, texts in changed.items()]
    pairs = [(path, *each, _text) for path, *each in zip(paths, before.kinds, now.kinds, strict=False)]
    pairs += [(*each, str) for each in zip(AMBIENT, before.ambient, now.ambient, strict=True)]
    found = [
        Change(name, f"{name} is {text(new)}, and was {text(old)}") for name, old, new, text in pairs if old != new
    ]
    found += closure.changes(before.closure, now.closure)
    return found or [Change("donated tensors", "which donated tensors share memory with others")]


def _wants_gradient(t: Tensor) -> bool:
    return t.requires_grad and torch.is_grad_enabled()


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (type(leaf), leaf.dtype, leaf.shape, leaf.stride(), leaf.device, _wants_gradient(leaf))
    return freeze(leaf)


def _text(kind: Value | None) -> str:
    if kind is None or not issubclass(kind[0], Tensor):
        return closures.text(kind)
    return f"{str(kind[1]).removeprefix('torch.')}{list(kind[2])} with strides {list(kind[3])} on {kind[4]}"
