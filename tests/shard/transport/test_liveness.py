"""A process that runs, is stopped or is dead is told apart, on this host and from another."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from shard.transport import liveness

pytestmark = pytest.mark.skipif(not liveness.own().born, reason="there is no /proc here")


def after(look, wanted):
    """Return what ``look`` tells, for which it has a moment."""
    deadline = time.monotonic() + 10
    while look() != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return look()


def test_the_states_of_a_process():
    """One that ended is dead as long as its parent has not waited for it, and when its number has another process."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    born = liveness._stat(process.pid)[liveness._BORN]
    look = lambda: liveness.state(process.pid, born)
    assert look() == liveness.RUNNING and liveness.state(process.pid, born + "0") == liveness.DEAD
    for number, wanted in (
        (signal.SIGSTOP, liveness.STOPPED), (signal.SIGCONT, liveness.RUNNING), (signal.SIGKILL, liveness.DEAD),
    ):  # fmt: skip
        process.send_signal(number)
        assert after(look, wanted) == wanted
    process.wait()
    assert look() == liveness.DEAD and liveness.state(process.pid, "") == liveness.UNKNOWN


RANK = """
import ctypes, socket, sys
sys.path.insert(0, sys.argv[1])  # without torch
import liveness
witness = liveness.Witness("127.0.0.1", socket.AF_INET, liveness.own())
print(witness.port, witness._process.pid, flush=True)
ctypes.PyDLL(None).sleep(1000)  # with Python's lock
"""


def test_a_witness_tells_of_a_rank_that_keeps_the_lock_of_python():
    """And of one that is stopped; it ends with its rank."""
    command = [sys.executable, "-c", RANK, os.path.dirname(liveness.__file__)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        port, witness = map(int, rank.stdout.readline().split())
        check(rank, port, witness)


def check(rank, port, witness):
    look = lambda: liveness.ask("127.0.0.1", port)
    assert look() == liveness.RUNNING
    rank.send_signal(signal.SIGSTOP)
    assert after(look, liveness.STOPPED) == liveness.STOPPED
    born = liveness._stat(witness)[liveness._BORN]
    rank.kill()
    rank.wait()
    assert after(lambda: liveness.state(witness, born), liveness.DEAD) == liveness.DEAD
    assert look() == liveness.UNKNOWN


def test_a_witness_is_closed():
    witness = liveness.Witness("127.0.0.1", socket.AF_INET, liveness.own())
    assert liveness.ask("127.0.0.1", witness.port) == liveness.RUNNING
    witness.close()
    assert liveness.ask("127.0.0.1", witness.port) == liveness.UNKNOWN
    assert os.getpid() == liveness.own().process
