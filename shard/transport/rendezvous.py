"""meet: the ranks of a group find out whether they are on one machine; if so, they share a file, and have sockets.

The file has no name and the sockets' names are in no folder, so nothing is left behind, however a process ends. Both
are Linux's. A name is a number drawn at random, and who comes to it says a second one, which only ranks of the group
know: the names of sockets can be read by everybody on the machine.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist

_SIZE = 1 << 46  # bytes of the file: an address space, of which nothing is there before it is written
_BITS, _BYTES = 62, 8  # of a secret, and of a number in a message


def meet(group: dist.ProcessGroup) -> tuple[int, dict[int, socket.socket]] | None:
    """A file that all ranks of ``group`` have, and by rank a socket to each other, which keeps the group's time-out.

    None on every rank where some are on another machine, or one cannot: on another system than Linux, in a container
    with a network of its own, at a limit on files. All ranks have to ask, and wait as in any collective.
    """
    rank, limit = group.rank(), group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    name, secret = secrets.randbits(_BITS), secrets.randbits(_BITS)
    door, file = _open(name, rank, group.size())
    names = _exchange([name, secret, int(door is not None)], group)
    reached = _reach(names[:rank], rank) if all(is_open for *_, is_open in names) else None
    if not all(has for (has,) in _exchange([int(reached is not None)], group)) or door is None or reached is None:
        _close([door, *(reached or {}).values()], file)
        return None
    peers = {**reached, **_accept(door, secret, group.size() - 1 - rank, limit)}
    for peer in peers.values():
        peer.settimeout(limit)
    if rank:
        _, (file, *_), *_ = socket.recv_fds(peers[0], 1, 1)
    else:
        for peer in peers.values():
            socket.send_fds(peer, [b"f"], [file])
    return file, peers


def _open(name: int, rank: int, ranks: int) -> tuple[socket.socket | None, int]:
    """A socket that others may come to, if there can be one, and the first rank's file."""
    if sys.platform != "linux":
        return None, -1
    door, file = None, -1
    try:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.bind(_address(name))
        door.listen(ranks)
        if rank == 0:
            file = os.memfd_create("fquant")
            os.ftruncate(file, _SIZE)
    except OSError:
        _close([door], file)
        return None, -1
    return door, file


def _reach(names: list[list[int]], rank: int) -> dict[int, socket.socket] | None:
    """Sockets to ranks of these names and secrets; None where one cannot be reached."""
    peers = dict[int, socket.socket]()
    try:
        for other, (name, secret, _) in enumerate(names):
            peers[other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peers[other].connect(_address(name))
            peers[other].send(secret.to_bytes(_BYTES) + rank.to_bytes(_BYTES))
    except OSError:
        _close(peers.values(), -1)
        return None
    return peers


def _accept(door: socket.socket, secret: int, count: int, limit: float) -> dict[int, socket.socket]:
    """The sockets of so many ranks that have come; others that did are sent away."""
    peers = dict[int, socket.socket]()
    door.settimeout(limit)
    while len(peers) < count:
        peer, _ = door.accept()
        peer.settimeout(limit)
        said = peer.recv(2 * _BYTES)
        if said[:_BYTES] == secret.to_bytes(_BYTES):
            peers[int.from_bytes(said[_BYTES:])] = peer
        else:
            peer.close()
    door.close()
    return peers


def _address(name: int) -> bytes:
    return b"\0fquant-%d" % name


def _close(sockets: Iterable[socket.socket | None], file: int) -> None:
    for one in sockets:
        if one is not None:
            one.close()
    if file >= 0:
        os.close(file)


def _exchange(mine: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    """The numbers of every rank, by rank."""
    t = torch.tensor(mine, dtype=torch.int64, device="cpu")
    out = [torch.empty_like(t) for _ in range(group.size())]
    dist.all_gather(out, t, group=group)
    return [each.tolist() for each in out]
