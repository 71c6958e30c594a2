"""Results that are no finite number: every program ends with a line that names the number, and not with status 0."""

import math
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

import shard
from examples import export, merge
from examples import quantize as quantise
from examples.common import finite
from examples.evaluate import cli as evaluate
from examples.generate import cli as generate
from examples.qlora import cli as qlora
from examples.sweep import cli as sweep
from examples.vqvae import cli as vqvae
from fquant import NF4, lora, quantize, tree
from fquant.io import peft
from models import hf
from tests.helpers.model_folders import tiny_model


def changed(folder, model, path, change):
    """Return a copy of a model, with a change of one weight."""
    cfg, params = hf.load(model)
    hf.save(folder, cfg, tree.map_at(path, change, params), extra={"eos_token_id": 0})
    shutil.copy(model / "tokenizer.json", folder)
    return folder


def with_nan(w):
    w = w.clone()
    w[1, 2] = math.nan
    return w


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    at = tmp_path_factory.mktemp("models")
    whole = tiny_model(at / "whole")
    return {
        "whole": whole,
        "nan": changed(at / "nan", whole, r"layers\.1\.o", with_nan),
        "steep": changed(at / "steep", whole, r"embed", lambda w: 3e4 * w),
    }


@pytest.fixture(autouse=True)
def alone():
    """Runs of one rank are in this process, where a fault leaves its process group."""
    yield
    shard.close()


TRAIN = ["--seq", "32", "--batch", "2", "--holdout", "2", "--steps", "1", "--mesh", "fsdp=1", "--out", "{out}"]
TRAIN += ["--data", "{text}", "--checkpoint", "full", "--format", "none"]
ANSWER = ["--prompt", "def", "--format", "none", "--max-new-tokens", "9"]
MEASURED = ["--data", "{text}", "--rows", "2", "--seq", "32", "--formats", "none", "--json"]
NAN = r"layers.1.o has nan at [1, 2]; wanted finite weights"
CASES = {
    "generate": (generate, "nan", ANSWER, "prompt 0: logits are not finite at token 1"),
    "generate, drawn": (generate, "nan", [*ANSWER, "--temperature", "1"], "logits are not finite"),
    "evaluate": (evaluate, "nan", MEASURED, f"none: the loss is nan; {NAN}"),
    "evaluate, steep": (evaluate, "steep", MEASURED, "none: the held-out loss is"),
    "first loss": (qlora, "nan", TRAIN, f"step 0: the loss is nan; {NAN}"),
    "steep": (qlora, "steep", [*TRAIN, "--lr", "1e-9"], "nats a token, and its perplexity is no finite number"),
    "rate": (qlora, "whole", [*TRAIN, "--lr", "1e30"], "use a smaller --lr"),
    "full": (qlora, "whole", [*TRAIN, "--lr", "1e39", "--train", "full"], "use a smaller --lr"),
    "sweep, first loss": (sweep, "nan", [*TRAIN, "--vary", "lr=1e-4,1e-3"], NAN),
    "sweep, rate": (sweep, "whole", [*TRAIN, "--vary", "lr=1e-4,1e30"], "use a smaller --lr"),
}  # fmt: skip


LONG = ("rate", "full", "steep", "sweep, first loss", "sweep, rate")  # of which "first loss" stands for the kind


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] * (x in LONG)) for x in CASES])
def test_a_line_and_no_result(name, models, text, tmp_path, capfd):
    program, model, args, fault = CASES[name]
    args = [arg.format(text=text, out=tmp_path / "run") for arg in args]
    assert program.main(["--model", str(models[model]), *args]) == 2
    printed = capfd.readouterr()
    last = printed.err.splitlines()[-1]
    assert fault in last and ("--lr" not in last or model != "nan")
    assert " nan" not in printed.out.lower() and not (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
def test_a_rate_of_an_autoencoder(tmp_path, capfd):
    args = ["--steps", "3", "--batch", "4", "--codes", "8", "--lr", "1e30", "--out", str(tmp_path / "run")]
    assert vqvae.main(args) == 2
    assert "use a smaller --lr\n" in capfd.readouterr().err


def test_numbers_of_results():
    finite.check([{"a": 1.0}, (2, 3.0), torch.tensor(math.nan), None], "x")
    with pytest.raises(ValueError, match=r"^x: the 1 0 is inf; use a smaller --lr$"):
        finite.check([1.0, (math.inf,)], "x")
    assert finite.perplexity(708.9, "x") == math.exp(708.9)
    for nats in (709.5, math.inf, math.nan):
        with pytest.raises(ValueError, match="perplexity is no finite number"):
            finite.perplexity(nats, "x")


def test_the_weight_that_is_to_blame():
    w = torch.ones(2, 64)
    w[1, 3] = math.inf
    good, bad = quantize(torch.ones(2, 64), NF4), {"a": torch.ones(3), "b": w}
    assert finite.culprit({"a": good}, bad) == "b has inf at [1, 3]; wanted finite weights"
    assert finite.culprit({"a": good}).startswith("all weights are finite")


WRITERS = {
    "quantize": (quantise.main, "bad out"),
    "merge": (merge.main, "bad adapter out"),
    "merge packed": (merge.main, "bad adapter out --format int8"),
    "dense": (export.main, "bad out --to merged"),
    "bitsandbytes": (export.main, "bad out --to bnb-nf4"),
    "compressed-tensors": (export.main, "bad out --to compressed-tensors"),
    "gguf": (export.main, "bad out --kind q8_0"),
}


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("path", ["embed", "final.norm", "layers.0.q"])
@pytest.mark.parametrize(("main", "args"), WRITERS.values(), ids=WRITERS)
def test_no_program_writes_a_weight_that_is_not_finite(main, args, path, value, model, tmp_path, monkeypatch, capsys):
    """The weight is named, and nothing that could be taken for a model is left."""
    monkeypatch.chdir(tmp_path)
    spoilt(model, path, value)
    assert main(args.split()) == 2
    printed = capsys.readouterr().err
    assert re.search(r"embe?d|norm|layers.0|blk.0", printed) and re.search("nan|NaN|inf", printed)
    assert not Path("out/config.json").exists() and not Path("out").is_file()


@pytest.mark.parametrize("args", ["export bad out --to merged --kind f16", "merge bad adapter out --dtype f16"])
def test_a_weight_that_overflows_is_named(args, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    spoilt(model, "layers.0.q", 1e38)
    program, *rest = args.split()
    assert {"export": export.main, "merge": merge.main}[program](rest) == 2
    assert "model.layers.0.self_attn.q_proj.weight: got inf at [0, 5], wanted finite weights" in capsys.readouterr().err


def spoilt(model, path, value):
    """Write a copy of the model with one other number at its sixth place, and an adapter of another weight."""
    put = lambda w: w.flatten().index_fill(0, torch.tensor([5]), value).view_as(w)
    changed(Path("bad"), model, re.escape(path), put)
    cfg, params = hf.load(model)
    peft.save("adapter", lora.init(params, "layers.1.q", 2, key=0), partial(hf.module_name, cfg=cfg))
