"""Kills at random moments: a run goes on at another size and ends with the adapter of one that was not disturbed."""

import pytest

from tests.bench import faults
from tests.bench.faults import kills


def check(found, count):
    assert found.failures == []
    assert [wanted for wanted in faults.of_kills(found, count).wanted[:-1] if not wanted.met] == []


def test_two_kills(tmp_path):
    """A rank and a launcher are killed, on two ranks; the run ends on one."""
    found = kills.measure(tmp_path / "runs", 2, 0, print, ("rank", "launcher"), ("fsdp=2", "fsdp=1"), 40)
    check(found, 2)
    assert found.faults == {"rank": 1, "launcher": 1} and found.named["rank"]


@pytest.mark.slow
def test_twenty_faults(tmp_path):
    check(kills.measure(tmp_path / "runs", 20, 0), 20)
