"""export: what is written is read by its own library, resumes, and is refused in one line."""

import dataclasses
import json
import shutil
from functools import partial

import gguf as package
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import export
from fquant import dequantize, lora, quantize, random, tree
from fquant.io import gguf_writer, peft
from models import decoder, hf
from models.export import folder
from tests.helpers import tokenizers
from tests.helpers.hf_models import GQA, random_params

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
    hf.save(at, CFG, random_params(CFG, torch.bfloat16), extra={"eos_token_id": 0})
    tokenizers.write(at, tokenizers.byte_level(), eos_token="<|end|>")
    (at / "generation_config.json").write_text("{}")
    return at


def run(*args):
    return export.main([str(arg) for arg in args])


def theirs(at, **options):
    model = AutoModelForCausalLM.from_pretrained(at, device_map="cpu", dtype=torch.float32, **options).train()
    with torch.no_grad():
        return model(TOKENS).logits


def test_gguf(source, tmp_path, capsys):
    out = tmp_path / "model.gguf"
    assert run(source, out, "--to", "gguf", "--kind", "bf16") == 0
    printed = capsys.readouterr().out
    assert "rows read back are right" in printed and "bf16" in printed and "f32" in printed
    assert len(package.GGUFReader(out).tensors) == 21
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert tokenizer.eos_token == "<|end|>"
    _, params = hf.load(source, torch.float32)
    with torch.no_grad():
        assert (theirs(tmp_path, gguf_file="model.gguf") - decoder.forward(params, TOKENS, CFG)).abs().max() < 2e-5


@pytest.mark.parametrize("to", export.BNB)
def test_bitsandbytes(source, tmp_path, to):
    assert run(source, tmp_path / "out", "--to", to) == 0
    _, params = hf.load(source)
    pack = lambda w: dequantize(quantize(w, export.BNB[to]), torch.float32)
    decoded = tree.map_at(r"layers\.\d+\.(q|k|v|o|gate|up|down)", pack, tree.map(lambda w: w, params))
    decoded = tree.map(lambda w: w.float(), decoded)
    with torch.no_grad():
        got, wanted = theirs(tmp_path / "out"), decoder.forward(decoded, TOKENS, CFG)
    assert (got - wanted).abs().max() < 0.2 * wanted.abs().max()  # bfloat16 products, int8 activations
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= names
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 0


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_compressed_tensors(source, tmp_path, kind):
    assert run(source, tmp_path / "out", "--to", "compressed-tensors", "--kind", kind) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert theirs(tmp_path / "out").isfinite().all()


def test_merged_with_an_adapter(source, tmp_path):
    """Compare with PEFT's own merge."""
    _, params = hf.load(source, torch.float32)
    adapters = lora.init(params, r"layers\.\d+\.(q|down)", rank=4, alpha=8, key=random.key(1))
    adapters = {
        path: dataclasses.replace(x, b=0.05 * random.normal(random.key(2), tuple(x.b.shape)))
        for path, x in adapters.items()
    }
    peft.save(tmp_path / "adapter", adapters, partial(hf.module_name, cfg=CFG))
    flags = ("--to", "merged", "--kind", "f32", "--adapter", tmp_path / "adapter")
    assert run(source, tmp_path / "out", *flags) == 0
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    _, found = hf.load(tmp_path / "out")
    weights = dict(model.named_parameters())
    for path in ("layers.0.q", "layers.1.down", "layers.0.k", "embed"):
        wanted = weights[hf.tensor_name(path, CFG)].float()
        assert (tree.get(found, path) - wanted).abs().max() <= 2**-7 * wanted.abs().max(), path
    exact = tree.get(lora.merge(params, adapters), "layers.0.q")
    assert (found.layers[0].q - exact).abs().max() < 1e-6 and not torch.equal(exact, params.layers[0].q)


def test_resume(source, tmp_path, monkeypatch, capsys):
    flags = ("--to", "merged", "--shard", "0.0001")
    assert run(source, tmp_path / "whole", *flags) == 0
    write, count = folder.safetensors.write, []

    def failing(path, *args):
        count.append(path)
        if len(count) == 4:
            raise OSError("disk full")
        write(path, *args)

    monkeypatch.setattr(folder.safetensors, "write", failing)
    assert run(source, tmp_path / "out", *flags) == 2
    assert capsys.readouterr().err == "export: disk full\n"
    assert len(list((tmp_path / "out").iterdir())) == 3
    monkeypatch.undo()
    assert run(source, tmp_path / "out", *flags) == 2
    assert run(source, tmp_path / "out", *flags, "--resume") == 0
    content = lambda at: {path.name: path.read_bytes() for path in at.iterdir()}
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_resume_of_a_gguf(source, tmp_path, monkeypatch, capsys):
    flags = ("--kind", "q8_0")
    assert run(source, tmp_path / "whole.gguf", *flags) == 0
    encode, count = gguf_writer.encode, []

    def failing(*args):
        count.append(args)
        if len(count) == 9:
            raise OSError("disk full")
        return encode(*args)

    monkeypatch.setattr(gguf_writer, "encode", failing)
    assert run(source, tmp_path / "a.gguf", *flags) == 2
    monkeypatch.undo()
    assert capsys.readouterr().err == "export: disk full\n" and not (tmp_path / "a.gguf").exists()
    assert run(source, tmp_path / "a.gguf", *flags) == 2
    assert "a.gguf.part: got the file of an interrupted run; resume that" in capsys.readouterr().err
    assert run(source, tmp_path / "a.gguf", *flags, "--resume") == 0
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()
    assert run(source, tmp_path / "a.gguf", *flags, "--resume") == 2
    assert "a.gguf: it exists already" in capsys.readouterr().err


REFUSED = {
    "kind": (("--to", "gguf", "--kind", "int4"), "--kind is int4 with --to gguf; wanted q4_k or f32"),
    "no kind": (("--to", "bnb-nf4", "--kind", "q4_k"), "--kind is q4_k with --to bnb-nf4, which has none"),
    "shard": (("--shard", "0"), "--shard is 0.0; wanted GiB above 0"),
    "option": (("--knd", "q4_k"), "--knd is no option; did you mean --kind?"),
    "width": (("--kind", "q4_k"), "width 128 is not a multiple of the 256 elements of a block of q4_k"),
}


@pytest.mark.parametrize("flags, fault", REFUSED.values(), ids=REFUSED)
def test_refused(source, tmp_path, capsys, flags, fault):
    assert run(source, tmp_path / "out", *flags) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("export: ") and fault in printed and printed.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("flags", "fault"), [((), "there is no IN"), (("{source}",), "there is no OUT; wanted where")])
def test_what_is_not_given(source, capsys, flags, fault):
    assert export.main([flag.format(source=source) for flag in flags]) == 2
    assert fault in capsys.readouterr().err


def test_an_adapter_of_another_model_is_refused(source, tmp_path, capsys):
    _, params = hf.load(source)
    adapters = lora.init(params, r"layers\.1\.q", rank=4, alpha=8, key=random.key(1))
    peft.save(tmp_path / "adapter", {"layers.7.q": adapters["layers.1.q"]}, partial(hf.module_name, cfg=CFG))
    assert run(source, tmp_path / "out", "--to", "merged", "--adapter", tmp_path / "adapter") == 2
    assert "--adapter: layers.7.q is no weight of this model" in capsys.readouterr().err


def test_a_tokenizer_may_be_left_out(source, tmp_path, capsys):
    flags = ("--to", "gguf", "--kind", "q8_0")
    model = tmp_path / "model"
    shutil.copytree(source, model)
    content = json.loads((model / "tokenizer.json").read_text())
    content["model"]["byte_fallback"] = True
    (model / "tokenizer.json").write_text(json.dumps(content))
    assert run(model, tmp_path / "a.gguf", *flags) == 2
    assert "model.byte_fallback = True is not supported" in capsys.readouterr().err
    assert run(model, tmp_path / "new" / "a.gguf", *flags, "--no-tokenizer") == 0
    keys = package.GGUFReader(tmp_path / "new" / "a.gguf").fields
    assert not [key for key in keys if key.startswith("tokenizer")]


def test_refused_folders(source, tmp_path, capsys):
    (tmp_path / "out").write_text("")
    assert run(source, tmp_path / "out") == 2
    assert "out: it exists already; choose another" in capsys.readouterr().err
    assert run(tmp_path / "none", tmp_path / "new") == 2
    assert "no such folder" in capsys.readouterr().err
