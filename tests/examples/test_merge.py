"""merge: the merged folder has the logits of PEFT's own merge, and what packing loses is measured."""

import dataclasses
import json
import re
from functools import partial

import peft as peer
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import merge as program
from fquant import INT8, Packed, dequantize, lazy, lora, quantize, random, tree
from fquant.io import peft
from models import decoder, hf
from tests.helpers import tokenizers
from tests.helpers.arrays import same_bits
from tests.helpers.hf_models import GQA, random_params

CFG = dataclasses.replace(GQA, vocab=320, dim=128, hidden=256, head_dim=32)
TOKENS = torch.arange(20)[None]
ALL = r"layers\.\d+\.(q|k|v|o|gate|up|down)"
pytestmark = pytest.mark.filterwarnings("ignore")  # peft and transformers warn of their own deprecations


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    at = tmp_path_factory.mktemp("source") / "model"
    hf.save(at, CFG, random_params(CFG, torch.float32), extra={"eos_token_id": 3})
    tokenizers.write(at, tokenizers.byte_level(), eos_token="<|end|>")
    (at / "generation_config.json").write_text('{"eos_token_id": 3, "temperature": 0.5, "do_sample": true}')
    return at


def theirs(source, folder, name="default", seed=1, **options):
    """Write an adapter that PEFT made with noise in all that it trains."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model = peer.get_peft_model(base, peer.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **options))
    for p in model.parameters():
        if p.requires_grad:
            p.data += 0.05 * torch.randn_like(p)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapters(source, tmp_path_factory):
    at = tmp_path_factory.mktemp("adapters")
    french = theirs(source, at / "french", target_modules=["q_proj", "down_proj"])
    return french, theirs(source, at / "legal", seed=2, target_modules="all-linear", rank_pattern={"q_proj": 8})


def run(*args):
    return program.main([str(arg) for arg in args])


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def merged_by_peft(source, *folders, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    names = [f"a{i}" for i in range(len(folders))]
    model = peer.PeftModel.from_pretrained(model, folders[0], adapter_name=names[0])
    for name, at in zip(names[1:], folders[1:], strict=True):
        model.load_adapter(at, name)
    return model.merge_and_unload(adapter_names=names)


def test_the_folder_loads_in_transformers_with_the_logits_of_peft(source, adapters, tmp_path, capsys):
    assert run(source, adapters[0], tmp_path / "out") == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert (logits(ours) - logits(merged_by_peft(source, adapters[0]))).abs().max() < 2e-5
    before = logits(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32))
    assert (logits(ours) - before).abs().max() > 1e-2
    assert ours.generation_config.temperature == 0.5 and ours.config.eos_token_id == 3
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|end|>"
    assert "4 weights of" in capsys.readouterr().out


def test_several_adapters_add_as_in_peft(source, adapters, tmp_path):
    assert run(source, *adapters, tmp_path / "out") == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert (logits(ours) - logits(merged_by_peft(source, *adapters))).abs().max() < 2e-5


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_several_doras_are_those_of_peft_in_order(source, tmp_path, order):
    """Compare with PEFT's merge and with both active."""
    targets = (["q_proj", "up_proj"], ["q_proj", "down_proj"])
    both = [theirs(source, tmp_path / f"{i}", seed=i, target_modules=x, use_dora=True) for i, x in enumerate(targets)]
    both = [both[i] for i in order]
    assert run(source, *both, tmp_path / "out") == 0
    ours = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32))
    model = peer.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), both[0])
    model.load_adapter(both[1], "other")
    model.base_model.set_adapter(["default", "other"])
    for wanted in (logits(merged_by_peft(source, *both)), logits(model)):
        assert (ours - wanted).abs().max() < 2e-5


def test_scales_multiply_the_updates(source, adapters, tmp_path):
    assert run(source, *adapters, tmp_path / "out", "--scales", "0.5", "-2") == 0
    _, base = hf.load(source)
    _, got = hf.load(tmp_path / "out")
    found = [peft.load(at, partial(hf.path_of, cfg=CFG)) for at in adapters]
    wanted = lora.merge(base, lora.combine(found, [0.5, -2.0], "cat"))
    for path, w in tree.items(wanted):
        assert (tree.get(got, path) - w).abs().max() < 1e-6, path


OPTIONS = {
    "dora": {"target_modules": ["q_proj", "up_proj"], "use_dora": True},
    "rslora, head": {"target_modules": ["v_proj", "lm_head"], "use_rslora": True},
    "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_of_peft(source, tmp_path, options):
    theirs(source, tmp_path / "adapter", **options)
    assert run(source, tmp_path / "adapter", tmp_path / "out") == 0
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert (logits(ours) - logits(merged_by_peft(source, tmp_path / "adapter"))).abs().max() < 2e-5


def test_a_sum_is_rounded_once(source, adapters, tmp_path):
    assert run(source, adapters[0], tmp_path / "out", "--dtype", "bf16", "--shard", "0.0001") == 0
    _, base = hf.load(source)
    _, got = hf.load(tmp_path / "out")
    wanted = lora.merge(base, peft.load(adapters[0], partial(hf.path_of, cfg=CFG)), torch.float32)
    assert all(map(same_bits, tree.leaves(got), tree.leaves(tree.map(torch.Tensor.bfloat16, wanted))))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3


def test_packed_with_the_measured_loss(source, adapters, tmp_path, capsys):
    """Compare with lora.merge_packed, and its losses with the table."""
    assert run(source, adapters[0], tmp_path / "out", "--format", "int8") == 0
    printed = capsys.readouterr().out
    _, base = hf.load(source)
    got = lazy.read(hf.lazy(tmp_path / "out")[1])
    found = peft.load(adapters[0], partial(hf.path_of, cfg=CFG))
    wanted, losses = lora.merge_packed(tree.map_at(ALL, lambda w: w, base), found, INT8)
    wanted = tree.map_at(ALL, lambda w: w if isinstance(w, Packed) else quantize(w, INT8), wanted)
    assert all(map(same_bits, tree.leaves(got), tree.leaves(wanted)))
    lost = re.search(r"\n q +(\S+)", printed)
    assert lost and min(losses.values()) < float(lost[1]) < max(losses["layers.0.q"], losses["layers.1.q"]) * 1.001
    assert (tmp_path / "out" / "tokenizer.json").exists() and (tmp_path / "out" / "generation_config.json").exists()


@pytest.mark.parametrize("flags", [("--format", "int8"), ("--shard", "0.0001")], ids=["packed", "plain"])
def test_an_interrupted_run_is_continued(source, adapters, tmp_path, monkeypatch, capsys, flags):
    """Folder and table are those of one run."""
    assert run(source, adapters[0], tmp_path / "whole", *flags) == 0
    table = capsys.readouterr().out.splitlines()[1:-1]
    total, count = program.total, []

    def failing(*args):
        count.append(args)
        if len(count) == 4:
            raise OSError("disk full")
        return total(*args)

    monkeypatch.setattr(program, "total", failing)
    assert run(source, adapters[0], tmp_path / "out", *flags) == 2
    assert capsys.readouterr().err == "merge: disk full\n"
    assert run(source, adapters[0], tmp_path / "out", *flags, "--resume") == 0
    assert capsys.readouterr().out.splitlines()[1:-1] == table
    content = lambda at: {path.name: path.read_bytes() for path in at.iterdir()}
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_packed_base(source, adapters, tmp_path):
    """Merge into 16 bits and back into the format; weights without an adapter keep their bytes."""
    _, dense = hf.load(source)
    base = tree.map_at(ALL, lambda w: quantize(w, INT8), dense)
    hf.save_packed(tmp_path / "base", CFG, base)
    found = peft.load(adapters[0], partial(hf.path_of, cfg=CFG))
    assert run(tmp_path / "base", adapters[0], tmp_path / "plain") == 0
    wanted = dequantize(lora.merge(base, found))
    assert all(map(same_bits, tree.leaves(hf.load(tmp_path / "plain")[1]), tree.leaves(wanted)))
    assert run(tmp_path / "base", adapters[0], tmp_path / "packed", "--format", "int8") == 0
    got = lazy.read(hf.lazy(tmp_path / "packed")[1])
    assert same_bits(got.layers[0].k.codes, base.layers[0].k.codes)
    assert not same_bits(got.layers[0].q.codes, base.layers[0].q.codes)


def test_merge_followed_by_save_loads_in_transformers(source, adapters, tmp_path):
    cfg, dense = hf.load(source)
    base = tree.map_at(r"layers\.\d+\.(k|v|up)", lambda w: quantize(w, INT8), dense)
    found = peft.load(adapters[1], partial(hf.path_of, cfg=CFG))
    whole = lora.merge(base, found, torch.float32)
    hf.save(tmp_path / "out", cfg, whole)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        attached = decoder.forward(lora.attach(base, found), TOKENS, cfg)
    got = logits(model)
    rounding = (got - logits(model.double())).abs().max()
    assert 0 < rounding and (got - attached).abs().max() < 4 * rounding


def spoil(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_refused(source, adapters, tmp_path, capsys):
    def refused(fault, *args):
        assert run(*args) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("merge: ") and fault in printed and printed.count("\n") == 1, printed
        assert not (tmp_path / "out").exists()

    one, out = adapters[0], tmp_path / "out"
    refused("got 2 folders; wanted BASE ADAPTER... OUT, see --help", source, out)
    refused("--scales has 2 numbers; wanted one for each of 1", source, one, out, "--scales", "1", "2")
    refused("--shard is 0.0; wanted GiB above 0", source, one, out, "--shard", "0")
    refused("--block is 64 with --format none", source, one, out, "--block", "64")
    refused("it exists already; choose another", source, one, tmp_path)
    refused("--scals=1 is no option; did you mean --scales?", source, one, out, "--scals=1")
    refused("adapter_config.json: got no such file", source, source, out)
    refused("no such folder", tmp_path / "none", one, out)
    _, params = hf.load(source)
    some = lora.init(params, r"layers\.1\.q", rank=4, alpha=8, key=random.key(1))["layers.1.q"]
    peft.save(tmp_path / "deep", {"layers.7.q": some}, partial(hf.module_name, cfg=CFG))
    refused(
        "deep: layers.7.q: got no weight of that path in the base; use the adapter's own",
        source,
        tmp_path / "deep",
        out,
    )
    wide = dataclasses.replace(some, a=torch.zeros(4, 64))
    peft.save(tmp_path / "wide", {"layers.1.q": wide}, partial(hf.module_name, cfg=CFG))
    refused("an adapter a (4, 64), b (128, 4) does not fit a weight (128, 128)", source, tmp_path / "wide", out)
    theirs(source, tmp_path / "saved", target_modules=["q_proj"], modules_to_save=["lm_head"])
    capsys.readouterr()  # transformers shows progress
    fault = "saved: final.head: two adapters store it whole, and they have no sum; leave one out"
    refused(fault, source, tmp_path / "saved", tmp_path / "saved", out)
    spoil(tmp_path / "wide", peft_type="LOHA")
    refused("adapter_config.json: peft_type: got 'LOHA'", source, tmp_path / "wide", out)
