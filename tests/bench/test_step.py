"""The comparison of steps: refusals, verdicts, and a small run from the command line."""

import json
import subprocess
import sys

import pytest

from tests.bench import step
from tests.bench.step import Figures, judge, main
from tests.bench.step_sides import SIDES

SMALL = "--layers 1 --dim 64 --hidden 128 --vocab 256 --heads 2 --kv-heads 1 --batch 2 --seq 16 --rank 2".split()


def figures(seconds, over, facts=None):
    return Figures(first=9.0, steps=[seconds, 2 * seconds, seconds / 2], loaded=100.0, peak=100.0 + over, loss=1.0,
                   facts=facts or {})  # fmt: skip


REFUSED = {
    "contestant": (["--only", "fquant", "peft"], "--only peft; wanted some of fquant, fquant remat"),
    "steps": (["--steps", "0"], "--steps is 0; wanted at least 1"),
    "threads": (["--threads", "0"], "--threads is 0; wanted 1 to"),
    "json": (["--json", "/nowhere/x.json"], "--json /nowhere/x.json: wanted a file"),
}


@pytest.mark.parametrize("args, said", REFUSED.values(), ids=REFUSED)
def test_bad_options(args, said, capsys):
    assert main(args) == 2
    assert said in capsys.readouterr().err


def test_what_is_wanted_is_judged():
    """Judge figures on both sides of each bound."""
    facts = {"predicted": 109, "measured": 100, "sent predicted": 7, "sent": 7}
    fast = {
        "fquant": figures(1.0, 35, facts), "fquant eager": figures(1.26, 117), "dense": figures(1.16, 101),
        "bnb": figures(1.2, 100.1), "limit": figures(0.951, 9), "limit on two": figures(0.96, 9),
        "fquant fsdp=2": figures(1.0, 10), "fquant dp=2": figures(0.96, 10), "torchao fsdp=2": figures(1.71, 10),
    }  # fmt: skip
    assert len(judge(fast)) == 10 and all(wanted.met for wanted in judge(fast))
    facts = {"predicted": 111, "measured": 100, "sent predicted": 8, "sent": 7}
    slow = {
        "fquant": figures(1.0, 36, facts), "fquant eager": figures(1.24, 119), "dense": figures(1.14, 101),
        "bnb": figures(1.2, 100.1), "limit": figures(0.949, 9), "limit on two": figures(0.89, 9),
        "fquant fsdp=2": figures(1.0, 10), "fquant dp=2": figures(0.94, 10), "torchao fsdp=2": figures(1.69, 10),
    }  # fmt: skip
    assert len(judge(slow)) == 10 and not any(wanted.met for wanted in judge(slow))
    assert judge({"dense": figures(1.0, 1)}) == []


def test_a_side_that_cannot_take_part_is_named(monkeypatch):
    """Continue the run without a peer that is not installed, or fails."""
    monkeypatch.setattr(step, "PATIENCE", 0.01)
    shape = step.Shape(layers=1, dim=64, hidden=64, vocab=64, heads=2)
    found, missing = step.measure({"limit": SIDES["limit"]}, shape, 1, 1)
    assert found == {} and missing == {"limit": "no answer in 0 s"}


def test_a_process_that_is_killed_is_named():
    """The system kills the largest when memory runs out, while others take their steps."""
    one = step.Contestant(SIDES["limit"], step.Shape(layers=1, dim=64, hidden=64, vocab=64, heads=2), 1)
    one.kill()
    with pytest.raises(step.Failed, match="its process died"):
        one.step()


@pytest.mark.slow
def test_a_small_run(tmp_path):
    """Run every kind of side of ours, one of them on two processes, and the limits."""
    names = ["fquant", "fquant fsdp=2", "limit", "limit on two"]
    command = [sys.executable, "-m", "tests.bench.step", *SMALL, "--steps", "1", "--only", *names]
    done = subprocess.run([*command, "--json", tmp_path / "x.json"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "its share of the limit: " in done.stdout and "bytes sent, as predicted, fquant fsdp=2: met" in done.stdout
    seen = json.loads((tmp_path / "x.json").read_text())
    assert sorted(seen) == sorted(names) and set(names) < set(SIDES)
    assert seen["fquant"]["loss"] == pytest.approx(seen["fquant fsdp=2"]["loss"], rel=1e-3)
    assert all(f["peak"] >= f["loaded"] > 50 and len(f["steps"]) == 1 for f in seen.values())
