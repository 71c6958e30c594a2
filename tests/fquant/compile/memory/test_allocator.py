"""The allocator of replays, by the pages that the system maps again and the memory that is given back.

Each case is a process of its own, because options of malloc hold for a whole process.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from fquant.compile.memory import allocator

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")

MIB = 8 * 24  # of the tensors that one replay makes
PROGRAM = """
import os, resource, torch
from pathlib import Path
from fquant import jit
from fquant.compile.memory import allocator

torch.set_num_threads(1)

def resident():  # MiB
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20

def faults():  # MiB mapped, if page by page
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt * os.sysconf("SC_PAGE_SIZE") // 2**20

def left(mib):  # of a tensor that comes and goes
    before = resident()
    torch.ones(mib * 2**18)
    return resident() - before

@jit(fuse=False, recompute=False)
def step(x):
    made = [x + i for i in range(8)]  # all live at once
    return sum(t.sum() for t in made)

step.__wrapped__(torch.ones(8))
eager = left(26)
step(torch.ones(8))
captured = left(28)  # larger than all before, so that glibc maps it separately
x = torch.ones(6 * 2**20)
for _ in range(4):
    step(x)  # until every tensor has found a place
mapped = []
for _ in range(4):
    before = faults()
    step(x)
    mapped.append(faults() - before)
held = resident()
allocator.release()
print(eager, captured, min(mapped), held - resident(), int(allocator.enable_reuse()))
"""


FORKED = """
import os, torch
from fquant import jit
from fquant.compile.memory import allocator

torch.set_num_threads(1)

@jit(fuse=False)
def step(x):
    return (x * 2 + 1).sum()

x = torch.ones(2**20)
step(x), step(x)
before = bytes(allocator.acquire(0))
child = os.fork()
if not child:
    step(3 * x)
    os._exit(bytes(allocator.acquire(0)) == before)
failed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(int(bytes(allocator.acquire(0)) == before), int(any(before)), 1 - failed)
"""

INSIDE = """
import os, threading, torch
from fquant import jit
from fquant.compile.memory import allocator

inner = jit(lambda x: torch.sort(x)[0] * 2)
op = torch.library.custom_op("nested::op", lambda x: inner(x).clone(), mutates_args=(), schema="(Tensor x) -> Tensor")
op.register_fake(torch.empty_like)
outer = lambda x: torch.cumsum(torch.ops.nested.op(torch.sort(x @ x)[0]), 0)
replay, x = jit(outer), torch.randn(300, 300)
nested = [replay(x).equal(outer(x)) for _ in range(3)]

threading.Thread(target=allocator.IN_USE.acquire).start()  # as a replay of that thread
while not allocator.IN_USE.locked():
    pass
child = os.fork()
if not child:
    first = jit(lambda x: torch.sort(x)[0] + 1)
    os._exit(not (first(x).equal(torch.sort(x)[0] + 1) and allocator.IN_USE.acquire(blocking=False)))
print(int(all(nested)), 1 - os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

FLAGS = """
import torch
from pathlib import Path
from fquant.compile.memory import allocator

place = torch.frombuffer(allocator.acquire(8 * 2**20), dtype=torch.uint8).data_ptr()
flags = []
for line in Path("/proc/self/smaps").read_text().splitlines():
    head = line.split()[0]
    if "-" in head:
        begin, end = (int(address, 16) for address in head.split("-"))
    elif head == "VmFlags:" and begin <= place < end:
        flags = line.split()[1:]
print(len(flags), int("sh" not in flags), int("hg" in flags))
"""


def run(program: str = PROGRAM, **variables: str) -> list[int]:
    """Return the numbers that a program prints.

    ``PROGRAM`` prints the MiB that stay of a freed tensor, before and after a capture. It then prints the MiB mapped by
    a replay, the MiB given back, and 1 if reuse is enabled.
    """
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_a_replay_finds_the_memory_of_the_one_before():
    eager, captured, mapped, released, kept = run(FQUANT_ALLOCATOR="reuse")
    assert eager < 2  # without a capture malloc is not configured
    assert captured > 26 and kept
    assert mapped < 0.1 * MIB and released > 0.9 * MIB


@pytest.mark.slow
def test_the_system_s_own_way_is_left_alone_on_demand():
    eager, captured, *_, kept = run(FQUANT_ALLOCATOR="system")
    assert eager < 2 and captured < 2 and not kept


@pytest.mark.slow
def test_a_forked_process_replays_in_memory_of_its_own():
    unchanged, written, changed_in_child = run(FORKED, FQUANT_ALLOCATOR="reuse")
    assert written and changed_in_child and unchanged


@pytest.mark.slow
def test_the_memory_of_replays_is_private_and_asks_for_large_pages():
    found, private, large = run(FLAGS, FQUANT_ALLOCATOR="reuse")
    if not found or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the system has no large pages, or does not say who has them")
    assert private and large  # huge pages of shared memory are another setting, off on most systems


def test_a_first_call_waits_for_no_replay_that_waits_for_it():
    """One inside an op of a replay, and one in a process that was forked during a replay of another thread."""
    assert run(INSIDE) == [1, 1]


def test_another_way_is_refused(monkeypatch):
    monkeypatch.setenv(allocator.VARIABLE, "mine")
    with pytest.raises(ValueError, match="FQUANT_ALLOCATOR is 'mine'; wanted reuse or system"):
        allocator.enable_reuse()
