"""Start local processes through torchrun's API, name the rank that failed in one line, and share the machine out.

The ranks end with the launcher, also if it is killed and cannot stop them. A signal that stops it goes to the ranks,
which have the time to take a step and write a checkpoint. A rank that is stopped (SIGSTOP) would notice no signal to
end, so it is killed when another rank has failed.
"""

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
from inspect import signature
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException as Stopped
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fquant.kernels.cpu import usable_cores

__all__ = ["RankFailed", "Stopped", "local", "record"]


ELASTIC = "torch.distributed.elastic"
LOGGERS = (ELASTIC, f"{ELASTIC}.agent.server.api", f"{ELASTIC}.multiprocessing.api", "torch.multiprocessing.spawn")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
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
    with tempfile.TemporaryDirectory(prefix="fquant-") as logs:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1, start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=logs), **_patience(),
        )  # fmt: skip
        try:
            with _stopped_ranks_killed():
                return elastic_launch(config, _run)(f, *args)[0]
        except ChildFailedError as error:
            if codes := {f.exitcode for f in error.failures.values()} & {128 + number for number in SIGNALS}:
                raise Stopped("the ranks were stopped", signal.Signals(codes.pop() - 128)) from None
            raise RankFailed(_story(error.failures)) from None


def _patience() -> dict[str, Any]:
    """Return the option for the time that ranks have to leave; torch 2.11 gives 30 seconds and has none."""
    return {"shutdown_timeout": PATIENCE} if "shutdown_timeout" in signature(LaunchConfig).parameters else {}


@contextmanager
def _stopped_ranks_killed() -> Iterator[None]:
    """Kill processes started inside of the block that are stopped, once another has failed."""
    ended, known = threading.Event(), set[Any]()

    def watch() -> None:
        failed_before = False
        while not ended.wait(POLL):
            alive = multiprocessing.active_children()
            known.update(alive)
            has_failed = any(process.exitcode for process in known)
            for process in alive if has_failed and failed_before else ():  # twice, so that the agent knows the cause
                if _is_stopped(process.pid):
                    process.kill()
            failed_before = has_failed

    watcher = threading.Thread(target=watch, name="kill stopped ranks", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _is_stopped(pid: int | None) -> bool:
    """Return True for a process that SIGSTOP or a terminal has stopped; False where /proc does not say."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _run(f: Callable[..., Any], *args: Any) -> Any:
    """Return ``f(*args)`` on a rank, which ends if its launcher does."""
    threading.Thread(target=_end_with_launcher, name="end with the launcher", daemon=True).start()
    try:
        return f(*args)
    except Stopped as stopped:  # a launcher that stops its ranks takes no results, and a rank that has one waits for it
        sys.exit(128 + stopped.sigval)


def _end_with_launcher() -> None:
    if (launcher := multiprocessing.parent_process()) is not None:
        launcher.join()  # a pipe, which closes however the launcher ends
        os.kill(os.getpid(), signal.SIGKILL)


def _story(failures: dict[int, ProcessFailure]) -> str:
    # A killed rank makes its peers fail too; the signal is the cause, and the earliest otherwise.
    killed = {rank: f for rank, f in failures.items() if f.exitcode < 0 and f.signal_name() != "SIGTERM"}
    rank, first = min((killed or failures).items(), key=lambda item: item[1].timestamp)
    if first.exitcode < 0:
        return f"rank {rank} (pid {first.pid}) was killed by {first.signal_name()}; the other ranks were stopped"
    said: Any = first.message  # of an error file a dict, which has the traceback too
    message = str(said["message"] if isinstance(said, dict) else said).strip().splitlines()
    return f"rank {rank} (pid {first.pid}) failed with exit status {first.exitcode}: {message[-1] if message else ''}"
