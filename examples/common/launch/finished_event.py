"""The event by which torch's launcher lets ranks that have ended go, for ranks that may be killed while they wait.

torch takes an Event of multiprocessing. ``set`` of that waits until each process that waited has woken. If one was
killed meanwhile, the launcher waits for ever. Here processes look at a byte of shared memory, and nothing is locked.
"""

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager

POLL = 0.01  # seconds between two looks


class FinishedEvent:
    """An event that is set without waiting for any process; it is passed to processes when they are started."""

    def __init__(self, method: str) -> None:
        self._byte = multiprocessing.get_context(method).RawValue("b", 0)

    def set(self) -> None:
        """Let all processes go, now and later."""
        self._byte.value = 1

    def wait(self) -> None:
        """Return when the event is set."""
        while not self._byte.value:
            time.sleep(POLL)


@contextmanager
def used(method: str) -> Iterator[None]:
    """Let events that are made for processes of this start method be a :class:`FinishedEvent` inside of the block."""
    context = multiprocessing.get_context(method)
    context.Event = lambda: FinishedEvent(method)  # type: ignore[method-assign]  # torch has no option for it
    try:
        yield
    finally:
        del context.Event
