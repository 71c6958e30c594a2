"""A signal to one rank is known to all ranks after a step, and a second signal ends at once."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

import shard
from examples.common.launch import interrupts
from tests.helpers import ranks

pytestmark = pytest.mark.xdist_group("ranks")


def interrupted(number, whose):
    """Take three steps; before the second, a signal comes to a rank, twice at once as a launcher and a terminal do."""
    shard.mesh(fsdp=dist.get_world_size())
    was, found = signal.getsignal(number), list[int]()
    with interrupts.noticed() as signals:
        for step in range(3):
            if step == 1 and dist.get_rank() == whose:
                for _ in range(2):
                    os.kill(os.getpid(), number)
            found.append(interrupts.agreed(signals))
    return found, signal.getsignal(number) is was


@pytest.mark.parametrize("whose", [0, 1])
def test_ranks_agree_after_the_step(whose):
    assert ranks.run(2, interrupted, signal.SIGTERM, whose) == [([0, 15, 15], True)] * 2


def faulty(whose, number):
    """Find a fault on a rank, after a signal to it if there is one."""
    shard.mesh(fsdp=dist.get_world_size())
    with interrupts.noticed() as signals:
        if number and dist.get_rank() == whose:
            os.kill(os.getpid(), number)
        interrupts.agreed(signals, "x.json: no space" * (dist.get_rank() == whose))


@pytest.mark.parametrize("number", [0, signal.SIGTERM])
def test_a_fault_of_a_rank_is_that_of_all(number):
    """A rank that its launcher stops does not return it, because the launcher takes no results then."""
    with pytest.raises(ranks.RankFailure) as found:
        ranks.run(2, faulty, 1, number)
    kinds = {rank: failure.type for rank, failure in found.value.failures.items()}
    assert kinds == {0: "ValueError", 1: "SignalException" if number else "ValueError"}
    assert all(failure.message == "x.json: no space" for failure in found.value.failures.values())


def test_a_signal_that_is_ignored_stays_so():
    """As under nohup; the ranks of these tests ignore Ctrl-C."""
    assert ranks.run(2, interrupted, signal.SIGINT, 0) == [([0, 0, 0], True)] * 2


PATIENT = """
import os, time
from examples.common.launch import interrupts
interrupts.AGAIN = 0.1
with interrupts.noticed() as signals:
    os.kill(os.getpid(), 2)
    time.sleep(0.2)
    print(signals.number, flush=True)
    os.kill(os.getpid(), 2)
    time.sleep(60)
"""


def test_a_second_signal_ends_at_once():
    start = time.monotonic()
    process = subprocess.run([sys.executable, "-c", PATIENT], stdout=subprocess.PIPE, text=True, timeout=50)
    assert process.returncode == -signal.SIGINT and process.stdout == "2\n" and time.monotonic() - start < 50


def bereaved():
    """Let rank 1 die; the signal that stops this rank then ends it."""
    shard.mesh(fsdp=2)
    with interrupts.noticed() as signals:
        if dist.get_rank() == 1:
            os._exit(3)
        while not shard.roll_call.lost():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        return signals.number


def test_a_signal_after_a_death_ends_at_once():
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, bereaved)
    assert [(f.type, f.message) for f in caught.value.failures.values()] == [
        ("died", "exit code -15"), ("died", "exit code 3"),
    ]  # fmt: skip
