"""plan: what is extrapolated is what the whole model takes, and what is predicted is what a real step does."""

import dataclasses
import json
import math

import pytest
import torch
import torch.distributed as dist

import shard
from examples.common import command_line, pricing, training_step
from examples.common.command_line import axes_in
from examples.common.pricing import Job, price
from examples.data import dataset as data
from examples.plan import cli as plan
from examples.plan import tables
from examples.plan.cli import bound
from examples.qlora import measure, train
from examples.qlora.options import Options
from fquant import AQ_3X8, INT8_ROW, NF4, NF4_DQ, jit, lora, optim, random, tree
from fquant.compile.roofline import DEVICES
from models import decoder
from models.config import Config
from models.hf.config import to_hf
from models.presets import PRESETS
from tests.helpers import ranks
from tests.helpers.arrays import named
from tests.helpers.live_memory import Peak

TINY = Config(256, 64, 6, 4, 2, 16, 128, max_positions=4096)
ALL = command_line.parse_targets("all", TINY)
JOB = Job(TINY, NF4_DQ, ALL, 4, 2, 32)
# A peak in the head, in the backward of the last layer, and in the update.
JOBS = {
    "long": dataclasses.replace(JOB, seq=64),
    "update": dataclasses.replace(JOB, rank=16, batch=1, seq=8, cfg=dataclasses.replace(TINY, tied=True)),
    "one weight": dataclasses.replace(JOB, targets=("q",), rank=64, batch=1, seq=16, format=NF4),
    "two weights": dataclasses.replace(JOB, targets=("q", "v")),
    "last": dataclasses.replace(JOB, rank=2, batch=4, seq=256, stream=torch.float32),
    "none": dataclasses.replace(JOB, checkpoint="none"),
    "selective": dataclasses.replace(JOB, checkpoint="selective"),
    "accumulate": dataclasses.replace(JOB, accumulate=2),
    "ordered": dataclasses.replace(JOB, ordered=True),
    "two": dataclasses.replace(JOB, ordered=True, accumulate=2),
    "dense": dataclasses.replace(JOB, format=None),
    "full": dataclasses.replace(JOB, format=None, train=shard.Precision()),
    "codes": dataclasses.replace(JOB, format=INT8_ROW, train=shard.Precision(), moments=optim.DYNAMIC8),
    "full, ternary": dataclasses.replace(JOB, format=None, train=shard.Precision(wire=shard.wire.TERNARY)),
    "full, none": dataclasses.replace(JOB, format=None, train=shard.Precision(), checkpoint="none"),
    "head": dataclasses.replace(
        JOB, cfg=dataclasses.replace(TINY, vocab=20000, qk_norm=True, family="qwen3"), targets=("v",)
    ),
}
MESHES = ("fsdp=1", "fsdp=3", "dp=2,fsdp=2")


@pytest.fixture
def alone():
    """No process group: imagined meshes are for processes that are in none."""
    shard.close()
    yield
    assert not dist.is_initialized()


def layers(job, count):
    return dataclasses.replace(job, cfg=dataclasses.replace(job.cfg, num_layers=count))


LAST = "backward of the last layer"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "mesh", "phase"),
    [("two weights", 6, "fsdp=3", LAST)]
    + [
        pytest.param(*row, marks=pytest.mark.slow)
        for row in (
            *(("long", count, "fsdp=1", "head") for count in (6, 7)),
            *(("long", count, mesh, LAST) for count in (6, 7) for mesh in MESHES[1:]),
            ("update", 6, "fsdp=3", "update"),
            ("last", 6, "fsdp=1", "head"),
            ("head", 6, "dp=2,fsdp=2", "head"),
        )
    ],
)
def test_extrapolated_is_traced(name, count, mesh, phase, alone):
    job, axes = layers(JOBS[name], count), axes_in(mesh)
    traced = pricing.total(pricing.figures(job, axes))
    assert price(job, axes) == traced and traced.phase == phase


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@named("name", JOBS)
def test_extrapolated_far(name, mesh, alone):
    job, axes = layers(JOBS[name], 16), axes_in(mesh)
    assert price(job, axes) == pricing.total(pricing.figures(job, axes))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("llama3-70b", "fsdp=1"), ("qwen3-0.6b", "fsdp=2"), ("llama3-8b", "dp=2")])
def test_presets_far(name, mesh, alone):
    """Of widths that models have: how far a layer is from the peak decides nothing."""
    job, axes = dataclasses.replace(JOB, cfg=PRESETS[name], rank=16, batch=1, seq=2048), axes_in(mesh)
    job = layers(job, 11)
    assert price(job, axes) == pricing.total(pricing.figures(job, axes))


@pytest.mark.slow
@pytest.mark.parametrize(("stash", "checkpoint"), [(False, "full"), (True, "full"), (True, "none")])
def test_few_layers_are_traced(alone, stash, checkpoint):
    calls = []
    for count, traces in ((1, 1), (5, 1), (6, 1 if stash else 2)):
        calls.clear()
        job = dataclasses.replace(layers(JOB, count), offload_activations=stash, checkpoint=checkpoint)
        found = price(job, {"fsdp": 2}, lambda: calls.append(1))
        assert len(calls) == traces
        if count < 6:
            assert found == pricing.total(pricing.figures(job, {"fsdp": 2}))


def test_kinds_are_what_they_are(alone):
    """Against sizes counted by hand."""
    job = dataclasses.replace(layers(JOB, 2), targets=("q", "down"), format=NF4)
    found = price(job, {"fsdp": 2})
    codes = sum(w // 2 + w // 64 * 4 for w in (64 * 64, 64 * 32, 64 * 32, 64 * 64, 64 * 128, 64 * 128, 64 * 128))
    assert found.base == (2 * 256 * 64 * 2 + 64 * 2 + 2 * (codes + 2 * 64 * 2)) // 2  # embed, head, norms, layers
    adapters = 2 * 4 * 4 * ((64 + 64) + (128 + 64))
    assert (found.adapters, found.moments) == (adapters, 2 * adapters + 8)
    calls = {c.name: (c.count, c.payload) for c in found.collectives}
    layer, head = codes + 2 * 64 * 2, 256 * 64 * 2 + 64 * 2
    ids, rows = 2 * 2 * 32 * 4, 2 * 2 * 32 * 64 * 2  # of the embedding, for the tokens of both ranks
    assert calls["all_gather"] == (2 + 2 * 2, ids + head + 2 * 2 * layer)
    assert calls["reduce_scatter"] == (1, rows) and calls["all_reduce"] == (1, adapters + 4)  # and the loss
    assert found.sent == (ids + rows + head + 2 * 2 * layer) // 2 + adapters + 4
    alone = price(job, {"fsdp": 1})
    assert (alone.sent, alone.gathered, alone.base) == (0, 0, 2 * found.base)


def test_vectors_of_each_weight_are_in_the_base(alone):
    job = dataclasses.replace(layers(JOB, 1), targets=("q",), format=AQ_3X8)
    rows = dict(q=(64, 64), k=(32, 64), v=(32, 64), o=(64, 64), gate=(128, 64), up=(128, 64), down=(64, 128))
    packed = sum(out * (width // 8 * 3 + 4) + 3 * 256 * 8 * 4 for out, width in rows.values())
    assert price(job, {"fsdp": 1}).base == 2 * 256 * 64 * 2 + 64 * 2 + packed + 2 * 64 * 2


# --- offloaded --------------------------------------------------------------------------------------------------------

WIDE = dataclasses.replace(JOB, cfg=dataclasses.replace(TINY, dim=256), batch=2, seq=1024)  # activations of a MiB
BROAD = dataclasses.replace(TINY, dim=2048, hidden=4096)
HEAVY = dataclasses.replace(WIDE, cfg=BROAD, seq=4096, offload_activations=True)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=1", "fsdp=2"])
@pytest.mark.parametrize("checkpoint", ["full", "selective"])
def test_offloaded_far(checkpoint, mesh, alone):
    job = dataclasses.replace(layers(WIDE, 11), checkpoint=checkpoint, offload="block")
    axes, card = axes_in(mesh), DEVICES["l4"]
    found, wanted = price(job, axes, device=card), pricing.total(pricing.figures(job, axes, card))
    assert dataclasses.replace(found, predicted=None) == dataclasses.replace(wanted, predicted=None)
    assert found.predicted is not None and wanted.predicted is not None
    times = lambda x: dict(x.by_kind) | {name: getattr(x, name) for name in ("serial", "limit", "copying")}
    assert times(found.predicted) == pytest.approx(times(wanted.predicted))


@pytest.mark.slow
def test_stashed_activations_are_in_no_more_memory(alone):
    """What the device has less of at its peak, the host has."""
    axes, card = {"fsdp": 1}, DEVICES["l4"]
    near = price(WIDE, axes, device=card)
    far = price(dataclasses.replace(WIDE, offload_activations=True), axes, device=card)
    assert 0 < near.peak - far.peak <= far.host <= far.stashed == far.fetched
    assert (near.base, near.flops) == (far.base, far.flops)


@pytest.mark.slow
def test_a_card_that_is_too_small_stashes_more(alone):
    """The step then waits for copies, and its peak is near the room of the card; chains fused later add some."""
    hidden = price(HEAVY, axes := {"fsdp": 1}, device=DEVICES["l4"])
    room = hidden.base + (hidden.peak - hidden.base) * 9 // 10
    small = price(HEAVY, axes, device=dataclasses.replace(DEVICES["l4"], memory=int(room / training_step.ROOM) + 1))
    assert small.peak < 1.06 * room < hidden.peak and small.stashed > hidden.stashed
    assert small.predicted and hidden.predicted and small.predicted.copying > hidden.predicted.copying


def test_what_the_host_has(alone):
    """Every block but the embedding, of which each layer is fetched for the forward and for the backward."""
    near = price(layers(JOB, 2), {"fsdp": 1}, device=DEVICES["h100"])
    far = price(dataclasses.replace(layers(JOB, 2), offload="block"), {"fsdp": 1}, device=DEVICES["h100"])
    embed, head = 256 * 64 * 2, 256 * 64 * 2 + 64 * 2
    assert (far.base, far.host) == (embed, near.base - embed) and (near.host, near.fetched) == (0, 0)
    assert (far.fetched, far.stashed) == (2 * (far.host - head) + head, 0)
    assert near.predicted is not None and far.predicted is not None
    assert (near.flops, near.predicted.limit) == (far.flops, far.predicted.limit)
    share, link = DEVICES["h100"].share.host, DEVICES["h100"].host
    assert far.predicted.copying == pytest.approx(far.fetched / (share * link) + 5 * DEVICES["h100"].latency)
    exposed = far.predicted.by_kind["copy"]
    assert 0 < exposed < far.predicted.copying
    assert far.predicted.overlapped == 1 - exposed / far.predicted.copying


# --- against reality --------------------------------------------------------------------------------------------------


def really(job, axes):
    """Take two steps on this rank: the bytes it sends, the peak it holds, and both as predicted."""
    mesh = shard.mesh(**axes)
    setup, cfg = pricing.arguments(job, mesh)["setup"], job.cfg
    weights = command_line.quantised(decoder.init(cfg, random.key(0), job.weights), job.format)
    adapters = lora.init(weights, command_line.pattern(job.targets), job.rank)
    placed, adapters = shard.place((weights, adapters), decoder.dims(cfg), setup.rules, mesh, cfg)
    rows = torch.arange(job.batch * job.seq).reshape(job.batch, job.seq) % cfg.vocab
    batch = data.Rows(rows, rows.roll(-1, -1), rows // 20)
    rest = shard.local(placed), ((batch, None),) * job.accumulate, torch.tensor(rows.numel())
    step = jit(training_step.train_step, **setup.capture())
    state, _ = step(training_step.initial(adapters, setup.opt), *rest, setup)
    held = tree.nbytes((state, rest))
    with shard.traffic() as traffic, Peak() as peak:
        _, measured = step(state, *rest, setup)
    assert torch.isfinite(measured.loss)
    shard.close()
    found = price(job, axes)
    return {
        "sent": (traffic.sent, found.sent),
        "calls": (len(traffic.calls), sum(c.count for c in found.collectives)),
        "payload": (traffic.payload(), sum(c.payload for c in found.collectives)),
        "peak": (held + peak.most, found.peak),
    }


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("name", "count", "mesh"),
    [
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (("last", 6, "fsdp=1"), ("head", 6, "fsdp=2"), ("head", 2, "fsdp=2"), ("two", 2, "fsdp=3"))
        ),
        pytest.param("update", 6, "dp=2", marks=pytest.mark.slow),
        ("ordered", 2, "fsdp=2"),
    ],
)
def test_predicted_is_measured(name, count, mesh):
    axes = axes_in(mesh)
    for found in ranks.run(math.prod(axes.values()), really, layers(JOBS[name], count), axes, timeout=240):
        assert all(real == predicted for real, predicted in found.values()), found


def trained(options, axes):
    """Take steps of examples.qlora: the bytes it reports as sent, the peak of a step, and the predicted peak."""
    run, state = train.start(options)
    assert run.step.__wrapped__ is training_step.train_step
    state, step = train.take(run, state)
    state, measured = run.step(state, run.local, *train.micro_batches(run, 1), run.setup)
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tree.leaves(measured))  # they keep no gradients
    predicted, held = measure.predict(run, state, run.base).peak, tree.nbytes((state, run.local))
    with Peak() as peak:
        train.take(run, state)
    return step.wire, held + peak.most, predicted


@pytest.mark.xdist_group("ranks")
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=1", "fsdp=2"])
def test_predicted_is_what_training_sends(mesh, model, text, capsys):  # noqa: F811
    axes = axes_in(mesh)
    size = math.prod(axes.values())
    options = Options(model=model, data=text, mesh=mesh, rank=4, seq=32, batch=4, holdout=4, steps=4, checkpoint="full")
    found = ranks.run(size, trained, options, axes, timeout=240)
    shard.close()
    args = ["--rank", "4", "--seq", "32", "--batch", str(4 // size), "--device", "cpu"]  # where sums are ordered
    assert plan.main(["--model", str(model), "--mesh", mesh, *args, "--json"]) == 0
    price = json.loads(capsys.readouterr().out)["price"]
    sent = sum(c["sent"] for c in price["collectives"])
    assert (sent > 0) == (size > 1)
    planned = sum(price[kind] for kind in tables.MEMORY)
    for wire, measured, predicted in found:
        assert wire == sent
        assert abs(predicted - measured) <= 0.1 * measured and abs(planned - measured) <= 0.1 * measured


def test_plan_and_job_trace_one_function(alone, monkeypatch):
    """The job captures ``train_step`` (asserted in ``trained``); the plan hands the same object to the tracer."""
    traced = []
    trace = pricing.trace.trace
    monkeypatch.setattr(pricing.trace, "trace", lambda f, *args, **named: traced.append(f) or trace(f, *args, **named))
    price(layers(JOB, 1), {"fsdp": 1})
    assert [f.args for f in traced] == [(training_step.train_step,)]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_hf(layers(JOB, 1).cfg) | {"torch_dtype": "float32"}))
    return tmp_path


def run(capsys, *args):
    assert plan.main([*map(str, args), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    "meshes", [("fsdp=1",), pytest.param(("fsdp=1", "dp=2,fsdp=2"), marks=pytest.mark.slow)], ids=" ".join
)
def test_rows(folder, capsys, alone, meshes):
    job = Job(layers(JOB, 1).cfg, NF4_DQ, ALL, 16, 1, 64, weights=torch.float32)  # sums are ordered on the host alone
    found = run(capsys, "--model", folder, "--mesh", *meshes, "--seq", 64, "--device", "l4")
    for x, mesh in zip(found, meshes, strict=True):
        axes = axes_in(mesh)
        assert (x["mesh"], x["ranks"], x["fits"]) == (mesh, math.prod(axes.values()), True)
        want = price(job, axes, device=DEVICES["l4"])
        assert x["price"] == json.loads(json.dumps(dataclasses.asdict(want)))
        least = bound(DEVICES["l4"], want.flops, want.read + want.written, want.sent)
        assert x["bound"] == dataclasses.asdict(least)
        tokens = 64 * x["ranks"]
        assert want.predicted is not None
        assert (x["seconds"], x["share"]) == (want.predicted.seconds, want.predicted.share)
        assert x["tokens_per_second"] == pytest.approx(tokens / x["seconds"])
        assert x["tokens_per_second_limit"] == pytest.approx(tokens / want.predicted.limit)
        assert x["tokens_per_second_bound"] == pytest.approx(tokens / max(x["bound"].values()))


@pytest.mark.slow
def test_what_fits(folder, capsys, alone):
    (x,) = run(capsys, "--model", folder, "--device", "l4")
    peak = sum(x["price"][kind] for kind in tables.MEMORY)
    there = DEVICES["l4"].memory
    for reserve, fits in (((there - peak) / 2**30 - 1e-6, True), ((there - peak) / 2**30 + 1e-6, False)):
        assert run(capsys, "--model", folder, "--device", "l4", "--reserve", reserve)[0]["fits"] == fits
    assert plan.main(["--model", str(folder), "--mesh", "fsdp=2", "fsdp=1", "dp=2"]) == 0
    assert "Smallest that fits: fsdp=1, 1 x h200" in capsys.readouterr().out
    assert plan.main(["--model", str(folder), "--device", "l4", "--reserve", "22.49"]) == 0
    assert "It does not fit: fsdp=1 needs" in capsys.readouterr().out


def test_bound():
    device = dataclasses.replace(DEVICES["a10"], flops=10.0, bandwidth=20.0, link=5.0)
    for flops, moved, sent, limit in ((100, 20, 5, "compute"), (10, 200, 5, "memory"), (10, 20, 50, "wire")):
        least = bound(device, flops, moved, sent)
        assert (least.compute, least.memory, least.wire) == (flops / 10, moved / 20, sent / 5)
        assert (least.limit, least.seconds) == (limit, 10.0)


def test_bar_is_the_device():
    parts = dict(zip(tables.MEMORY.values(), (6, 1, 2, 3, 4), strict=True))
    assert tables.bar(parts, 24).plain.count("█") == tables.WIDTH * 16 // 24
    assert tables.bar(parts, 8).plain == "█" * tables.WIDTH


BAD = {
    "--model llama4": "--model llama4: no preset, and no folder with a config.json; wanted one or the other",
    "--mesh fsdp": "--mesh fsdp: cannot read 'fsdp'; wanted axes and sizes such as dp=1,fsdp=2",
    "--mesh fsdp=2 tp=2": "mesh axis 'tp' is unknown; wanted some of dp, fsdp",
    "--mesh fsdp=0": "size 0",
    "--device h300": "device h300 is unknown; wanted one of b200, h200",
    "--plot nowhere/x.png": "--plot nowhere/x.png: its folder does not exist; make it",
    "--targets q,z": "--targets: 'z' is no weight",
    "--block 48": "block is 48",
    "--block 128": "layers.0.q: dim 1 = 64 is not a multiple of nf4_dq's block 128; use --block 64",
    "--rank 0": "--rank is 0; wanted at least 1",
    "--seq 5000": "--seq is 5000; wanted at most 4096",
    "--batch 0": "--batch is 0",
    "--reserve 200": "--reserve is 200.0; wanted 0 to the 140 GiB there are",
    "--reserve nan": "--reserve is nan",
    "--link 0": "--link is 0.0; wanted GB/s above 0",
    "--train full": "--train full with --format nf4_dq: nf4_dq cannot be trained: wanted integers in blocks along rows",
    "--wire fp8": "--wire is fp8 with --train lora, whose base travels packed; leave it out",
    "--sequence 3": "--sequence is no option; did you mean --seq?",
}


@pytest.mark.parametrize("args", BAD)
def test_bad_option(args, folder, capsys):
    refused(capsys, BAD[args], *([] if "--model" in args else ["--model", str(folder)]), *args.split())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2"}, "config.json: model_type = 'gpt2', want 'llama' or 'mistral'"),
        ({"torch_dtype": "int8"}, "torch_dtype = 'int8', want one of bfloat16, float16, float32"),
    ],
)
def test_bad_folder(change, said, folder, capsys):
    (folder / "config.json").write_text(json.dumps(to_hf(TINY) | change))
    refused(capsys, said, "--model", str(folder))
    (folder / "config.json").write_text("{")
    refused(capsys, "config.json: got no JSON", "--model", str(folder))


def refused(capsys, said, *args):
    assert plan.main(list(args)) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and err.startswith("plan: "), err
