"""The choice among tiles of products of integers: the shortest estimate."""

import pytest

from fquant.kernels import integer_plans as plans

DEPTH, WIDTH = 4096, 14336


@pytest.mark.parametrize("target", [80, 90, 100])
@pytest.mark.parametrize("bits, block, dense", [(8, None, False), (8, None, True), (4, 128, False), (2, 64, False)])
def test_chosen_plan_has_the_least_estimate(target, bits, block, dense):
    """No candidate of the generation is better, and a plan for many rows has more of them than one for few."""
    found = []
    for rows in (1, 40, 300, 5000):
        args = rows, DEPTH, WIDTH, bits, block, target, dense
        some = [plan for plan in plans.CANDIDATES if len(plans.COUNTED[target].get(plan, ())) > (0 if dense else 1)]
        some = [plan for plan in some if block is None or dense or len(plans.COUNTED[target][plan]) == 4]
        found.append(plans.plan_for(*args))
        assert found[-1] in some
        assert plans.estimate(found[-1], *args) == min(plans.estimate(plan, *args) for plan in some)
    assert found[0].rows == 16 < found[-1].rows


def test_estimates_rise_with_work_and_fall_with_processors():
    for plan in (plans.FEW, plans.SOME, plans.HALF):
        for bits, block in ((8, None), (4, 128), (4, 16)):
            small, large = (plans.estimate(plan, 512, depth, WIDTH, bits, block, 90) for depth in (4096, 16384))
            assert 0 < small < large
            slow = plans.CARDS[90]._replace(processors=33)
            assert plans.estimate(plan, 512, DEPTH, WIDTH, bits, block, 90, card=slow) > small


def test_smaller_blocks_take_longer():
    """Each block is scaled for itself, so instructions rise by the same number with each block of a step."""
    count = lambda block: plans.instructions(plans.HALF, block, 90)
    each = plans.COUNTED[90][plans.HALF][3] - plans.COUNTED[90][plans.HALF][2]
    assert [count(block) - count(128) for block in (64, 32, 16)] == [each, 3 * each, 7 * each] and each > 0
    assert count(None) <= count(4096) <= count(128)
    assert plans.candidates(16, 90) == [plans.FEW_WIDE] and len(plans.candidates(32, 90)) > 1


def test_one_row_of_4_bits_is_bound_by_memory_or_nearly():
    """4096 x 14336 codes on an H100: 29 MB in 9.8 us, and two launches."""
    args = 1, DEPTH, WIDTH, 4, 128, 90
    seconds = plans.estimate(plans.plan_for(*args), *args) - 2 * plans.LAUNCH
    assert 1 <= seconds / (DEPTH * WIDTH / 2 / plans.CARDS[90].bandwidth) < 1.6
