"""Detection of ranks that do not take part in a call: in another, gone, stopped, cut off, or waiting in a circle.

Each rank sends an announcement to the others of the group, and then waits for theirs. The reading thread of the control
plane takes what arrives, and answers questions. Calls of a group are numbered by each of its ranks, and a rank returns
from one only if all others have announced it. So two ranks of a group are never in calls of different numbers.

A wait that takes longer than half a second asks. Each round goes to the ranks that have not announced the call, and to
those that these wait for. The answers are a graph of waits. A circle in it is a deadlock, because a rank waits for all
others of its group. Answers of one round are of different times. Those of three rounds with equal numbers of calls are
of one state, in which every rank of the circle stood between the rounds.

While tensors travel, the thread that computes waits in the transport, and cannot ask. So the reading thread does, once
in half a second. If a rank of the transfer is silent or has failed, it closes the connections of the transport. The
wait then raises this module's error. A rank that ended without an error has sent all, so it is waited for.

gloo loses the error of a closed connection in the middle of a message, and waits until its time-out. A thread that
waits uses no processor. If it used none for a second, the process ends, with the error on stderr and in the report.

Silence is counted in rounds and not by a clock, since a process that was stopped itself finds the clock ahead. A silent
rank that runs keeps Python's lock, and is waited for: the system tells (liveness.py), again after each such silence.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from . import control_plane, last_resort, liveness
from .control_plane import POLL, Gather
from .error_text import Arrival, difference, line, waits_in_circle

SILENCE = 6.0  # seconds without an answer, after which a rank counts as stopped
ROUNDS = 3  # of answers that have the same circle
STUCK = 2  # ticks after an error in which a thread that waits in a transfer uses no processor
IDLE = 0.01  # seconds of processor time in a tick, of a thread that only waits
LONGEST = 2000  # characters of last words


class Members(NamedTuple):
    """The ranks of a group, a name that they share, and one for messages."""

    key: str
    ranks: tuple[int, ...]
    label: str


class Answer(NamedTuple):
    """A rank's answer to a round: the number of its calls, what it does, and the ranks that it waits for."""

    round: int
    calls: int
    doing: str
    missing: list[int]


class Transfer(NamedTuple):
    """A transfer under way: the other ranks, the number of its first round, and the clock of the thread that waits."""

    others: list[int]
    first: int
    clock: int


class RollCall:
    """The calls of this rank, and what it knows of the others; ``interrupt`` ends every wait of the transport."""

    def __init__(self, rank: int, interrupt: Callable[[], None]) -> None:
        self._rank, self._interrupt = rank, interrupt
        self._plane: control_plane.ControlPlane | None = None
        self._changed = threading.Condition()
        self._numbers = dict[str, int]()  # of the last call of each group
        self._arrived = dict[tuple[str, int], dict[int, Arrival]]()  # that this rank has not returned from
        self._waiting: tuple[tuple[str, int], list[int]] | None = None  # the call, and its other ranks
        self._transfer: Transfer | None = None
        self._used, self._idle = 0.0, 0  # processor time of the thread that waits, and ticks since it used any
        self._calls, self._doing, self._shown = 0, "computes, before its first collective", "its first collective"
        self._round, self._answers = 0, dict[int, Answer]()
        self._busy = dict[int, int]()  # rounds in which silent ranks were seen to run
        self._gone, self._failed, self._last = dict[int, str](), set[int](), dict[int, str]()
        self._error: str | None = None

    def gather(self, over: Members, kind: str, what: str, payload: str = "") -> list[str]:
        """Return the ``payload`` of every rank of ``over``, in their order, once all have announced the same ``kind``.

        Raises RuntimeError as the module says, showing ``what`` each rank was about to do.
        """
        shown, others = f"{what} over {over.label}{line()}", [rank for rank in over.ranks if rank != self._rank]
        with self._changed:
            if self._error is not None:
                raise RuntimeError(self._error)
            number = self._numbers[over.key] = self._numbers.get(over.key, 0) + 1
            call, self._calls = (over.key, number), self._calls + 1
            self._waiting, self._doing, self._shown = (call, others), f"waits in {shown}", shown
        assert self._plane is not None
        self._plane.send(others, ["call", *call, kind, shown, payload])
        arrived = self._wait(call, others, shown)
        arrived[self._rank] = Arrival(kind, shown, payload)
        if len({each.kind for each in arrived.values()}) > 1:
            self._fail(difference(arrived))
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
                if fault := self._silence(rank, first):
                    self._fail(f"{fault}; rank {self._rank} waits for it in {shown}", call)
            self._ask(missing)

    @contextmanager
    def transfer(self, over: Members, alone: bool = False) -> Iterator[None]:
        """Watch the other ranks of ``over`` while tensors of the last call travel between them.

        An error of the transport becomes a RuntimeError with the ranks that are silent or have gone, if any. With
        ``alone`` another error may be that of this rank only: it says so, and the others end the transfer.
        """
        with self._changed:
            if self._error is not None:
                raise RuntimeError(self._error)
            others, before = [rank for rank in over.ranks if rank != self._rank], self._transfer
            self._transfer = Transfer(others, self._round + 1, time.pthread_getcpuclockid(threading.get_ident()))
            self._doing = f"is in {self._shown}"
        try:
            yield
        except BaseException as error:
            if isinstance(error, (RuntimeError, OSError)) and (lost := self._losses(over)):
                raise RuntimeError(lost) from error
            if alone and self._error is None:
                self._error = f"rank {self._rank} raised {type(error).__name__} in {self._shown}: {error}"
                self.say(f"raised {type(error).__name__}: {error}")
            raise
        finally:
            with self._changed:
                self._transfer, self._doing = before, f"computes, behind {self._shown}"

    def tick(self) -> None:
        """Begin a round of questions about the transfer under way, or end it if a rank is silent or has failed."""
        with self._changed:
            if (transfer := self._transfer) is None:
                return
            used, self._used = self._used, time.clock_gettime(transfer.clock)
            if self._error is not None:
                self._idle = self._idle + 1 if self._used - used < IDLE else 0
                if self._idle >= STUCK:
                    last_resort.end_process(self._error)
                return
            failed = [f"rank {rank} {self._gone[rank]}" for rank in transfer.others if rank in self._failed]
            silent = (fault for rank in transfer.others if (fault := self._silence(rank, transfer.first)))
            if why := failed[0] if failed else next(silent, ""):
                self._error = f"{why}; rank {self._rank} is in {self._shown}"
        if why:
            self.say(f"raised RuntimeError: {self._error}")
            self._interrupt()
        else:
            self._ask(transfer.others)

    def _silence(self, rank: int, first: int) -> str:
        """Return that ``rank`` did not answer for SILENCE seconds, since the round ``first`` or later, or nothing."""
        answer = self._answers.get(rank)
        seen = max(first - 1, answer.round if answer else 0, self._busy.get(rank, 0))
        if self._plane is None or rank in self._gone or (self._round - seen) * POLL < SILENCE:
            return ""
        if (state := self._plane.state(rank)) == liveness.RUNNING:
            self._busy[rank] = self._round
            return ""
        said = answer.doing if answer and answer.round >= first else f"was last seen {self._seen(rank)}"
        return f"rank {rank} has not answered for {SILENCE:g} s, so it is {state or 'stopped or cut off'}; it {said}"

    def _is_decided(self, call: tuple[str, int], others: list[int]) -> bool:
        arrived = self._arrived.get(call, {})
        return len(arrived) == len(others) or any(rank in self._gone and rank not in arrived for rank in others)

    def _ask(self, missing: list[int]) -> None:
        """Begin a round of questions to the ranks in ``missing``, and to those that they wait for."""
        asked, more = set[int](), set(missing)
        while more:
            asked |= more
            more = {r for rank in more if rank in self._answers for r in self._answers[rank].missing} - asked
        with self._changed:
            self._round += 1
            question = ["ask", self._round]
        assert self._plane is not None
        self._plane.send(asked - {self._rank}, question)

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
        return waits_in_circle(ranks, doing)

    def _seen(self, rank: int) -> str:
        return f"in {self._last[rank]}" if rank in self._last else "before its first collective"

    def _fail(self, why: str, call: tuple[str, int] = ("", 0)) -> NoReturn:
        """Raise ``why``, from now on in every call, and say so to all other ranks; ``call`` is revoked."""
        self._error = why
        self.say(f"raised RuntimeError: {why}", call)
        raise RuntimeError(why)

    def say(self, words: str, revoked: tuple[str, int] = ("", 0), failed: bool = True) -> None:
        """Send this rank's last words to all others: it takes part in no further call, and not in ``revoked``.

        If it ``failed``, others end the transfers that they have with it.
        """
        if self._plane is not None:
            self._plane.send(self._plane.ranks, ["gone", *revoked, words[:LONGEST], failed])

    def gone(self, over: Members) -> str:
        """Return which ranks of ``over`` are known to have gone, or nothing; it does not wait."""
        return "; ".join(f"rank {rank} {self._gone[rank]}" for rank in over.ranks if rank in self._gone)

    def _losses(self, over: Members) -> str:
        """Return the error of this roll call, which may be that ranks of ``over`` have gone; wait half a second."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self.gone(over), POLL)
            if is_new := self._error is None and bool(self.gone(over)):
                self._error = f"{self.gone(over)}; rank {self._rank} is in {self._shown}"
        if is_new:
            self.say(f"raised RuntimeError: {self._error}")
        return self._error or ""

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
                key, number, words, failed = rest
                self._gone.setdefault(rank, words)
                self._failed |= {rank} if failed else set()
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
            if rank not in self._gone:
                self._failed.add(rank)
            self._gone.setdefault(rank, f"has gone, its connection closed; it was last seen {self._seen(rank)}")
            self._changed.notify_all()

    def connect(self, ranks: int, gather: Gather, seconds: float) -> None:
        """Connect to the other ranks: a collective; see :func:`control_plane.connect`."""
        self._plane = control_plane.connect(self._rank, ranks, gather, seconds, self)

    def connections(self) -> set[tuple[str, ...]]:
        """Return both ends of the connections to the other ranks, none of which carries tensors."""
        return self._plane.ends() if self._plane is not None else set()

    def close(self) -> None:
        """Close the connections to the other ranks."""
        if self._plane is not None:
            self._plane.close()
