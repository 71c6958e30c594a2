"""A run of examples.qlora over time: validation, the best adapter, kept states, an end before or beyond its steps."""

import dataclasses
import json
import math
import random
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from examples import export
from examples.common import run_folder, runs, training_step
from examples.common.progress import metrics
from examples.qlora import cli, measure, train
from examples.qlora.options import Options
from fquant import lora, tree
from fquant.compile import flops as flops_of
from fquant.compile.cost import cost
from fquant.compile.roofline import DEVICES, of
from fquant.device import HOST
from fquant.io import peft
from models import decoder, hf
from shard.checkpoint import steps
from tests.helpers import ranks
from tests.helpers.cases import slow_after
from tests.helpers.model_folders import TINY
from tests.helpers.sharding.checkpoints import last_bytes, last_state

pytestmark = pytest.mark.xdist_group("ranks")
SMALL = {"rank": 4, "seq": 32, "batch": 4, "holdout": 8, "dtype": "f32", "checkpoint": "none", "mesh": "fsdp=1"}


def work(options):
    return runs.work(cli.PROGRAM, options)


def ran(options, n=1):
    """Run, and return the message of a fault."""
    return ranks.run(n, work, options, timeout=240)[0]


@pytest.fixture(scope="module")
def given(model, text, tmp_path_factory):
    return Options(model=model, data=text, lr=0.01, steps=6, **SMALL, out=tmp_path_factory.mktemp("runs") / "given")


@pytest.fixture(scope="module")
def whole(given):
    """A run that validates and keeps three states."""
    options = dataclasses.replace(given, validate_every=2, keep=3, save_every=2, track="tensorboard")
    pytest.importorskip("tensorboard", reason="is not installed")
    assert ran(options) is None
    return options


PATH_OF = partial(hf.path_of, cfg=TINY)


def adapters_in(folder):
    return peft.load(folder / "adapter", PATH_OF)


def assert_same(a, b):
    assert tree.paths(a) == tree.paths(b) and all(map(torch.equal, tree.leaves(a), tree.leaves(b)))


def test_files(whole):
    out = whole.out
    assert {path.name for path in out.iterdir()} == {
        "adapter", "best", "checkpoints", "loss.png", "metrics.jsonl", "result.json", "run.json", "tensorboard",
    }  # fmt: skip
    assert steps(out / "checkpoints") == [2, 4, 6]
    found = metrics(out)
    assert [step["validation"] is not None for step in found] == [False, True] * 3
    best = json.loads((out / "best" / "best.json").read_text())
    assert best["validation"] == min(step["validation"] for step in found if step["validation"] is not None)
    result = json.loads((out / "result.json").read_text())
    assert result["perplexity_adapted"] == pytest.approx(math.exp(found[-1]["validation"]))
    assert result["perplexity_bf16"] is None and result["wire_bf16"] is None


def test_a_run_resumes_with_its_own_data_and_model(given, text, model, tmp_path):
    """Changed ones are named. Without a state, as if it was killed before its first, the run begins again."""
    data, folder = tmp_path / "text.txt", tmp_path / "model"
    shutil.copy(text, data)
    shutil.copytree(model, folder)
    options = dataclasses.replace(given, model=folder, data=str(data), steps=2, out=tmp_path / "run")
    assert ran(options) is None
    state, resumed = last_bytes(options.out), dataclasses.replace(options, out=None)
    resumed = dataclasses.replace(resumed, resume=options.out)
    data.write_text(text.read_text().replace("return x + 7\n", "return x - 7\n"))
    assert f"--data {data} has another content than when the run was started" in str(ran(resumed))
    shutil.copy(text, data)
    cfg, params = hf.load(folder)
    hf.save(tmp_path / "other", cfg, dataclasses.replace(params, embed=params.embed * 1.01))
    shutil.copy(tmp_path / "other" / "model.safetensors", folder)
    assert f"--model {folder} has another content than when the run was started" in str(ran(resumed))
    shutil.rmtree(folder)
    shutil.copytree(model, folder)
    assert last_bytes(options.out) == state and len(metrics(options.out)) == 2
    shutil.rmtree(options.out / "checkpoints")
    assert ran(resumed) is None
    assert last_bytes(options.out) == state and len(metrics(options.out)) == 2


@pytest.mark.slow
def test_a_damaged_file_of_a_run_is_refused(whole, tmp_path):
    """A thousand flipped bits and as many cuts, in all files that are read again."""
    out, draw = tmp_path / "run", random.Random(0)
    shutil.copytree(whole.out, out)
    right = run_folder.restored(Options, out / "run.json")
    resumed = dataclasses.replace(right, out=None, resume=out)
    read = {"adapter_model.safetensors": lambda path: adapters_in(path.parent.parent)}
    files = [*out.rglob("*.safetensors"), *out.rglob("manifest.json"), *[out / "run.json"] * 4]
    for i in range(2000):
        path = files[i // 2 % len(files)]
        raw = path.read_bytes()
        bit = draw.randrange(8 * len(raw.rstrip()))
        path.write_bytes(raw[: bit // 8] + bytes([raw[bit // 8] ^ 1 << bit % 8]) + raw[bit // 8 + 1 :])
        if i % 2:
            path.write_bytes(raw[: bit // 8])
        if path.name == "run.json":
            try:
                run_folder.check_resumed(out, resumed)
            except ValueError as error:
                assert str(error).startswith(f"{path}: ")
            else:
                assert run_folder.restored(Options, path) == right
        else:
            with pytest.raises(ValueError, match=f"(^|: ){re.escape(str(path))}: "):  # perhaps behind its manifest's
                read.get(path.name, lambda path: last_state(path.parent))(path)
        path.write_bytes(raw)


def measured(options):
    """The loss of the held-out rows beside the best adapter, row by row and not captured."""
    run, _ = train.start(options)
    adapters = adapters_in(options.out / "best")
    value = measure.mean_loss(dataclasses.replace(run, evaluate=run.evaluate.__wrapped__), run.local, adapters)
    return value


def test_the_best_adapter_has_the_loss_that_was_validated(whole):
    best = json.loads((whole.out / "best" / "best.json").read_text())
    (value,) = ranks.run(1, measured, whole, timeout=120)
    assert value == pytest.approx(best["validation"], abs=1e-6)


def flops(options):
    """FLOPs of a validation, and of the logits of its rows in plain torch, by torch's counter."""
    run, state = train.start(options)
    batches = measure.in_batches(run)
    setup, found = run.setup, []
    for rows in batches:
        found.append(cost(training_step.evaluate, state.trained, run.local, rows, setup).flops)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        params = training_step.attached(state.trained, run.local, None, setup)
        for rows in batches:
            decoder.forward(params, rows.tokens, setup.cfg, setup.comm(), rows.segments, setup.dtype)
    return sum(found), counter.get_total_flops(), sum(len(rows.tokens) for rows in batches), len(run.work.held.tokens)


def test_a_validation_costs_its_own_tokens(given):
    """Each held-out row goes through the model once, forward."""
    ((found, forward, rows, held),) = ranks.run(1, flops, dataclasses.replace(given, holdout=10), timeout=120)
    assert rows == held == 10
    assert 0 < found <= forward


@pytest.mark.parametrize("where", ["", "checkpoints/step-4"])
def test_an_adapter_comes_out_of_any_checkpoint(whole, tmp_path, capsys, where):
    assert export.main([str(whole.out / where), str(tmp_path / "adapter")]) == 0
    state = last_state(whole.out / where)
    assert f"14 adapters after {int(state.done)} steps" in capsys.readouterr().out
    assert_same(adapters_in(tmp_path), {path: state.trained[path] for path in adapters_in(tmp_path)})
    assert export.main([str(tmp_path / "adapter"), str(tmp_path / "b"), "--to", "adapter"]) == 2
    assert "got no checkpoint there, wanted the folder of a run" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_goes_on_beyond_its_end(whole, given, tmp_path):
    """Six steps and four more; with a constant rate they are ten steps to the bit."""
    constant = dataclasses.replace(given, schedule="constant", warmup=0, out=tmp_path / "a")
    assert ran(constant) is None
    assert ran(dataclasses.replace(constant, out=None, resume=tmp_path / "a", steps=10)) is None
    assert ran(dataclasses.replace(constant, steps=10, out=tmp_path / "b")) is None
    assert_same(*(last_state(tmp_path / name) for name in "ab"))
    losses = [[step["loss"] for step in metrics(tmp_path / name)] for name in "ab"]
    assert losses[0] == losses[1] and len(losses[0]) == 10
    assert json.loads((tmp_path / "a" / "run.json").read_text())["options"]["steps"] == 10


def test_fewer_steps_than_were_taken_are_refused(whole, capsys):
    assert cli.main(["--resume", str(whole.out), "--steps", "5"]) == 2
    assert f"--steps is 5, and {whole.out} has taken 6; wanted at least as many" in capsys.readouterr().err


@pytest.mark.slow
def test_patience_ends_a_run(given, tmp_path):
    """At a rate that changes no output, the run stops after two validations that are no better than the first."""
    options = dataclasses.replace(given, lr=1e-30, steps=40, validate_every=1, patience=2, warmup=0, out=tmp_path / "a")
    assert ran(options) is None
    found = [step["validation"] for step in metrics(tmp_path / "a")]
    assert len(found) == 3 and len(set(found)) == 1
    assert int(last_state(tmp_path / "a").done) == len(found)
    assert json.loads((tmp_path / "a" / "best" / "best.json").read_text())["steps"] == 1
    assert ran(dataclasses.replace(options, out=None, resume=tmp_path / "a")) is None  # and stays at its end
    assert len(metrics(tmp_path / "a")) == len(found)


def dies(*_):
    raise ValueError("the last measurement died")


def work_and_die(options):
    return runs.work(cli.PROGRAM._replace(measure=dies), options)


def test_the_adapter_outlives_a_last_measurement_that_dies(given, tmp_path):
    (fault,) = ranks.run(1, work_and_die, dataclasses.replace(given, steps=2, out=tmp_path / "a"), timeout=120)
    assert fault == (2, "the last measurement died")
    written, state = adapters_in(tmp_path / "a"), last_state(tmp_path / "a")
    assert_same(written, {path: state.trained[path] for path in written})


KINDS = {
    "dora": {"dora": True, "targets": "q,v"},
    "patterns": {"rank_pattern": "down=2,q=3", "alpha_pattern": "q=7"},
    "embedding": {"targets": "embed,q"},
    "stabilised": {"rank_stabilised": True, "targets": "all-linear"},
    "lion": {"optimizer": "lion", "lr": 1e-3, "weight_decay": 0.1},
    "sgd": {"optimizer": "sgd", "lr": 0.1},
}


@pytest.mark.parametrize("options", slow_after(0, [*KINDS.values()]), ids=KINDS)
def test_kinds_of_adapters_and_optimisers(given, tmp_path, options):
    """PEFT's folder of each says what was asked for, trains, and starts another run."""
    options = dataclasses.replace(given, steps=3, out=tmp_path / "a", **options)
    assert ran(options) is None
    adapters = peft.load(tmp_path / "a" / "adapter", PATH_OF, hf.tied_modules(hf.read_config(given.model)))
    assert all(x.b.abs().max() > 0 for x in adapters.values())
    one = adapters["layers.0.q"]
    assert (one.magnitude is not None) == options.dora and one.rank_stabilised == options.rank_stabilised
    assert ("embed" in adapters) == ("embed" in options.targets)
    if options.rank_pattern:
        assert (one.a.shape[0], one.alpha, adapters["layers.1.down"].a.shape[0]) == (3, 7, 2)
        assert (adapters["layers.1.k"].a.shape[0], adapters["layers.1.k"].alpha) == (4, 32)
    again = dataclasses.replace(
        given, steps=1, lr=1e-9, warmup=0, adapter=tmp_path / "a" / "adapter", out=tmp_path / "b", weight_decay=0.0
    )
    assert ran(again) is None
    second = peft.load(tmp_path / "b" / "adapter", PATH_OF, hf.tied_modules(hf.read_config(given.model)))
    for path, x in tree.items(second, is_leaf=lambda x: isinstance(x, lora.Lora)):
        assert tree.structure(x) == tree.structure(adapters[path])
        for name, t in tree.items(x):
            torch.testing.assert_close(t, tree.get(adapters[path], name), atol=1e-6, rtol=0)


def test_an_option_that_does_nothing_is_refused_of_a_resumed_run_too():
    """If it may change; and no default of the model that is shipped does nothing."""
    with pytest.raises(ValueError, match="--compare-dense True measures the perplexity of a base before it is packed"):
        Options(resume=Path("run"), format="none", compare_dense=True).check()
    assert Options(format="none").resolved(10, 1).compare_dense is False
    assert Options().resolved(10, 1).compare_dense is True


def test_what_is_left_open():
    """Steps, rate and comparison depend on data and model; those of the shipped model are its own."""
    shipped, other = Options(), Options(model="elsewhere")  # type: ignore[arg-type]
    found = shipped.resolved(1000, 4_000_000)
    assert (found.steps, found.lr, found.compare_dense) == (60, 1e-2, True)
    found = other.resolved(1000, 7_000_000_000)
    assert (found.steps, found.lr, found.compare_dense) == (375, 2e-4, False)  # three epochs of 125 batches of 8
    assert other.resolved(1001, 65_000_000_000).lr == 1e-4
    assert dataclasses.replace(other, epochs=0.5, accumulate=2).resolved(1000, 1).steps == 32
    assert dataclasses.replace(shipped, epochs=1.0).resolved(1000, 1).steps == 125


CARD = DEVICES["l4"]


def speeds(options):
    """Return the figures of three steps, those of the second as one line, and the FLOPs of a step by dtype and kind."""
    run, state = train.start(options)
    assert run.card == of(HOST)
    run, found = dataclasses.replace(run, card=CARD), []
    for _ in range(3):
        state, step = train.take(run, state)
        found.append(step)
    (captured,) = run.step.traced.values()
    counted = []
    for node in captured.module.graph.nodes:
        if node.op == "call_function" and (n := flops_of(node)):
            counted.append((n, node.all_input_nodes[0].meta["val"].dtype, "attention" in str(node.target)))
    return found, cli.summary(found[1]), counted


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("f32", marks=pytest.mark.slow)])
def test_a_step_shows_its_share_of_the_limit(given, tmp_path, dtype):
    """Which is the seconds of products and attention on the card over those that the step took."""
    options = dataclasses.replace(given, out=tmp_path / "run", dtype=dtype)
    ((found, line, counted),) = ranks.run(1, speeds, options, timeout=240)
    limit = sum(
        n / (CARD.rate(kind) * (CARD.share.attention if attends else CARD.share.products))
        for n, kind, attends in counted
    )
    assert any(attends for *_, attends in counted) and len(counted) > 20
    for step in found:
        seconds = options.batch * options.seq / step.tokens_per_second
        assert step.share == pytest.approx(limit / seconds)
    second = found[1]
    wanted = f"  {second.tokens_per_second:,.0f} tok/s, {100 * second.share:.0f} % of the limit  "
    assert wanted in line and cli.speed_text(15756.6, 0.716) == "15,757 tok/s, 72 % of the limit"


@pytest.mark.parametrize(
    ("seconds", "share", "line"), [(4.0, 0.5, "8 tok/s, 50 % of the limit"), (1.0, None, "8 tok/s")]
)
def test_a_share_above_one_is_not_shown(monkeypatch, seconds, share, line):
    monkeypatch.setattr(training_step, "limit", lambda step, device: 2.0)
    assert training_step.share(None, CARD, seconds) == share and cli.speed_text(8.0, share) == line


@pytest.fixture(scope="module")
def without_offload(given, tmp_path_factory):
    """A short run with a state in the middle."""
    out = tmp_path_factory.mktemp("offload") / "wanted"
    options = dataclasses.replace(given, out=out, steps=4, save_every=2, schedule="constant")
    assert ran(options) is None
    return options


@pytest.mark.parametrize(
    "offload", slow_after(1, [{"offload": "block", "offload_activations": True}, {"offload": "block"}]), ids=len
)
def test_offload_changes_no_bit(without_offload, tmp_path, offload):
    """On the host a fetch is a copy; a run may begin with offload and go on without."""
    out, wanted = tmp_path / "run", without_offload.out
    assert ran(dataclasses.replace(without_offload, out=out, **offload)) is None
    assert [s["loss"] for s in metrics(out)] == [s["loss"] for s in metrics(wanted)]
    assert last_bytes(out) == last_bytes(wanted)
    run_folder.check_resumed(out, dataclasses.replace(without_offload, out=None, resume=out, ordered=True))


REFUSED = {
    "both": (["--steps", "3", "--epochs", "2"], "--steps is 3 and --epochs is 2.0; leave one out"),
    "patience": (["--patience", "3"], "--patience is 3 without --validate-every; give both"),
    "pattern": (["--rank-pattern", "q:8"], "--rank-pattern q:8: cannot read 'q:8'; wanted names and numbers such as"),
    "no target": (["--targets", "q,v", "--rank-pattern", "down=2"], "--rank-pattern: 'down' is not among the targets"),
    "half a rank": (["--rank-pattern", "q=2.5"], "--rank-pattern: q=2.5; wanted a whole number"),
    "a tied head": (["--targets", "head"], "--targets: the head of this model is its embedding; use embed, which ada"),
    "two ranks": (["--adapter", "x", "--rank", "8"], "--rank with --adapter x, which has its own; leave one out"),
    "keep": (["--keep", "0"], "--keep is 0; wanted at least 1"),
    "epochs": (["--epochs", "0"], "--epochs is 0.0; wanted a number above 0"),
}


@pytest.mark.parametrize(("args", "said"), REFUSED.values(), ids=REFUSED)
def test_refused(model, text, tmp_path, capsys, args, said):
    assert (
        cli.main(["--model", str(model), "--data", str(text), "--seq", "32", "--out", str(tmp_path / "a"), *args]) == 2
    )
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1
