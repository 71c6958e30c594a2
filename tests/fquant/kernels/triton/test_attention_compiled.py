"""Attention in Triton compiled ahead of time for three generations of devices, at the shapes of models."""

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from tests.helpers.arrays import named
from tests.helpers.cases import slow_after
from tests.helpers.kernels.ahead_of_time import TARGETS, TENSOR_CORES, assert_fits, compiled_for, uses
from tests.helpers.kernels.attention import planned

if find_spec("triton") is None:
    pytest.skip("triton is not installed; pip install triton", allow_module_level=True)
pytestmark = pytest.mark.xdist_group("interpreter")
F32, BF16, MOST = torch.float32, torch.bfloat16, (64, 128, 256)
FULL = {"window": 512, "cap": 50.0}
PLAIN = {(90, 256): ("_of_keys",), (100, 256): ("_of_keys",)}  # whose tiles are too small for products of four warps
KERNELS = ["_forward", "_delta", "_of_keys", "_of_queries"]
SHAPES = {128: [(4, 32, 8, 2048, 128), (1, 32, 8, 8192, 128)], 64: [(4, 32, 8, 2048, 64)], 256: [(4, 16, 8, 2048, 256)]}
REAL = [(90, 128), (80, 64), *((t, e) for e in MOST for t in TARGETS if (t, e) not in ((90, 128), (80, 64)))]


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def compiled(target, shape, dtype=BF16, documents=False, sinks=False, **options):
    """Return reports of the kernels of a call and its gradients; a long sequence has those of a short one."""
    tiles, (b, h, kv, t, e) = import_module("fquant.kernels.triton.attention_tiles"), shape
    q, k = meta(b, h, t, e, dtype=dtype), meta(b, kv, t, e, dtype=dtype)
    runs, lone = meta(b, t, dtype=torch.int64) if documents else None, meta(b, h, dtype=F32) if sinks else None
    plan = tiles.FLOAT32 if dtype is F32 else next(plan for most, plan in tiles.PLANS[target].items() if e <= most)
    with compiled_for(target) as reports:
        planned(plan)(q, k, k, q, runs, lone, **options)
    return reports


@named(
    "target, most", slow_after(2, [(90, 128), (80, 64), *(case for case in REAL if case not in [(90, 128), (80, 64)])])
)
def test_compiled(target, most):
    """Products are those of tensor cores, and nothing spills, at the shapes of models."""
    for shape in SHAPES[most]:
        reports = compiled(target, shape, **(FULL if most == 256 else {}))
        assert [r.name for r in reports] == KERNELS
        for report in reports:
            assert_fits(report)
            plain = report.name in PLAIN.get((target, most), ())
            assert report.name == "_delta" or uses(report, TENSOR_CORES[80 if plain else target]), report.name
            assert target == 80 or report.name == "_delta" or uses(report, "cp.async.bulk.tensor"), report.name


@named("less", [16, pytest.param(0, marks=pytest.mark.slow)])
@named("target, most", slow_after(1, [(100, 128), *(case for case in REAL if case != (100, 128))]))
def test_compiled_with_every_option(target, most, less):
    """Documents, windows, caps and sinks take registers too; heads of other sizes are masked, which takes more."""
    reports = compiled(target, (2, 8, 4, 2048, most - less), documents=True, sinks=True, **FULL)
    assert [r.name for r in reports if r.name != "_spans"] == KERNELS
    list(map(assert_fits, reports))
    list(map(assert_fits, compiled(target, (2, 8, 4, 2048, most), documents=True, causal=False)))


@named("target", slow_after(1, [90, 80, 100]))
def test_compiled_for_float32(target):
    for options in ({}, FULL):
        for report in compiled(target, (2, 8, 4, 2048, 64), F32, documents=bool(options), **options):
            assert_fits(report)
            assert report.name in ("_spans", "_delta") or uses(report, TENSOR_CORES[80]), report.name
