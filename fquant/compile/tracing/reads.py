"""Check that a function reads no tensor that it is not given and that is differentiated or mapped.

A Function of torch.func computes its forward outside of the transforms around it, and gives gradients to its arguments
alone. A tensor that a user's function holds in a closure, an object or a global would get none. The check sees what is
read, so it does not matter where the tensor is held. A constant may be read.
"""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_current_level,
    maybe_get_level,
)
from torch.overrides import TorchFunctionMode

from ...autodiff import Modes, is_dual, layers
from ..graph import describe
from ..user_code import frames, name_of
from .tracer import tensors

DRAW = "pass a key, and draw with fquant.random"
_MADE = "_made_within"  # the attribute of an intermediate result that is wrapped


@dataclasses.dataclass(frozen=True)  # which is a leaf to pytree
class Around:
    """Name what may follow a tensor at a call: autograd, and the transforms of torch.func, outermost first."""

    autograd: bool
    transforms: tuple[TransformType, ...]

    @classmethod
    def here(cls) -> "Around":
        return cls(torch.is_grad_enabled(), tuple(each.key() for each in get_interpreter_stack() or ()))


class Reads(TorchFunctionMode):
    """Notes the tensors that a function reads, is not given, and that what is around the call may follow.

    The forward of an autograd Function runs outside of the transforms around it. A transform within the function may
    then have the level of one around it, and the wrapper of a tensor does not tell them apart. So what is noted may
    also be an intermediate result. A second call makes other intermediate results: what it reads ``again`` is not one,
    and is a fault. The caller raises faults, because an operator of a tensor turns a TypeError into another.
    """

    def __init__(self, of: str, around: Around, given: Sequence[Tensor], again: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.found, self.faults = list[Tensor](), list[str]()
        self._given, self._again, self._of, self._around = {id(t) for t in given}, again, of, around

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.Generator):
                name = name_of(x, frames(sys._getframe(1))) or "of torch"
                self.faults.append(f"{self._of} reads the generator {name!r}; {DRAW}")
        read = [t for t in tensors((*args, *kwargs.values())) if self._is_foreign(t)]
        out = args  # so that an op that fails has read them
        try:
            out = func(*args, **kwargs)
        finally:
            if read and any(True for _ in tensors((out,))):  # no shape or dtype
                self._note(read)
        for t in tensors((out,)):
            if (is_functorch_wrapped_tensor(t) or t.requires_grad) and not any(t is x for x in tensors(args)):
                setattr(t, _MADE, self)
        return out

    def _is_foreign(self, t: Tensor) -> bool:
        while is_functorch_wrapped_tensor(t):
            if id(t) in self._given or t.__dict__.get(_MADE) is self:
                return False
            level, around, current = maybe_get_level(t), self._around.transforms, maybe_current_level() or 0
            is_mapped = is_batchedtensor(t)
            may_be_around = 0 < level <= len(around) and is_mapped == (around[level - 1] == TransformType.Vmap)
            if may_be_around or not 0 < level <= current:
                followed = is_mapped or current or TransformType.Jvp in around
                return bool(followed) or any(x.requires_grad or is_batchedtensor(x) for x in layers(t))
            t = get_unwrapped(t)
        if t.__dict__.get(_MADE) is self or id(t) in self._given:
            return False
        return self._around.autograd and t.requires_grad or is_dual(t)

    def _note(self, read: Sequence[Tensor]) -> None:
        for t in read:
            if any(t is x for x in self._again):
                name = name_of(t, frames(sys._getframe(2)))
                what = f"the tensor {name!r}, {describe(t)}," if name else f"a tensor {describe(t)}"
                fault = f"reads {what} that it is not given, whose gradient would silently be zero"
                self.faults.append(f"{self._of} {fault}; pass it as an argument")
        self.found += read


def checked(
    run: Callable[..., tuple[Tensor, ...]], of: str, around: Around, given: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return ``run(*given)``, which is ``of`` a verb; raise TypeError for a tensor that it may not read."""
    again: list[Tensor] = []
    while True:
        reads = Reads(of, around, given, again)
        try:
            out = run(*given, reads=reads)
        except Exception:
            if not reads.faults and (again or not reads.found):
                raise
        if reads.faults:
            raise TypeError(reads.faults[0])
        if again or not reads.found:
            return out
        again = reads.found


def without_reads(modes: Modes) -> Modes:
    """Return ``modes`` without the checks of a call around this one, whose levels are others."""
    return modes._replace(functions=tuple(mode for mode in modes.functions if not isinstance(mode, Reads)))
