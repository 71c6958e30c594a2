"""The control plane: a socket between each two ranks, for short messages beside the tensors that gloo or NCCL move.

    plane = control_plane.connect(rank, ranks, gather, seconds, events)   # a collective
    plane.send([other], ["call", 3])                      # events.receive(rank, ["call", 3]) on the other rank
    plane.close()                                         # events.lost(rank) on every other rank

A thread reads all sockets, so a rank answers while it computes or waits, and a message needs no call that receives it.
Torch releases Python's lock in its ops. A process that has ended, by any cause, closes its sockets, and the others
learn of it at once. One that is stopped keeps them, and does not answer. Every half second the thread calls
``events.tick()``, once it has read all that had arrived.

There is no server: a store would be a process of its own, or stop with the rank that hosts it. Messages of two ranks
arrive in the order in which they were sent. They are JSON behind four bytes of length.

A rank may keep Python's lock, and then its thread does not answer. ``plane.state(rank)`` asks the system (liveness.py).

A rank listens on the interface GLOO_SOCKET_IFNAME if it is set. Otherwise it listens at the address by which it reaches
MASTER_ADDR, or on the loopback interface if that is not set. One that connects sends a secret of that rank, which only
ranks of the job have.
"""

import contextlib
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from . import connections, liveness

Gather = Callable[[str], list[str]]  # from the text of this rank to those of all, by rank
Look = Callable[[int], str]  # from a rank to the state of its process
POLL = 0.5  # seconds between two ticks
_HEAD = struct.Struct("!I")
_HELLO = struct.Struct("!16sI")  # the secret and the rank
_CHUNK = 1 << 16  # bytes read at a time
_SEND = 5.0  # seconds in which another rank must take a message from a full buffer
_INTERFACE = 0x8915  # SIOCGIFADDR of Linux: the address of an interface


class Events(Protocol):
    """The calls of the reading thread: a message of a rank, the end of its connection, and half a second."""

    def receive(self, rank: int, message: Any) -> None: ...
    def lost(self, rank: int) -> None: ...
    def tick(self) -> None: ...


class ControlPlane:
    """The sockets of one rank, by rank, and the thread that reads them."""

    def __init__(
        self, peers: dict[int, socket.socket], events: Events, state: Look, witness: liveness.Witness | None
    ) -> None:
        self._peers, self._events, self.state, self._witness = peers, events, state, witness
        self.ranks = tuple(peers)
        self._locks = {rank: threading.Lock() for rank in peers}
        for peer in peers.values():
            peer.settimeout(_SEND)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector = selectors.DefaultSelector()
        _OPEN.add(self)
        threading.Thread(target=self._read, name="fquant control plane", daemon=True).start()

    def send(self, ranks: Iterable[int], message: Any) -> None:
        """Send ``message``, of JSON's types, to each of ``ranks``; one that has gone is left out."""
        text = json.dumps(message).encode()
        data = _HEAD.pack(len(text)) + text
        for rank in ranks:
            with self._locks[rank], contextlib.suppress(OSError):  # of which the reading thread learns too
                self._peers[rank].sendall(data)

    def ends(self) -> set[tuple[str, ...]]:
        """Return both ends of every connection; see connections.py."""
        found = set[tuple[str, ...]]()
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # its rank has gone
                found.add(tuple(connections.ends_of(peer)))
        return found

    def close(self) -> None:
        """Close the connections; the thread ends by that."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        if self._witness is not None:
            self._witness.close()

    def forget(self) -> None:
        """Close this process's descriptors alone: those of a forked child, which is no rank."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                os.close(peer.detach())

    def _read(self) -> None:
        buffers = {rank: bytearray() for rank in self._peers}
        for rank, peer in self._peers.items():
            self._selector.register(peer, selectors.EVENT_READ, rank)
        next_tick = time.monotonic() + POLL
        while buffers:
            for key, _ in self._selector.select(max(0.0, next_tick - time.monotonic())):
                rank, data = key.data, b""
                with contextlib.suppress(OSError):
                    data = self._peers[rank].recv(_CHUNK)
                buffers[rank] += data
                for message in _messages(buffers[rank]):
                    self._events.receive(rank, message)
                if not data:
                    self._selector.unregister(self._peers[rank])
                    self._peers[rank].close()
                    del buffers[rank]
                    self._events.lost(rank)
            if time.monotonic() >= next_tick:
                self._events.tick()
                next_tick = time.monotonic() + POLL
        self._selector.close()


_OPEN: weakref.WeakSet[ControlPlane] = weakref.WeakSet()


def _forget_all() -> None:
    for plane in list(_OPEN):
        plane.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _messages(buffer: bytearray) -> list[Any]:
    """Return the messages that are whole in ``buffer``, and remove them from it."""
    found = []
    while len(buffer) >= _HEAD.size:
        end = _HEAD.size + _HEAD.unpack_from(buffer)[0]
        if len(buffer) < end:
            break
        found.append(json.loads(buffer[_HEAD.size : end]))
        del buffer[:end]
    return found


def connect(rank: int, ranks: int, gather: Gather, seconds: float, events: Events) -> ControlPlane:
    """Connect this rank to all others of ``ranks``; a collective, which uses ``gather`` for addresses and secrets.

    The reading thread calls ``events``. Raises RuntimeError on every rank if one cannot be reached, with its address.
    """
    listener, fault, secret, found = None, "", secrets.token_bytes(16), dict[int, socket.socket]()
    try:
        address = _own_address()
        listener = socket.create_server((address, 0), family=_family(address), backlog=ranks)
        listener.settimeout(seconds)
        port = listener.getsockname()[1]
    except OSError as error:
        address, port, fault = "", 0, f"rank {rank} cannot listen: {error}"
    place = liveness.own()
    told = [json.loads(text) for text in gather(json.dumps([address, port, secret.hex(), place]))]
    for other, (host, port, key, _) in enumerate(told[:rank]):
        try:
            found[other] = socket.create_connection((host, port), timeout=seconds)
            found[other].sendall(_HELLO.pack(bytes.fromhex(key), rank))
        except OSError as error:
            fault = fault or f"rank {rank} cannot reach rank {other} at {host}:{port}: {error}"
    faults = [text for text in gather(fault) if text]
    if faults or listener is None:
        for each in [*found.values(), *([listener] if listener else [])]:
            each.close()
        raise RuntimeError(f"mesh: {'; '.join(faults)}; set GLOO_SOCKET_IFNAME to the interface between the ranks")
    state, witness = _states(place, address, [(each[0], liveness.Place(*each[3])) for each in told], gather)
    with listener:
        while len(found) < ranks - 1:
            peer, _ = listener.accept()
            peer.settimeout(seconds)
            hello = _receive_exactly(peer, _HELLO.size)
            if len(hello) == _HELLO.size and hello[:16] == secret:
                found[_HELLO.unpack(hello)[1]] = peer
            else:
                peer.close()
    return ControlPlane(found, events, state, witness)


def _states(
    own: liveness.Place, address: str, ranks: list[tuple[str, liveness.Place]], gather: Gather
) -> tuple[Look, liveness.Witness | None]:
    """Return a function that tells the state of a rank's process, and the witness of this one if there are more hosts.

    ``ranks`` are the address and the place of each.
    """
    witness, ports = None, [0] * len(ranks)
    if any(place.host != own.host for _, place in ranks):
        with contextlib.suppress(OSError):  # without one, a rank that keeps Python's lock is cut off for other hosts
            witness = liveness.Witness(address, _family(address), own)
        ports = [int(text) for text in gather(str(witness.port if witness else 0))]

    def state(rank: int) -> str:
        place = ranks[rank][1]
        if place.host == own.host:
            return liveness.state(place.process, place.born)
        return liveness.ask(ranks[rank][0], ports[rank])

    return state, witness


def _receive_exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < count and (part := peer.recv(count - len(data))):
            data += part
    return data


def _own_address() -> str:
    """Return the address of this machine at which other ranks reach it."""
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        with contextlib.suppress(ImportError, OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            import fcntl

            return socket.inet_ntoa(fcntl.ioctl(probe, _INTERFACE, struct.pack("256s", name.encode()[:15]))[20:24])
    if not (master := os.environ.get("MASTER_ADDR")):
        return "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # no packet is sent; it chooses the interface
        return probe.getsockname()[0]


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
