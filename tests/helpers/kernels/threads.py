"""Run kernels on more threads than the test process may otherwise use: it has OMP_NUM_THREADS=1."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from fquant.kernels.cpu import threads


@contextmanager
def num_threads(n: int) -> Iterator[None]:
    """Inside, torch and the C kernels run on ``n`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        with mock.patch.object(threads, "limit", lambda: n):
            assert threads.num_threads() == n
            yield
    finally:
        torch.set_num_threads(before)
