"""The table of formats: every figure is there and equals its definition; nothing is timed."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fquant import AQ_3X8, NF4, dequantize, quantize, random
from fquant.format import FORMATS
from tests.bench import formats as program
from tests.bench.formats import Options, speeds
from tests.bench.formats import errors as formats
from tests.bench.formats.errors import COLUMNS

TINY = replace(speeds.CFG, vocab=64, dim=64, num_heads=2, num_kv_heads=2, head_dim=32, hidden=96)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "formats.json"
    command = [sys.executable, "-m", "tests.bench.formats", "--only", "errors", "--dim", "128", "--tokens", "64"]
    command += ["--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


def test_every_figure_is_there(found):
    figures, text = found
    assert set(COLUMNS) == {*FORMATS, "aq_2x8+i", "aq_3x8+i"}
    rows = {row["name"]: row["figures"] for row in figures["rows"]}
    assert list(rows) == [f"{kind}: {row}" for kind in formats.WEIGHTS for row in ("bits", "weights", "outputs")]
    assert all(tuple(row) == COLUMNS and min(row.values()) > 0 for row in rows.values())
    assert "weights 128 x 128, 64 inputs, seed 0" in text and all(name in text for name in [*COLUMNS, *rows])
    bits = {"int4_zero": 4 + 64 / 128, "mxfp4": 4 + 8 / 32 + 32 / 128**2, "fp8": 8.25}
    bits |= {"nf4": 4.5, "fp4": 4.5, "int8": 8 + 32 / 128, "aq_2x8": 2 + (128 * 32 + 2 * 256 * 8 * 32) / 128**2}
    assert all(rows[f"{kind}: bits"][name] == size for kind in formats.WEIGHTS for name, size in bits.items())


@pytest.mark.parametrize("kind", formats.WEIGHTS)
def test_errors_are_what_they_say(found, kind):
    rows = {row["name"]: row["figures"] for row in found[0]["rows"]}
    key = random.fold(random.key(0), kind)
    w = formats.WEIGHTS[kind](key, 128).double()
    seen, held = (t.double() for t in formats.inputs(random.fold(key, "inputs"), 64, 128))
    for name, format, importance in (("nf4", NF4, None), ("aq_3x8+i", AQ_3X8, seen.square().mean(0).float())):
        q = dequantize(quantize(w.float(), format, importance)).double()
        of_weights = 100 * ((w - q).square().sum() / w.square().sum()).sqrt()
        of_outputs = 100 * ((held @ (w - q).T).square().sum() / (held @ w.T).square().sum()).sqrt()
        assert rows[f"{kind}: weights"][name] == pytest.approx(of_weights.item(), rel=1e-4)
        assert rows[f"{kind}: outputs"][name] == pytest.approx(of_outputs.item(), rel=1e-4)


def test_what_is_quantised():
    key = random.key(3)
    w, tails = formats.normal(key, 256), formats.heavy(key, 256)
    kurtosis = lambda t: (t.pow(4).mean() / t.square().mean().square()).item()
    assert 2.9 < kurtosis(w) < 3.1 and kurtosis(tails) > 6
    seen, held = formats.inputs(key, 512, 128)
    assert not torch.equal(seen, held)
    sizes = seen.square().mean(0)
    both = torch.stack([sizes.log(), held.square().mean(0).log()])
    assert sizes.max() > 20 * sizes.min() and torch.corrcoef(both)[0, 1] > 0.9


@pytest.mark.parametrize(
    "args, message",
    [
        (["--dim", "0"], "formats: --dim is 0; wanted at least 1"),
        (["--tokens", "-1"], "formats: --tokens is -1; wanted at least 1"),
        (["--json", "nowhere/a.json"], "formats: --json nowhere/a.json: wanted a file, in a folder that exists"),
    ],
)
def test_bad_options(args, message, capsys):
    assert program.main(args) == 2
    assert capsys.readouterr().err.strip() == message
    assert Options().check() is None


def test_every_timed_row_is_there_beside_its_bounds():
    tables = list(speeds.measure(rows=8, width=128, repeats=1, cfg=TINY))
    rows = [row for _, found in tables for row in found]
    products = [f"{name} 8 x 128 x 128" for name in ("dynamic int8", "dynamic int4", "mixed-int8")]
    names = [*products, "one row", "error of nf4 as int8 beside nf4"]
    assert [row.name for row in rows] == [*names, "training step"]
    assert all(min(row.figures.values()) > 0 for row in rows) and rows[4].figures["nf4 as int8"] < 3
    assert [w.at_most for row in rows for w in row.wanted] == [*[1 / 1.5] * 3, 1.1, 1.0, *[1 / 1.25] * 3]
    assert all(next(iter(row.figures)) == columns[0] for columns, found in tables for row in found if row.wanted)
