"""Kills at random moments: a run goes on at another size and ends with the adapter of one that was not disturbed."""

import pytest

from tests.bench import faults
from tests.bench.faults import kills

# Most faults kill a rank, which is the cheapest: the launcher goes on. Each of the others is there once.
MOSTLY_RANKS = ("launcher", "all", "sigterm", "freeze", *["rank"] * 16)


def check(found, count):
    assert found.failures == []
    judged = faults.of_kills(found, count).wanted[: -len(found.named)]  # the others are of times
    assert [wanted for wanted in judged if not wanted.met] == []


def test_twenty_faults(tmp_path):
    """The short form of the benchmark: every kind of fault, on two ranks and on three."""
    found = kills.measure(tmp_path / "runs", 20, 0, print, MOSTLY_RANKS, ("fsdp=2", "dp=3"), within=0.2)
    check(found, 20)
    assert found.faults == {kind: MOSTLY_RANKS.count(kind) for kind in kills.KINDS}


@pytest.mark.slow
def test_twenty_faults_of_each_kind_alike(tmp_path):
    check(kills.measure(tmp_path / "runs", 20, 0), 20)
