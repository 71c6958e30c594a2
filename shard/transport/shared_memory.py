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

The file and the sockets have no names in any folder, so nothing remains, however a process ends. Both need Linux; the
file is not in /dev/shm, which is small in many containers. A socket's name is a random number, which all processes of
the machine can read. So a rank that connects also sends the secret of that socket, which only ranks of the group have.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work, _register_work

from fquant.device import HOST

MAX_SLOTS = 255  # their numbers are bytes
MAX_PENDING = 2  # publications that were not waited for
_MESSAGE = 4096  # bytes of a message, at most
_SOCKETS: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # all of this module
_SIZE = 1 << 46  # bytes of the file: an address space, whose pages exist once they are written
_BITS, _BYTES = 62, 8  # of a secret, and of a number in a message


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
        found = _rendezvous(group)
        _KNOWN[group] = found and SharedMemory(group.rank(), *found)
        if memory := _KNOWN[group]:
            weakref.finalize(group, memory.close)
    return _KNOWN[group]


def interrupt() -> None:
    """End every wait for another rank, in all groups: it raises, here and on the other rank."""
    for each in list(_SOCKETS):
        with contextlib.suppress(OSError):  # it is closed, or not connected yet
            each.shutdown(socket.SHUT_RDWR)


def _rendezvous(group: dist.ProcessGroup) -> tuple[int, dict[int, socket.socket]] | None:
    """Return a file that all ranks of ``group`` share, and by rank a socket to each other, with the group's time-out.

    It returns None on every rank if one cannot take part: one on another machine, without Linux, in a container with a
    network of its own, or at a limit on open files.
    """
    rank, seconds = group.rank(), group._get_backend(HOST).options._timeout.total_seconds()
    name, secret = secrets.randbits(_BITS), secrets.randbits(_BITS)
    listener, file = _listen(name, rank, group.size())
    addresses = _exchange([name, secret, int(listener is not None)], group)
    reached = _connect(addresses[:rank], rank) if all(is_open for *_, is_open in addresses) else None
    success = all(has for (has,) in _exchange([int(reached is not None)], group))
    if not success or listener is None or reached is None:
        _close([listener, *(reached or {}).values()], file)
        return None
    peers = {**reached, **_accept(listener, secret, group.size() - 1 - rank, seconds)}
    for peer in peers.values():
        peer.settimeout(seconds)
        if rank == 0:
            socket.send_fds(peer, [b"f"], [file])
    if rank:
        _, (file, *_), *_ = socket.recv_fds(peers[0], 1, 1)
    return file, peers


def _listen(name: int, rank: int, ranks: int) -> tuple[socket.socket | None, int]:
    """Return a socket that listens under ``name``, or None if that is impossible, and on the first rank the file."""
    listener, file = None, -1
    try:
        listener = _socket()
        listener.bind(_address(name))
        listener.listen(ranks)
        if rank == 0:
            file = os.memfd_create("fquant")
            os.ftruncate(file, _SIZE)
    except (OSError, AttributeError):  # another system than Linux has no such sockets or files
        _close([listener], file)
        return None, -1
    return listener, file


def _connect(addresses: list[list[int]], rank: int) -> dict[int, socket.socket] | None:
    """Connect to the ranks with these names and secrets; return None if one cannot be reached."""
    peers = dict[int, socket.socket]()
    try:
        for other, (name, secret, _) in enumerate(addresses):
            peers[other] = _socket()
            peers[other].connect(_address(name))
            peers[other].send(secret.to_bytes(_BYTES) + rank.to_bytes(_BYTES))
    except OSError:
        _close(peers.values(), -1)
        return None
    return peers


def _accept(listener: socket.socket, secret: int, count: int, seconds: float) -> dict[int, socket.socket]:
    """Accept ``count`` ranks that know the secret, and reject other processes."""
    peers = dict[int, socket.socket]()
    listener.settimeout(seconds)
    while len(peers) < count:
        peer, _ = listener.accept()
        _SOCKETS.add(peer)
        peer.settimeout(seconds)
        message = peer.recv(2 * _BYTES)
        if message[:_BYTES] == secret.to_bytes(_BYTES):
            peers[int.from_bytes(message[_BYTES:])] = peer
        else:
            peer.close()
    listener.close()
    return peers


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _SOCKETS.add(made)
    return made


def _address(name: int) -> bytes:
    return b"\0fquant-%d" % name


def _close(sockets: Iterable[socket.socket | None], file: int) -> None:
    for each in sockets:
        if each is not None:
            each.close()
    if file >= 0:
        os.close(file)


def _exchange(numbers: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Return the numbers of every rank, by rank."""
    t = torch.tensor(numbers, dtype=torch.int64, device=HOST)
    out = [torch.empty_like(t) for _ in range(group.size())]
    dist.all_gather(out, t, group=group)
    return [each.tolist() for each in out]
