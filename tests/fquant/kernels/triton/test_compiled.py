"""The CUDA kernels compiled ahead of time for three generations of devices, at the shapes of a model of 8B."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from fquant.format import DYNAMIC8, INT4_ZERO, INT8, NF4, NF4_DQ
from fquant.kernels.spec import Spec, layout
from tests.helpers.kernels.ahead_of_time import TARGETS, assert_exact, assert_fits, compiled_for, opcodes

if find_spec("triton") is None:
    pytest.skip("triton is not installed; pip install triton", allow_module_level=True)
pytestmark = [pytest.mark.xdist_group("interpreter"), pytest.mark.parametrize("target", TARGETS)]
SHAPE = (4096, 14336)
BF16 = torch.bfloat16


def buffers(spec):
    """Return buffers of ``spec`` that have no memory."""
    return [torch.empty(shape, dtype=dtype, device="meta") for _, shape, dtype in layout(spec)]


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_codecs_and_draws(target):
    """Products and sums are not fused, denormals are kept, and no registers spill."""
    from fquant.kernels import triton

    spec = Spec(NF4_DQ, SHAPE, BF16)
    zero, flat = spec._replace(format=INT4_ZERO), spec._replace(shape=(7, 99))
    with compiled_for(target) as reports:
        for format in (NF4, INT8, DYNAMIC8):
            triton.encode(meta(*SHAPE), format)
        for some in (spec, spec._replace(format=replace(INT8, center=True)), flat, zero):
            triton.decode(buffers(some), some, BF16)
        key = meta(3, dtype=torch.int64)
        triton.fold(key, key)
        triton.bits(key, (4096,))
        triton.bernoulli(key, 2**31, (4096,))
    assert [r.name for r in reports] == ["_encode"] * 3 + ["_decode"] * 4 + ["_fold"] + ["_draw"] * 2
    for report in reports:
        assert_fits(report)
        assert_exact(report)


def test_few_rows(target):
    """One row and many: decoded as the reference does, multiplied by tensor cores, copied 16 bytes at a time."""
    from fquant.kernels import triton

    with compiled_for(target) as reports:
        for format in (NF4_DQ, INT4_ZERO, INT8):
            spec = Spec(format, SHAPE, BF16)
            for rows in (1, 16, 64):
                triton.matmul(meta(rows, SHAPE[1]), buffers(spec), spec)
    assert [r.name for r in reports] == ["_few"] * 9
    for report in reports:
        assert_fits(report)
        assert_exact(report)
        assert opcodes(report)["HMMA"]
        assert "cp.async.cg.shared.global [ %" in report.ptx and ", 0x10," in report.ptx
