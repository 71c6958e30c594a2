"""A process that forks after kernels ran on several threads: the child runs them too, and torch, with the same bits."""

import subprocess
import sys

import pytest

from fquant.kernels.cpu import threads

SECONDS = 60.0  # of a program that takes about 5; a child that waits for its parent's threads never ends
PROGRAM = """
import os, signal, torch
from fquant import NF4
from fquant.kernels.cpu import codec, threads
torch.set_num_threads(2)
threads.limit = lambda: 2
w = torch.linspace(-1, 1, 256 * 1024, device="cpu").reshape(256, 1024)
encoded = lambda: [t.numpy().tobytes() for t in codec.encode(w, NF4)]
(w.T @ w).sum()
right = encoded()
for generation in range(2):  # a child, and a child of it
    child = os.fork()
    if child:
        same = right == encoded()
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) if same else 1)
    signal.alarm(20)
same = right == encoded()
{rest}
os._exit(int(not same))
"""
# One worker of the runtime is there: the kernel ran on it, beside this thread. Threads of a call alone would be gone.
ON_THE_RUNTIME = "same = same and len(os.listdir('/proc/self/task')) == 2"
WITH_TORCH = "same = same and bool((w.T @ w).isfinite().all())"


@pytest.mark.skipif(threads.openmp("GOMP_parallel") is None, reason="torch has no OpenMP runtime that forks badly")
@pytest.mark.parametrize("rest", ["", ON_THE_RUNTIME, WITH_TORCH], ids=["bits", "on the runtime", "with torch"])
def test_a_forked_process_runs_kernels(rest):
    program = PROGRAM.replace("{rest}", rest)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
