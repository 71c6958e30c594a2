"""Products of integers compiled ahead of time for three generations of devices, at the shapes of a model of 8B."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from fquant.format import INT2, INT3, INT4, INT4_ZERO, INT8, INT8_ROW, INT8_ROW_ZERO, NF4_INT8
from fquant.kernels import integer_plans
from fquant.kernels.spec import Spec, layout
from tests.helpers.arrays import named
from tests.helpers.cases import slow_after
from tests.helpers.kernels.ahead_of_time import (
    TARGETS,
    assert_exact,
    assert_fits,
    compiled_for,
    loop_of_products,
    uses,
)

if find_spec("triton") is None:
    pytest.skip("triton is not installed; pip install triton", allow_module_level=True)
pytestmark = pytest.mark.xdist_group("interpreter")
each_target = pytest.mark.parametrize("target", TARGETS)
OUT, WIDTH = 4096, 14336
PRODUCTS = {  # of signed bytes; few rows are multiplied by the older instruction everywhere
    80: ("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32",),
    90: ("wgmma.mma_async.sync.aligned.m64n", "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"),
    100: ("tcgen05.mma.cta_group::1.kind::i8", "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"),
}


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled(target, format, act, plan=None, rows=512):
    """Compile the product with a packed weight, or without a format the one of two dense operands."""
    from fquant.kernels import triton

    with compiled_for(target) as reports:
        if format is None:
            triton.integer_mm(meta(rows, WIDTH), meta(OUT, WIDTH), act, act, plan)
        else:
            spec = Spec(format, (OUT, WIDTH), torch.bfloat16)
            buffers = [meta(*shape, dtype=dtype) for _, shape, dtype in layout(spec)]
            triton.integer_matmul(meta(rows, WIDTH), buffers, spec, act, plan)
    *rows_of, product = reports
    assert [r.name for r in rows_of] == ["_quantize"] * (2 if format is None else 1) and product.name == "_multiply"
    return reports


def assert_integers(target, reports):
    for report in reports:
        assert_fits(report)
        assert_exact(report)
    assert any(name in reports[-1].ptx for name in PRODUCTS[target]), "no product of signed bytes by tensor cores"


@each_target
@named("format", slow_after(2, [None, INT4_ZERO, INT8_ROW, INT2, INT3, NF4_INT8]))
def test_chosen_plans(target, format):
    """One row and a batch, with zero points of rows and without."""
    for rows, act in ((1, INT8_ROW), (512, INT8_ROW_ZERO)):
        assert_integers(target, compiled(target, format, act, rows=rows))


@each_target
def test_codes_are_copied_asynchronously(target):
    """Words of 16 bytes of 4-bit codes go to shared memory steps ahead, and no code is converted by itself."""
    report = compiled(target, INT4, INT8_ROW, integer_plans.FEW)[-1]
    assert "cp.async.cg.shared.global [ %" in report.ptx and ", 0x10," in report.ptx
    assert uses(report, "cp.async.commit_group") and not uses(report, "cvt.f32.s8", "cvt.rn.f32.s8")


@each_target
@pytest.mark.slow
@named("act", [INT8_ROW, INT8_ROW_ZERO])
@named("format", [None, INT8, INT8_ROW, INT4_ZERO, INT2, INT3, NF4_INT8, replace(INT4_ZERO, name="16", block=16)])
def test_every_plan(target, format, act):
    for plan in integer_plans.candidates(format and format.block, target, format is None):
        assert_integers(target, compiled(target, format, act, plan))


@each_target
@pytest.mark.slow
def test_counted_instructions_of_the_estimates(target):
    """No step takes more instructions than its estimate says, and none has 0.6 of them."""
    kinds = [None, INT8_ROW, INT4_ZERO, replace(INT4_ZERO, block=64)]
    for plan, wanted in integer_plans.COUNTED[target].items():
        for format, most in zip(kinds, wanted, strict=False):
            counted = loop_of_products(compiled(target, format, INT8_ROW, plan)[-1])
            assert most * 0.6 < counted <= most, (plan, format, counted)
