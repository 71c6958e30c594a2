"""Check that a function reads no tensor that it is not given and that is differentiated or mapped.

A Function of torch.func computes its forward outside of the transforms around it, and gives gradients to its arguments
alone. A tensor that a user's function holds in a closure, an object or a global would get none. The check sees what is
read, so it does not matter where the tensor is held. A constant may be read.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from ...autodiff import Modes, has_tangent, layers
from ..graph import describe
from ..user_code import Place, frames, name_of
from .tracer import tensors

DRAW = "pass a key, and draw with fquant.random"
_MADE = "_made_within"  # the attribute of an intermediate result that is wrapped, or that follows from what is read


@dataclasses.dataclass(frozen=True)  # which is a leaf to pytree
class Around:
    """Name what may follow a tensor at a call: autograd, and the transforms of torch.func, outermost first.

    Within the forward of another checked call autograd is disabled, and may follow what it follows around that call.
    """

    autograd: bool
    transforms: tuple[TransformType, ...]

    @classmethod
    def here(cls) -> "Around":
        checks = (mode for mode in _get_current_function_mode_stack() if isinstance(mode, Reads))
        autograd = torch.is_grad_enabled() or any(check.around.autograd for check in checks)
        return cls(autograd, tuple(each.key() for each in get_interpreter_stack() or ()))


class Reads(TorchFunctionMode):
    """Notes the tensors that a function reads, is not given, and that what is around the call may follow.

    The forward of an autograd Function runs outside of the transforms around it. A transform within the function may
    then have the level of one around it, and the wrapper of a tensor does not tell them apart. So what is noted may
    also be an intermediate result. A second call makes other intermediate results. So a tensor that both calls
    read is a fault, and so is a tensor that the ``first`` call made of such tensors and kept. The caller raises faults,
    because an operator of a tensor turns a TypeError into another.
    """

    def __init__(self, of: str, around: Around, given: Sequence[Tensor], first: "Reads | None" = None) -> None:
        super().__init__()
        self.found, self.faults, self.mark = list[Tensor](), list[str](), object()
        self._given, self._first, self._of, self.around = {id(t) for t in given}, first, of, around

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.Generator):
                name = name_of(x, frames(sys._getframe(1))) or "of torch"
                self.faults.append(f"{self._of} reads the generator {name!r}; {DRAW}")
        given = list(tensors((*args, *kwargs.values())))
        read = [found for t in given if (found := self.foreign(t)) is not None]
        out = args  # so that an op that fails has read them
        try:
            out = func(*args, **kwargs)
        finally:
            if read and any(True for _ in tensors((out,))):  # no shape or dtype
                self.note(read, frames(sys._getframe(1)))
        follows = bool(read) or any(t.__dict__.get(_MADE) is self.mark for t in given)
        for t in tensors((out,)):
            if (follows or is_functorch_wrapped_tensor(t) or t.requires_grad) and not any(t is x for x in given):
                setattr(t, _MADE, self.mark)
        return out

    def foreign(self, t: Tensor) -> Tensor | None:
        """Return the layer of ``t`` that what is around the call may follow; None if there is none."""
        while True:
            made = t.__dict__.get(_MADE)
            if self._first is not None and made is self._first.mark:
                return t
            if id(t) in self._given or made is self.mark:
                return None
            if not is_functorch_wrapped_tensor(t):
                return t if self.around.autograd and t.requires_grad or has_tangent(t) else None
            level, around, current = maybe_get_level(t), self.around.transforms, maybe_current_level() or 0
            is_mapped = is_batchedtensor(t)
            may_be_around = 0 < level <= len(around) and is_mapped == (around[level - 1] == TransformType.Vmap)
            if may_be_around or not 0 < level <= current:
                followed = is_mapped or current or TransformType.Jvp in around
                return t if followed or any(x.requires_grad or is_batchedtensor(x) for x in layers(t)) else None
            t = get_unwrapped(t)

    def note(self, read: Sequence[Tensor], places: Iterable[Place] = ()) -> None:
        """Note that the function reads or returns the tensors ``read``, which :meth:`foreign` found."""
        if (first := self._first) is not None:
            kept = [t for t in read if t.__dict__.get(_MADE) is first.mark or any(t is x for x in first.found)]
            self.faults += [self._fault(t, places) for t in kept]
        self.found += read

    def _fault(self, t: Tensor, places: Iterable[Place]) -> str:
        name = name_of(t, places)
        what = f"the tensor {name!r}, {describe(t)}," if name else f"a tensor {describe(t)}"
        fault = f"reads {what} that it is not given, whose gradient would silently be zero"
        return f"{self._of} {fault}; pass it as an argument"

    def blame(self, error: BaseException) -> None:
        """Note the tensor that a transform within the function was given, if torch failed to wrap it again."""
        if "INTERNAL ASSERT" not in str(error):
            return
        places = [(frame, place) for frame, place in reversed([*_places(error)])]
        for frame, _ in places:
            for t in tensors(frame.f_locals.values()):
                is_given = any(id(x) in self._given for x in layers(t))  # and a transform that has ended wraps it
                if not is_given and (found := self.foreign(t)) is not None:
                    return self.faults.append(self._fault(found, places))


def _places(error: BaseException) -> Iterator[Place]:
    place = error.__traceback__
    while place is not None:
        yield place.tb_frame, place.tb_lasti
        place = place.tb_next


def checked(
    run: Callable[..., tuple[Tensor, ...]], of: str, around: Around, given: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return ``run(*given)``, which is ``of`` a verb; raise TypeError for a tensor that it may not read."""
    first: Reads | None = None
    while True:
        reads = Reads(of, around, given, first)
        try:
            out = run(*given, reads=reads)
            reads.note([found for t in out if (found := reads.foreign(t)) is not None])
        except Exception as error:
            if not reads.faults and (first is not None or not reads.found):
                reads.blame(error)
                if not reads.faults:
                    raise
        if reads.faults:
            raise TypeError(reads.faults[0])
        if first is not None or not reads.found:
            return out
        first = reads


def without_reads(modes: Modes) -> Modes:
    """Return ``modes`` without the checks of a call around this one, whose levels are others."""
    return modes._replace(functions=tuple(mode for mode in modes.functions if not isinstance(mode, Reads)))
