"""The benchmark of loading: every figure is there, memory keeps its bound; times are not judged here."""

import json

import pytest

from fquant import NF4_DQ, tree
from models import hf
from tests.bench.loading import __main__ as loading
from tests.bench.loading.__main__ import Options

TINY = ["--dim", "256", "--layers", "1", "--vocab", "512", "--repeats", "1", "--threads", "1"]


def bench(path, *flags):
    assert loading.main([*flags, "--json", str(path), "--folder", str(path.parent)]) == 0
    found = json.loads(path.read_text())
    assert [each.name for each in path.parent.iterdir()] == [path.name]  # the checkpoint is gone
    return {row["name"]: row for row in found["rows"]}


def test_every_figure_is_there(tmp_path, capsys):
    rows, text = bench(tmp_path / "l.json", *TINY), capsys.readouterr().out
    assert list(rows) == ["warm", "cold", "processor", "memory"] and "parameters in bf16 to nf4_dq, 1 threads" in text
    for name in ("warm", "cold", "processor"):
        assert list(rows[name]["figures"]) == ["load", "read", "kernels"] and min(rows[name]["figures"].values()) > 0
        of_floor = rows[name]["figures"]["load"] / (rows[name]["figures"]["read"] + rows[name]["figures"]["kernels"])
        assert rows[name]["wanted"][0][2] == pytest.approx(of_floor)
    assert list(rows["memory"]["figures"]) == ["load", "result", "largest tensor", "largest quantised"]


def test_what_is_loaded(tmp_path):
    options = Options(dim=256, layers=1, vocab=512)
    loading.write(tmp_path / "model", options.config())
    params = loading.load(tmp_path / "model", NF4_DQ)
    assert params.layers[0].down.format == NF4_DQ and params.layers[0].down.shape == (256, 704)
    _, dense = hf.load(tmp_path / "model")
    assert params.embed.equal(dense.embed) and 0.019 < dense.embed.float().std() < 0.021
    assert loading.kernels(tmp_path / "model", NF4_DQ) > 0
    assert tree.nbytes(params.layers[0].q) == 256 * 256 // 2 + 1024 + 4 * 4 + 4


@pytest.mark.slow
@pytest.mark.parametrize("format", ["nf4_dq", "int8", "fp8"])
def test_memory_is_the_result_and_the_largest_tensor(tmp_path, format):
    """Load 160 M parameters in a new process; the largest tensor is the embedding, of 64 MiB.

    glibc keeps up to some tens of MiB of holes in its heap, so with small tensors the bound would be on these.
    """
    flags = ["--dim", "1024", "--layers", "8", "--vocab", "32768", "--repeats", "1", "--threads", "1"]
    rows = bench(tmp_path / "l.json", *flags, "--format", format)
    figures, (wanted,) = rows["memory"]["figures"], rows["memory"]["wanted"]
    assert figures["largest tensor"] == 64 and figures["result"] > 150
    assert wanted[1] and wanted[2] <= 1.2, figures


@pytest.mark.parametrize(
    "args, message",
    [
        (["--dim", "100"], "loading: --dim is 100; wanted a multiple of 256"),
        (["--layers", "0"], "loading: --layers is 0; wanted at least 1"),
        (["--format", "nf5"], "loading: --format is nf5; wanted one of nf4, nf4_dq"),
        (["--folder", "nowhere"], "loading: --folder nowhere: wanted a folder that exists"),
        (["--json", "nowhere/a.json"], "loading: --json nowhere/a.json: wanted a file, in a folder that exists"),
    ],
)
def test_bad_options(args, message, capsys):
    assert loading.main(args) == 2
    assert capsys.readouterr().err.startswith(message)
