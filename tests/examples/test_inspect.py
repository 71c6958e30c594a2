"""inspect: folders that other libraries wrote, with the errors that those libraries' own decoding has."""

import dataclasses
import json
import re

import bitsandbytes.functional as bnb
import gguf as gguf_package
import peft as peer
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from examples import export, quantize
from examples import inspect as program
from fquant import NF4, dequantize, random, tree
from fquant import quantize as pack
from fquant.io import safetensors as files
from models import hf
from tests.helpers.hf_models import GQA, random_params

CFG = dataclasses.replace(GQA, vocab=320, dim=128, hidden=256, head_dim=32)
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and bitsandbytes warn of their own deprecations


@pytest.fixture(autouse=True)
def eager():
    """Keep bitsandbytes from compiling its own reference."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    at = tmp_path_factory.mktemp("source") / "model"
    hf.save(at, CFG, random_params(CFG, torch.bfloat16))
    return at


def run(*args):
    return program.main([str(arg) for arg in args])


@pytest.fixture
def rows(capsys):
    def found(*args):
        capsys.readouterr()  # what other programs printed
        assert run(*args, "--json") == 0
        content = json.loads(capsys.readouterr().out)
        return content, {row["path"]: row for row in content["tensors"]}

    return found


def relative(got, wanted):
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())


def test_a_dense_folder_as_a_table(source, capsys):
    assert run(source) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\n layers.1.down +128 256 +bfloat16 +64.0 ?\n", printed)
    assert "21 weights, 0.7 MiB" in printed and "error" not in printed and "Hugging Face folder" in printed


def test_headers_alone_are_read(source, rows, monkeypatch):
    monkeypatch.setattr(files, "read", lambda *args: pytest.fail("a weight was read"))
    content, found = rows(source)
    entries = files.header(source / "model.safetensors").tensors
    assert len(found) == len(entries) and content["bytes"] == sum(x.stop - x.start for x in entries.values())
    assert found["layers.0.gate"] == {
        "path": "layers.0.gate", "shape": [256, 128], "format": "bfloat16", "bytes": 65536, "error": None,
    }  # fmt: skip


@pytest.mark.parametrize("double", [False, True])
def test_a_folder_that_transformers_quantised_with_bitsandbytes(source, tmp_path, rows, double):
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=config, device_map="cpu", dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "out")
    content, found = rows(tmp_path / "out", "--against", source)
    assert content["kind"] == "Hugging Face folder, quantised: bitsandbytes" and content["notes"] == []
    _, dense = hf.load(source)
    assert set(found) == set(tree.paths(dense))
    for path in ("layers.0.q", "layers.1.down"):
        w = tree.get(dense, path)
        row, decoded = (
            found[path],
            bnb.dequantize_4bit(*bnb.quantize_4bit(w, compress_statistics=double, quant_type="nf4")),
        )
        assert row["format"] == ("nf4_dq" if double else "nf4") and row["shape"] == list(w.shape)
        assert row["error"] == pytest.approx(relative(decoded, w), rel=6e-3)  # three digits are printed
    assert found["embed"]["error"] == 0 and found["embed"]["format"] == "bfloat16"


@pytest.mark.parametrize("to, kind, name", [("bnb-int8", None, "int8"), ("compressed-tensors", "int4", "int4 of 32")])
def test_exported_folders(source, tmp_path, rows, to, kind, name):
    assert export.main([str(source), str(tmp_path / "out"), "--to", to, *(["--kind", kind] if kind else [])]) == 0
    content, found = rows(tmp_path / "out", "--against", source)
    assert content["notes"] == [] and 0 < found["layers.0.q"]["error"] < 0.2
    assert found["layers.0.q"]["format"].split()[0] == name.split()[0]
    on_disk = sum(x.stop - x.start for x in files.header(tmp_path / "out" / "model.safetensors").tensors.values())
    assert content["bytes"] == on_disk


def test_a_packed_folder(source, tmp_path, rows):
    assert quantize.main([str(source), str(tmp_path / "out"), "--format", "nf4", "--block", "128"]) == 0
    content, found = rows(tmp_path / "out", "--against", source)
    w = hf.load(source)[1].layers[0].q
    error = relative(dequantize(pack(w, dataclasses.replace(NF4, block=128)), torch.float32), w)
    assert content["kind"] == "packed folder" and found["layers.0.q"]["format"] == "nf4 of 128"
    assert found["layers.0.q"]["error"] == pytest.approx(error, rel=6e-3)
    one, _ = rows(tmp_path / "out" / hf.PACKED)
    assert one["kind"] == "tree" and one["bytes"] == content["bytes"]


def test_gguf(source, tmp_path, rows):
    """Compare shapes, kinds and bytes with gguf's reader, and errors with its decoder."""
    out = tmp_path / "model.gguf"
    assert export.main([str(source), str(out), "--to", "gguf", "--kind", "q8_0", "--no-tokenizer"]) == 0
    content, found = rows(out, "--against", source)
    assert content["kind"] == "GGUF, architecture llama"
    theirs = {x.name: x for x in gguf_package.GGUFReader(out).tensors}
    assert set(found) == set(theirs)
    for name, x in theirs.items():
        assert found[name]["shape"] == x.shape.tolist()[::-1] and found[name]["bytes"] == x.n_bytes
        assert found[name]["format"] == x.tensor_type.name.lower()
    w = hf.load(source)[1].layers[1].down
    x = theirs["blk.1.ffn_down.weight"]
    decoded = torch.from_numpy(gguf_package.dequantize(x.data, x.tensor_type))
    assert found[x.name]["error"] == pytest.approx(relative(decoded, w), rel=6e-3)
    assert found["blk.0.attn_q.weight"]["error"] < 0.01  # rows are in another order there


def test_an_adapter(source, tmp_path, rows, capsys):
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = peer.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, rank_pattern={"down_proj": 2},
        target_modules=["q_proj", "down_proj", "embed_tokens"], modules_to_save=["lm_head"],
    )  # fmt: skip
    peer.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    capsys.readouterr()
    content, found = rows(tmp_path / "adapter")
    assert content["kind"] == "PEFT adapter"
    assert found["layers.0.q"] | {"format": ""} == {
        "path": "layers.0.q", "shape": [128, 128], "format": "", "bytes": 4 * 4 * 256, "error": None,
    }  # fmt: skip
    assert found["layers.1.down"]["format"] == "lora, rank 2, alpha 8" and found["embed"]["shape"] == [320, 128]
    assert found["lm_head.weight"]["format"] == "float32"
    on_disk = files.header(tmp_path / "adapter" / "adapter_model.safetensors").tensors
    assert content["bytes"] == sum(x.stop - x.start for x in on_disk.values())
    assert run(tmp_path / "adapter", "--against", source) == 2
    assert "is a PEFT adapter, which has no weights to compare" in capsys.readouterr().err


def test_what_is_not_known_is_shown_with_a_note(source, tmp_path, rows, capsys):
    config = json.loads((source / "config.json").read_text())
    weights = safetensors.torch.load_file(source / "model.safetensors")
    weights["\x1b[31mred"] = torch.zeros(2)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    changes = {"quantization_config": {"quant_method": "secret"}, "model_type": "llama9"}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    content, found = rows(tmp_path)
    assert "model_type = 'llama9'" in content["notes"][0] and "'quant_method' is 'secret'" in content["notes"][1]
    assert found["model.layers.0.self_attn.q_proj.weight"]["format"] == "bfloat16"
    assert run(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "note: config.json: model_type" in printed


def test_a_quantised_weight_with_a_part_missing(source, tmp_path, rows):
    assert export.main([str(source), str(tmp_path / "out"), "--to", "bnb-nf4"]) == 0
    weights = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight.absmax"]
    safetensors.torch.save_file(weights, tmp_path / "out" / "model.safetensors")
    content, found = rows(tmp_path / "out")
    assert "model.layers.0.self_attn.q_proj.weight.absmax" in content["notes"][0] and len(content["notes"]) == 1
    assert "layers.0.q" not in found and found["layers.0.k"]["format"] == "nf4"
    assert found["model.layers.0.self_attn.q_proj.weight"]["format"] == "uint8"


def _write(content):
    return lambda folder, source: (folder / "file").write_bytes(content) and folder / "file"


def _cut(folder, source):
    (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-9])
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


def _config(text):
    def spoil(folder, source):
        (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
        (folder / "config.json").write_text(text)
        return folder

    return spoil


HOSTILE = {
    "missing": (lambda folder, source: folder / "none", "no such file or folder; check the path"),
    "empty folder": (lambda folder, source: folder, "there is no config.json and no adapter_config.json"),
    "empty file": (_write(b"\0"), "file: got 1 bytes, wanted at least 8"),
    "huge header": (_write(b"\xff" * 16), "file: got a header of 18446744073709551615 bytes"),
    "zip": (_write(b"PK\x03\x04" + bytes(64)), "file: got a header of"),
    "cut": (_cut, " bytes, wanted the"),
    "GGUF of nothing": (_write(b"GGUF" + bytes(4)), "file: got "),
    "config is no JSON": (_config("{"), "config.json: got no JSON"),
    "config is deep": (_config("[" * 200_000), "config.json: got no JSON"),
    "keys twice": (_config('{"a": 1, "a": 2}'), "config.json: got no JSON"),
}


@pytest.mark.parametrize("spoil, fault", HOSTILE.values(), ids=HOSTILE)
def test_hostile_input_gives_one_line(source, tmp_path, capsys, spoil, fault):
    assert run(spoil(tmp_path, source)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("inspect: ") and fault in printed and printed.count("\n") == 1, printed
    assert len(printed) < 2000


def test_another_model_is_refused(source, tmp_path, capsys):
    other = dataclasses.replace(CFG, hidden=512)
    hf.save(tmp_path / "other", other, random_params(other))
    assert run(source, "--against", tmp_path / "other") == 2
    assert "layers.0.gate: got shape (256, 128), but the original has (512, 128)" in capsys.readouterr().err
    files.save(tmp_path / "file", {"a": random.normal(random.key(1), (2,))})
    assert run(tmp_path / "file", "--against", source) == 2
    assert "none of its weights is in" in capsys.readouterr().err
    assert run(source, "--jsn") == 2
    assert "--jsn is no option; did you mean --json?" in capsys.readouterr().err
