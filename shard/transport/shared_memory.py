"""shared: one piece of memory for all ranks of a group, where they are on one machine.

    memory = shared.of(group)                     # None where some rank is elsewhere, the same on every rank
    slot   = memory.take(nbytes)                  # a part of it, the same on every rank
    x      = slot.tensor(torch.bfloat16, shape)   # each rank writes there what is its own
    memory.tell("all_gather", x)                  # waiting for x is then waiting until all have done so

Between processes of one machine a gather over TCP copies every byte into the kernel and out of it again, in threads
that compete with those that compute. Here each rank writes its part where the others read it, and what travels, through
a socket of the machine and in the thread that computes, is a message of a few bytes, which says that it is there. So a
wait fails as any other where a rank has gone, as its sockets are closed then, or is late.

Whether a slot may be written again is nobody's local knowledge. A rank gives a slot back when the last tensor that lies
in it is gone, and says so in its next message. Which slots are free follows from what all ranks have said, up to the
message before the last, for which everyone waits: so all come to the same answer, without asking.

The memory is a file without a name (see shard.transport.rendezvous), so /dev/shm, which is small in many containers, is not used. Slots
are kept for the next gather; what is resident stays at its highest, a few times the largest gathers (see fquant.compile.memory.allocator).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work, _register_work

from .rendezvous import meet

MOST = 255  # slots: their numbers are bytes
AHEAD = 2  # messages that have not arrived, at most
_LONGEST = 4096  # bytes of a message


class Slot:
    """A part of the memory: its number, its pages, and how many ranks have given it back since it was taken."""

    def __init__(self, number: int, pages: mmap.mmap, given_back: list[int]) -> None:
        self.number, self.pages, self.back, self._given_back = number, pages, 0, given_back

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """What lies in the slot. It is given back when this tensor and all its views are gone: to be called once."""
        holder = memoryview(self.pages)
        weakref.finalize(holder, self._given_back.append, self.number).atexit = False
        count = torch.Size(shape).numel() * dtype.itemsize
        return torch.frombuffer(holder, dtype=torch.uint8, count=count).view(dtype).view(shape)


class Shared:
    """The memory of one group, and the sockets to its other ranks; see the module's docstring."""

    def __init__(self, rank: int, file: int, peers: dict[int, socket.socket]) -> None:
        self._rank, self._file, self._peers = rank, file, peers
        self._slots, self._end = list[Slot](), 0
        self._given_back, self._rounds = list[int](), deque[_Round]()
        self._error: str | None = None

    def take(self, nbytes: int) -> Slot | None:
        """A slot of at least so many bytes, which no rank reads any more; None where too many are in use.

        Every rank takes the same, in the same order. Waits for the messages before the last, and raises what that
        raises.
        """
        while len(self._rounds) >= AHEAD:
            self.read(self._rounds[0])
            for number in self._rounds.popleft().given_back or ():
                self._slots[number].back += 1
        free = [slot for slot in self._slots if slot.back == 1 + len(self._peers)]
        slot = min((s for s in free if len(s.pages) >= nbytes), key=lambda s: len(s.pages), default=None)
        slot = slot or self._larger(nbytes, max(free, key=lambda s: len(s.pages), default=None))
        if slot is not None:
            slot.back = 0
        return slot

    def tell(self, what: str, out: Tensor, then: Callable[[], None] | None = None) -> None:
        """Say that this rank's part, which is ``what`` on every rank, is in the slot that was taken last, if one was.

        Waiting for ``out`` is from now on waiting until all ranks have said so. ``then`` is called when that is known.
        """
        mine = bytes(self._given_back.pop() for _ in range(len(self._given_back)))
        for rank, peer in self._peers.items():
            with self._reaching(rank):
                peer.send(bytes([len(mine)]) + mine + what.encode())
        self._rounds.append(_Round(self, what, mine, then))
        _register_work(out, self._rounds[-1])

    def read(self, until: _Round) -> None:
        """Wait for messages, in order, up to those of one round.

        RuntimeError where a rank has gone, is late, or says something else; from then on for everything.
        """
        if until.given_back is not None:
            return
        for one in [one for one in self._rounds if one.given_back is None]:
            given_back = one.mine
            for rank in self._peers:
                count, *message = self._receive(rank)
                given_back += bytes(message[:count])
                if (told := bytes(message[count:]).decode()) != one.what:
                    self._fail(f"rank {self._rank} of the group is in {one.what}, and rank {rank} in {told}")
            one.given_back = given_back
            one.finish()
            if one is until:
                return

    def close(self) -> None:
        """Let go of the file and the sockets. Tensors in the memory stay; what was not waited for never arrives."""
        self._error = self._error or "the group was destroyed"
        os.close(self._file)
        for peer in self._peers.values():
            peer.close()

    def _receive(self, rank: int) -> bytes:
        message = b""
        with self._reaching(rank):
            message = self._peers[rank].recv(_LONGEST)
            if not message:
                raise ConnectionError("Connection closed")
        return message

    @contextlib.contextmanager
    def _reaching(self, rank: int) -> Iterator[None]:
        if self._error is not None:
            raise RuntimeError(self._error)
        try:
            yield
        except TimeoutError as error:
            within = self._peers[rank].gettimeout() or 0
            self._fail(f"Timed out waiting {1000 * within:.0f}ms for rank {rank} of the group", error)
        except OSError as error:
            self._fail(f"rank {rank} of the group has gone: {error}", error)

    def _fail(self, why: str, error: Exception | None = None) -> NoReturn:
        self._error = why
        raise RuntimeError(why) from error

    def _larger(self, nbytes: int, instead: Slot | None) -> Slot | None:
        """A new slot, whose pages nobody had before; that of ``instead``, whose own are returned, if there is one."""
        if instead is None and len(self._slots) == MOST:
            return None
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        pages, self._end = mmap.mmap(self._file, size, offset=self._end), self._end + size
        if instead is not None:
            with contextlib.suppress(OSError):  # a system that cannot return them keeps them
                instead.pages.madvise(mmap.MADV_REMOVE)
            instead.pages = pages
            return instead
        self._slots.append(Slot(len(self._slots), pages, self._given_back))
        return self._slots[-1]


class _Round(Work):
    """What all ranks say of one slot; ``given_back`` are the slots that they give back, once it has arrived."""

    def __init__(self, memory: Shared, what: str, mine: bytes, then: Callable[[], None] | None) -> None:
        super().__init__()
        self.what, self.mine = what, mine
        self.given_back: bytes | None = None
        self._memory, self._then = memory, then

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for it, which may be asked for again."""
        self._memory.read(self)
        return True

    def finish(self) -> None:
        """What is to be done when it has arrived."""
        then, self._then = self._then, None
        if then is not None:
            then()


_KNOWN: weakref.WeakKeyDictionary[dist.ProcessGroup, Shared | None] = weakref.WeakKeyDictionary()


def of(group: dist.ProcessGroup) -> Shared | None:
    """The memory of ``group``; None where not all its ranks can have some. Every rank gets the same answer.

    The first time all ranks have to ask.
    """
    if group not in _KNOWN:
        found = meet(group)
        _KNOWN[group] = found and Shared(group.rank(), *found)
        if memory := _KNOWN[group]:
            weakref.finalize(group, memory.close)
    return _KNOWN[group]
