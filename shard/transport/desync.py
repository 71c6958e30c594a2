"""Detection of ranks that do not take part in a call: in another, gone, stopped, or waiting in a circle.

Each rank sends an announcement to the others of the group, and then waits for theirs. The reading thread of the control
plane takes what arrives, and answers questions. Calls of a group are numbered by each of its ranks, and a rank returns
from one only if all others have announced it. So two ranks of a group are never in calls of different numbers.

A wait that takes longer than half a second asks. Each round goes to the ranks that have not announced the call, and to
those that these wait for. The answers are a graph of waits. A circle in it is a deadlock, because a rank waits for all
others of its group. Answers of one round are of different times. Those of three rounds with equal numbers of calls are
of one state, in which every rank of the circle stood between the rounds.

Silence is counted in rounds and not by a clock, since a process that was stopped itself finds the clock ahead.
"""

import os
import sys
import threading
from typing import Any, NamedTuple, NoReturn

import torch

from fquant import tree

from . import control_plane
from .control_plane import Gather

POLL = 0.5  # seconds between two rounds of questions
SILENCE = 7.0  # seconds without an answer, after which a rank counts as stopped
ROUNDS = 3  # of answers that have the same circle
LONGEST = 2000  # characters of last words
FIX = "call the same collectives on every rank, in the same order"


class Members(NamedTuple):
    """The ranks of a group, a name that they share, and one for messages."""

    key: str
    ranks: tuple[int, ...]
    label: str


class Arrival(NamedTuple):
    """A rank's announcement: what is compared, what is shown, and what it gives to the others."""

    kind: str
    shown: str
    payload: str


class Answer(NamedTuple):
    """A rank's answer to a round: the number of its calls, what it does, and the ranks that it waits for."""

    round: int
    calls: int
    doing: str
    missing: list[int]


class RollCall:
    """The calls of this rank, and what it knows of the others."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._plane: control_plane.ControlPlane | None = None
        self._changed = threading.Condition()
        self._numbers = dict[str, int]()  # of the last call of each group
        self._arrived = dict[tuple[str, int], dict[int, Arrival]]()  # that this rank has not returned from
        self._waiting: tuple[tuple[str, int], list[int]] | None = None  # the call, and its other ranks
        self._calls, self._doing = 0, "computes, before its first collective"
        self._round, self._answers = 0, dict[int, Answer]()
        self._gone, self._last = dict[int, str](), dict[int, str]()
        self._error: str | None = None

    def gather(self, over: Members, kind: str, what: str, payload: str = "") -> list[str]:
        """Return the ``payload`` of every rank of ``over``, in their order, once all have announced the same ``kind``.

        Raises RuntimeError as the module says, showing ``what`` each rank was about to do.
        """
        shown, others = f"{what} over {over.label}{_line()}", [rank for rank in over.ranks if rank != self._rank]
        with self._changed:
            if self._error is not None:
                raise RuntimeError(self._error)
            number = self._numbers[over.key] = self._numbers.get(over.key, 0) + 1
            call, self._calls = (over.key, number), self._calls + 1
            self._waiting, self._doing = (call, others), f"waits in {shown}"
        assert self._plane is not None
        self._plane.send(others, ["call", *call, kind, shown, payload])
        arrived = self._wait(call, others, shown)
        arrived[self._rank] = Arrival(kind, shown, payload)
        if len({each.kind for each in arrived.values()}) > 1:
            self._fail(_difference(arrived))
        return [arrived[rank].payload for rank in over.ranks]

    def _wait(self, call: tuple[str, int], others: list[int], shown: str) -> dict[int, Arrival]:
        """Return what all ``others`` announced in ``call``."""
        first, rounds, before = self._round + 1, 0, None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_decided(call, others), POLL)
                arrived = self._arrived.setdefault(call, {})
                missing = [rank for rank in others if rank not in arrived]
                if not missing:
                    self._waiting, self._doing = None, f"computes, behind {shown}"
                    return self._arrived.pop(call)
                gone = [f"rank {rank} {self._gone[rank]}" for rank in missing if rank in self._gone]
            if gone:
                self._fail(f"{'; '.join(gone)}; rank {self._rank} waits for it in {shown}", call)
            if len({each.kind for each in arrived.values()}) > 1:
                return dict(arrived)
            circle = self._circle(missing)
            rounds, before = (rounds + 1 if circle == before else 1), circle
            if circle and rounds >= ROUNDS:
                self._fail(self._wait_in_circle(circle, shown), call)
            for rank in missing:
                answer = self._answers.get(rank)
                silent = self._round - max(first - 1, answer.round if answer else 0)
                if silent * POLL >= SILENCE:
                    said = answer.doing if answer and answer.round >= first else f"was last seen {self._seen(rank)}"
                    fault = f"rank {rank} has not answered for {SILENCE:g} s, so it is stopped or cut off; it {said}"
                    self._fail(f"{fault}; rank {self._rank} waits for it in {shown}", call)
            self._ask(missing)

    def _is_decided(self, call: tuple[str, int], others: list[int]) -> bool:
        arrived = self._arrived.get(call, {})
        return len(arrived) == len(others) or any(rank in self._gone and rank not in arrived for rank in others)

    def _ask(self, missing: list[int]) -> None:
        """Begin a round of questions to the ranks in ``missing``, and to those that they wait for."""
        asked, more = set[int](), set(missing)
        while more:
            asked |= more
            more = {r for rank in more if rank in self._answers for r in self._answers[rank].missing} - asked
        self._round += 1
        assert self._plane is not None
        self._plane.send(asked - {self._rank}, ["ask", self._round])

    def _circle(self, missing: list[int]) -> list[tuple[int, Answer]] | None:
        """Return the ranks from one in ``missing`` to one that waits for this rank, with answers of the last round."""
        paths: list[list[tuple[int, Answer]]] = [[]]
        seen = {self._rank}
        for path in paths:
            for rank in path[-1][1].missing if path else missing:
                if rank == self._rank:
                    return [(rank, answer._replace(round=0)) for rank, answer in path]
                answer = self._answers.get(rank)
                if rank not in seen and answer is not None and answer.round == self._round:
                    seen.add(rank)
                    paths.append([*path, (rank, answer)])
        return None

    def _wait_in_circle(self, circle: list[tuple[int, Answer]], shown: str) -> str:
        ranks = [self._rank, *(rank for rank, _ in circle), self._rank]
        doing = [f"waits in {shown}", *(answer.doing for _, answer in circle)]
        each = [f"rank {a} {text} for rank {b}" for a, text, b in zip(ranks, doing, ranks[1:], strict=False)]
        return f"ranks wait for each other: {'; '.join(each)}; {FIX}"

    def _seen(self, rank: int) -> str:
        return f"in {self._last[rank]}" if rank in self._last else "before its first collective"

    def _fail(self, why: str, call: tuple[str, int] = ("", 0)) -> NoReturn:
        """Raise ``why``, from now on in every call, and say so to all other ranks; ``call`` is revoked."""
        self._error = why
        self.say(f"raised RuntimeError: {why}", call)
        raise RuntimeError(why)

    def say(self, words: str, revoked: tuple[str, int] = ("", 0)) -> None:
        """Send this rank's last words to all others: it takes part in no further call, and not in ``revoked``."""
        if self._plane is not None:
            self._plane.send(self._plane.ranks, ["gone", *revoked, words[:LONGEST]])

    def losses(self, over: Members, seconds: float = POLL) -> str:
        """Return which ranks of ``over`` have gone, or nothing if all are there after some seconds."""
        gone = lambda: [f"rank {rank} {self._gone[rank]}" for rank in over.ranks if rank in self._gone]
        with self._changed:
            self._changed.wait_for(gone, seconds)  # gloo may learn of it first
            return "; ".join(gone())

    def receive(self, rank: int, message: Any) -> None:
        """Take a message of another rank, in the thread that reads."""
        kind, *rest = message
        if kind == "ask":
            self._answer(rank, rest[0])
        elif kind == "answer":
            self._answers[rank] = Answer(*rest)
        with self._changed:
            if kind == "call":
                key, number, *arrival = rest
                self._arrived.setdefault((key, number), {})[rank] = Arrival(*arrival)
                self._last[rank] = arrival[1]
            elif kind == "gone":
                key, number, words = rest
                self._gone.setdefault(rank, words)
                self._arrived.get((key, number), {}).pop(rank, None)
            if kind == "gone" or (self._waiting and self._is_decided(*self._waiting)):
                self._changed.notify_all()

    def _answer(self, rank: int, number: int) -> None:
        with self._changed:
            call, others = self._waiting or (("", 0), [])
            missing = [other for other in others if other not in self._arrived.get(call, {})]
            answer = ["answer", number, self._calls, self._doing, missing]
        if self._plane is not None:
            self._plane.send([rank], answer)

    def lost(self, rank: int) -> None:
        """Note that the connection to ``rank`` has closed."""
        with self._changed:
            self._gone.setdefault(rank, f"has gone, its connection closed; it was last seen {self._seen(rank)}")
            self._changed.notify_all()

    def connect(self, ranks: int, gather: Gather, seconds: float) -> None:
        """Connect to the other ranks: a collective; see :func:`control_plane.connect`."""
        self._plane = control_plane.connect(self._rank, ranks, gather, seconds, self.receive, self.lost)

    def close(self) -> None:
        """Close the connections to the other ranks."""
        if self._plane is not None:
            self._plane.close()


def _difference(arrived: dict[int, Arrival]) -> str:
    """Return the error of ranks that announce different things, of which the lines of the first ranks are shown."""
    seen: dict[str, list[int]] = {}
    for rank, arrival in sorted(arrived.items()):
        seen.setdefault(arrival.kind, []).append(rank)
    named = lambda ranks: f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    each = "; ".join(f"{named(ranks)} {arrived[ranks[0]].shown}" for ranks in seen.values())
    return f"ranks are about to do different things: {each}; {FIX}"


_INSIDE = tuple(os.path.dirname(file) + os.sep for file in (os.path.dirname(__file__), tree.__file__, torch.__file__))


def _line() -> str:
    """Return the line of the program that called, outside of this library and of torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
