"""The choice among plans of a product: the shortest estimate, and what has no choice."""

import pytest
import torch

from fquant.format import INT8, NF4_DQ
from fquant.kernels import cuda_plans as plans
from fquant.kernels.spec import Spec

SPEC = Spec(NF4_DQ, (14336, 4096), torch.bfloat16)


def chosen(rows, spec=SPEC, dtype=torch.bfloat16, across=False, in_words=True, target=90):
    return plans.plan_for(rows, spec, dtype, across, in_words, target)


TABLE = {  # rows: (x · Wᵀ, g · W), the tile alone
    1: ("Few 8", "Fused 16"), 16: ("Few 16", "Fused 16"), 64: ("Fused 64",) * 2, 128: ("Fused 128",) * 2,
    256: ("Tiled",) * 2, 2048: ("Tiled",) * 2, 4096: ("Tiled",) * 2,
}  # fmt: skip


@pytest.mark.parametrize("rows", TABLE)
def test_the_table(rows):
    """One pass for few rows, tensor cores beside decoding for hundreds, slabs for thousands."""
    for across, name in zip((False, True), TABLE[rows], strict=True):
        plan = chosen(rows, across=across)
        assert name == type(plan).__name__ + ("" if isinstance(plan, plans.Tiled) else f" {plan.rows}"), plan


@pytest.mark.parametrize("target", [80, 90, 100])
def test_chosen_plan_has_the_least_estimate(target):
    """No candidate of the generation is better, by a search that repeats nothing of the choice."""
    for rows, across in ((1, False), (24, True), (100, False), (700, True)):
        args = rows, *(SPEC.shape if across else SPEC.shape[::-1]), 4, target
        kinds = (plans.Fused, plans.Tiled) if across else (plans.Few, plans.Fused, plans.Tiled)
        slabs = plans.slabs(rows, args[1])
        some = [p for p in (*plans.candidates(target), *plans.FEW_PLANS, slabs) if isinstance(p, kinds)]
        found = chosen(rows, across=across, target=target)
        if rows > plans.FEW:
            some = [p for p in some if not isinstance(p, plans.Few)]
        assert isinstance(found, kinds)
        assert plans.estimate(found, *args, across=across) == min(plans.estimate(p, *args, across=across) for p in some)


def test_estimates_rise_with_work_and_fall_with_processors():
    """A longer reduction takes longer by any plan, and a later generation is faster."""
    for plan in (*plans.FEW_SWEPT, *plans.candidates(80), *plans.SLABS):
        for rows in (1, 512):
            small, large = (plans.estimate(plan, rows, depth, 4096, 4, 90) for depth in (4096, 16384))
            assert 0 < small < large
            assert plans.estimate(plan, rows, 4096, 16384, 4, 100) < plans.estimate(plan, rows, 4096, 16384, 4, 80)


def test_estimate_of_slabs_is_the_sum_of_its_parts():
    """8192 rows with a square weight: 2·8192·4096² operations at 0.78 of the peak, and 2.5 bytes an element decoded."""
    operations, moved = 2 * 8192 * 4096**2, 2.5 * 4096**2
    wanted = operations / (0.78 * 4096 * 132 * 1.755e9) + moved / 3e12 + 2 * 2e-6
    assert plans.estimate(plans.Tiled(), 8192, 4096, 4096, 4, 90) == pytest.approx(wanted, rel=1e-12)


def test_slabs_are_larger_for_few_rows_and_long_sums():
    """And another slab costs launches, and a product that does not fill the device."""
    assert plans.slabs(1024, 4096).size == plans.slabs(4096, 28672).size == 2 * plans.slabs(4096, 8192).size
    one, two = (plans.estimate(plans.Tiled(mib << 20), 8192, 8192, 8192, 4, 90) for mib in (128, 64))
    assert two - one == pytest.approx(2 * 2e-6 + 6e-6, rel=1e-9)


def test_without_tensor_cores_or_words_slabs_are_left():
    assert isinstance(chosen(4, in_words=False), plans.Tiled)
    assert isinstance(chosen(4, dtype=torch.float64), plans.Tiled)
    assert isinstance(chosen(4, dtype=torch.float32), plans.Few)
    assert isinstance(chosen(4, dtype=torch.float32, across=True), plans.Tiled)
    assert isinstance(chosen(400, dtype=torch.float32), plans.Tiled)
    assert isinstance(chosen(4, SPEC._replace(format=INT8)), plans.Few)
