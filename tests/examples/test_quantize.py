"""quantize: the packed folder computes what bitsandbytes and transformers compute, and trains like its source."""

import dataclasses
import json
import re

import bitsandbytes.functional as peer
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples import export
from examples import quantize as program
from examples.common.command_line import quantised
from examples.qlora import train
from examples.qlora.options import Options
from fquant import NF4, NF4_DQ, Packed, dequantize, format, lazy, quantize, tree
from fquant.io import safetensors
from models import decoder, hf
from tests.helpers import tokenizers
from tests.helpers.arrays import same_bits
from tests.helpers.hf_models import CONFIGS, GQA, random_params

CFG = dataclasses.replace(GQA, vocab=320, dim=128, hidden=256, head_dim=32)
TOKENS = torch.arange(20)[None]
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and bitsandbytes warn of their own deprecations


@pytest.fixture(autouse=True)
def eager():
    """Keep bitsandbytes from compiling its own reference."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    at = tmp_path_factory.mktemp("source") / "model"
    hf.save(at, CFG, random_params(CFG, torch.bfloat16), extra={"eos_token_id": 3})
    tokenizers.write(at, tokenizers.byte_level(), eos_token="<|end|>")
    (at / "generation_config.json").write_text('{"eos_token_id": 3}')
    return at


def run(*args):
    return program.main([str(arg) for arg in args])


def read(folder):
    cfg, params = hf.lazy(folder)
    return cfg, lazy.read(params)


@pytest.mark.parametrize("name, fmt", {"nf4": NF4, "nf4_dq": NF4_DQ}.items())
def test_logits_are_those_of_bitsandbytes_weights_in_transformers(source, tmp_path, name, fmt):
    assert run(source, tmp_path / "out", "--format", name, "--dtype", "f32") == 0
    cfg, params = read(tmp_path / "out")
    assert cfg == CFG and params.layers[0].q.format == fmt
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    nested = fmt.scale is not None
    for x in model.model.layers.modules():
        if isinstance(x, torch.nn.Linear):
            packed, state = peer.quantize_4bit(x.weight.data, quant_type="nf4", compress_statistics=nested)
            x.weight.data = peer.dequantize_4bit(packed, state)
    with torch.no_grad():
        assert (model(TOKENS).logits - decoder.forward(params, TOKENS, cfg)).abs().max() < 2e-5


@pytest.mark.parametrize("name", ["int8", "int4", "int4_zero", "fp8", "mxfp4", "fp4"])
def test_weights_are_those_quantised_in_memory(source, tmp_path, capsys, name):
    assert run(source, tmp_path / "out", "--format", name) == 0
    _, dense = hf.load(source)
    wanted = quantised(dense, format.parse(name))
    _, params = read(tmp_path / "out")
    assert tree.paths(params) == tree.paths(wanted)
    assert all(map(same_bits, tree.leaves(params), tree.leaves(wanted)))
    printed = capsys.readouterr().out
    error = lambda p, w: ((dequantize(p, torch.float32) - w.float()).square().sum(), w.float().square().sum())
    off, size = map(sum, zip(*[error(wanted.layers[i].q, dense.layers[i].q) for i in range(2)], strict=True))
    assert re.search(rf"\n q +2 +0.1 +0.\d .* {(off / size) ** 0.5:.2e}", printed), printed
    assert "copied tokenizer.json, tokenizer_config.json, generation_config.json" in printed


def test_the_files_beside_the_weights(source, tmp_path):
    assert run(source, tmp_path / "out") == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eos_token_id"] == 3 and "quantization_config" not in config
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    with pytest.raises(OSError, match="no file named"):  # transformers does not take it for a dense model
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_training_begins_with_the_same_base(model, text, tmp_path):
    assert run(model, tmp_path / "out") == 0
    options = Options(data=text, seq=32, rank=4)
    ours, theirs = (train.prepare(dataclasses.replace(options, model=at)).packed for at in (tmp_path / "out", model))
    assert tree.paths(ours) == tree.paths(theirs)
    assert all(map(same_bits, tree.leaves(lazy.read(ours)), tree.leaves(lazy.read(theirs))))
    kept = train.prepare(dataclasses.replace(options, model=tmp_path / "out", format="none")).packed
    assert isinstance(lazy.read(kept).layers[0].q, Packed)
    with pytest.raises(ValueError, match=r"layers.0.q: is packed in nf4_dq already, and --format is int8; use"):
        train.prepare(dataclasses.replace(options, model=tmp_path / "out", format="int8"))


@pytest.mark.parametrize("name", ["gemma3", "phi3", "biases", "qwen3, everything", "qwen2"])
def test_families(tmp_path, name):
    cfg = CONFIGS[name]
    hf.save(tmp_path / "model", cfg, random_params(cfg))
    assert run(tmp_path / "model", tmp_path / "out", "--format", "int8") == 0
    found, params = read(tmp_path / "out")
    assert found == cfg
    _, dense = hf.load(tmp_path / "model")
    linear = re.compile(r"layers\.\d+\.(q|k|v|o|qkv|gate|up|gate_up|down)")
    for path, w in tree.items(dense):
        got = tree.get(params, path)
        wanted = quantize(w, format.INT8) if linear.fullmatch(path) else w
        assert all(map(same_bits, tree.leaves(got), tree.leaves(wanted))), path


def test_what_is_packed_is_kept_or_packed_again(source, tmp_path, capsys):
    assert run(source, tmp_path / "a") == 0
    assert run(tmp_path / "a", tmp_path / "same") == 0
    content = lambda at: (at / "packed.safetensors").read_bytes()
    assert content(tmp_path / "a") == content(tmp_path / "same")
    assert run(tmp_path / "a", tmp_path / "other", "--format", "int8") == 0
    first, second = (read(tmp_path / name)[1].layers[0].q for name in ("a", "other"))
    assert same_bits(second.codes, quantize(dequantize(first), format.INT8).codes)
    assert hf.load(tmp_path / "a", torch.float32)[1].layers[0].q.dtype == torch.float32


def test_export_writes_the_packed_bytes(source, tmp_path, capsys):
    """The bitsandbytes folder of the packed weights is that of the dense ones, which transformers' equals."""
    assert run(source, tmp_path / "packed") == 0
    for at in ("packed", "plain"):
        given = source if at == "plain" else tmp_path / at
        assert export.main([str(given), str(tmp_path / f"bnb-{at}"), "--to", "bnb-nf4-dq"]) == 0
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / f"bnb-{at}").iterdir()} for at in ("packed", "plain")
    ]
    assert files[0] == files[1]


def test_an_interrupted_run_is_continued(source, tmp_path, monkeypatch, capsys):
    """The folder and the table are those of one run; weights that are there are not quantised again, but for a few."""
    assert run(source, tmp_path / "whole") == 0
    table = capsys.readouterr().out
    quantise, count = program.quantize, []

    def failing(w, fmt):
        count.append(w)
        if not w.is_meta and sum(not w.is_meta for w in count) == 10:
            raise OSError("disk full")
        return quantise(w, fmt)

    monkeypatch.setattr(program, "quantize", failing)
    assert run(source, tmp_path / "out") == 2
    assert capsys.readouterr().err == "quantize: disk full\n"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"{hf.PACKED}.part", f"{hf.PACKED}.part.log"]
    assert run(source, tmp_path / "out") == 2
    assert "out: it exists already; choose another, or --resume an interrupted run" in capsys.readouterr().err
    assert run(source, tmp_path / "out", "--resume", "--format", "nf4") == 2
    assert "out: --format was nf4_dq when the run began, and is nf4; restore it" in capsys.readouterr().err
    del count[:]
    assert run(source, tmp_path / "out", "--resume") == 0
    assert sum(not w.is_meta for w in count) < 14
    rows = lambda text: text.splitlines()[1:-1]
    assert rows(capsys.readouterr().out) == rows(table)
    content = lambda at: {path.name: path.read_bytes() for path in at.iterdir()}
    assert content(tmp_path / "out") == content(tmp_path / "whole")


REFUSED = {
    "format": (("--format", "none"), "--format none leaves nothing to do"),
    "block": (("--block", "48"), "nf4_dq: block is 48; wanted one of 16, 32"),
    "option": (("--blok", "64"), "--blok is no option; did you mean --block?"),
}


@pytest.mark.parametrize("flags, fault", REFUSED.values(), ids=REFUSED)
def test_refused(source, tmp_path, capsys, flags, fault):
    assert run(source, tmp_path / "out", *flags) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("quantize: ") and fault in printed and printed.count("\n") == 1
    assert not list(tmp_path.iterdir())


def _cut(folder):
    path = folder / hf.PACKED
    path.write_bytes(path.read_bytes()[:-7])


def _other(folder):
    _, params = hf.lazy(folder)
    safetensors.save(folder / hf.PACKED, {"a": lazy.read(params).embed})


def _wide(folder):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"intermediate_size": 512}))


def _infinite(folder):
    _, params = hf.load(folder)
    params.layers[1].up[3, 5] = float("inf")
    (folder / "config.json").unlink()
    (folder / hf.PACKED).unlink()
    hf.save(folder, CFG, params)


SPOILT = {
    "cut": (_cut, "packed.safetensors: got "),
    "another tree": (_other, "packed.safetensors: embed: missing from the parameters"),
    "another config": (_wide, "layers.0.gate: got shape (256, 128), want (512, 128); check the config"),
    "infinite": (_infinite, "layers.1.up: 1 of 32768 values are NaN or infinite, the first at row 3, column 5"),
}


@pytest.mark.parametrize("spoil, fault", SPOILT.values(), ids=SPOILT)
def test_spoilt_folders(source, tmp_path, capsys, spoil, fault):
    hf.save_packed(tmp_path / "in", *hf.lazy(source))
    spoil(tmp_path / "in")
    assert run(tmp_path / "in", tmp_path / "out") == 2
    printed = capsys.readouterr().err
    assert printed.startswith("quantize: ") and fault in printed and printed.count("\n") == 1
    assert not (tmp_path / "out" / "config.json").exists()


def test_folders_that_are_taken_or_missing(source, tmp_path, capsys):
    assert run(source, tmp_path) == 2 and "it exists already; choose another" in capsys.readouterr().err
    assert run(tmp_path / "none", tmp_path / "out") == 2 and "no such folder" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"there is a config.json already"):
        hf.save_packed(source, *hf.lazy(source))
