"""The benchmark of experts: every row, bound and error is there, for any times; nothing here is timed."""

import contextlib
import io
import json
import math

import pytest

from tests.bench import experts

SMALL = (
    "--experts 4 --top 2 --tokens 8 --dim 64 --hidden 64 --threads 1 --repeats 1 --layers 2 --formats nf4 int8".split()
)


def test_rows(tmp_path):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert experts.main([*SMALL, "--cpu-time", "--json", str(tmp_path / "a.json")]) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == [f"{kind}-{name}" for name in ("nf4", "int8") for kind in ("layer", "train", "memory")]
    for name, row in rows.items():
        assert list(row["figures"]) == (["fquant"] if "memory" in name else experts.COLUMNS)
        assert all(math.isfinite(x) and x >= 0 for x in row["figures"].values())
        assert len(row["wanted"]) == ("train" not in name) and name in out.getvalue()
    assert found["title"].startswith("4 experts of 128 x 64 and 64 x 64, top 2, 8 tokens, 1 threads")


BAD = {
    "--tokens 0": "--tokens is 0; wanted at least 1",
    "--formats nf5": "--formats: 'nf5' is unknown; wanted some of nf4",
    "--threads 2 --cpu-time": "--cpu-time counts one thread, and --threads is 2; wanted --threads 1",
    "--threads 9999": "--threads is 9999; wanted 1 to",
}


@pytest.mark.parametrize("args, message", BAD.items(), ids=BAD)
def test_bad_options(args, message, capsys):
    assert experts.main(args.split()) == 2
    assert message in capsys.readouterr().err
