"""Shared memory of the ranks of a group that are on one machine.

    memory = shared_memory.of_group(group)        # the same on every rank: None if a rank is on another machine
    slot   = memory.acquire(nbytes)               # a range of pages, the same on every rank
    x      = slot.tensor(torch.bfloat16, shape)   # each rank writes its part there
    memory.publish("all_gather", x)               # a wait for x then waits until all ranks have published

A gather over TCP between processes of one machine copies every byte into the kernel and out of it again. Its threads
compete with those that compute. Here only a message of a few bytes travels, which says that a part is there. The
computing thread sends it through a local socket. So a wait fails if a rank has gone or is late.

A rank releases a slot when the last tensor in it is gone, and says so in its next message. The messages of all ranks,
up to the one before the last, determine which slots are free. Every rank has waited for these, so all agree unasked.
Slots are kept for the next gather, so resident memory stays at its maximum, a few times the largest gathers.
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

from .rendezvous import rendezvous

MAX_SLOTS = 255  # their numbers are bytes
MAX_PENDING = 2  # publications that were not waited for
_MESSAGE = 4096  # bytes of a message, at most


class Slot:
    """A part of the memory: its number, its pages, and the number of ranks that released it."""

    def __init__(self, number: int, pages: mmap.mmap, released: list[int]) -> None:
        self.number, self.pages, self.num_released, self._released = number, pages, 0, released

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the slot as a tensor, once. This rank releases the slot when the tensor and all its views are gone."""
        holder = memoryview(self.pages)
        weakref.finalize(holder, self._released.append, self.number).atexit = False
        count = torch.Size(shape).numel() * dtype.itemsize
        return torch.frombuffer(holder, dtype=torch.uint8, count=count).view(dtype).view(shape)


class SharedMemory:
    """The shared memory of one group, and the sockets to its other ranks."""

    def __init__(self, rank: int, file: int, peers: dict[int, socket.socket]) -> None:
        self._rank, self._file, self._peers = rank, file, peers
        self._slots, self._end = list[Slot](), 0
        self._released, self._pending = list[int](), deque[_Publication]()
        self._error: str | None = None

    def acquire(self, nbytes: int) -> Slot | None:
        """Return a free slot of at least ``nbytes``, or None if too many are in use.

        Every rank acquires the same slots in the same order. Waits for all publications except the last; see
        :meth:`wait`.
        """
        while len(self._pending) >= MAX_PENDING:
            self.wait(self._pending[0])
            for number in self._pending.popleft().released or ():
                self._slots[number].num_released += 1
        free = [slot for slot in self._slots if slot.num_released == 1 + len(self._peers)]
        slot = min((s for s in free if len(s.pages) >= nbytes), key=lambda s: len(s.pages), default=None)
        slot = slot or self._new_pages(nbytes, max(free, key=lambda s: len(s.pages), default=None))
        if slot is not None:
            slot.num_released = 0
        return slot

    def publish(self, what: str, out: Tensor, then: Callable[[], None] | None = None) -> None:
        """Send that this rank's part of ``what`` is in the slot acquired last, if any.

        A wait for ``out`` then waits until all ranks have published ``what``, and calls ``then``.
        """
        released = bytes(self._released.pop() for _ in range(len(self._released)))
        for rank, peer in self._peers.items():
            with self._named_errors(rank):
                peer.send(bytes([len(released)]) + released + what.encode())
        self._pending.append(_Publication(self, what, released, then))
        _register_work(out, self._pending[-1])

    def wait(self, until: _Publication) -> None:
        """Wait for the messages of all ranks, in order, up to those of one publication.

        Raises RuntimeError if a rank has gone, is late, or published something else, and from then on in every call.
        """
        if until.released is not None:
            return
        for publication in [each for each in self._pending if each.released is None]:
            released = publication.own_released
            for rank, peer in self._peers.items():
                message = b""
                with self._named_errors(rank):
                    if not (message := peer.recv(_MESSAGE)):
                        raise ConnectionError("Connection closed")
                first = 1 + message[0]
                released += message[1:first]
                if (what := message[first:].decode()) != publication.what:
                    self._fail(f"rank {self._rank} of the group is in {publication.what}, and rank {rank} in {what}")
            publication.released = released
            then, publication.then = publication.then, None  # a finished publication holds no tensors
            if then is not None:
                then()
            if publication is until:
                return

    def close(self) -> None:
        """Close the file and the sockets. Tensors in the memory stay; publications that are pending never arrive."""
        self._error = self._error or "the group was destroyed"
        os.close(self._file)
        for peer in self._peers.values():
            peer.close()

    @contextlib.contextmanager
    def _named_errors(self, rank: int) -> Iterator[None]:
        if self._error is not None:
            raise RuntimeError(self._error)
        try:
            yield
        except TimeoutError as error:
            seconds = self._peers[rank].gettimeout() or 0
            self._fail(f"Timed out waiting {1000 * seconds:.0f}ms for rank {rank} of the group", error)
        except OSError as error:
            self._fail(f"rank {rank} of the group has gone: {error}", error)

    def _fail(self, why: str, error: Exception | None = None) -> NoReturn:
        self._error = why
        raise RuntimeError(why) from error

    def _new_pages(self, nbytes: int, instead: Slot | None) -> Slot | None:
        """Return a slot with new pages: ``instead``, whose old pages go back to the system, or a new one."""
        if instead is None and len(self._slots) == MAX_SLOTS:
            return None
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        pages, self._end = mmap.mmap(self._file, size, offset=self._end), self._end + size
        if instead is not None:
            with contextlib.suppress(OSError):  # a system that cannot return them keeps them
                instead.pages.madvise(mmap.MADV_REMOVE)
            instead.pages = pages
            return instead
        self._slots.append(Slot(len(self._slots), pages, self._released))
        return self._slots[-1]


class _Publication(Work):
    """The message of every rank about one slot; ``released`` has the slots that they release, once all arrived."""

    def __init__(self, memory: SharedMemory, what: str, released: bytes, then: Callable[[], None] | None) -> None:
        super().__init__()
        self.what, self.own_released, self.then = what, released, then
        self.released: bytes | None = None
        self._memory = memory

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the messages; a second call returns at once."""
        self._memory.wait(self)
        return True


_KNOWN: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedMemory | None] = weakref.WeakKeyDictionary()


def of_group(group: dist.ProcessGroup) -> SharedMemory | None:
    """Return the memory of ``group``, or None on all ranks if some cannot share it. The first call is a collective."""
    if group not in _KNOWN:
        found = rendezvous(group)
        _KNOWN[group] = found and SharedMemory(group.rank(), *found)
        if memory := _KNOWN[group]:
            weakref.finalize(group, memory.close)
    return _KNOWN[group]
