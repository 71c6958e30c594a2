"""The table of optimisers: every figure is there, and bytes are those of the formats; no time is judged."""

import json

import pytest

from tests.bench import optimisers
from tests.bench.optimisers import Options


def test_every_figure_is_there(tmp_path, capsys):
    path = tmp_path / "optimisers.json"
    assert optimisers.main(["--size", "8192", "--repeats", "1", "--json", str(path)]) == 0
    rows = {row["name"]: row["figures"] for row in json.loads(path.read_text())["rows"]}
    names = ("8 bits", "4 bits", "fp8", "f32", "torch", "bitsandbytes")
    assert all(tuple(row) == names and min(row.values()) > 0 for row in rows.values())
    wanted = {"8 bits": 2 + 8 / 256, "4 bits": 1 + 8 / 128, "fp8": 2 + 8 / 256, "f32": 8, "torch": 8, "bitsandbytes": 2}
    assert rows["state"] == pytest.approx(wanted, rel=0.02)
    text = capsys.readouterr().out
    assert "AdamW, 8192 elements" in text and all(name in text for name in (*names, "of torch's bytes"))


@pytest.mark.parametrize(
    "args, message",
    [
        (["--size", "100"], "optimisers: --size is 100; wanted at least 4096"),
        (["--repeats", "0"], "optimisers: --repeats is 0; wanted at least 1"),
        (["--json", "nowhere/a.json"], "optimisers: --json nowhere/a.json: wanted a file, in a folder that exists"),
    ],
)
def test_bad_options(args, message, capsys):
    assert optimisers.main(args) == 2
    assert capsys.readouterr().err.strip() == message
    assert Options().check() is None
