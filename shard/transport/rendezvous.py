"""Rendezvous of the ranks of a group on one machine: they share a file, and have sockets to each other.

The file and the sockets have no names in any folder, so nothing remains, however a process ends. Both need Linux; the
file is not in /dev/shm, which is small in many containers. A socket's name is a random number, which all processes of
the machine can read. So a rank that connects also sends the secret of that socket, which only ranks of the group have.
"""

import os
import secrets
import socket
from collections.abc import Iterable

import torch
import torch.distributed as dist

_SIZE = 1 << 46  # bytes of the file: an address space, whose pages exist once they are written
_BITS, _BYTES = 62, 8  # of a secret, and of a number in a message


def rendezvous(group: dist.ProcessGroup) -> tuple[int, dict[int, socket.socket]] | None:
    """Return a file that all ranks of ``group`` share, and by rank a socket to each other, with the group's time-out.

    It is a collective. It returns None on every rank if a rank is on another machine, or cannot take part: it is not on
    Linux, is in a container with a network of its own, or is at a limit on open files.
    """
    rank, seconds = group.rank(), group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
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
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
            peers[other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
        peer.settimeout(seconds)
        message = peer.recv(2 * _BYTES)
        if message[:_BYTES] == secret.to_bytes(_BYTES):
            peers[int.from_bytes(message[_BYTES:])] = peer
        else:
            peer.close()
    listener.close()
    return peers


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
    t = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    out = [torch.empty_like(t) for _ in range(group.size())]
    dist.all_gather(out, t, group=group)
    return [each.tolist() for each in out]
