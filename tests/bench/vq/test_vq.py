"""The comparison of codebooks: a small run has every figure, and bad options are named; nothing is timed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench import vq

ROOT = Path(__file__).parents[3]
SMALL = "--rows 256 --codes 16 --means 8 --iterations 2 --seeds 1 --repeats 1 --out 64 --width 64".split()


@pytest.mark.slow
def test_a_small_run(tmp_path):
    path = tmp_path / "vq.json"
    command = [sys.executable, "-m", "tests.bench.vq", *SMALL, "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row["figures"] for row in json.loads(path.read_text())["rows"]}
    assert set(rows) == set(vq.ROWS)
    peers = {
        name: "vq" if name in vq.ROWS[:6] else "faiss" if name[:5] in ("learn", "error") else "decode" for name in rows
    }
    assert all({"fquant", peers[name]} <= set(row) for name, row in rows.items())
    assert all(figure > 0 for row in rows.values() for figure in row.values())
    assert all(name in done.stdout for name in (*vq.ROWS, "256 x 64 rows, 16 codes"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rows 0", "--rows is 0; wanted at least 1"),
        ("--rows 4 --means 5", "--means is 5 for 4 rows; wanted at most as many"),
        ("--only update upset", "--only: there is no row 'upset'; wanted some of encode"),
    ],
)
def test_bad_options(options, message, capsys):
    assert vq.main(options.split()) == 2
    assert message in capsys.readouterr().err
