"""plan --trace: the predicted step of a mesh, node by node, as a picture and as a trace."""

import json

import pytest

from examples.plan import cli
from models.config import Config
from models.hf.config import to_hf

CFG = Config(256, 64, 1, 4, 2, 16, 128, max_positions=4096)


@pytest.fixture
def options(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_hf(CFG) | {"torch_dtype": "float32"}))
    return ["--model", str(tmp_path), *"--mesh fsdp=2 fsdp=1 --seq 16 --device h100 --json --trace".split()]


def test_the_trace_of_the_first_mesh(options, tmp_path, capsys):
    """Its computation takes the predicted seconds, and collectives are beside it."""
    assert cli.main([*options, str(tmp_path / "step")]) == 0
    row, _ = map(json.loads, capsys.readouterr().out.splitlines())
    entries = json.loads((tmp_path / "step" / "trace.json").read_bytes())["traceEvents"]
    spans = [e for e in entries if e["ph"] == "X"]
    assert sum(e["dur"] for e in spans if e["tid"] == 0) == pytest.approx(1e6 * row["seconds"])
    assert {e["tid"] for e in spans} == {0, 1}
    assert (tmp_path / "step" / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_is_no_folder(options, tmp_path, capsys):
    assert cli.main([*options, str(tmp_path / "config.json")]) == 2
    assert "config.json: is a file; wanted a folder" in capsys.readouterr().err
