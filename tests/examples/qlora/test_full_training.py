"""Runs of --train full: on any mesh, resumed to the bit, read by transformers, and options that make no sense."""

import dataclasses
import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples import export
from examples.common import runs
from examples.common.progress import metrics
from examples.qlora import cli, full_training
from examples.qlora.options import SHIPPED, Options
from fquant import INT8_ROW, NF4, dequantize, quantize, tree
from models import hf
from tests.helpers import ranks
from tests.helpers.sharding.checkpoints import last_state

pytestmark = pytest.mark.xdist_group("ranks")
SMALL = {"train": "full", "format": "none", "seq": 32, "batch": 4, "holdout": 8, "dtype": "f32", "checkpoint": "none"}
CONSTANT = {"schedule": "constant", "warmup": 0, "lr": 3e-3}


def work(options):
    return runs.work(cli.PROGRAM, options)


def ran(options, n):
    """Run on n ranks, and return the message of a fault."""
    return ranks.run(n, work, dataclasses.replace(options, mesh=f"fsdp={n}"), timeout=240)[0]


@pytest.fixture(scope="module")
def given(model, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("full") / "given"
    return Options(
        model=model, data=text, steps=6, save_every=3, keep=2, validate_every=3, **SMALL, **CONSTANT, out=out
    )


@pytest.fixture(scope="module")
def whole(given):
    assert ran(given, 2) is None
    return given


def losses(folder):
    return [step["loss"] for step in metrics(folder)]


def test_files(whole):
    """The state has float32 masters and moments by name; the model is the masters, in the dtype of the base."""
    state, out = last_state(whole.out), whole.out
    names = {path.name for path in out.iterdir()}
    assert names == {"best", "checkpoints", "loss.png", "metrics.jsonl", "model", "result.json", "run.json"}
    cfg, before = hf.load(whole.model)
    found, after = hf.load(out / "model")
    assert found == cfg and int(state.done) == 6 and tree.structure(state.trained) == tree.structure(after)
    assert {t.dtype for t in tree.leaves((state.trained, state.moments[1].mean))} == {torch.float32}
    for (path, was), now, master in zip(
        tree.items(before), tree.leaves(after), tree.leaves(state.trained), strict=True
    ):
        assert now.dtype == was.dtype and torch.equal(now, master.to(was.dtype)) and not torch.equal(now, was), path
    assert (out / "model" / "tokenizer.json").read_bytes() == (whole.model / "tokenizer.json").read_bytes()
    result, last = json.loads((out / "result.json").read_text()), metrics(out)[-1]["validation"]
    assert result["perplexity_adapted"] == pytest.approx(math.exp(last)) and losses(out)[-1] < losses(out)[0]
    assert result["perplexity_packed"] > result["perplexity_adapted"]
    assert (out / "best" / "model" / "model.safetensors").is_file()


def test_transformers_reads_the_model(whole):
    model = AutoModelForCausalLM.from_pretrained(whole.out / "model", dtype=torch.float32)
    cfg, ours = hf.load(whole.out / "model", torch.float32)
    found = dict(model.named_parameters())
    for path, t in tree.items(ours):
        assert torch.equal(found[hf.tensor_name(path, cfg)], t), path


def test_a_run_resumes_to_the_bit_and_on_another_mesh(whole, tmp_path):
    """From the state after three steps, on two ranks and on three."""
    for n, name in ((2, "same"), (3, "other")):
        shutil.copytree(whole.out, tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-6")
        assert ran(dataclasses.replace(whole, out=None, resume=tmp_path / name), n) is None
        got, want = last_state(tmp_path / name), last_state(whole.out)
        if n == 2:
            assert all(map(torch.equal, tree.leaves(got), tree.leaves(want))) and losses(tmp_path / name) == losses(
                whole.out
            )
        else:
            torch.testing.assert_close(tree.leaves(got.trained), tree.leaves(want.trained), rtol=1e-3, atol=3e-4)
            assert losses(tmp_path / name) == pytest.approx(losses(whole.out), abs=1e-4)


def test_a_checkpoint_becomes_a_model(whole, tmp_path, capsys):
    assert export.main([str(whole.out / "checkpoints" / "step-3"), str(tmp_path / "model")]) == 0
    assert "the model after 3 steps" in capsys.readouterr().out
    _, found = hf.load(tmp_path / "model")
    state = last_state(whole.out / "checkpoints" / "step-3")
    for t, master in zip(tree.leaves(found), tree.leaves(state.trained), strict=True):
        assert torch.equal(t, master.to(t.dtype))


@pytest.mark.parametrize("wire", ["int8", *(pytest.param(x, marks=pytest.mark.slow) for x in ("fp8", "ternary"))])
def test_quantised_messages(wire, whole, tmp_path):
    """Fewer bytes are gathered, of the layers alone, and the loss falls."""
    options = dataclasses.replace(whole, wire=wire, out=tmp_path / wire, validate_every=None, steps=4)
    assert ran(options, 2) is None
    found = metrics(tmp_path / wire)
    assert found[0]["wire"] < metrics(whole.out)[0]["wire"] and losses(tmp_path / wire)[-1] < losses(tmp_path / wire)[0]


@pytest.mark.slow
def test_codes_are_the_only_copy(whole, tmp_path):
    """Of int8 beside moments of 8 bits: the state has them, the model is decoded, fewer bytes travel; it resumes."""
    options = dataclasses.replace(
        whole, format="int8_row", moments="dynamic8", out=tmp_path / "run", validate_every=None
    )
    assert ran(options, 2) is None
    out = tmp_path / "run"
    state, (_, after) = last_state(out), hf.load(out / "model")
    q = state.trained.layers[0].q
    assert q.codes.dtype == torch.uint8 and torch.equal(dequantize(q).to(after.layers[0].q.dtype), after.layers[0].q)
    assert not torch.equal(q.codes, quantize(hf.load(whole.model)[1].layers[0].q, INT8_ROW).codes)
    assert losses(out)[-1] < losses(out)[0] and losses(out) == pytest.approx(losses(whole.out), abs=0.05)
    assert metrics(out)[0]["wire"] < metrics(whole.out)[0]["wire"]
    shutil.copytree(out, again := tmp_path / "again")
    shutil.rmtree(again / "checkpoints" / "step-6")
    assert ran(dataclasses.replace(options, out=None, resume=again), 2) is None
    assert all(map(torch.equal, tree.leaves(last_state(again)), tree.leaves(state))) and losses(again) == losses(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"checkpoint": "full"}, {"checkpoint": "selective"}, {"accumulate": 2, "batch": 2}]
)
def test_modes_and_micro_batches_change_nothing(options, whole, tmp_path):
    assert ran(dataclasses.replace(whole, out=tmp_path / "run", **options), 2) is None
    assert losses(tmp_path / "run") == pytest.approx(losses(whole.out), abs=1e-4)


@pytest.mark.slow
def test_other_objectives(whole, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    row = {"prompt": "def f(x):", "chosen": " return x", "rejected": " pass"}
    pairs.write_text("\n".join(json.dumps(row | {"prompt": f"def f{i}(x):"}) for i in range(40)))
    options = dataclasses.replace(whole, data=pairs, objective="orpo", out=tmp_path / "run", validate_every=None)
    assert ran(options, 2) is None
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["loss_after"] < result["loss_before"]


FAULTS = {
    "--train full": "--train full with --format nf4_dq: nf4_dq cannot be trained: wanted integers in blocks along rows",
    "--train full --format int8_row --wire int8": "--wire is int8 with --format int8_row, whose weights travel as they",
    "--train full --format none --rank 4": "--rank with --train full, which has no adapters; leave it out",
    "--train full --format none --dora": "--dora with --train full, which has no adapters; leave it out",
    "--train full --format none --targets q": "--targets with --train full, which has no adapters; leave it out",
    "--train full --format none --dither 1": "--dither with --train full, which has no adapters; leave it out",
    "--train full --format none --objective dpo": "--objective dpo, whose reference is the base without adapters; use",
    "--train full --format none --offload block": "--offload block with --train full, whose blocks stay on the device",
    "--wire int8": "--wire is int8 with --train lora, whose base travels packed; leave it out",
    "--train full --merge-aware": "--merge-aware with --train full, which has no adapters; leave it out",
}


@pytest.mark.parametrize("args", FAULTS)
def test_options_that_make_no_sense_are_named(args, capsys):
    assert cli.main(args.split()) == 2
    assert FAULTS[args] in capsys.readouterr().err


def test_a_packed_base_is_named(given, tmp_path, capsys):
    cfg, params = hf.load(given.model)
    packed = tree.map_at(r"layers\.\d+\.(q|k|v|o|gate|up|down)", lambda w: quantize(w, NF4), params)
    hf.save_packed(tmp_path / "packed", cfg, packed)
    shutil.copy(given.model / "tokenizer.json", tmp_path / "packed" / "tokenizer.json")
    args = ["--train", "full", "--format", "none", "--model", tmp_path / "packed", "--data", given.data, "--seq", "32"]
    assert cli.main([*map(str, args)]) == 2
    fault = "layers.0.q: nf4 cannot be trained: wanted integers in blocks along rows with float32 scales"
    assert f"--train full of {tmp_path / 'packed'}: {fault}" in capsys.readouterr().err


def test_the_rate_of_the_model_that_is_shipped():
    full = Options(train="full", format="none")
    assert (full.resolved(100, 10).lr, full.resolved(100, 10).compare_dense) == (1e-3, False)
    assert dataclasses.replace(full, model=SHIPPED.parent).resolved(100, 10).lr == 2e-5
    assert full_training.precision(Options()) is None
