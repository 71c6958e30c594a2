"""Runs of examples.qlora that distil a teacher: the dense model itself, and another model of the same tokenizer."""

import dataclasses
import json
import math
import os
import shutil

import pytest
import torch
from tokenizers import Tokenizer

from examples.common import runs
from examples.qlora import cli, teacher, train
from examples.qlora.options import Options
from fquant import lazy, lora
from models import decoder, hf
from tests.helpers import ranks
from tests.helpers.cases import slow_after
from tests.helpers.model_folders import TINY, tiny_model
from tests.helpers.sharding.checkpoints import last_state

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
pytestmark = pytest.mark.xdist_group("ranks")
SMALL = {"rank": 4, "seq": 32, "batch": 4, "holdout": 6, "dtype": "f32", "checkpoint": "none", "lr": 1e-3}
WIDER = dataclasses.replace(TINY, vocab=4160, dim=96, num_layers=1)


@pytest.fixture(scope="module")
def wider(tmp_path_factory):
    """A teacher of other sizes, whose tables have 64 rows more."""
    return tiny_model(tmp_path_factory.mktemp("wider"), WIDER)


def judged(options):
    """Train, and return TRL's divergence on whole logits of the held-out rows, before and after."""
    from trl.experimental.gkd import GKDTrainer

    assert runs.work(cli.PROGRAM, options) is None
    its = train.prepare(options)
    cfg, its_teacher = its.cfg, its.teacher
    state = last_state(options.out)
    base, dense = lazy.read(its.packed), lazy.read(its_teacher.weights)
    held, found = its.held, []
    for params in (base, lora.attach(base, state.trained)):
        logits = (
            decoder.forward(x, held.tokens, c, segments=held.segments, dtype=torch.float32)
            for x, c in ((params, cfg), (dense, its_teacher.cfg))
        )
        goal = options.minimised()
        found.append(float(GKDTrainer.generalized_jsd_loss(*logits, held.targets, goal.beta, goal.temperature)))
    return found


GIVEN = {
    "wider": {"beta": 0.5, "temperature": 2.0, "validate_every": 4, "lr": 1e-2},
    "itself": {"compare_dense": True},
}


@pytest.mark.parametrize("given", slow_after(0, [*GIVEN.values()]), ids=GIVEN)
def test_the_divergence_falls(model, wider, text, tmp_path, given):
    given = {**SMALL, "teacher": None if "compare_dense" in given else wider, **given, "out": tmp_path / "run"}
    options = Options(model=model, data=str(text), objective="distill", steps=12, mesh="fsdp=1", **given)
    ((before, after),) = ranks.run(1, judged, options, timeout=240)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["divergence_packed"] == pytest.approx(before, rel=1e-3)
    assert result["divergence_adapted"] == pytest.approx(after, rel=1e-3)
    assert after < 0.95 * before
    if options.compare_dense:
        assert result["perplexity_teacher"] == result["perplexity_bf16"]
    assert (tmp_path / "run" / "best").exists() == ("validate_every" in given)


def test_rows_beyond_the_vocabulary_are_left_out(model, wider):
    cfg, dense = hf.lazy(model)
    found = teacher.find(Options(model=model, objective="distill", teacher=wider, seq=32), cfg, dense)
    assert found.cfg == dataclasses.replace(WIDER, vocab=cfg.vocab)
    tokens = torch.arange(18).reshape(2, 9) * 200
    whole = decoder.forward(hf.load(wider)[1], tokens, WIDER)
    assert torch.equal(decoder.forward(lazy.read(found.weights), tokens, found.cfg), whole[..., : cfg.vocab])


def test_another_tokenizer_is_refused(model, text, tmp_path, capsys):
    for name in ("other", "fewer"):
        tiny_model(tmp_path / name, TINY if name == "other" else dataclasses.replace(TINY, vocab=4000))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens(["a token of its own"])
    tokenizer.save(str(tmp_path / "other" / "tokenizer.json"))
    shutil.copytree(model, tmp_path / "none")
    (tmp_path / "none" / "tokenizer.json").unlink()
    args = ["--model", str(model), "--data", str(text), "--seq", "32", "--objective", "distill", "--teacher"]
    said = {
        "other": "its tokenizer has another number for 'a token of its own' than that of",
        "fewer": "has 4000 rows for tokens",
        "none": "tokenizer.json: no such file",
        "nothing": "config.json",
    }
    for name, words in said.items():
        assert cli.main([*args, str(tmp_path / name)]) == 2
        printed = capsys.readouterr().err
        assert words in printed and printed.count("\n") == 1


REFUSED = {
    "nothing to learn": (["--objective", "distill", "--format", "none"], "which packs nothing; give a --teacher"),
    "beta": (["--objective", "distill", "--beta", "2"], "--beta is 2.0; wanted 0 (forward) to 1 (reverse)"),
    "unused beta": (["--beta", "0.5"], "--beta is 0.5, and --objective sft has none; leave it out"),
    "teacher": (["--teacher", "x"], "--teacher and --temperature are of --objective distill, and this is sft"),
    "temperature": (["--objective", "distill", "--temperature", "0"], "--temperature is 0.0; wanted a number above 0"),
}


@pytest.mark.parametrize(("args", "said"), REFUSED.values(), ids=REFUSED)
def test_refused(model, text, capsys, args, said):
    assert cli.main(["--model", str(model), "--data", str(text), "--seq", "32", *args]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1


def some_steps(options):
    run, state = train.start(options)
    losses = []
    for _ in range(3):
        state, step = train.take(run, state)
        losses.append(step.loss)
    return losses


@pytest.mark.slow
def test_two_ranks_are_one(model, wider, text):
    options = Options(model=model, data=str(text), objective="distill", teacher=wider, **SMALL, steps=3, accumulate=2)
    found = []
    for mesh in ("fsdp=1", "fsdp=2", "dp=2"):
        found += ranks.run(int(mesh[-1]), some_steps, dataclasses.replace(options, mesh=mesh), timeout=240)
    assert all(math.isfinite(x) for x in found[0])
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], abs=1e-5)
