"""Grouped products in Triton: each group equals its own product, and the host never reads the counts.

Tests marked ``interpreted`` run in Triton's interpreter, or on the card of ``--device``
(tests/helpers/kernels/interpreter.py).
"""

import importlib
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fquant import quantize, tree
from fquant.format import INT2_ZERO, INT3, INT4_ZERO, INT8, NF4, NF4_DQ
from fquant.kernels import grouped_ops
from fquant.kernels.cuda_plans import grouped_plan
from fquant.kernels.spec import Spec
from fquant.packed import buffers, dequantize
from tests.helpers.arrays import randn
from tests.helpers.kernels.interpreter import interpreted, interpreter  # noqa: F401
from tests.helpers.kernels.rounding import assert_product

if find_spec("triton") is None:
    pytest.skip("triton is not installed; pip install triton", allow_module_level=True)
pytestmark = pytest.mark.xdist_group("interpreter")
named = partial(pytest.mark.parametrize, ids=lambda x: str(getattr(x, "name", x)).removeprefix("torch."))
BF16 = torch.bfloat16
COUNTS = [5, 0, 1, 20, 0, 7]
FORMATS = [
    NF4, NF4_DQ, replace(NF4_DQ, name="centred", center=True), replace(INT4_ZERO, block=32), INT8, INT2_ZERO,
    replace(INT3, block=32),
]  # fmt: skip


def assert_groups(got, counts, of):
    """Compare the rows of each group with ``of(e, rows)``, the factors of its product."""
    start = 0
    for e, count in enumerate(counts):
        rows = slice(start, start + count)
        if count:
            assert_product(got[rows], *of(e, rows), note=(e, count))
        start += count
    assert start == len(got)


def assert_grouped(device, w, x, g, counts, format, apart, plan=None):
    """Check both products of a packed stack: one array of all groups, or an array each."""
    w, x, g, there = (t.to(device) for t in (w, x, g, torch.tensor(counts)))
    p = quantize(w, format) if not apart else tree.map(lambda *t: torch.stack(t), *[quantize(m, format) for m in w])
    spec, values = Spec(p.format, p.shape, p.dtype), dequantize(p).to(x.dtype)
    kernels = importlib.import_module("fquant.kernels.triton.grouped")
    for a, across in ((x, False), (g, True)):
        got = kernels.grouped_matmul(a, there, buffers(p), spec, across, plan)
        one = lambda e, rows, a=a, across=across: (a[rows], values[e] if across else values[e].mT)
        assert_groups(got, counts, one)


@named("format", FORMATS)
@interpreted
def test_packed_stacks(device, format):
    """Empty groups, groups of one row, and groups of several tiles; blocks of nested scales that straddle groups."""
    width = 136 if format.bits >= 4 else 160  # rows of whole words
    w = randn(6, 17, width).to(BF16)
    for apart in (False, True):
        if not (format.flat and not apart):
            assert_grouped(device, w, randn(33, width).to(BF16), randn(33, 17).to(BF16), COUNTS, format, apart)


@interpreted
def test_every_tile(device):
    for rows, arch in ((1, 90), (20, 90), (50, 80), (500, 90)):
        plan = grouped_plan(rows, arch)
        w, x, g = (t.to(torch.float16) for t in (randn(2, 40, 72), randn(plan.rows + 2, 72), randn(plan.rows + 2, 40)))
        assert_grouped(device, w, x, g, [1, plan.rows + 1], NF4, True, plan)


@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=5), out=st.integers(1, 70), words=st.integers(1, 9),
    of=st.sampled_from([BF16, torch.float16]), apart=st.booleans(), format=st.sampled_from(FORMATS[:2]),
)  # fmt: skip
@settings(max_examples=6, deadline=None)
def _any_groups(device, counts, out, words, of, apart, format):
    rows = sum(counts)
    if rows:
        w, x, g = randn(len(counts), out, 8 * words), randn(rows, 8 * words), randn(rows, out)
        assert_grouped(device, w.to(BF16), x.to(of), g.to(of), counts, format, apart)


@interpreted
def test_any_groups(device):
    _any_groups(device)


@interpreted
def test_dense_stacks_and_outer_products(device):
    """Both orientations, an outer product with zeros of empty groups, and operands with gaps between rows."""
    counts = torch.tensor(COUNTS, device=device)
    for dtype in (BF16, torch.float16):
        w, x, g = (t.to(device, dtype) for t in (randn(6, 70, 90), randn(33, 180), randn(33, 70)))
        x = x[:, :90]
        for a, across in ((x, False), (g, True)):
            got = grouped_ops.dense(a, counts, w, across)
            assert_groups(got, COUNTS, lambda e, r, a=a, w=w, across=across: (a[r], w[e] if across else w[e].mT))
        got, start = grouped_ops.outer(g, x, counts), 0
        for e, count in enumerate(COUNTS):
            assert_product(got[e], g[start : start + count].mT, x[start : start + count], note=e)
            start += count
        assert not got[1].any() and not got[4].any()


@interpreted
def test_ops_leave_the_counts_to_the_device(device):
    """The ops call the kernels without a number of the counts, and other dtypes keep the loop of the host."""
    with pytest.MonkeyPatch.context() as patch:

        def refused(self):
            raise AssertionError("the host reads the counts")

        patch.setattr(torch.Tensor, "tolist", refused)
        w, x, counts = (t.to(device) for t in (randn(2, 16, 64), randn(5, 64), torch.tensor([2, 3])))
        p = quantize(w.to(BF16), NF4)
        args = counts, buffers(p), Spec(p.format, p.shape, p.dtype)
        assert grouped_ops.packed(x.to(BF16), *args).shape == (5, 16)
        assert grouped_ops.dense(x.to(BF16), counts, w.to(BF16)).shape == (5, 16)
        assert grouped_ops.outer(x.to(BF16), x.to(BF16), counts).shape == (2, 64, 64)
        with pytest.raises(AssertionError, match="the host reads the counts"):
            grouped_ops.packed(x, *args)


@interpreted
def test_counts_of_other_rows_are_an_assertion_of_the_device():
    """Where the host reads them it raises an error. An assertion that fails on a card ends the use of the card."""
    w, x = randn(2, 16, 64).to(BF16), randn(5, 64).to(BF16)
    for counts in ([2, 2], [6, -1]):
        with pytest.raises(RuntimeError, match="grouped_mm got counts for other rows; wanted .* add up to 5"):
            grouped_ops.dense(x, torch.tensor(counts), w)
        with pytest.raises(ValueError, match="grouped_mm got counts of 4 rows|of 5 rows, the least -1"):
            grouped_ops.dense(x.float(), torch.tensor(counts), w.float())


@interpreted
def test_nothing(device):
    p = quantize(randn(2, 16, 64).to(device, BF16), NF4)
    counts, spec = torch.tensor([0, 0], device=device), Spec(p.format, p.shape, p.dtype)
    no_rows = lambda n: torch.empty(0, n, dtype=BF16, device=device)
    assert grouped_ops.packed(no_rows(64), counts, buffers(p), spec).shape == (0, 16)
    assert not grouped_ops.outer(no_rows(8), no_rows(9), counts).any()
