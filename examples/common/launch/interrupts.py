"""Ctrl-C and SIGTERM in a run: its ranks agree after a step, write a checkpoint, and leave.

    with noticed() as signals:                # on each rank
        ...
        if number := agreed(signals): ...     # after a step, the same on every rank: SIGINT, SIGTERM, or 0 for none

A signal may reach one rank or all, and at any time. A rank that left at once would leave the others in a collective. So
a handler notes it alone, and after each step the ranks exchange what they have noted, in one text. With it travels the
fault of a rank that cannot write, such as a full disk, so that all end alike.

A second signal ends the rank at once, if it comes a second or more after the first: the terminal and the launcher both
send the first one. So does a signal after the death of another rank, because then there is no rank to agree with.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fquant.compile import all_gather_text
from shard import roll_call

from .rank_server import SIGNALS
from .ranks import Stopped

AGAIN = 1.0  # seconds between two signals that a person sends


@dataclass
class Noticed:
    """The first signal that this rank got, 0 before, and when."""

    number: int = 0
    at: float = 0.0


@contextmanager
def noticed() -> Iterator[Noticed]:
    """Note signals inside of the block, in place of what they do outside; those that are ignored stay so."""
    found = Noticed()

    def note(number: int, frame: Any) -> None:
        is_second = found.number and time.monotonic() - found.at > AGAIN
        if is_second or roll_call.lost():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not found.number:
            found.number, found.at = number, time.monotonic()

    former: dict[signal.Signals, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for each in SIGNALS:
                if signal.getsignal(each) is not signal.SIG_IGN:
                    former[each] = signal.signal(each, note)
        yield found
    except ValueError as error:
        if not found.number:
            raise
        if dist.get_rank() == 0:  # a launcher that stops its ranks takes no results, and they would wait for it
            print(error, file=sys.stderr)
        raise Stopped(str(error), signal.Signals(found.number)) from error
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)


def agreed(found: Noticed, fault: str = "") -> int:
    """Return a signal that some rank has noted, or 0; every rank calls it and gets the same.

    Raises ValueError on every rank with the ``fault`` of the first that has one.
    """
    texts = all_gather_text(f"{int(found.number)} {fault}", "exchange of signals")
    numbers, faults = zip(*(text.split(" ", 1) for text in texts), strict=True)
    if any(faults):
        raise ValueError(next(filter(None, faults)))
    return max(map(int, numbers))
