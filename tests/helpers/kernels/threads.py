"""A number of threads for kernels, beyond the OMP_NUM_THREADS=1 of the test process."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from fquant.kernels.cpu import threads


@contextmanager
def num_threads(n: int) -> Iterator[None]:
    """Let torch and the C kernels use ``n`` threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        with mock.patch.object(threads, "limit", lambda: n):
            assert threads.num_threads() == n
            yield
    finally:
        torch.set_num_threads(before)
