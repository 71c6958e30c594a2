"""The text of errors about ranks that do different things, and the line of the program that called."""

import contextlib
import os
import sys
from itertools import zip_longest
from typing import NamedTuple

import torch

from fquant import tree

FIX = "call the same collectives on every rank, in the same order"


class Arrival(NamedTuple):
    """A rank's announcement: what is compared, what is shown, and what it gives to the others."""

    kind: str
    shown: str
    payload: str


def difference(arrived: dict[int, Arrival]) -> str:
    """Return the error of ranks that announce different things, of which the lines of the first ranks are shown.

    Of equal collectives of different trees, the first leaf that differs is shown too.
    """
    seen: dict[str, list[int]] = {}
    for rank, arrival in sorted(arrived.items()):
        seen.setdefault(arrival.kind, []).append(rank)
    runs = {kind: kind.split("\n") for kind in seen}
    places = zip_longest(*runs.values())
    place = next(i for i, lines in enumerate(places) if len(set(lines)) > 1)
    leaf = lambda run: f", leaf {run[place] if place < len(run) else 'nothing'}" * (place > 0)
    named = lambda ranks: f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    each = "; ".join(f"{named(ranks)} {arrived[ranks[0]].shown}{leaf(runs[kind])}" for kind, ranks in seen.items())
    return f"ranks are about to do different things: {each}; {FIX}"


def waits_in_circle(ranks: list[int], doing: list[str]) -> str:
    """Return the error of ``ranks``, each of which waits for the next; the last is the first again."""
    each = [f"rank {a} {text} for rank {b}" for a, text, b in zip(ranks, doing, ranks[1:], strict=False)]
    return f"ranks wait for each other: {'; '.join(each)}; {FIX}"


_FOLDERS = (os.path.dirname(file) + os.sep for file in (os.path.dirname(__file__), tree.__file__, torch.__file__))
_INSIDE = (*_FOLDERS, contextlib.__file__)


def line() -> str:
    """Return the line of the program that called, outside of this library and of torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
