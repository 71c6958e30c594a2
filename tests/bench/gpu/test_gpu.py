"""The GPU benchmark without a GPU: its options, its tables, and its measurements with the host standing in."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fquant.compile.roofline import DEVICES
from fquant.device import HOST
from fquant.format import NF4_DQ
from tests.bench.gpu import integers, lines, step, table, whole
from tests.bench.gpu.__main__ import COMMANDS, main
from tests.bench.gpu.lines import Item, Result, Session
from tests.helpers.cases import slow_after

ROOT = Path(__file__).parents[3]
H100 = DEVICES["h100"]
TINY = table.Sizes(128, 128, (1, 3), ("nf4_dq",), 1)
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, which would be measured")


@pytest.mark.slow
def test_help_as_a_user_asks_for_it():
    for name in COMMANDS:
        command = [sys.executable, "-m", "tests.bench.gpu", name, "--help"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "--minutes" in done.stdout and "--out" in done.stdout, done.stderr


@no_cuda
@pytest.mark.parametrize("name", ["check", "table", "job", "mesh"])
def test_without_a_device_nothing_is_measured(name, tmp_path, capsys):
    assert main([name, "--out", str(tmp_path / "table.md")]) == 0
    text = (tmp_path / "table.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert rows and all(lines.NO_DEVICE in row for row in rows) and "commit " in text
    assert lines.NO_DEVICE in capsys.readouterr().out


@no_cuda
@pytest.mark.slow
@pytest.mark.parametrize("name", ["step", "large"])
def test_the_plan_stands_without_a_device(name, tmp_path):
    assert main([name, "--out", str(tmp_path / "table.md")]) == 0
    text = (tmp_path / "table.md").read_text()
    assert "of the limit" in text and "GiB" in text and "failed" not in text


BAD = {
    "dim": (["table", "--out-dim", "100"], "--out-dim is 100; wanted a multiple of 128"),
    "rows": (["table", "--rows", "1", "0"], "--rows has 0; wanted at least 1"),
    "folder": (["mesh", "--out", "nowhere/a.md"], "--out nowhere/a.md: wanted a file, in a folder that exists"),
    "minutes": (["job", "--minutes", "0"], "--minutes is 0.0; wanted a number above 0"),
    "card": (["step", "--card", "gtx"], "--card gtx is unknown; wanted one of b200"),
    "model": (["step", "--model", "gpt"], "--model gpt is unknown; wanted one of llama3-8b"),
}


@pytest.mark.parametrize("args, message", BAD.values(), ids=BAD)
def test_bad_option_is_refused(args, message, capsys):
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""


def fail():
    raise RuntimeError("CUDA error: an illegal memory access\nmore")


def test_a_line_that_fails_leaves_the_others(tmp_path, capsys):
    items = [
        Item("a", "1", lambda: Result("2", False)),
        Item("b", measure=fail),
        Item("c", predict=fail, measure=lambda: Result("3", True, {"peer": "4"})),
    ]
    found = lines.run("title", items, Session(HOST, out=tmp_path / "a.md"))
    assert [line.measured for line in found] == ["2", "failed: RuntimeError: CUDA error: an illegal memory access", "3"]
    assert [line.verdict for line in found] == ["missed", "missed", "met"] and lines.status(found) == 1
    head = "|  | wanted | predicted | measured | peer | verdict |"
    assert head in (tmp_path / "a.md").read_text() and "title" in capsys.readouterr().out


def test_what_is_not_begun_says_why():
    broken, over = Session(HOST, is_broken=True), Session(HOST, minutes=0)
    assert lines.judged(Item("a"), broken).measured == lines.BROKEN
    assert lines.judged(Item("a"), over).measured == lines.OVER
    assert lines.judged(Item("a", minutes=3), Session(HOST, minutes=2)).measured == lines.OVER


def test_kernels_with_the_host_standing_in():
    found = [lines.judged(item, Session(HOST)) for item in table.items(TINY, HOST, H100)]
    names = ["quantise nf4_dq", "dequantise nf4_dq", "linear-1 nf4_dq", "linear-3 nf4_dq", "attention"]
    assert [line.name for line in found][:5] == names and len(found) == 9
    assert not [line for line in found if "failed" in line.measured + line.predicted]
    assert "of a copy" in found[1].measured and found[1].verdict in ("met", "missed")
    assert "of bf16" in found[3].measured and "bf16" in found[3].beside and "torch" in found[4].beside


def test_products_of_integers_with_the_host_standing_in():
    found = [lines.judged(item, Session(HOST)) for item in integers.items(TINY, HOST, H100)]
    assert len(found) == 2 * len(integers.FORMATS) + 3 and found[0].name == "integers-1 int8_row"
    assert not [line for line in found if "failed" in line.measured + line.predicted]
    assert all(
        "of bf16" in line.measured and line.predicted.endswith(" ms") and "bf16" in line.beside for line in found
    )


def test_operands_of_int8_training():
    x, w, g = (torch.randn(shape) for shape in ((3, 5), (4, 5), (3, 4)))
    for name, (m, n, k) in integers.orientations(table.Sizes(4, 5, (3,))).items():
        a, b = integers.operands(name, x, w, g)
        assert a.shape == (m, k) and b.shape == (n, k)


@pytest.mark.parametrize("how", slow_after(1, ["captured", "ordered", "without graph", "uncaptured"]))
def test_a_step_with_the_host_standing_in(how):
    items = step.items(step.Case(whole.TINY, 2, 32), HOST, H100, [how], 1e12, None, 1)
    found = [lines.judged(item, Session(HOST)) for item in items]
    assert found[0].verdict == ("missed" if how == "captured" else "met") and "of the limit" in found[0].measured
    assert not [line for line in found if "failed" in line.measured + line.predicted]


def test_lines_of_a_step_that_failed_fail_too():
    items = step.items(step.Case(whole.TINY, 0, 32), HOST, H100, ["captured"], 1e12, None, 1)
    found = [lines.judged(item, Session(HOST)) for item in items]
    assert [line.measured for line in found[1:]] == ["failed: RuntimeError: the step did not run"] * 2


def test_a_replayed_step_is_predicted_to_wait_for_nothing():
    assert step.waiting_nodes(step.Case(whole.TINY, 2, 32)) == []


@pytest.mark.slow
def test_a_mesh_of_one_rank_with_the_host_standing_in():
    assert whole.one_rank(HOST).met and whole.captured(HOST).met


def test_the_files_of_the_fixture_are_found():
    assert all((ROOT / path).is_file() for path in whole.files())


def test_predictions_are_of_copies_and_of_bf16():
    """A product that is bound by arithmetic takes what bf16 takes, and what decoding adds to it."""
    found = {item.name: item.predict() for item in table.items(table.Sizes(formats=("nf4_dq",)), None, H100)}
    assert found["dequantise nf4_dq"].startswith("0.94 of a copy, ")  # 0.85 of the peak, of which a copy reaches 0.9
    rows, n = 4096, 8192 * 8192
    decoding = (2 * n + table.packed_bytes((8192, 8192), NF4_DQ)) / (H100.bandwidth * H100.share.memory)
    bf16 = 2 * rows * n / (H100.flops * H100.share.products)
    assert found["linear-4096 nf4_dq"] == f"{1 + decoding / bf16:.2f} of bf16, {1e3 * (decoding + bf16):.4f} ms"


@pytest.mark.slow
def test_resources_need_no_device(tmp_path):
    pytest.importorskip("triton")
    args = ["--out-dim", "256", "--in-dim", "256", "--rows", "1", "512", "--out", str(tmp_path / "table.md")]
    assert main(["resources", *args]) == 0
    text = (tmp_path / "table.md").read_text()
    assert "_few sm_90" in text and "registers x" in text and "failed" not in text and "missed" not in text
    assert main(["resources", *args, "--card", "l4"]) == 0
    assert "not compiled: l4 is none of sm_80, sm_90, sm_100" in (tmp_path / "table.md").read_text()


@pytest.mark.slow
def test_the_job_with_the_host_standing_in():
    """Both runs are the host's, so no loss differs."""
    assert whole.compared(HOST, 2, "f32").measured.startswith("0.00e+00 ")
