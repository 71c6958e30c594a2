"""Tests of fquant.io.quantized.blocks: scales of foreign blocks as scales of ours, by a loop over elements."""

import pytest
import torch

from fquant.format import INT4, INT4_ZERO
from fquant.io.quantized import blocks
from fquant.io.quantized.blocks import ROW, TENSOR, Grid
from tests.helpers.arrays import randn

GRIDS = [
    TENSOR,
    ROW,
    Grid(1, 32),
    Grid(1, 48),
    Grid(4, 16),
    Grid(3, 128),
    Grid(128, 128),
    Grid(1, 1000),
    Grid(None, 64),
]


@pytest.mark.parametrize("shape", [(6, 256), (7, 200), (5, 96)], ids=str)
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_each_element_has_its_scale(grid, bits, shape):
    out, width = shape
    format, scale = blocks.integers("w", bits, grid.columns, width), randn(*grid.shape(shape))
    ours = blocks.spread(scale, grid, format, shape)
    for n in range(out):
        for k in range(width):
            theirs = scale[n // (grid.rows or out), k // (grid.columns or width)]
            assert ours[n, k // (format.block or width)] == theirs


@pytest.mark.parametrize("bits", range(1, 9))
def test_integers(bits):
    format, zero = blocks.integers("w", bits, 32, 64), blocks.integers("w", bits, 32, 64, zero=True)
    assert format.table is not None and zero.table is not None and zero.zero and not format.zero
    assert format.table[: 2**bits] == tuple(range(-(2 ** (bits - 1)), 2 ** (bits - 1)))
    assert zero.table[: 2**bits] == tuple(range(2**bits))
    assert (format.name, zero.name) == ("int4", "int4_zero") if bits == 4 else format.name == f"int{bits}_plain"
    assert blocks.integers("w", 4, 128, 256) == INT4 and blocks.integers("w", 4, 128, 256, zero=True) == INT4_ZERO


def test_exponents():
    every = torch.arange(256, dtype=torch.uint8)
    assert blocks.exponents(every)[:255].double().equal(2.0 ** (torch.arange(255).double() - 127))
    assert blocks.exponents(every)[255].isinf()
    assert blocks.exponents(every)[:255].equal(every[:255].view(torch.float8_e8m0fnu).float())


@pytest.mark.parametrize("columns", [1, 8, 24, 100])
def test_refuses_blocks_that_none_of_ours_divides(columns):
    with pytest.raises(ValueError, match=rf"^w: blocks of {columns} elements; wanted a multiple of 16, or whole rows"):
        blocks.integers("w", 4, columns, 4096)
