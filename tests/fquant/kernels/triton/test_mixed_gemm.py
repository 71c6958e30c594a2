"""Mixed-input products in the interpreter: within the rounding of float32 sums for any format, shape and plan."""

import itertools
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fquant.format import BLOCKS, DYNAMIC8, FP4, INT2_ZERO, INT3, INT4_ZERO, INT8, NF4, NF4_DQ
from fquant.kernels import cuda_plans, packed_ops, reference
from fquant.kernels.dispatch import backend
from fquant.kernels.spec import Spec
from fquant.packed import FLOATS
from tests.helpers.formats import BY_ROWS8, KINDS, shifted
from tests.helpers.kernels.interpreter import interpreted, interpreter  # noqa: F401
from tests.helpers.kernels.products import assert_products, operands
from tests.helpers.kernels.rounding import assert_product

if find_spec("triton") is None:
    pytest.skip("triton is not installed; pip install triton", allow_module_level=True)
pytestmark = pytest.mark.xdist_group("interpreter")
named = partial(pytest.mark.parametrize, ids=lambda x: str(getattr(x, "name", x)).removeprefix("torch."))
BF16 = torch.bfloat16
SMALL = (16, 32, 64, 4, 3)  # a tile, warps and stages


def fused(*args):
    return cuda_plans.Fused(*args)


def fits(format, shape):
    """Return True if rows are whole words; blocks of a flat array that straddle rows make it one row."""
    return cuda_plans.in_words(Spec(format, shape, BF16))


@named("format", KINDS)
@interpreted
def test_formats(device, format):
    """Every kind of packed array whose rows are whole words: even tiles, and tiles cut short on all sides."""
    for shape, dtype, of, rows in [
        ((64, 128), BF16, BF16, 16), ((70, 200), torch.float32, torch.float16, 19), ((17, 264), BF16, BF16, 3),
    ]:  # fmt: skip
        if format.bits < 4:  # 32 codes are the least whole words of 2 and of 3 bits
            shape = shape[0], shape[1] // 32 * 32
        if fits(format, shape):
            assert_products(device, format, shape, dtype, of, rows, plan=fused(*SMALL))


@named("block", BLOCKS)
@interpreted
def test_blocks(device, block):
    """Tiles within a block, tiles of several blocks, and blocks that end with the row, of two blocks or a short one."""
    width = 1032 if 256 < block <= 1024 else 520 if block == 256 else 264
    width += 24  # whole words of codes of 2 and 3 bits too
    for format in (NF4_DQ, INT4_ZERO, INT2_ZERO, INT3, replace(DYNAMIC8, flat=False)):
        for columns, depth in ((128, 64), (32, 128)):
            format = replace(format, block=block)
            assert_products(device, format, (40, width), BF16, BF16, 5, plan=fused(16, columns, depth, 4, 2))


@named("splits", [1, 3, 64])
@interpreted
def test_parts_of_a_reduction(device, splits):
    """Programs share a reduction, more of them than steps too; sums have the same bits twice."""
    module = backend(device.type)[1]
    plan = fused(*SMALL, splits)
    for format, shape, stack in ((NF4_DQ, (160, 328), ()), (INT8, (136, 72), (2,))):
        assert_products(device, format, shape, BF16, BF16, 6, stack, plan=plan)
        buffers, spec, _, x, g = operands(device, format, shape, BF16, BF16, 6)
        for f, a in ((module.matmul, x), (module.matmul_t, g)):
            assert torch.equal(f(a, buffers, spec, plan), f(a, buffers, spec, plan))


@interpreted
def test_every_tile(device):
    """Each tile computes both products of a weight that cuts it short."""
    formats = itertools.cycle([NF4_DQ, INT8, INT4_ZERO])
    tiles = {plan[:3]: plan for plan in (*cuda_plans.SMALL, *cuda_plans.LARGE)}
    for plan, format in zip(tiles.values(), formats, strict=False):
        assert_products(device, format, (136, 200), BF16, BF16, plan.rows + 1, plan=plan)


@named("format", [NF4, NF4_DQ, FP4, INT8, BY_ROWS8])
@interpreted
def test_tile_equals_the_dequantised_weight_to_the_bit(device, format):
    """A row of x with a single 1 picks a column of the weight, and a row of g a row of it."""
    module = backend(device.type)[1]
    buffers, spec, w, *_ = operands(device, format, (96, 128), BF16, BF16, 1)
    assert torch.equal(module.matmul(torch.eye(128, dtype=BF16, device=device), buffers, spec, fused(*SMALL)), w.mT)
    assert torch.equal(module.matmul_t(torch.eye(96, dtype=BF16, device=device), buffers, spec, fused(*SMALL)), w)


@interpreted
def test_infinite_row_next_to_an_edge(device):
    """A row of a weight that is infinite meets no rows beyond the weight, whose products would be NaN."""
    buffers, spec, _, _, g = operands(device, NF4, (65, 128), BF16, BF16, 3)
    buffers[1][-1] = float("inf")
    w = reference.decode(buffers, spec, torch.float32)
    got = backend(device.type)[1].matmul_t(g, buffers, spec, fused(*SMALL))
    wanted = g.float() @ w
    finite = wanted.isfinite()
    assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.isinf(), wanted.isinf()) and not finite.all()


@given(
    format=st.sampled_from(KINDS), block=st.sampled_from(BLOCKS[:6]), dtype=st.sampled_from(FLOATS),
    of=st.sampled_from(FLOATS[1:]), rows=st.integers(1, 40), out=st.integers(1, 80), words=st.integers(1, 40),
    tile=st.tuples(*map(st.sampled_from, ((16, 32), (32, 64), (64, 128)))), splits=st.integers(1, 3),
    stack=st.lists(st.integers(1, 2), max_size=1), seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def _any_product(device, format, block, dtype, of, rows, out, words, tile, splits, stack, seed):
    format = format if format.block is None else replace(format, block=block)
    width = words * (8 if format.bits >= 4 else 32)
    if fits(format, (out, width)):
        assert_products(device, format, (out, width), dtype, of, rows, stack, seed, fused(*tile, 4, 3, splits))


@interpreted
def test_any_product(device):
    _any_product(device=device)


@interpreted
def test_rows_with_gaps_and_weights_that_are_cut(device):
    buffers, spec, w, x, _ = operands(device, NF4, (24, 256), BF16, BF16, 20)
    wide = torch.cat([x, x], -1)[:, : x.shape[1]]
    module, plan = backend(device.type)[1], fused(*SMALL)
    for rows in (wide, shifted(x)):
        assert_product(module.matmul(rows, buffers, spec, plan), x, w.mT)
    some, spec = [buffers[0][3:, 32:96], buffers[1][3:, 1:3]], spec._replace(shape=(21, 128))
    assert_product(module.matmul(x[:, 64:192], some, spec, plan), x[:, 64:192], w[3:, 64:192].mT)


@interpreted
def test_plan_that_cannot_compute(device):
    """A plan for tensor cores refuses float32 and rows that are not whole words, and names a way out."""
    module = backend(device.type)[1]
    for shape, of in (((8, 64), torch.float32), ((8, 33), BF16)):
        buffers, spec, _, x, _ = operands(device, NF4, shape, BF16, of, 2)
        with pytest.raises(ValueError, match="Fused.*wanted rows of whole 32-bit words.*leave the plan out"):
            module.matmul(x, buffers, spec, fused(*SMALL))
        assert packed_ops.matmul(x, buffers, spec).shape == (2, 8)
