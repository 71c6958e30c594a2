"""A pool of rank processes for tests, started at first use and kept for the rest of the run.

    def total(x):                                      # at module level, so that it pickles
        t = torch.full((), x * dist.get_rank())
        dist.all_reduce(t)
        return t.item()

    @pytest.mark.xdist_group("ranks")                  # one worker runs all of these, so there is one pool
    def test_total():
        assert ranks.run(3, total, 2.0) == [6.0] * 3

Each call of :func:`run` is a fresh gloo group of exactly ``n`` of the processes. They rendezvous in a file, because a
TCPStore looks up the name of each client, which takes seconds with a slow name server. A rank that raises leaves its
group at once, as a real one would by exiting, so that its peers fail instead of waiting. If a rank does not answer in
time, the whole pool is killed, and the message holds the rank's stack.

Ranks are forked from a server without threads that has imported torch and this project ("forkserver"). So a new rank
costs milliseconds instead of the seconds of the import. Calls and results travel pickled by value.

All files are in one temporary folder. The test process removes it when it ends; if it is killed, its ranks do.
"""

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import gc
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

START = 120.0  # seconds for a new process to start, for a test module to be imported in it, or to join a group
LEAVE = 10.0  # seconds to leave a group
# Imports of the calls of most tests, and imports of torch at first use.
PRELOAD = ["torch", "torch.distributed.tensor", "torch._dynamo", "shard", "examples.qlora", "tests.fquant.test_packed"]


class Failure(NamedTuple):
    """An error of one rank. ``type`` is the name of its class, or "died" if the process is gone."""

    type: str
    message: str
    traceback: str


class RankFailure(Exception):
    """An error of some ranks; ``failures`` has a :class:`Failure` for each of them."""

    def __init__(self, failures: dict[int, Failure]) -> None:
        self.failures = dict(sorted(failures.items()))
        lines = [f"rank {r}: {f.type}: {f.message}" for r, f in self.failures.items()]
        super().__init__("\n".join([*lines, "", *(f"rank {r}:\n{f.traceback}" for r, f in self.failures.items())]))


class RankTimeout(Exception):
    """The ranks in ``hung`` did not answer in time and were killed; ``failures`` has the errors of others."""

    def __init__(
        self, seconds: float, stacks: dict[int, str], returned: list[int], failures: dict[int, Failure]
    ) -> None:
        self.hung, self.returned, self.failures = list(stacks), returned, failures
        lines = [f"ranks {self.hung} did not answer within {seconds:g} s and were killed; ranks {returned} returned"]
        lines += [f"rank {r} raised {f.type}: {f.message}" for r, f in failures.items()]
        super().__init__("\n".join([*lines, "", *(f"rank {r} was in:\n{stack}" for r, stack in stacks.items())]))


# --- the test process


@dataclasses.dataclass
class Rank:
    """A process of the pool, the pipe to it, and the file of its stack."""

    process: Any
    pipe: Connection
    stack: Path


POOL: list[Rank] = []
COUNT = itertools.count()


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of all files of the pool; the test process makes it at first use."""
    made = tempfile.TemporaryDirectory(prefix="ranks-")
    multiprocessing.current_process()._config["tempdir"] = made.name  # type: ignore[attr-defined]  # the server's socket
    return made


def run(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call ``fn(*args)`` on ``n`` ranks of a fresh gloo group; return the results, by rank.

    ``fn`` is a module-level function. ``timeout`` counts from the moment when all ranks have joined the group.
    Raises RankFailure if ranks raised or died, RankTimeout if one is still busy after ``timeout`` seconds.
    """
    call = pickle.dumps((fn, args))
    members = grow(n)
    try:
        answers = converse(members, call, timeout)
    except BaseException:
        kill()  # the next messages of these ranks are unknown
        raise
    failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
    if failures:
        raise RankFailure(failures)
    return [pickle.loads(answers[rank]) for rank in range(n)]


def pids() -> list[int]:
    """Return the process ids of the pool, by rank."""
    return [member.process.pid for member in POOL]


def converse(members: list[Rank], call: bytes, timeout: float) -> dict[int, Any]:
    """Run one call, from loading it to leaving its group; return each rank's pickled result or Failure."""
    n = len(members)
    group = (f"{folder().name}/call{next(COUNT)}", n, timeout)
    messages: list[Any] = [(call, *group, rank) for rank in range(n)]
    for seconds in (START, START, timeout):  # to load the call, to join the group, to call
        answers = ask(members, messages, seconds)
        failures = {rank: answer for rank, answer in answers.items() if isinstance(answer, Failure)}
        if len(answers) < n:
            stacks = {rank: where(member) for rank, member in enumerate(members) if rank not in answers}
            raise RankTimeout(seconds, stacks, sorted(answers.keys() - failures.keys()), failures)
        if failures:
            break
        messages = [True] * n

    left = ask(members, [not failures] * n, LEAVE)
    stuck = [rank for rank in range(n) if rank not in left]
    if stuck and not failures:
        raise RankTimeout(LEAVE, {rank: where(members[rank]) for rank in stuck}, sorted(left), {})
    if stuck:
        kill()
    return answers


def ask(members: list[Rank], messages: list[Any], seconds: float) -> dict[int, Any]:
    """Send each member its message; return the answers, by rank, that arrived within ``seconds``."""
    for member, message in zip(members, messages, strict=True):
        with contextlib.suppress(BrokenPipeError):  # it is dead, and reading meets the end of file
            member.pipe.send(message)
    deadline = time.monotonic() + seconds
    waiting = {member.pipe: rank for rank, member in enumerate(members)}
    answers: dict[int, Any] = {}
    while waiting and (pipes := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for pipe in pipes:
            rank = waiting.pop(pipe)  # type: ignore[arg-type]
            try:
                answers[rank] = pipe.recv()  # type: ignore[union-attr]
            except (EOFError, ConnectionResetError):
                members[rank].process.join(LEAVE)
                answers[rank] = Failure("died", f"exit code {members[rank].process.exitcode}", "")
    return answers


def server() -> Any:
    """Return what starts processes that have imported torch and this project."""
    folder()
    if torch.cuda.is_available():  # which asking for devices ends for processes that are forked
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def grow(n: int) -> list[Rank]:
    """Return the first ``n`` members of the pool; start those that are missing or dead."""
    at, context = Path(folder().name), server()
    for rank in range(n):
        if rank < len(POOL) and POOL[rank].process.is_alive():
            continue
        ours, theirs = context.Pipe()
        stack = at / f"stack{next(COUNT)}"
        process = context.Process(target=serve, args=(theirs, stack), name=f"rank{rank}", daemon=True)
        process.start()
        theirs.close()  # else a dead rank would send no end of file
        POOL[rank : rank + 1] = [Rank(process, ours, stack)]
    return POOL[:n]


def kill() -> None:
    """Kill every process of the pool; the next call starts new ones."""
    for member in POOL:
        member.process.kill()
    for member in POOL:
        member.process.join()
        member.pipe.close()
    POOL.clear()


def where(member: Rank) -> str:
    """Return the Python stack of a rank that does not answer."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(member.process.pid, signal.SIGUSR1)
    time.sleep(0.3)
    return member.stack.read_text()


# --- a rank


def serve(pipe: Connection, stack: Path) -> None:
    """Answer calls until the test process is gone, then remove its folder, in case it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    with stack.open("w") as file, contextlib.suppress(EOFError, ConnectionError):
        faulthandler.register(signal.SIGUSR1, file)
        while True:
            call, *group = pipe.recv()
            gc.freeze()  # modules that are imported; the collection of every leave need not walk them
            torch.set_num_threads(1)  # an earlier call may have set another number
            go = True  # false once any rank has failed: then all leave
            try:
                for answer in steps(call, *group):
                    pipe.send(answer)
                    if not (go := pipe.recv()):
                        break
            except BaseException as error:  # SystemExit and the error of torch.distributed.checkpoint are failures too
                pipe.send(failure(error))
                go = None
            if go is None:  # connections close only here, where the error and its frames are gone
                leave(barrier=False)
                go = pipe.recv()
            leave(barrier=go)
            pipe.send("left")
    shutil.rmtree(stack.parent, ignore_errors=True)


def steps(call: bytes, *group: Any) -> Iterator[Any]:
    """Take the steps of one call; yield the message to the test process after each."""
    fn, args = pickle.loads(call)
    yield "ready"
    join(*group)
    yield "joined"
    yield pickle.dumps(fn(*args))


def join(file: str, n: int, seconds: float, rank: int) -> None:
    """Join the group of ``file``. Its time-out is after that of the pool, which names the ranks that hang."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n))
    limit = datetime.timedelta(seconds=seconds + 30)
    dist.init_process_group("gloo", store=dist.FileStore(file, n), rank=rank, world_size=n, timeout=limit)


def leave(barrier: bool) -> None:
    """Leave the group, if there is one; without a barrier gloo may abort a peer that still reads."""
    if dist.is_initialized():
        if barrier:
            dist.barrier()
        dist.destroy_process_group()
    gc.collect()  # the connections close when nothing holds the group


def failure(error: BaseException) -> Failure:
    """Return ``error`` as a Failure."""
    return Failure(type(error).__name__, str(error), "".join(traceback.format_exception(error)))
