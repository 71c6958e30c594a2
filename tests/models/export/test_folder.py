"""Tests of models.export.folder and .dense: an export resumes, and foreign or damaged shards are refused."""

import json

import pytest
import safetensors.torch as peer
import torch
from transformers import AutoModelForCausalLM

from fquant import NF4, dequantize, quantize, tree
from fquant.io import safetensors
from fquant.lazy import Lazy
from models import hf
from models.export import dense, folder
from models.export.leaves import is_linear
from tests.helpers.hf_models import CONFIGS, GQA, random_params

SHARD = 3000


def tensors(reads=None, fails=None):
    def read(i):
        if i == fails:
            raise OSError("gone")
        if reads is not None:
            reads.append(i)
        return torch.full((10, 50), float(i))

    return {f"t{i:02}": Lazy(lambda i=i: read(i), torch.empty(10, 50, device="meta")) for i in range(6)}


def test_an_interrupted_export_resumes(tmp_path):
    with pytest.raises(OSError, match="gone"):
        folder.write(tmp_path / "a", tensors(fails=4), {}, SHARD)
    assert not (tmp_path / "a" / "config.json").exists()
    with pytest.raises(ValueError, match="there is a model-00001-of-00006.safetensors already"):
        folder.write(tmp_path / "a", tensors(), {}, SHARD)
    reads, counts = [], []
    folder.write(tmp_path / "a", tensors(reads), {"k": 1}, SHARD, resume=True, done=lambda *count: counts.append(count))
    folder.write(tmp_path / "b", tensors(), {"k": 1}, SHARD)
    assert counts == [(i, 6) for i in range(1, 7)] and reads == [0, 1, 2, 3, 4, 5]  # four to compare, two to write
    content = lambda at: {path.name: path.read_bytes() for path in at.iterdir()}
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert folder.verify_all(tmp_path / "a", tensors(), SHARD) == 60
    with pytest.raises(ValueError, match="there is a config.json already"):
        folder.write(tmp_path / "a", tensors(), {}, SHARD, resume=True)


def test_foreign_and_damaged_shards_are_refused(tmp_path):
    with pytest.raises(OSError):
        folder.write(tmp_path, tensors(fails=4), {}, SHARD)
    first = tmp_path / "model-00001-of-00006.safetensors"
    raw = first.read_bytes()
    first.write_bytes(raw[:-4] + b"abcd")
    with pytest.raises(ValueError, match="model-00001-of-00006.safetensors: t00: got bytes .*; the file is damaged"):
        folder.write(tmp_path, tensors(), {}, SHARD, resume=True)
    first.write_bytes(raw)
    other = {name: t + 1 for name, t in peer.load_file(first).items()}
    safetensors.write(first, other)
    with pytest.raises(ValueError, match="model-00001-of-00006.safetensors: t00 has other values than its source"):
        folder.write(tmp_path, tensors(), {}, SHARD, resume=True)
    first.write_bytes(raw[:-4])
    with pytest.raises(ValueError, match="the file is damaged or cut short"):
        folder.write(tmp_path, tensors(), {}, SHARD, resume=True)
    safetensors.write(first, {"t00": torch.zeros(10, 50, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match="t00 is not what this export writes; use the options of the interrupted run"):
        folder.write(tmp_path, tensors(), {}, SHARD, resume=True)


def test_shards():
    sizes = {"a": 5, "b": 5, "c": 11, "d": 1, "e": 1}
    assert list(folder.shards(sizes, 10).values()) == [["a", "b"], ["c"], ["d", "e"]]
    assert list(folder.shards(sizes, 10))[0] == "model-00001-of-00003.safetensors"
    assert folder.shards(sizes, 100) == {"model.safetensors": list(sizes)}


def test_an_unknown_matrix_is_refused():
    """A matrix of a family that came later must not stay dense without a word."""
    matrix, vector = (Lazy(lambda: None, torch.empty(shape, device="meta")) for shape in ((2, 3), (2,)))
    assert is_linear("layers.0.q", matrix) and not is_linear("embed", matrix) and not is_linear("layers.0.new", vector)
    with pytest.raises(ValueError, match="layers.0.router: a matrix that is not known here; export a plain folder"):
        is_linear("layers.0.router", matrix)


def test_companions(tmp_path):
    for name in ("tokenizer.json", "generation_config.json", "model.bin"):
        (tmp_path / name).write_text(name)
    (tmp_path / "out").mkdir()
    assert folder.copy_companions(tmp_path, tmp_path / "out") == ["tokenizer.json", "generation_config.json"]
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"


@pytest.mark.filterwarnings("ignore")  # transformers warns of its own deprecations
@pytest.mark.parametrize("cfg", [GQA, CONFIGS["qwen3, everything"]], ids=["llama", "qwen3"])
def test_a_dense_folder(tmp_path, cfg):
    """Our reader and transformers read the decoded weights, rounded once."""
    packed = tree.map_at(r"layers\.\d+\.(q|down)", lambda w: quantize(w, NF4), random_params(cfg))
    dense.save(tmp_path / "a", cfg, packed, torch.bfloat16, max_shard_bytes=20000)
    got, params = hf.load(tmp_path / "a")
    assert got == cfg
    for path, w in tree.items(dequantize(packed)):
        assert torch.equal(tree.get(params, path), w.bfloat16()), path
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.dtype == torch.bfloat16
    for name, w in model.named_parameters():
        if name != "lm_head.weight" or not cfg.tied:
            path = hf.path_of(name.removesuffix(".weight"), cfg) if name.endswith("weight") else None
            assert path is None or torch.equal(tree.get(params, path), w)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    with pytest.raises(TypeError, match="dtype = torch.int8, want one of"):
        dense.save(tmp_path / "b", cfg, packed, torch.int8)
