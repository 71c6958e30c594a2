"""The CUDA kernels compiled ahead of time for three generations of devices, at the shapes of a model of 8B."""

import itertools
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from fquant.format import DYNAMIC8, FP8, INT2_ZERO, INT3, INT4_ZERO, INT8, NF4, NF4_DQ
from fquant.kernels.spec import Spec, layout
from tests.helpers.arrays import named
from tests.helpers.cases import slow_after
from tests.helpers.kernels.ahead_of_time import (
    TARGETS,
    TENSOR_CORES,
    assert_exact,
    assert_fits,
    compiled_for,
    longest_loop,
    uses,
)
from tests.helpers.kernels.moments import FORMATS, many, steps

if find_spec("triton") is None:
    pytest.skip("triton is not installed; pip install triton", allow_module_level=True)
pytestmark = pytest.mark.xdist_group("interpreter")
each_target = pytest.mark.parametrize("target", TARGETS)
SHAPE = (4096, 14336)
BF16 = torch.bfloat16


def buffers(spec):
    """Return buffers of ``spec`` that have no memory."""
    return [torch.empty(shape, dtype=dtype, device="meta") for _, shape, dtype in layout(spec)]


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


@each_target
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


STEPS = [  # moments, rule, dtype of the parameter, key of stochastic rounding
    ("f32", "adamw", torch.float32, None),
    ("f32", "lion", torch.bfloat16, 3),
    ("8", "adamw", torch.bfloat16, None),
    ("8", "sgd", torch.float16, 3),
    ("4", "adam", torch.bfloat16, 3),
]


@pytest.mark.parametrize("target", slow_after(1, TARGETS))
def test_steps_of_optimisers(target):
    """With moments in float32 and packed, and parameters that are rounded to nearest and stochastically."""
    from fquant.kernels import triton

    with compiled_for(target) as reports:
        for formats, rule, dtype, key in STEPS:
            name, args = next(steps(rule, FORMATS[formats], (40, 300), dtype, "nearest", True, key=key))
            getattr(triton, name)(*(t.to("meta") if isinstance(t, torch.Tensor) else t for t in args))
        for formats in ("f32", "4"):
            name, args, _ = many("adamw", FORMATS[formats], (40, 300), torch.float32, True)
            getattr(triton, name)(*(t.to("meta") if isinstance(t, torch.Tensor) else t for t in args))
    assert [report.name for report in reports] == ["_update"] * (len(STEPS) + 2)
    for report in reports:
        assert_exact(report)


@each_target
@named("format", [INT2_ZERO, INT3])
def test_codes_of_2_and_3_bits(target, format):
    """Codes are decoded where those of 4 bits are, and nothing but the product's kernel runs."""
    from fquant.kernels import triton
    from fquant.kernels.cuda_plans import FEW_PLANS, SMALL

    spec = Spec(format, SHAPE, BF16)
    with compiled_for(target) as reports:
        triton.matmul(meta(8, SHAPE[1]), buffers(spec), spec, FEW_PLANS[0])
        triton.matmul_t(meta(16, SHAPE[0]), buffers(spec), spec, SMALL[0])
        triton.decode(buffers(spec), spec, BF16)
    assert [r.name for r in reports] == ["_few", "_multiply", "_decode"]
    assert_multiplies(reports[0], even=format is INT2_ZERO)  # three bytes are no word, and x is permuted
    assert_multiplies(reports[1])
    assert_fits(reports[2])
    assert_exact(reports[2])


FEW = (8, 16, 32)  # rows of a plan


@each_target
@named("turn", slow_after(1, range(3)))  # of a square in which every two of generation, format and plan meet
@named("format", [NF4_DQ, INT4_ZERO, INT8])
def test_few_rows(target, format, turn):
    """One row and many: decoded as the reference does, multiplied by tensor cores, copied 16 bytes at a time."""
    from fquant.kernels import triton
    from fquant.kernels.cuda_plans import FEW_PLANS

    rows = FEW[(TARGETS.index(target) + (NF4_DQ, INT4_ZERO, INT8).index(format) + turn) % 3]
    spec, (plan,) = Spec(format, SHAPE, BF16), (plan for plan in FEW_PLANS if plan.rows == rows)
    with compiled_for(target) as reports:
        triton.matmul(meta(rows, SHAPE[1]), buffers(spec), spec, plan)
    (report,) = reports
    assert report.name == "_few" and len(FEW_PLANS) == 3
    assert_multiplies(report)


def assert_multiplies(report, even=True):
    """Check the resources, that tensor cores multiply what is decoded exactly, and copies of 16 bytes if ``even``."""
    assert_fits(report)
    assert_exact(report)
    assert uses(report, *TENSOR_CORES.values()), "no instruction of tensor cores"
    assert not even or ("cp.async.cg.shared.global [ %" in report.ptx and ", 0x10," in report.ptx)


def products(target, format, shape, rows, plans=(None,), of=BF16):
    """Compile both products of a weight by each of ``plans``, and return the reports of those that multiply."""
    from fquant.kernels import triton

    spec = Spec(format, shape, BF16)
    with compiled_for(target) as reports:
        for plan, m in itertools.product(plans, rows):
            triton.matmul(meta(m, shape[1], dtype=of), buffers(spec), spec, plan)
            triton.matmul_t(meta(m, shape[0], dtype=of), buffers(spec), spec, plan)
    return [report for report in reports if report.name != "_add"]


@each_target
def test_beside_tensor_cores(target):
    """The chosen plans of a model's weight, for x · Wᵀ and g · W, for few rows."""
    found = products(target, NF4_DQ, (14336, 4096), (16, 32, 64))
    for report in (reports := [r for r in found if r.name == "_multiply"]):
        assert_multiplies(report)
    assert len(reports) >= 3


@each_target
def test_groups(target):
    """The experts of a mixture: packed and dense stacks in both orientations, and outer products."""
    from fquant.kernels.triton import grouped

    spec, counts, rows = Spec(NF4_DQ, SHAPE, BF16), meta(8, dtype=torch.int64), 8192
    stack = [torch.empty(8, *t.shape, dtype=t.dtype, device="meta") for t in buffers(spec)]
    with compiled_for(target) as reports:
        for across, width in ((False, SHAPE[1]), (True, SHAPE[0])):
            grouped.grouped_matmul(meta(rows, width), counts, stack, spec, across)
            grouped.grouped_mm(meta(rows, width), counts, meta(8, *SHAPE), across)
        grouped.grouped_outer(meta(rows, SHAPE[0]), meta(rows, SHAPE[1]), counts)
    assert [r.name for r in reports] == ["_multiply"] * 4 + ["_outer"]
    for report in reports:
        assert_multiplies(report)


@each_target
@pytest.mark.slow
@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("format", [NF4_DQ, INT4_ZERO, INT8, FP8, INT2_ZERO, INT3], ids=lambda format: format.name)
def test_every_plan_beside_tensor_cores(target, format, even):
    """Every tile that is a candidate of the generation, for whole tiles, and for weights that end within one."""
    from fquant.kernels.cuda_plans import candidates

    tiles = {plan[:5]: plan for plan in candidates(target, even)}
    reports = products(target, format, (4096, 4096) if even else (4104, 4128), (512,), tiles.values())
    assert [r.name for r in reports] == ["_multiply"] * 2 * len(tiles)
    for report in reports:
        assert_multiplies(report, even)


@each_target
@pytest.mark.slow
def test_counted_instructions_of_the_estimates(target):
    """No tile takes more instructions an element than its estimate says, and none has 0.6 of them; whole reductions."""
    from fquant.kernels.cuda_plans import COUNTED, candidates

    tiles = [plan for plan in candidates(target) if plan.splits == 1]
    reports = products(target, NF4_DQ, (4096, 4096), (512,), tiles)
    for plan, one, other in zip(tiles, reports[::2], reports[1::2], strict=True):
        each = 32 * plan.warps / (plan.columns * plan.depth)
        counted = max(longest_loop(one), longest_loop(other)) * each
        wanted = COUNTED[target][plan.rows, plan.warps]
        assert wanted * 0.6 < counted <= wanted + 0.1, (plan, counted)


def test_generations():
    from fquant.kernels.triton.codes import generation

    for arch, wanted in ((80, 80), (86, 80), (89, 80), (90, 90), (100, 100), (103, 100), (120, 80)):
        with compiled_for(arch):
            assert generation(torch.device("meta")) == wanted
