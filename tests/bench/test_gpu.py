"""The benchmark of the CUDA kernels without a GPU: its output, verdicts and checks. Nothing is timed."""

import contextlib
import io
import itertools
import subprocess
import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fquant.format import NF4_DQ
from tests.bench import gpu
from tests.bench.gpu import AT_LEAST, AT_MOST, Line, judged, markdown, table
from tests.helpers.kernels.interpreter import interpreted, interpreter  # noqa: F401

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("interpreter")
triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; pip install triton")


@pytest.mark.slow
def test_help_as_a_user_asks_for_it():
    command = [sys.executable, "-m", "tests.bench.gpu", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for word in ("--out-dim", "--in-dim", "--rows", "--formats", "--repeats", "--sweep", "--seed", "--out "):
        assert word in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, which would be measured for minutes")
def test_without_a_gpu(capsys):
    assert gpu.main([]) == 2
    out, err = capsys.readouterr()
    assert err == "gpu: there is no CUDA device that this torch can use; run it on a machine with one\n" and out == ""


BAD = {
    "dim": (["--out-dim", "100"], "--out-dim is 100; wanted a multiple of 128"),
    "in dim": (["--in-dim", "0"], "--in-dim is 0; wanted a multiple of 128"),
    "repeats": (["--repeats", "0"], "--repeats has 0; wanted at least 1"),
    "rows": (["--rows", "1", "0"], "--rows has 0; wanted at least 1"),
    "no rows": (["--rows"], "--rows has 0; wanted at least 1"),
    "no formats": (["--formats"], "--formats has 0; wanted at least 1"),
    "folder": (["--out", "nowhere/a.md"], "--out nowhere/a.md: wanted a file, in a folder that exists"),
}


@pytest.mark.parametrize("args, message", BAD.values(), ids=BAD)
def test_bad_option_is_refused(args, message, capsys):
    assert gpu.main(args) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""


def test_shares_of_a_copy():
    """Judge 100 bytes at a copy's 50 bytes a ms, in 2 ms and more."""
    for row, least in AT_LEAST.items():
        for ms in (1.0, 2.0, 2.0 / least, 2.001 / least, 9.0):
            line = judged(f"{row} nf4", {"fquant": ms, "bf16": 1.0}, 100 / 50, 100)
            assert line.met == (2 / ms >= least) and line.figure == f"{100 / ms / 1e6:.0f} GB/s, {2 / ms:.2f} of a copy"
    assert judged("quantise nf4", {"fquant": 4e-5}, 2e-5, 100) == Line(
        "quantise nf4", {"fquant": 4e-5}, "2 GB/s, 0.50 of a copy", None
    )


def test_ratios_to_bf16():
    for row, most in AT_MOST.items():
        for ms in (0.5, most, most + 0.001):
            line = judged(f"{row} nf4", {"fquant": ms, "bf16": 1.0, "bnb": 0.1}, 0, 0)
            assert line.met == (ms <= most) and line.figure == f"{ms:.2f} of bf16"
    assert judged("linear-64 nf4", {"fquant": 3.0, "bf16": 2.0}, 0, 0)[2:] == ("1.50 of bf16", None)
    assert judged("linear-64 nf4", {"fquant": 3.0}, 0, 0)[2:] == ("", None)


LINES = [
    Line("dequantise nf4", {"fquant": 0.25, "bnb": 0.5}, "3900 GB/s, 0.91 of a copy", True),
    Line("linear-512 nf4", {"fquant": 1.5, "bf16": 1.0}, "1.50 of bf16", False),
    Line("linear-64 nf4, Tiled(size=1)", {}, "too big for the device"),
]


def test_markdown():
    assert markdown(LINES, ["2030-01-01, a device.", "bitsandbytes took no part."]).split("\n") == [
        "2030-01-01, a device.",
        "bitsandbytes took no part.",
        "",
        "|  | fquant, ms | bf16, ms | bnb, ms | fquant | wanted |",
        "| --- | ---: | ---: | ---: | --- | --- |",
        "| dequantise nf4 | 0.2500 |  | 0.5000 | 3900 GB/s, 0.91 of a copy | met |",
        "| linear-512 nf4 | 1.5000 | 1.0000 |  | 1.50 of bf16 | missed |",
        "| linear-64 nf4, Tiled(size=1) |  |  |  | too big for the device |  |",
        "",
    ]
    assert "bnb" not in markdown(LINES[1:], [])


def test_table():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        gpu.report.console().print(table(LINES))
    text = out.getvalue()
    assert all(line.name in text and line.figure in text for line in LINES) and "---" not in text


@triton
@interpreted
def test_lines():
    """Run every timed call once, with a clock on which each takes half a millisecond."""
    bench = import_module("tests.bench.gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "DEVICE", "cpu")
        patch.setattr(bench, "cache_bytes", lambda: 1)
        patch.setattr(bench, "milliseconds", lambda call, number, *_, **__: [call(i) for i in range(number)] and 0.5)
        patch.setattr(bench, "_bitsandbytes", lambda format: None)
        weights = bench.Weights((128, 256), NF4_DQ)
        assert weights.number == 2 and weights.packed_bytes == 128 * 256 // 2 + 512 + 2 * 4 + 4
        lines = bench.compare(weights, (1, 3), 1e5, 1)
        names = ["quantise", "dequantise", "linear-1", "linear-3", "grad-512"]
        assert [line.name for line in lines] == [f"{name} nf4_dq" for name in names]
        times = {"fquant": 0.5, "bf16": 0.5}
        assert [line.times for line in lines] == [{"fquant": 0.5}] * 2 + [times] * 3
        assert [line.figure.partition(", ")[2] or line.figure for line in lines] == [
            "1.65 of a copy", "1.65 of a copy", "0.34 of a copy", "1.00 of bf16", "1.00 of bf16"
        ]  # fmt: skip
        assert [line.met for line in lines] == [None, True, False, None, True]
        swept = [line.name for line in bench.sweep(weights, (1,), 1e5, 1)]
        assert swept[0] == "dequantise nf4_dq, tile 1024, 2 warps" and len(swept) == 12 + 6 + 4
        assert swept[12] == "linear-1 nf4_dq, Few(rows=8, parts=4, stages=2)"


# --- what is checked before anything is timed -------------------------------------------------------------------------


@triton
@interpreted
def test_kernels_that_are_right_pass():
    check = import_module("tests.bench.gpu_check")
    with check.poisoned():
        assert check.check_formats("cpu", 1, [NF4_DQ]) == {"decodings": 2, "products": 4}
        assert check.check_draws("cpu", 1, 2001) == {"draws": 17}
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # numpy's, of infinities
            assert check.check_losses("cpu", 1, (7, 300)) == {"losses": 23}
            assert check.check_norms("cpu", 1, (7, 300)) == {"norms": 23}
    assert check.check_big("cpu", 2, (80, 320)) == {"encodings": 1, "decodings": 2, "products": 4}
    assert not torch.are_deterministic_algorithms_enabled()


@triton
@interpreted
def test_kernels_that_are_wrong_do_not():
    check = import_module("tests.bench.gpu_check")
    faults = {
        "encode": lambda f: lambda *args: (f(*args)[0] ^ 1, f(*args)[1]),
        "decode": lambda f: lambda *args: f(*args) * 1.01,
        "matmul": lambda f: lambda *args: f(*args) * 1.01,
        "matmul_t": lambda f: lambda *args: torch.full_like(f(*args), torch.nan),
    }
    for (name, fault), shape in itertools.product(faults.items(), [(80, 320)]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(check.triton, name, fault(getattr(check.triton, name)))
            with pytest.raises(AssertionError, match=f"^{name} "):
                check.check_big("cpu", 3, shape)
    wrong = lambda f: lambda *args: f(*args) ^ 1
    for name in ("fold", "bits", "bernoulli"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(check.triton, name, wrong(getattr(check.triton, name)))
            with pytest.raises(AssertionError, match=f"^{name} "):
                check.check_draws("cpu", 3, 100)
    faults = {
        "a loss of": lambda value, slope: (value * 1.001, slope),
        "a loss of .*its slope": lambda value, slope: (value, slope * 1.01),
        "the ends of a loss": lambda value, slope: (value, slope * (slope.shape != (7, 300))),
    }
    for name, fault in faults.items():
        with pytest.MonkeyPatch.context() as patch:
            right = check.triton.nll_backward
            patch.setattr(check.triton, "nll_backward", lambda *args, right=right, fault=fault: fault(*right(*args)))
            patch.setattr(check.losses, "ROWS", {"all equal": check.losses.ROWS["all equal"]})
            with pytest.raises(AssertionError, match=name):
                check.check_losses("cpu", 3, (7, 300))
    at_the_end = lambda t: torch.where(torch.arange(len(t))[:, None] == 6, 0, t) if t.shape == (7, 300) else t
    faults = {
        "a scale of": ("rms_norm", lambda out: (out[0], out[1] * 1.0001)),
        "a norm of": ("rms_norm", lambda out: (out[0] * 1.01, out[1])),
        "a slope of": ("rms_norm_backward", lambda dx: dx * 1.01),
        "a norm at the ends of": ("rms_norm", lambda out: (at_the_end(out[0]), out[1])),
        "a slope at the ends of": ("rms_norm_backward", at_the_end),
    }
    for message, (name, fault) in faults.items():
        with pytest.MonkeyPatch.context() as patch:
            right = getattr(check.triton, name)
            patch.setattr(check.triton, name, lambda *args, right=right, fault=fault: fault(right(*args)))
            patch.setattr(check.losses, "ROWS", {"all equal": check.losses.ROWS["all equal"]})
            with pytest.raises(AssertionError, match=message):
                check.check_norms("cpu", 3, (7, 300))
