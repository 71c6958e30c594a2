"""The TCP connections between ranks, so that a wait of gloo can be ended.

    mine  = connections.open_now()                  # of this process: [[own end, other end], ...]
    found = connections.between(mine, theirs)       # those that another rank has too, from its side
    connections.end(found)                          # waits in them raise, here and on the other rank

gloo waits outside of Python, until data arrive, its time-out passes, or a connection closes. torch 2.13 ends a wait in
no other way: ``_abort_process_group`` and the backend's ``abort`` return at once, and the wait goes on to its time-out.
``shutdown`` of the socket ends a wait for a message that has not begun within 20 ms, on both ranks. One in the middle
of a message goes on: gloo forgets which buffer it reads or writes (``Pair::signalException`` of its tcp transport). The
socket stays gloo's, so nothing is closed twice.

Neither torch nor gloo says which sockets they have. So ranks exchange the ends of all TCP connections of their
processes. One that two ranks have, with the ends exchanged, is between them. The connection to MASTER_PORT is left
out: a store outlives a group, and the next group may need it. Connections that gloo makes at
first use (TORCH_GLOO_LAZY_INIT) are not found, and a wait in one goes on.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterable, Iterator

Ends = list[str]  # this process's and the other's, as address:port
_FOLDER = "/dev/fd"  # the descriptors of this process, on Linux and macOS


def open_now() -> list[Ends]:
    """Return both ends of every TCP connection of this process; none where the system does not list descriptors."""
    return [ends for _, ends in _connected()]


def between(mine: Iterable[Ends], theirs: Iterable[Ends]) -> set[tuple[str, ...]]:
    """Return those of ``mine`` that are in ``theirs`` with the ends exchanged, but for those of MASTER_PORT."""
    store = f":{os.environ.get('MASTER_PORT')}"
    others = {tuple(reversed(ends)) for ends in theirs}
    return {tuple(ends) for ends in mine if tuple(ends) in others and not any(end.endswith(store) for end in ends)}


def end(found: Iterable[tuple[str, ...]]) -> None:
    """Shut down those connections of this process that are in ``found`` and still open."""
    wanted = set(found)
    for peer, ends in _connected():
        if tuple(ends) in wanted:
            with contextlib.suppress(OSError):  # the other rank has closed it
                peer.shutdown(socket.SHUT_RDWR)


def _connected() -> Iterator[tuple[socket.socket, Ends]]:
    """Yield each TCP connection of this process, by a descriptor that is closed again, and its ends."""
    try:
        names = os.listdir(_FOLDER)
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):  # it is closed by now, or not connected
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as peer:
                    if peer.family in (socket.AF_INET, socket.AF_INET6) and peer.type == socket.SOCK_STREAM:
                        yield peer, ends_of(peer)


def ends_of(peer: socket.socket) -> Ends:
    """Return both ends of a connection; raises OSError if it is closed."""
    return [_text(peer.getsockname()), _text(peer.getpeername())]


def _text(address: tuple[str, int]) -> str:
    return f"{address[0].removeprefix('::ffff:')}:{address[1]}"  # an IPv4 address is the same on a socket of both kinds
