"""The benchmark of products in order: refusals, and a small run from the command line."""

import pytest

from tests.bench import batch_invariant

SMALL = "--tokens 12 --batch 3 --dim 64 --vocab 96 --rank 4 --repeats 1 --threads 1".split()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--rank", "0"], "--rank is 0; wanted at least 1"),
        (["--tokens", "10", "--batch", "4"], "--tokens is 10; wanted a multiple of --batch, 4"),
    ],
)
def test_bad_options(capsys, given, message):
    assert batch_invariant.main(given) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("dtype", batch_invariant.DTYPES)
def test_a_small_run(capsys, dtype, monkeypatch):
    monkeypatch.setattr(batch_invariant, "WIDTHS", (64, 512))
    assert batch_invariant.main([*SMALL, "--dtype", dtype]) == 0
    shown = capsys.readouterr().out
    options = batch_invariant.Options(tokens=12, batch=3, dim=64, vocab=96, rank=4)
    assert all(name in shown for name in batch_invariant.operands(options))
    for few in (1, 4, 6):
        assert f"{few} of 12 rows, in order: 0 of 16 products have other bits" in shown
        assert f"{few} of 12 rows, torch: " in shown
