"""The benchmarks: every row, ratio and verdict is there and right for any times; nothing here is timed."""

import contextlib
import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import bitsandbytes.functional as F
import pytest
import torch

from fquant import NF4_DQ, quantize, tree
from fquant.format import FORMATS
from tests.bench import linear, peers, report, timing
from tests.bench.report import Row, Wanted, at_most

ROOT = Path(__file__).parents[2]
SMALL = ["--dim", "128", "--weights", "2", "--repeats", "1", "--threads", "1"]
CODED, TRAINS = ["fquant", "bnb", "torchao"], ["fquant", "bf16", "bnb", "torchao"]
ALL = ["fquant", "bf16", "bnb", *(["bnb eval"] if F.has_avx512bf16() else []), "torchao"]
COLUMNS = {
    "quantise": CODED, "dequantise-fresh": CODED, "dequantise-warm": CODED,
    "linear-1": [*ALL, "read"], "linear-4": ALL, "linear-16": ALL, "linear-64": ALL, "linear-512": ALL,
    "linear-2048": ALL, "train-16": TRAINS, "train-512": TRAINS, "train-2048": TRAINS,
    "grad-1": TRAINS, "grad-16": TRAINS, "grad-512": TRAINS,
    "memory-1": ALL, "memory-16": ALL, "memory-512": ALL, "memory-train-512": TRAINS,
}  # fmt: skip


def run(*args):
    """Return the figures and the text of a small run."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert linear.main([*SMALL, *map(str, args)]) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "linear.json"
    text = run("--json", path)
    return json.loads(path.read_text()), text


def test_every_row_has_every_contestant(comparison):
    rows = {row["name"]: row for row in comparison[0]["rows"]}
    assert list(rows) == list(COLUMNS) == list(linear.ROWS)
    for name, row in rows.items():
        assert list(row["figures"]) == COLUMNS[name]
        assert all(math.isfinite(x) and (x > 0 or row["unit"] == "MiB") for x in row["figures"].values()), row
    assert {row["unit"] for name, row in rows.items() if name.startswith("memory")} == {"MiB"}


def test_every_bound_is_judged(comparison):
    rows = {row["name"]: row for row in comparison[0]["rows"]}
    judged = {}
    for name, row in rows.items():
        for wanted in row["wanted"]:
            if (most := wanted["at_most"]) is None:
                assert (name, wanted["what"], wanted["met"]) == ("dequantise-fresh", "bit-equal to bnb", True)
                continue
            other = wanted["what"].removeprefix("of ")
            ours = row["figures"]["fquant"]
            assert wanted["got"] == (ours if other == "MiB" else ours / row["figures"][other])
            assert wanted["met"] == (wanted["got"] <= most)
            judged[name, other] = most
    assert judged == {
        ("quantise", "bnb"): 0.1, ("dequantise-fresh", "bnb"): 1, ("dequantise-warm", "bnb"): 1,
        **({("linear-1", "bnb eval"): 1} if "bnb eval" in ALL else {}), ("linear-1", "read"): 1.3,
        ("linear-16", "bf16"): 1, ("linear-512", "bf16"): 1.06, ("train-512", "bf16"): 1.06,
        **{(name, "MiB"): 8 for name in COLUMNS if name.startswith("memory")},
    }  # fmt: skip


def test_what_is_printed(comparison):
    figures, text = comparison
    assert "NF4_DQ, 128 x 128, 1 threads, 2 weights in turn" in text and "median of 1 or more" in text
    for name in [*COLUMNS, *linear.COLUMNS, "bit-equal to bnb: met", f"kernels {figures['kernels']}"]:
        assert name in text
    (row,) = (row for row in figures["rows"] if row["name"] == "grad-16")
    assert f"({row['figures']['fquant'] / row['figures']['bf16']:.2f})" in text
    assert set(figures["read"]["GB/s"]) == set(timing.reads(64)) and f"read: {figures['read']['by']}, " in text
    assert set(figures["versions"]) == {"torch", "bitsandbytes", "torchao"}
    assert figures["others"] is None or 0 <= figures["others"] < 1e4


def test_formats(tmp_path):
    text = run("--all-formats", "--json", tmp_path / "a.json")
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    forms = [name for name, format in FORMATS.items() if format.vectors is None]
    assert [row["name"] for row in rows] == [f"linear-{m} {form}" for m in (1, 16, 512) for form in forms]
    assert all(list(row["figures"]) == ["bf16", "f32", "f16"] and row["wanted"] == [] for row in rows)
    assert "linear-512 int8, ms" in text and "fquant" not in text
    some = run("--formats", "fp4", "int8", "--only", "linear-16")
    assert [line.split(",")[0].strip() for line in some.splitlines() if "ms" in line] == [
        "linear-16 fp4", "linear-16 int8"
    ]  # fmt: skip


def test_absent_peers_leave_empty_columns(tmp_path, monkeypatch):
    for name in ("bitsandbytes", "torchao", "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"):
        monkeypatch.setitem(sys.modules, name, None)
    text = run("--only", "dequantise", "linear-1", "memory-train", "--json", tmp_path / "a.json")
    figures = json.loads((tmp_path / "a.json").read_text())
    assert {row["name"]: list(row["figures"]) for row in figures["rows"]} == {
        "dequantise-fresh": ["fquant"], "dequantise-warm": ["fquant"], "linear-1": ["fquant", "bf16", "read"],
        "memory-train-512": ["fquant", "bf16"],
    }  # fmt: skip
    assert [wanted["what"] for row in figures["rows"] for wanted in row["wanted"]] == ["of read", "MiB"]
    assert set(figures["versions"]) == {"torch"}
    header = next(line for line in text.splitlines() if "wanted of" in line)
    for name in ("bnb", "bnb eval", "torchao"):
        assert f"{name} is missing: import of" in text and name in header


def test_a_row_is_judged_by_its_ratios(monkeypatch):
    monkeypatch.setattr(timing, "medians", lambda calls, *_: {name: 4.0 - (name == "read") for name in calls})
    found, _ = peers.contestants()
    weights = peers.Weights({name: found[name] for name in ("fquant", "bf16")}, (128, 128), 4)
    row = linear.measure("linear-1", weights, 1, lambda i: None)
    assert row.figures == {"fquant": 4, "bf16": 4, "read": 3} and row.wanted == [Wanted("of read", False, 4 / 3, 1.3)]
    assert linear.measure("train-512", weights, 1).wanted == [Wanted("of bf16", True, 1, 1.06)]


@pytest.mark.parametrize("who", ALL)
def test_contestants_compute_the_same(who):
    """Compare the call of each kind of row with the second weight with float64, up to bfloat16's rounding."""
    found, _ = peers.contestants()
    weights = peers.Weights(found, (256, 384), 2)
    coded = who if found[who].dequantise else "fquant"
    decode: Any = found[coded].dequantise
    w = weights.dense[1] if who == "bf16" else decode(weights.packed(coded)[1])
    state = weights.generator.get_state()
    for name in ("linear-4", "train-4", "grad-4") if found[who].trains else ("linear-4",):
        weights.generator.set_state(state)
        call: Any = linear._call(name, who, weights)
        with torch.set_grad_enabled(name != "linear-4"):
            got = call(1) if name == "linear-4" else call(1)[0]
        weights.generator.set_state(state)
        x, g = weights.normal(4, 384), weights.normal(4, 256)
        wanted = x.double() @ w.double().mT if name == "linear-4" else g.double() @ w.double()
        assert got.dtype == torch.bfloat16 and got.shape == wanted.shape
        assert (got.double() - wanted).norm() < 0.01 * wanted.norm(), (who, name)
    y, *grads = linear._results(found[who], x, weights.packed(who)[1], g)
    assert y.shape == (4, 256) and grads == []
    if found[who].trains:
        y, grad = linear._results(found[who], x.requires_grad_(), weights.packed(who)[1], g)
        assert torch.equal(grad, got)


@pytest.mark.slow
def test_help_as_a_user_asks_for_it():
    command = [sys.executable, "-m", "tests.bench.linear", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for word in (
        "--dim",
        "--out-dim",
        "--in-dim",
        "--threads",
        "--repeats",
        "--only",
        "--formats",
        "--json",
        "grad-ROWS",
    ):
        assert word in done.stdout


BAD = {
    "dim": (["--dim", "100"], "--dim is 100; wanted a multiple of 128"),
    "in dim": (["--in-dim", "0"], "--in-dim is 0; wanted a multiple of 128"),
    "dims": (["--dim", "256", "--in-dim", "128", "--out-dim", "128"], "--dim 256 is of no use beside --out-dim"),
    "threads": (["--threads", "0"], "--threads is 0; wanted 1 to "),
    "too many threads": (["--threads", "9999"], "--threads is 9999; wanted 1 to "),
    "repeats": (["--repeats", "0"], "--repeats is 0; wanted at least 1"),
    "weights": (["--weights", "0"], "--weights is 0; wanted at least 1"),
    "row": (["--only", "linear-3"], "--only: there is no row 'linear-3'; wanted some of quantise, "),
    "row of formats": (
        ["--all-formats", "--only", "quantise"],
        "there is no row 'quantise'; wanted some of linear-1, ",
    ),
    "part of a word": (["--only", "lin"], "there is no row 'lin'"),
    "formats twice": (["--all-formats", "--formats", "nf4"], "--all-formats and --formats exclude each other"),
    "folder": (["--json", "nowhere/a.json"], "--json nowhere/a.json: wanted a file, in a folder that exists"),
}


@pytest.mark.parametrize("args, message", BAD.values(), ids=BAD)
def test_bad_option_is_refused(args, message, capsys):
    assert linear.main(args) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""


@pytest.mark.parametrize("args", [["--formats", "nf5"], ["--dims", "128"], ["--repeats", "many"]])
def test_unreadable_option_is_refused(args, capsys):
    with pytest.raises(SystemExit) as stopped:
        linear.main(args)
    assert stopped.value.code == 2 and args[0] in capsys.readouterr().err


def test_contestants_take_turns_and_weights_in_order():
    """Check order and samples on a clock that only the calls move, by about 1, 20 and 0.4 ms."""
    ms = 2.0**-10  # so that sums are exact
    now, log, cost = [0.0], [], {"a": ms, "b": 20 * ms, "c": 0.375 * ms}

    def call(name, i):
        log.append((name, i))
        now[0] += cost[name]

    calls = {name: lambda i, name=name: call(name, i) for name in cost}
    befores = []
    samples = timing.interleave(calls, 3, before=lambda: befores.append(now[0]), clock=lambda: now[0])
    turn = ["a"] * (3 + 5) + ["b"] + ["c"] * (6 + 10)  # settling for 2 ms and more, samples for 5 ms, at most 10
    assert [name for name, _ in log] == ["a"] * 2 + ["b"] * 2 + ["c"] * 2 + turn * 3
    for name, number in (("a", 15), ("b", 3), ("c", 30)):
        used = [i for who, i in log if who == name]
        assert used == list(range(len(used)))
        assert samples[name] == pytest.approx([cost[name]] * number)
    assert len(befores) == len(log)


def test_median():
    costs = iter([9.0, 9.0, 3.0, 1.0, 2.0])
    now = [0.0]

    def call(i):
        now[0] += next(costs)

    assert timing.interleave({"a": call}, 3, clock=lambda: now[0]) == {"a": [3.0, 1.0, 2.0]}


def test_last_level_cache(tmp_path):
    def add(cpu, index, level, size, shared):
        folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, value in {"level": level, "size": size, "shared_cpu_list": shared}.items():
            (folder / name).write_text(f"{value}\n")

    with pytest.raises(ValueError, match="cache cannot be read from .*; say with --weights"):
        timing.last_level_cache(tmp_path)
    for cpu in range(4):  # two clusters of two
        add(cpu, 0, 1, "48K", cpu)
        add(cpu, 1, 3, "32768K" if cpu < 2 else "16M", "0-1" if cpu < 2 else "2-3")
    assert timing.last_level_cache(tmp_path) == 48 << 20


@pytest.mark.parametrize("size, cache, number", [(10, 100, 40), (3, 100, 134), (400, 100, 2), (201, 100, 2)])
def test_num_weights(size, cache, number):
    assert timing.num_weights(size, cache) == number
    assert number * size >= timing.CACHES * cache


@pytest.mark.parametrize("shape", [(128, 128), (256, 640)])
def test_bytes_of_a_weight(shape):
    assert linear.num_bytes(shape) == tree.nbytes(quantize(torch.randn(shape), NF4_DQ))


def test_extra_bytes():
    def inside(n):
        a = torch.empty(n, dtype=torch.uint8)
        b = torch.empty(3 * n, dtype=torch.uint8)
        del a
        return b, b[:n], torch.empty(n, dtype=torch.uint8)

    assert timing.extra_bytes(lambda: inside(1 << 20)) == 1 << 20  # a
    assert timing.extra_bytes(lambda: inside(1 << 20)[1]) == 1 << 20  # a, then what inside returns and this does not
    assert timing.extra_bytes(lambda: inside(1 << 20)[2]) == 4 << 20  # a and b
    x = torch.randn(1000)
    assert timing.extra_bytes(lambda: x.exp().exp().sum()) == 8000
    assert (
        timing.extra_bytes(lambda: x.exp().exp().exp().exp().exp()) == 8000
    )  # two before the last, at addresses reused
    y = torch.randn(1000, requires_grad=True)
    assert timing.extra_bytes(lambda: (z := y.exp(), *torch.autograd.grad(z, y, x))) == 0


@pytest.mark.parametrize("num_bytes", [64, 100_000])
def test_every_way_to_read_reads_all(num_bytes):
    calls = timing.reads(num_bytes, 3)
    n = num_bytes // 4
    one, two = (torch.full((2,), x).view(torch.float64).item() for x in (1.0, 2.0))
    whole = [torch.full((2,), x).view(torch.int64).item() for x in (1.0, 2.0)]
    assert all(calls["sum of float32"](i) == 3 * n // 2 for i in range(4)) and calls["max of float32"](0) == 2
    assert calls["dot of float32"](0) == n
    assert calls["sum of float64"](0).item() == pytest.approx((one + two) * (n // 4))
    assert calls["max of int64"](0) == whole[1]
    assert calls["sum of int64"](0) == (sum(whole) * (n // 4) + 2**63) % 2**64 - 2**63


def test_fastest_read(monkeypatch):
    monkeypatch.setattr(timing, "medians", lambda calls, _: {name: 2.0 + i % 3 for i, name in enumerate(calls)})
    best, call, speed = timing.fastest_read(10**6, 2, 1)
    assert best == "sum of int64" and speed[best] == 0.5 and call(0).dtype == torch.int64
    assert list(speed) == list(timing.reads(64)) and speed["max of int64"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("kind", ["fresh", "warm"])
def test_memory_changes_no_result(kind):
    x = torch.randn(1 << 20)
    with timing.memory(kind) as before:
        for _ in range(3):
            before()
            assert torch.equal((x + 1) - 1, (x + 1) - 1)


def test_threads_are_put_back():
    before = torch.get_num_threads()
    with contextlib.suppress(KeyError), timing.threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before


def test_table():
    rows = [
        Row("a", "ms", {"us": 12.345, "them": 24.69}, [at_most("of them", 0.5, 0.4), at_most("of it", 1.0, 1.0)]),
        Row("b", "MiB", {"us": 2.5, "them": 5.0}, [Wanted("equal", True)]),
    ]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        report.console().print(report.table(rows, ["us", "them", "absent"]))
    lines = [line.split() for line in out.getvalue().splitlines() if line.strip(" ─")]
    assert lines == [
        ["us", "them", "absent", "wanted", "of", "us"],
        ["a,", "ms", "12.3", "24.7", "(0.50)", "0.5", "of", "them,", "at", "most", "0.4:", "missed"],
        ["1", "of", "it,", "at", "most", "1:", "met"],
        ["b,", "MiB", "2.500", "5.000", "equal:", "met"],
    ]


def test_a_broken_write_leaves_the_file(tmp_path):
    path = tmp_path / "a.json"
    report.write(path, {"x": 1.5})
    with pytest.raises(ValueError):
        report.write(path, {"x": math.nan})
    assert json.loads(path.read_text()) == {"x": 1.5} and list(tmp_path.iterdir()) == [path]
