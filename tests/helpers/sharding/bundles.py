"""A block with tensors of every dtype and shape, and comparison of trees in every bit."""

import math

import torch

from fquant import INT4_ZERO, INT8, NF4, NF4_DQ, quantize, tree
from shard import bundle

DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.bfloat16, torch.float16,
    torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
)  # fmt: skip


def bits(shape, dtype, seed=0):
    """Return random bit patterns, including denormals and NaNs with payloads."""
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)


def zoo():
    """Return a block with every dtype, a scalar, empty tensors, odd sizes, and nested scales."""
    w = torch.randn(6, 128, generator=torch.Generator().manual_seed(1))
    return {
        "dtypes": [bits((3, 5), dtype, i) for i, dtype in enumerate(DTYPES)],
        "scalar": bits((), torch.float64),
        "empty": [torch.empty(0, 4), torch.empty(3, 0, dtype=torch.bfloat16)],
        "strided": bits((4, 6), torch.int16)[:, ::2].T,
        "dq": quantize(w, NF4_DQ),
        "int8": quantize(w.half(), INT8),
        "short": quantize(w[:, :70], NF4),
        "zero": quantize(w, INT4_ZERO),
        "last": torch.empty(0, dtype=torch.float8_e4m3fn),
    }


def same_bits(a, b):
    return tree.structure(a) == tree.structure(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(bundle.raw(x), bundle.raw(y))
        for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)
    )
