"""Start local processes through torchrun's API, name the rank that failed in one line, and share the machine out.

The ranks end with the launcher, also if it is killed and cannot stop them. A signal that stops it goes to the ranks,
which have the time to take a step and write a checkpoint. A rank that is stopped (SIGSTOP) would notice no signal to
end, so it is killed when another rank has failed.

Ranks are forked from a server where that can be (rank_server.py), so that they start again in a fraction of a second.
One that is killed while it waits for the others to end is named like any other (finished_event.py).
Temporary files of a launcher, and of torch's part in it, are in one folder (temporary_folder.py).
"""

import gc
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from inspect import signature
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException as Stopped
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fquant.kernels.cpu import usable_cores

from . import finished_event, rank_server, temporary_folder
from .rank_server import SIGNALS

__all__ = ["RankFailed", "Stopped", "import_early", "local", "record"]


ELASTIC = "torch.distributed.elastic"
LOGGERS = (ELASTIC, f"{ELASTIC}.agent.server.api", f"{ELASTIC}.multiprocessing.api", "torch.multiprocessing.spawn")
PATIENCE = 600  # seconds in which ranks leave after a signal
POLL = 0.5  # seconds between two looks at the ranks


class RankFailed(RuntimeError):
    """A rank died or raised; the message names it."""


def local(ranks: int, f: Callable[..., Any], *args: Any) -> Any:
    """Run ``f(*args)`` on ``ranks`` local processes and return the first's result; decorate ``f`` with ``record``.

    Raises RankFailed naming the first rank that died or raised, after the others were stopped. Raises Stopped after a
    signal to this process, or if the ranks raise it after a signal to one of them.
    """
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores(ranks)))
    with temporary_folder.used() as folder, tempfile.TemporaryDirectory(dir=folder) as logs:
        if (method := rank_server.method(folder)) == "forkserver":
            rank_server.start(f.__module__)
            rank_server.await_imports()
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1, start_method=method,
            logs_specs=DefaultLogsSpecs(log_dir=logs), **_patience(),
        )  # fmt: skip
        died = dict[int, BaseProcess]()
        try:
            with _watched(ranks, died), finished_event.used(method):
                return elastic_launch(config, _run)(f, *args)[0]
        except ChildFailedError as error:
            if codes := {f.exitcode for f in error.failures.values()} & {128 + number for number in SIGNALS}:
                raise Stopped("the ranks were stopped", signal.Signals(codes.pop() - 128)) from None
            raise RankFailed(_story(error.failures, died)) from None


def import_early(*modules: str) -> None:
    """Begin to import ``modules`` for the ranks of later calls of :func:`local`, while this process goes on."""
    with temporary_folder.used() as folder:
        if rank_server.method(folder) == "forkserver":
            rank_server.start(*modules)


def _patience() -> dict[str, Any]:
    """Return the option for the time that ranks have to leave; torch 2.11 gives 30 seconds and has none."""
    return {"shutdown_timeout": PATIENCE} if "shutdown_timeout" in signature(LaunchConfig).parameters else {}


@contextmanager
def _watched(ranks: int, died: dict[int, BaseProcess]) -> Iterator[None]:
    """Kill ranks started inside of the block that are stopped, once another has failed.

    At the end of the block ``died`` gets those that a signal from elsewhere has ended, if all of them were seen alive.
    """
    ended, others = threading.Event(), set(multiprocessing.active_children())
    known, killed = set[BaseProcess](), set[BaseProcess]()

    def watch() -> None:
        failed_before = False
        while not ended.wait(POLL):
            alive = set(multiprocessing.active_children()) - others
            known.update(alive)
            has_failed = any(process.exitcode for process in known)
            for process in alive if has_failed and failed_before else ():  # twice, so that the agent knows the cause
                if _is_stopped(process.pid):
                    killed.add(process)
                    process.kill()
            failed_before = has_failed

    watcher = threading.Thread(target=watch, name="kill stopped ranks", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        started = sorted(known, key=lambda process: int(process.name.rpartition("-")[2]))  # in this order
        for rank, process in enumerate(started if len(started) == ranks else ()):
            if process not in killed and (process.exitcode or 0) < 0 and process.exitcode != -signal.SIGTERM:
                died[rank] = process


def _is_stopped(pid: int | None) -> bool:
    """Return True for a process that SIGSTOP or a terminal has stopped; False where /proc does not say."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _run(f: Callable[..., Any], *args: Any) -> Any:
    """Return ``f(*args)`` on a rank, which ends if its launcher does."""
    rank_server.began()
    gc.freeze()  # what was imported stays: to visit it takes Python's collector half a second, and all ranks wait
    with suppress(ImportError):  # torch.fx makes a bar with a lock of processes, which a killed rank would leave
        import_module("tqdm").tqdm.set_lock(threading.RLock())
    threading.Thread(target=_end_with_launcher, name="end with the launcher", daemon=True).start()
    try:
        return f(*args)
    except Stopped as stopped:  # a launcher that stops its ranks takes no results, and a rank that has one waits for it
        sys.exit(128 + stopped.sigval)
    finally:
        gc.unfreeze()  # so that libraries see their objects end


def _end_with_launcher() -> None:
    if (launcher := multiprocessing.parent_process()) is not None:
        launcher.join()  # a pipe, which closes however the launcher ends
        os.kill(os.getpid(), signal.SIGKILL)


def _story(failures: dict[int, ProcessFailure], died: dict[int, BaseProcess]) -> str:
    """Return the cause as a line: a signal, as the peers of a killed rank fail too, or else the first failure."""
    for rank, process in died.items():
        name = signal.Signals(-(process.exitcode or 0)).name
        return f"rank {rank} (pid {process.pid}) was killed by {name}; the other ranks were stopped"
    killed = {rank: f for rank, f in failures.items() if f.exitcode < 0 and f.signal_name() != "SIGTERM"}
    rank, first = min((killed or failures).items(), key=lambda item: item[1].timestamp)
    if first.exitcode < 0:
        return f"rank {rank} (pid {first.pid}) was killed by {first.signal_name()}; the other ranks were stopped"
    said: Any = first.message  # of an error file a dict, which has the traceback too
    message = str(said["message"] if isinstance(said, dict) else said).strip().splitlines()
    return f"rank {rank} (pid {first.pid}) failed with exit status {first.exitcode}: {message[-1] if message else ''}"
