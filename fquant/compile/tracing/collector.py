"""Python's garbage collector, paused while a graph is made.

A graph of torch.fx is many objects that live long. The collector visits them all again and again: of the capture of 80
layers that was a quarter of the time, and half of the time of the memory plan.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Pause Python's garbage collector, in all threads."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
