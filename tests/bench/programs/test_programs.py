"""The benchmark of programs: each runs and equals itself captured in every bit, and the rows and bounds are there."""

import contextlib
import io
import json
import math

import pytest
import torch

from fquant import jit, tree
from tests.bench import programs
from tests.bench.programs.catalogue import PROGRAMS

TINY = 4


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_captured_program_has_the_same_bits(name):
    torch.manual_seed(0)
    fn, args = PROGRAMS[name].make(TINY)
    wanted, captured = tree.leaves(fn(*args)), jit(fn)
    for _ in range(2):
        found = tree.leaves(captured(*args))
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert all(bool(t.isfinite().all()) for t in found)


def test_rows(tmp_path):
    out, options = io.StringIO(), "--programs contrastive pointwise_chain --scale 0.01".split()
    with contextlib.redirect_stdout(out):
        assert programs.main([*options, "--json", str(tmp_path / "a.json")]) == 0
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["name"] for row in rows["memory"]] == ["contrastive", "pointwise_chain"]
    assert [row["name"] for row in rows["time"]] == [
        "contrastive", "contrastive, first", "pointwise_chain", "pointwise_chain, first",
    ]  # fmt: skip
    for kind, columns in (("memory", programs.MEMORY_COLUMNS), ("time", programs.TIME_COLUMNS)):
        for row in rows[kind]:
            assert tuple(row["figures"]) == columns and len(row["wanted"]) == 1 and row["name"] in out.getvalue()
            assert all(math.isfinite(x) for x in row["figures"].values())


BAD = {
    "--programs maml lstn": "--programs lstn; wanted some of maml",
    "--scale 0": "--scale is 0.0; wanted a factor above 0",
    "--json /none/a.json": "--json /none/a.json: wanted a file",
}


@pytest.mark.parametrize("args, message", BAD.items(), ids=BAD)
def test_bad_options(args, message, capsys):
    assert programs.main(args.split()) == 2
    assert message in capsys.readouterr().err
