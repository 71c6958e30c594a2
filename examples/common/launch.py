"""Start local processes through torchrun's API, name the rank that failed in one line, and share the machine out.

The ranks end with the launcher, also if it is killed and cannot stop them.
"""

import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException as Stopped
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fquant.kernels.cpu import usable_cores

__all__ = ["RankFailed", "Stopped", "local", "record"]


class RankFailed(RuntimeError):
    """A rank died or raised; the message names it."""


def local(ranks: int, f: Callable[..., Any], *args: Any) -> Any:
    """Run ``f(*args)`` on ``ranks`` local processes and return the first's result; decorate ``f`` with ``record``.

    Raises RankFailed naming the first rank that died or raised, after the others were stopped.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores(ranks)))
    with tempfile.TemporaryDirectory(prefix="fquant-") as logs:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1, start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )  # fmt: skip
        try:
            return elastic_launch(config, _run)(f, *args)[0]
        except ChildFailedError as error:
            raise RankFailed(_story(error.failures)) from None


def _run(f: Callable[..., Any], *args: Any) -> Any:
    """Return ``f(*args)`` on a rank, which ends if its launcher does."""
    threading.Thread(target=_end_with_launcher, name="end with the launcher", daemon=True).start()
    return f(*args)


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
    message = str(first.message).strip().splitlines()
    return f"rank {rank} (pid {first.pid}) failed with exit status {first.exitcode}: {message[-1] if message else ''}"
