"""``cost`` counts what ops of torch take from malloc beside their results: it is what a process grows by."""

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fquant import cost
from fquant.compile.memory.scratch import IN_FLOAT32
from tests.bench.loading.resident import resident

MIB = 2**20
LIBC, M_MMAP_THRESHOLD = ctypes.CDLL(None), -3
aten = torch.ops.aten


def image(channels):
    return torch.randn(32, channels, 56, 56)


def options(kernel, stride=1, groups=1):
    return [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups


def convolution(i, o, kernel, stride=1, groups=1):
    """Return a convolution of images of ``i`` channels into ``o``, and its arguments."""
    f = lambda x, w: aten.convolution(x, w, None, *options(kernel, stride, groups))
    return f, image(i), torch.randn(o, i // groups, kernel, kernel)


def gradients(i, o, kernel, of_input=True):
    """Return the gradients of a convolution, and their arguments."""
    f = lambda g, x, w: aten.convolution_backward(g, x, w, None, *options(kernel), [of_input, True, False])
    return f, image(o), image(i), torch.randn(o, i, kernel, kernel)


def factor(n):
    m = torch.randn(n, n)
    return torch.linalg.cholesky(m @ m.mT + n * torch.eye(n))


def half(*sizes):
    return torch.randn(*sizes).bfloat16()


OPS = {
    "convolution": lambda: convolution(64, 64, 3),
    "convolution, more channels": lambda: convolution(64, 128, 1),
    "convolution, strided": lambda: convolution(64, 128, 3, 2),
    "convolution, of colours": lambda: convolution(3, 64, 7, 2),
    "convolution, one channel out": lambda: convolution(64, 1, 3),
    "convolution, odd channels": lambda: convolution(40, 40, 3),
    "convolution, by channel": lambda: convolution(64, 64, 3, 1, 64),
    "convolution, channels last": lambda: (
        convolution(64, 64, 3)[0],
        image(64).contiguous(memory_format=torch.channels_last),
        torch.randn(64, 64, 3, 3),
    ),
    "gradients": lambda: gradients(64, 64, 3),
    "gradients, more channels": lambda: gradients(64, 128, 1),
    "gradients, one channel out": lambda: gradients(64, 1, 3),
    "gradients, of colours": lambda: gradients(3, 64, 7),
    "gradients, of the weight": lambda: gradients(64, 64, 3, of_input=False),
    "bmm": lambda: (torch.bmm, torch.randn(4, 1024, 1536), torch.randn(4, 1536, 1024)),
    "bmm, an operand that BLAS cannot read": lambda: (
        torch.bmm,
        torch.randn(1536, 1024, 4).permute(2, 1, 0),
        torch.randn(4, 1536, 1024),
    ),
    "bmm in bf16": lambda: (torch.bmm, half(4, 2048, 512), half(4, 512, 2048)),
    "mm in bf16": lambda: (torch.mm, half(4096, 512), half(512, 3072)),
    "addmm in bf16": lambda: (torch.addmm, half(3072), half(4096, 512), half(512, 3072)),
    "cholesky_solve": lambda: (torch.cholesky_solve, torch.randn(2048, 1), factor(2048)),
    "an op that takes nothing": lambda: (torch.tanh, torch.randn(2048, 2048)),
}


def taken(name):
    """Return the bytes that an op takes beside its results, predicted and measured."""
    torch.manual_seed(0)
    f, *args = OPS[name]()
    predicted = cost(f, *args).scratch
    for _ in range(2):
        f(*args)
    LIBC.malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    out = f(*args)
    most, kept = resident("VmHWM") - before, resident("VmRSS") - before
    del out
    return predicted, most - kept


def main():
    """Print what every op takes. Larger blocks than 64 KiB go back to the system when they are freed."""
    assert LIBC.mallopt(M_MMAP_THRESHOLD, 65536)
    torch.set_num_threads(1)
    print(json.dumps({name: taken(name) for name in OPS}))


@pytest.fixture(scope="module")
def measured():
    command = [sys.executable, "-c", f"from {__name__} import main; main()"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[4])
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", OPS)
def test_what_an_op_takes_is_counted(name, measured):
    if "bf16" in name and not IN_FLOAT32:
        pytest.skip("this machine has instructions for bf16, or torch has no oneDNN: what torch takes then differs")
    predicted, taken = measured[name]
    assert abs(predicted - taken) <= 0.05 * taken + MIB


def test_most_of_a_graph_counts():
    """Two ops take theirs one after the other."""
    f = lambda x, w, v: aten.convolution(aten.convolution(x, w, None, *options(3)), v, None, *options(3))
    x, w, v = image(32), torch.randn(64, 32, 3, 3), torch.randn(32, 64, 3, 3)
    first = cost(lambda x, w: aten.convolution(x, w, None, *options(3)), x, w).scratch
    assert cost(f, x, w, v).scratch >= first > 0 == cost(torch.tanh, x).scratch
