"""Tell whether the process of a rank runs, is stopped or is dead, without an answer of that process.

A rank that keeps Python's lock, in a long ``json.loads`` or a regular expression, runs, and no thread of it answers.
The system knows its state: a rank of the same host reads /proc. For ranks of other hosts, a small process beside each
rank reads it (``Witness``). It is this file, run as a program, without torch and with a lock of its own.
"""

import contextlib
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

RUNNING, STOPPED, DEAD, UNKNOWN = "running", "stopped", "dead", ""
ANSWER = 2.0  # seconds in which a witness answers
_SPACES = ("pid", "net")  # namespaces of Linux: processes of others are not in /proc, or are reached over a cable
_FIRST, _BORN = 0, 19  # fields of /proc/PID/stat behind the name: the state, and the time of the start


class Place(NamedTuple):
    """The place of a rank: its host and namespaces, its process, and the time at which that began."""

    host: str
    process: int
    born: str


def own() -> Place:
    """Return the place of this process; the host is empty where /proc does not tell it."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host = " ".join([boot, *(os.readlink(f"/proc/self/ns/{name}") for name in _SPACES)])
        return Place(host, os.getpid(), _stat(os.getpid())[_BORN])
    return Place("", os.getpid(), "")


def state(process: int, born: str) -> str:
    """Return the state of a process of this host that began at ``born``, or UNKNOWN without that."""
    if not born:
        return UNKNOWN
    try:
        fields = _stat(process)
    except OSError:
        return DEAD
    return DEAD if fields[_BORN] != born or fields[_FIRST] in "ZX" else STOPPED if fields[_FIRST] in "Tt" else RUNNING


def _stat(process: int) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


class Witness:
    """A process beside this one that tells its state to each rank that connects to ``port``; it ends with this one."""

    def __init__(self, address: str, family: socket.AddressFamily, place: Place) -> None:
        with socket.create_server((address, 0), family=family) as listener:
            self.port: int = listener.getsockname()[1]
            words = [str(listener.fileno()), str(int(family)), str(place.process), place.born]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *words], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()], start_new_session=True,
            )  # fmt: skip

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def ask(address: str, port: int) -> str:
    """Return the state that the witness at ``address`` tells, or UNKNOWN if it does not answer."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=ANSWER) as peer:
        return peer.recv(100).decode()
    return UNKNOWN


def _serve(descriptor: int, family: int, process: int, born: str) -> None:
    listener = socket.socket(socket.AddressFamily(family), fileno=descriptor)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:  # which ends with the rank
        with contextlib.suppress(OSError), listener.accept()[0] as peer:
            peer.sendall(state(process, born).encode())


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
