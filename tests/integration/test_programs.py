"""Any program, of torch's or ours: captured it is what it is, to the bit, transformed, fused or donated to."""

import random

import pytest

from tests.helpers import programs
from tests.helpers.verbs import VERBS

pytestmark = [
    pytest.mark.usefixtures("twice"),
    pytest.mark.filterwarnings("ignore"),  # of torch, of all that is slow, deprecated or of no elements
]


def many(few, all_of_them):
    """Seeds, of which all but a few are for those who wait."""
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(few, all_of_them))]


@pytest.mark.parametrize("seed", many(10, 1500))
def test_any_program(seed):
    if why := programs.refused(programs.TORCH, random.Random(seed)):
        pytest.skip(why)


@pytest.mark.parametrize("seed", many(3, 400))
def test_any_program_of_verbs(seed):
    if why := programs.refused(VERBS, random.Random(seed)):
        pytest.skip(why)
