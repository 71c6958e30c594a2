"""The program of training curves: every mode takes steps, its table and picture are written, bad options are named."""

import json

import pytest

from tests.bench import training_curves
from tests.bench.training_curves import DISTANCES, Options

TEXTS = [f"def f{i}(x):\n    return x + {i * i}\n" * 20 for i in range(40)]


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(training_curves.pretrain, "documents", lambda: TEXTS)


def run(tmp_path, modes):
    options = ["--steps", "3", "--rows", "2", "--seq", "16", "--out", str(tmp_path / "curves.png")]
    code = training_curves.main([*options, "--json", str(tmp_path / "curves.json"), "--modes", *modes])
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    found = json.loads((tmp_path / "curves.json").read_text())
    return code, found["curves"]


def test_few_steps(few, tmp_path, capsys):
    code, curves = run(tmp_path, ["full", "again", "adam8"])
    assert code == 0 and {len(y) for y in curves.values()} == {3}
    assert curves["full"] == pytest.approx(curves["again"], abs=1e-3) and curves["full"] != curves["again"]
    printed = capsys.readouterr().out
    assert "adam8" in printed and "above full, at most" in printed


@pytest.mark.slow
def test_every_mode(few, tmp_path):
    _, curves = run(tmp_path, ["full", *DISTANCES])
    assert set(curves) == {"full", *DISTANCES}
    for name, losses in curves.items():
        assert losses == pytest.approx(curves["full"], abs=0.2), name
    assert len({tuple(losses) for losses in curves.values()}) == len(curves)


def test_a_step_has_rows_of_many_documents(few):
    options = Options(steps=4, rows=3, seq=16)
    first, again = training_curves.batches(options), training_curves.batches(options)
    assert [tuple(b.shape) for b in first] == [(3, 17)] * 4
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    with pytest.raises(ValueError, match="--steps 100000: the documents have"):
        training_curves.batches(Options(steps=100000))


FAULTS = {
    "--modes full int9": "--modes: ",
    "--modes int8": "--modes: wanted full and some of",
    "--steps 0": "--steps is 0; wanted at least 1",
}


@pytest.mark.parametrize("args", FAULTS)
def test_bad_options_are_named(args, capsys):
    assert training_curves.main(args.split()) == 2
    assert FAULTS[args] in capsys.readouterr().err
