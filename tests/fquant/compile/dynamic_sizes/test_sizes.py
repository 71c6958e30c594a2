"""Sizes to pad to, and tensors that are padded."""

import pytest
import torch

from fquant import DynamicSize
from fquant.compile.dynamic_sizes.sizes import holds, next_size, pad


@pytest.mark.parametrize("to", [3, 64, (1, 2, 9), range(8, 33, 8)])
def test_the_next_size_is_the_least_that_holds(to):
    sizes = [to << i for i in range(8)] if isinstance(to, int) else list(to)
    for n in range(max(sizes) + 1 if not isinstance(to, int) else 300):
        assert next_size(DynamicSize("n", to), n) == min(size for size in sizes if size >= n)


@pytest.mark.parametrize("to", [0, -4, (), (0, 4), (4, 4), (8, 4)])
def test_sizes_that_are_refused(to):
    with pytest.raises(ValueError, match=r"DynamicSize\('n'\): to is .*; wanted positive sizes that increase"):
        DynamicSize("n", to)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_padding(dtype):
    x = (torch.arange(12).reshape(4, 3) % 2).to(dtype)
    for t in (x, x.mT, x[::2], x[:0]):
        for dim in range(-2, 2):
            for to in (t.shape[dim], t.shape[dim] + 3):
                padded, more = pad(t, dim, to, 1), list(t.shape)
                more[dim] = to - t.shape[dim]
                assert torch.equal(padded, torch.cat([t, torch.ones(more, dtype=dtype)], dim))
                assert padded.is_contiguous() and padded.dtype == dtype


def test_values_of_dtypes():
    nan, inf = float("nan"), float("inf")
    held = {torch.uint8: (0, 255), torch.bool: (False, True), torch.int64: (-100,), torch.bfloat16: (0.1, inf, nan)}
    refused = {torch.uint8: (-1, 256, 0.5), torch.bool: (2,), torch.int64: (0.5, nan), torch.float16: (1e9,)}
    assert all(holds(dtype, value) for dtype, values in held.items() for value in values)
    assert not any(holds(dtype, value) for dtype, values in refused.items() for value in values)
