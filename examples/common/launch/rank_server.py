"""A server that has imported the program and forks ranks, which so start in a fraction of a second.

    start("examples.qlora.cli")                   # it begins to import, while this process goes on
    LaunchConfig(start_method=method(folder))     # "forkserver", or "spawn" without a server

The server is multiprocessing's: a process of its own, without threads and without CUDA, neither of which survives a
fork. Where CUDA can be used each rank is a new process and imports for itself.

Signals of a terminal or of a batch system reach all processes. The server alone knows how its ranks end, so it must
outlive them: signals are blocked in it, and in a rank until :func:`began`.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, get_context, resource_tracker
from pathlib import Path

import torch

__all__ = ["SIGNALS", "await_imports", "began", "method", "start"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LATE = ("torch._dynamo", "torch.distributed.tensor")  # modules that torch imports when a rank first needs them
LONGEST = 107 - 32  # bytes of a path: those of a socket's less "/pymp-abcdefgh/listener-abcdefgh", multiprocessing's


def method(folder: Path) -> str:
    """Return how ranks are started, in the words of multiprocessing; the server's socket would be in ``folder``."""
    is_short = len(os.fsencode(folder)) <= LONGEST
    return "forkserver" if is_short and not torch.cuda.is_available() else "spawn"


def start(*modules: str) -> None:
    """Start the server, which imports ``modules``, unless it runs."""
    forkserver.set_forkserver_preload([*modules, *LATE])
    resource_tracker.ensure_running()  # or the server starts it, and it lets signals through
    with _blocked():
        forkserver.ensure_running()


def await_imports() -> None:
    """Wait until the server has imported and forks. A signal waits too: it would leave a process half made."""
    with _deferred():
        process = get_context("forkserver").Process(target=os.getpid)
        process.start()
        process.join()


def began() -> None:
    """Let signals through to this rank."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _deferred() -> Iterator[None]:
    """Let signals come after the block; blocked ones would still reach threads of libraries, and so the main one."""
    if threading.current_thread() is not threading.main_thread():  # which alone runs handlers
        yield
        return
    came = list[int]()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    handlers = {number: each for number, each in handlers.items() if each not in (signal.SIG_IGN, None)}
    for number in handlers:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)
