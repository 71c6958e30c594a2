"""The benchmark of decoding: every figure is there, and contestants compute the same; times are not judged here."""

import json

import pytest

from tests.bench.generate import __main__ as bench

pytestmark = pytest.mark.filterwarnings("ignore")  # bitsandbytes and transformers warn of their own deprecations
TINY = ["--dim", "256", "--layers", "1", "--vocab", "512", "--repeats", "1", "--threads", "1", "--prompt", "8"]


def test_every_figure_is_there(tmp_path, capsys):
    path = tmp_path / "g.json"
    assert bench.main([*TINY, "--tokens", "3", "--json", str(path), "--folder", str(tmp_path)]) == 0
    found = json.loads(path.read_text())
    assert [each.name for each in tmp_path.iterdir()] == [path.name]  # the checkpoint is gone
    for row in found["rows"]:
        assert row["figures"]["fquant"] > 0 and row["figures"]["bnb"] > 0
        assert row["wanted"][0][2] == pytest.approx(row["figures"]["fquant"] / row["figures"]["bnb"])
    assert found["cosines"]["bnb"] == pytest.approx(found["cosines"]["fquant"], abs=5e-3)
    assert min(found["cosines"].values()) > 0.95
    text = capsys.readouterr().out
    assert "1 layers of 256, 512 tokens, a prompt of 8; 1 threads" in text and "decode, a token, ms" in text


def test_bad_options(capsys):
    assert bench.main(["--threads", "1000"]) == 2
    assert "generate: --threads is 1000" in capsys.readouterr().err
