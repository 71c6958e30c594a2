"""Traces of a captured function after its first one: a warning if the same changes again, or a bound by the user.

A trace takes seconds, and its plan takes memory. A function of two batch sizes is traced twice, as it should be. One of
a Python number that changes with every step is traced at every step. So from the second time on that the same argument
or other guard has changed, a warning names it, with both values.
"""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Change", "Retraces", "RetraceWarning"]

_COMPILE = os.path.dirname(__file__) + os.sep
SHOWN = 3  # changes in a message
FIX = (
    "pass what changes from call to call as a tensor argument, pad it to a few shapes (dynamic=), or expect so many by "
    "max_traces"
)


class RetraceWarning(UserWarning):
    """A captured function is traced again because of what had changed before too."""


class Change(NamedTuple):
    """A guard that differs between two traces, by the path of an argument or another name, and how, in words."""

    name: str
    text: str


class Retraces:
    """The traces of the captured function ``name`` so far; ``most`` is the number that its user expects."""

    def __init__(self, name: str, most: int | None) -> None:
        self.name, self.most, self._times = name, most, Counter[str]()

    def note(self, changes: Sequence[Change], count: int, expected: bool = False) -> None:
        """Note a trace beside ``count`` others; from the most alike of these its guards differ by ``changes``.

        One that is ``expected``, of arguments padded to another size, causes no warning.
        Raises RuntimeError for more traces than the user expects. If the user has said nothing, warns from the second
        time on that the same has changed.
        """
        what = "; ".join(change.text for change in changes[:SHOWN])
        if self.most is not None and count >= self.most:
            raise RuntimeError(f"jit({self.name}) would be traced more than {self.most} times: {what}; {FIX}")
        if expected:
            return
        self._times.update(change.name for change in changes)
        if self.most is None and any(self._times[change.name] > 1 for change in changes):
            text = f"jit({self.name}) is traced again, and for the same reason as before: {what}; it has {count} traces"
            warnings.warn(f"{text}; {FIX}", RetraceWarning, stacklevel=_frames_of_the_compiler() + 1)


def _frames_of_the_compiler() -> int:
    """Return the number of frames between this function and the user's call."""
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_COMPILE):
        frame, count = frame.f_back, count + 1
    return count - 1
