"""Profiles: the times and buffers of a step's nodes are those of its graph, measured and predicted."""

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch.func import grad_and_value

import fquant
from fquant.compile import liveness, roofline
from fquant.compile.roofline import DEVICES
from fquant.compile.trace import trace
from fquant.profiling import pictures, record, report
from tests.helpers.arrays import equal
from tests.helpers.qlora_step import copied, start, step, tokens_of

LIBRARY = torch.library.Library("fquant_test_profiling", "DEF")
LIBRARY.define("slow(Tensor x) -> Tensor")
LIBRARY.impl("slow", lambda x: time.sleep(0.02) or x.clone(), "CPU")
LIBRARY.impl("slow", torch.empty_like, "Meta")
SLOW = torch.ops.fquant_test_profiling.slow.default
DONATED = ("adapters", "state")


def of_lines(w, x):
    """Return a loss whose lines are known: one is slow, one holds most."""
    h = torch.sin(x @ w)
    wide = h.repeat(1, 64).exp()
    return (wide.sum(1) + SLOW(wide.detach().sum(1))).sum()


def place(of):
    """Return the line number in this file that begins with ``of``."""
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(i for i, text in enumerate(lines) if text.strip().startswith(of))


@pytest.fixture(scope="module")
def profiled():
    adapters, state, base = start(dropout=0.0)
    before = copied((adapters, state, base))
    found = fquant.profile(step, adapters, state, base, tokens_of(0), donate=DONATED, repeats=2)
    return found, before, (adapters, state, base)


def test_the_arguments_stay_as_they_are(profiled):
    _, before, after = profiled
    assert equal(before, after)


def test_every_node_that_works_has_a_time(profiled):
    found, *_ = profiled
    assert found.is_measured and found.seconds > 0 and found.device == "cpu"
    assert [e.place for e in found.events] == sorted({e.place for e in found.events})
    assert all(e.seconds > 0 and e.kind for e in found.events) and len(found.events) > 50
    ends = [e.start + e.seconds for e in found.events]
    assert [e.start for e in found.events[1:]] == pytest.approx(ends[:-1])  # one after another
    assert {"product", "thin product", "attention", "norm", "elementwise"} <= {e.kind for e in found.events}


def test_lines_are_those_of_forward_and_backward(profiled):
    """A product's backward has the place of the product; none is inside of the library."""
    found, *_ = profiled
    products = [e for e in found.events if e.op == "fquant.matmul_t"]
    assert products and all(e.backward and "models/" in e.line for e in products)
    forward = {e.line for e in found.events if e.op == "fquant.matmul"}
    assert {e.line for e in products} <= forward
    assert not any("/fquant/" in e.line.replace("/tests/fquant/", "") for e in found.events)


def test_live_bytes_are_those_of_the_walk():
    """At every node, and so is the peak that ``cost`` has."""
    adapters, state, base = start()
    g = trace(lambda given: step(*given), (adapters, state, base, tokens_of(0)), lines=True)
    found = fquant.profiling.predicted(g, DEVICES["h100"])
    wanted = [total for _, total, _ in liveness.walk_memory(g.module.graph)]
    held = record.live(found)
    given = len(g.paths)  # arguments are held from the first node on
    assert held[given:] == wanted[given : len(held)] and max(held) == found.cost.peak == max(wanted)
    assert wanted[record.peak(found)] == max(wanted)


def test_what_is_predicted_adds_up_to_the_prediction():
    adapters, state, base = start()
    g = trace(lambda given: step(*given), (adapters, state, base, tokens_of(0)), lines=True)
    found = fquant.profiling.predicted(g, DEVICES["h100"], "a step")
    wanted = roofline.predict(g.module.graph, DEVICES["h100"])
    assert found.seconds == wanted.seconds and not found.is_measured
    assert sum(e.seconds for e in found.events if e.track == record.COMPUTE) == pytest.approx(wanted.seconds)
    assert all(e.roofline <= e.seconds for e in found.events)


def test_a_share_above_one_is_not_shown(tmp_path):
    """Neither in the table nor in the trace; the shares of other nodes are."""
    found = fquant.profile(grad_and_value(of_lines), torch.randn(32, 32), torch.randn(64, 32), repeats=1)
    events = [dataclasses.replace(e, roofline=e.seconds * (3.0 if i % 2 else 0.5)) for i, e in enumerate(found.events)]
    spoilt = dataclasses.replace(found, events=type(found.events)(events))
    entries = json.loads(pictures.trace(spoilt, tmp_path / "trace.json").read_text())["traceEvents"]
    shown = [entry["args"].get("roofline") for entry in entries if entry["ph"] == "X"]
    assert shown == [None if i % 2 else 0.5 for i in range(len(events))]
    wholly = dataclasses.replace(found, events=type(found.events)(e for e in events if e.roofline > e.seconds))
    assert "3.00" not in str(wholly) and "0.50" in str(
        dataclasses.replace(found, events=type(found.events)(events[::2]))
    )


def test_a_slow_line_and_a_large_one_are_found():
    w, x = torch.randn(32, 32), torch.randn(64, 32)
    found = fquant.profile(grad_and_value(of_lines), w, x, repeats=3)
    (slow,) = [e for e in found.events if e.op.endswith("slow")]
    assert slow.seconds > 0.02 and found.seconds > 0.02 and not slow.backward
    rows = str(found).splitlines()
    first = next(row for row in rows if ".py:" in row)
    assert f"test_profiling.py:{place('return (wide')}" in first  # the slowest comes first
    (held,) = [row for row in rows if f"test_profiling.py:{place('wide = ')})" in row and "backward" not in row]
    assert float(held.split()[-1]) >= 64 * 32 * 64 * 4 / 2**20  # MiB of its result, which the backward reads
    assert "all nodes" in rows[-2] + rows[-3] and "roofline" in rows[2]


def test_the_table_has_the_rest_in_one_row(profiled):
    found, *_ = profiled
    short, whole = report.text(found, rows=3), report.text(found, rows=1000)
    assert "more lines" in short and "more lines" not in whole and len(short) < len(whole)
    calls = lambda text: int(next(row for row in text.splitlines() if "all nodes" in row).split()[2])
    assert calls(short) == calls(whole) == len(found.events)


def test_files(profiled, tmp_path):
    """The trace has an entry for each event, on its track, and the picture is drawn."""
    found, *_ = profiled
    png, path = found.save(tmp_path / "new")
    assert png.read_bytes().startswith(b"\x89PNG") and sorted(p.name for p in (tmp_path / "new").iterdir()) == [
        "memory.png", "trace.json",
    ]  # fmt: skip
    entries = json.loads(path.read_bytes())["traceEvents"]
    spans = [e for e in entries if e["ph"] == "X"]
    assert len(spans) == len(found.events) and {e["tid"] for e in spans} == {0}
    assert [e["ts"] + e["dur"] for e in spans[:-1]] == pytest.approx([e["ts"] for e in spans[1:]])
    assert max(e["args"]["bytes"] for e in entries if e["ph"] == "C") == found.cost.peak
    names = {e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert names == {"compute", "collectives", "copies"}


def test_holders(profiled):
    found, *_ = profiled
    holders = {pictures.holder(b) for b in found.buffers}
    assert {"argument adapters", "argument state", "argument base", "argument tokens"} <= holders
    assert any(name.startswith("attention (models/attention.py:") for name in holders)


def test_every_holder_has_an_entry(profiled, tmp_path, monkeypatch):
    """Those of functions whose names begin with an underscore too."""
    found, seen = profiled[0], list[list[str]]()
    texts = lambda self: [text.get_text() for text in self.axes[0].get_legend().get_texts()]
    save = lambda self, *_, **__: seen.append(texts(self))
    monkeypatch.setattr(Figure, "savefig", save)
    pictures.memory(found, tmp_path / "memory.png")
    (names,) = seen
    assert names[-1] == pictures.OTHERS and all(" MiB" in name for name in names[:-1])
    assert any(name.startswith("_") for name in names) and len(names) == len(set(names)) > 4


@pytest.mark.parametrize("repeats", [0, -1])
def test_repeats(repeats):
    with pytest.raises(ValueError, match=f"repeats is {repeats}; wanted at least 1"):
        fquant.profile(torch.sin, torch.ones(2), repeats=repeats)


def test_a_tensor_without_values():
    given = {"x": torch.ones(2), "w": torch.ones(2, device="meta")}
    with pytest.raises(ValueError, match=r"profile: given\.w has no values.*fquant\.cost"):
        fquant.profile(lambda given: given["x"] * given["w"], given)


def test_a_captured_function_is_profiled_too():
    f = fquant.jit(lambda x: (x * 2).cumsum(0))
    found = fquant.profile(f, torch.ones(3), repeats=1)
    assert {e.op for e in found.events} == {"aten.mul", "aten.cumsum"}
