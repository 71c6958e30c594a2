"""The benchmark of faults: refusals, verdicts, damage of files, and mismatches of ranks, in their short forms."""

import random

import pytest

from tests.bench import faults
from tests.bench.faults import bits, damage, kills, mismatches
from tests.bench.faults.mismatches import Outcome

pytestmark = pytest.mark.xdist_group("ranks")
REFUSED = {
    "row": (["--only", "kills", "fire"], "--only fire; wanted some of kills, throughput"),
    "faults": (["--faults", "0"], "--faults is 0; wanted at least 1"),
    "minutes": (["--minutes", "0"], "--minutes is 0.0; wanted a number above 0"),
    "json": (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: wanted a file"),
}


@pytest.mark.parametrize("args, said", REFUSED.values(), ids=REFUSED)
def test_bad_options(args, said, capsys):
    assert faults.main(args) == 2
    assert said in capsys.readouterr().err


def met(part):
    return [wanted.met for wanted in part.wanted]


def test_faults_are_judged():
    good = kills.Found({"rank": 2}, resumed=2, runs=1, identical=1, named={"rank": [0.3, 4.9]})
    bad = kills.Found(
        {"rank": 2}, resumed=1, runs=2, identical=1, wrong_steps=3, processes=1, files=[".a.tmp"], unnamed=["x"],
        temporary=["fquant-00000000"], named={"rank": [0.3, 5.1]},
    )  # fmt: skip
    assert met(faults.of_kills(good, 2)) == [True] * 9 and met(faults.of_kills(bad, 3)) == [False] * 9


def test_damages_and_mismatches_are_judged():
    assert met(faults.of_damage(damage.Found({"base": 3}, refused=3, placed=3))) == [True] * 2
    assert met(faults.of_damage(damage.Found({"base": 3}, refused=2, placed=1, missed=["base: x"]))) == [False] * 2
    assert met(faults.of_mismatches({"a": Outcome(9.9, "error", True)})) == [True] * 3
    assert (
        met(faults.of_mismatches({"a": Outcome(10.1, "error", True), "b": Outcome(None, "hangs", False)}))
        == [False] * 3
    )


@pytest.mark.parametrize("way", damage.WAYS)
def test_damage_changes_the_file(way):
    draw, good, other = random.Random(0), bytes(range(64)) + bytes(64), bytes(range(32)) + bytes(96)
    for _ in range(200):
        bad, _ = damage._damaged(way, good, other, draw)
        assert bad not in (good, other) and len(bad) == len(good) if way != "cut" else len(bad) < len(good)
        if way == "flip":
            assert sum((a ^ b).bit_count() for a, b in zip(good, bad, strict=True)) == 1


def test_damaged_files_are_refused(tmp_path):
    found = damage.measure(tmp_path, 72, seed=1)
    assert found.missed == [] and found.placed == found.refused == 72 == sum(found.damages.values())
    assert set(found.damages) == {"checkpoint", "adapter", "base"}


SHORT = ("one collective fewer", "another order", "a captured step more", "a rank is killed")


@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(x, marks=pytest.mark.slow) for x in mismatches.CASES if x not in SHORT)]
)
def test_mismatches_are_errors_with_both_ranks(name):
    found = mismatches.measure(name)
    assert found.seconds is not None and found.seconds < mismatches.WANTED and found.named, found


def test_ranks_without_an_error_are_told(monkeypatch):
    monkeypatch.setattr(mismatches, "DIES", set())
    assert mismatches.measure("a rank is killed") == Outcome(None, "ranks [1] have no error of a mismatch", False)


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True])
def test_bits(captured):
    wanted = bits.oracle(4)
    assert len(set(wanted)) == 4
    for axes in ({"fsdp": 3}, {"dp": 2, "fsdp": 2}):
        assert bits.measure(axes, captured, 4, wanted) is None
    assert bits.measure({"fsdp": 1}, True, 4, [*wanted[:2], "other", wanted[3]]) == 2
