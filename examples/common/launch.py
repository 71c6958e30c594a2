"""Start local processes through torchrun's API, and name the rank that failed.

The agent, the store and the signals are torch's. Where torchrun prints a page, this module prints one line that names
the rank and its fate. It also removes the folder in which the agent keeps logs.
"""

from __future__ import annotations

import logging
import os
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException as Stopped
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from . import machine

__all__ = ["RankFailed", "Stopped", "local", "record"]


class RankFailed(RuntimeError):
    """A rank died or raised; the message names it."""


def local(ranks: int, f: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``f(*args)`` on ``ranks`` local processes and return the results by rank; decorate ``f`` with ``record``.

    Raises RankFailed naming the first rank that died or raised, after the others were stopped.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(machine.threads(ranks)))
    with tempfile.TemporaryDirectory(prefix="fquant-") as logs:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=ranks, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1, start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )  # fmt: skip
        try:
            results = elastic_launch(config, f)(*args)
        except ChildFailedError as error:
            raise RankFailed(_story(list(error.failures.values()), error.failures)) from None
    return [results[rank] for rank in range(ranks)]


def _story(failures: list[ProcessFailure], by_rank: dict[int, ProcessFailure]) -> str:
    # A killed rank makes its peers fail too; the signal is the cause, and the earliest otherwise.
    killed = [f for f in failures if f.exitcode < 0 and f.signal_name() != "SIGTERM"]
    first = min(killed or failures, key=lambda f: f.timestamp)
    rank = next(rank for rank, f in by_rank.items() if f is first)
    if first.exitcode < 0:
        return f"rank {rank} (pid {first.pid}) was killed by {first.signal_name()}; the other ranks were stopped"
    message = str(first.message).strip().splitlines()
    return f"rank {rank} (pid {first.pid}) failed with exit status {first.exitcode}: {message[-1] if message else ''}"
