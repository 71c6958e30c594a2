"""Runs of examples.qlora that learn preferences, or are merge-aware: what they write and what they reach."""

import dataclasses
import json
from functools import partial

import pytest
import torch

from examples.common import runs
from examples.common.progress import metrics
from examples.merge import main as merge
from examples.qlora import cli, train
from examples.qlora.options import Options
from fquant import NF4_DQ, Packed, lazy, lora, quantize, tree
from fquant.io import peft
from models import hf
from tests.helpers import ranks
from tests.helpers.arrays import same_bits
from tests.helpers.cases import slow_after
from tests.helpers.sharding.checkpoints import last_state

pytestmark = pytest.mark.xdist_group("ranks")
SMALL = {"rank": 4, "seq": 32, "batch": 4, "holdout": 6, "dtype": "f32", "checkpoint": "none", "lr": 0.01}


def work(options):
    return runs.work(cli.PROGRAM, options)


def ran(options, n=1):
    return ranks.run(n, work, options, timeout=240)[0]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Pairs, and answers with labels, of which the good ones all end alike."""
    folder = tmp_path_factory.mktemp("records")
    pairs = [{"prompt": f"f{i}(", "chosen": f"x, {i})", "rejected": f"{i * 7}"} for i in range(30)]
    labelled = [{"prompt": x["prompt"], "completion": x["chosen"], "label": True} for x in pairs]
    labelled += [{"prompt": x["prompt"], "completion": x["rejected"], "label": False} for x in pairs]
    for name, found in (("pairs", pairs), ("labelled", labelled)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in found))
    return folder


LEARNT = {
    "dpo": {"data": "pairs", "objective": "dpo", "beta": 0.5, "validate_every": 4},
    "orpo": {"data": "pairs", "objective": "orpo"},
    "kto": {"data": "labelled", "objective": "kto", "beta": 0.5, "accumulate": 2},
    "ipo": {"data": "pairs", "objective": "dpo", "kind": "ipo", "accumulate": 2},
    "dpo, merge-aware": {"data": "pairs", "objective": "dpo", "merge_aware": True},
}


@pytest.mark.parametrize("given", slow_after(0, [*LEARNT.values()]), ids=LEARNT)
def test_preferences_are_learnt(model, records, tmp_path, given):
    given = given | {"data": str(records / f"{given['data']}.jsonl")}
    options = Options(model=model, **SMALL, **given, steps=12, mesh="fsdp=1", out=tmp_path / "run")
    assert ran(options) is None
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["loss_after"] < result["loss_before"] and result["right_after"] > 0.8
    if given["objective"] == "dpo" and "kind" not in given:
        assert result["loss_before"] == pytest.approx(0.6931, abs=0.02)
        assert metrics(tmp_path / "run")[0]["loss"] == pytest.approx(0.6931, abs=0.02)
    assert (tmp_path / "run" / "best").exists() == ("validate_every" in given)
    assert peft.load(tmp_path / "run" / "adapter", partial(hf.path_of, cfg=hf.read_config(model)))


def some_steps(options):
    run, state = train.start(options)
    losses = []
    for _ in range(3):
        state, step = train.take(run, state)
        losses.append(step.loss)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto"])
def test_two_ranks_are_one(model, records, objective):
    data = str(records / ("labelled.jsonl" if objective == "kto" else "pairs.jsonl"))
    options = Options(model=model, data=data, objective=objective, **SMALL, steps=3, accumulate=2)
    found = []
    for mesh in ("fsdp=1", "fsdp=2", "dp=2"):
        n = int(mesh[-1])
        found += ranks.run(n, some_steps, dataclasses.replace(options, mesh=mesh), timeout=240)
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], abs=1e-5)


@pytest.mark.slow
def test_merge_aware_trains_the_file_that_it_writes(model, text, tmp_path):
    """The merged folder has the bytes of the adapter merged into the packed base, by lora and by examples.merge."""
    options = Options(
        model=model, data=str(text), **SMALL, steps=4, merge_aware=True, mesh="fsdp=1", out=tmp_path / "run"
    )
    assert ran(options) is None
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["survives"] == 1.0 and result["perplexity_merged"] == result["perplexity_adapted"]
    cfg, dense = hf.load(model)
    base = tree.map_at(r"layers\.\d+\.(q|k|v|o|gate|up|down)", lambda w: quantize(w, NF4_DQ), dense)
    state = last_state(tmp_path / "run")
    wanted, _ = lora.merge_packed(base, state.trained)
    found = lazy.read(hf.lazy(tmp_path / "run" / "merged")[1])
    assert all(map(same_bits, tree.leaves(found), tree.leaves(wanted)))
    assert not same_bits(found.layers[0].q.codes, base.layers[0].q.codes) and isinstance(found.layers[0].q, Packed)
    assert (tmp_path / "run" / "merged" / "tokenizer.json").exists()
    hf.save_packed(tmp_path / "packed", cfg, base)
    args = [tmp_path / "packed", tmp_path / "run" / "adapter", tmp_path / "again", "--format", "nf4_dq"]
    assert merge([str(arg) for arg in args]) == 0
    content = [(at / "packed.safetensors").read_bytes() for at in (tmp_path / "again", tmp_path / "run" / "merged")]
    assert content[0] == content[1]
    assert ran(dataclasses.replace(options, out=None, resume=tmp_path / "run", steps=5)) is None
    assert (tmp_path / "run" / "merged" / "packed.safetensors").read_bytes() != content[1]


def test_without_dither_adapters_begin_at_zero(model, text):
    options = Options(model=model, data=str(text), **SMALL, steps=1, mesh="fsdp=1", merge_aware=True)
    assert ranks.run(1, begins, dataclasses.replace(options, dither=0.0), timeout=120) == [0.0]
    assert ranks.run(1, begins, options, timeout=120)[0] > 0


def begins(options):
    _, state = train.start(options)
    return float(torch.stack([x.b.abs().max() for x in state.trained.values()]).max())


REFUSED = {
    "kind": (["--kind", "ipo"], "--kind and --smoothing are of --objective dpo, and this is sft; leave them out"),
    "no kind": (["--objective", "dpo", "--kind", "ppo"], "kind is 'ppo'; wanted one of sigmoid, hinge"),
    "dora": (["--merge-aware", "--dora"], "--merge-aware with --dora or --dropout, which a merged weight cannot have"),
    "dense": (["--merge-aware", "--format", "none"], "--merge-aware with --format none; wanted a format with fixed"),
    "text": (["--objective", "dpo"], "--data: got texts, instructions or chats, wanted pairs of chosen and rejected"),
    "pairs": (["--data", "{pairs}"], "--data: got pairs of chosen and rejected answers, wanted texts, instructions or"),
    "labels": (
        ["--data", "{pairs}", "--objective", "kto"],
        "--data: got pairs of chosen and rejected answers, wanted ans",
    ),
    "beta": (["--objective", "dpo", "--beta", "0"], "--beta is 0.0, and --objective dpo wants a number above 0"),
}


@pytest.mark.parametrize(("args", "said"), REFUSED.values(), ids=REFUSED)
def test_refused(model, text, records, tmp_path, capsys, args, said):
    args = [arg.format(pairs=records / "pairs.jsonl") for arg in args]
    args = ["--model", str(model), "--data", str(text), "--seq", "32", "--out", str(tmp_path / "a"), *args]
    assert cli.main(args) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1
