"""Every reader of a model's or an adapter's folder, and every file there, as a link to a private file and as a pipe."""

import json
import os
from pathlib import Path

import pytest

from examples import inspect as inspect_program
from examples.common.model_folders import companions
from examples.data import tokenizer
from examples.generate import prompts
from fquant.io import peft, peft_ia3
from models import hf, hf_encoder
from models.export import folder as exported
from models.export.gguf_tokenizer import tokenizer_values
from tests.helpers import tokenizers
from tests.helpers.hf_models import GQA, random_params

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
WEIGHTS = ("model.safetensors.index.json", "model-00001-of-00006.safetensors")
load = lambda f: peft.load(f, lambda name: name)
READERS = {
    "hf.lazy": (hf.lazy, ("config.json", *WEIGHTS, "model.safetensors", "packed.safetensors")),
    "hf.read_config": (hf.read_config, ("config.json",)),
    "hf_encoder.lazy": (hf_encoder.lazy, ("config.json",)),
    "peft.load": (load, ("adapter_config.json", "adapter_model.safetensors")),
    "peft_ia3.load": (lambda f: peft_ia3.load(f, lambda name: name), ("adapter_config.json",)),
    "tokenizer.text": (
        tokenizer.text,
        (*TOKENIZER, "special_tokens_map.json", "additional_chat_templates/tool_use.jinja"),
    ),
    "tokenizer.vocabulary": (tokenizer.vocabulary, ("tokenizer.json",)),
    "prompts.settings": (prompts.settings, ("generation_config.json",)),
    "gguf_tokenizer": (lambda f: tokenizer_values(f, 320), TOKENIZER),
    "companions": (companions, ("config.json",)),
    "inspect": (
        inspect_program.inspect,
        ("config.json", *WEIGHTS, "model.safetensors", "packed.safetensors", "adapter_config.json"),
    ),
    "copies": (
        lambda f: exported.copy_companions(f, f.parent / "out"),
        (*TOKENIZER, "generation_config.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"),
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with every file that a reader may open."""
    path = tmp_path_factory.mktemp("model") / "model"
    found = tokenizers.byte_level()
    hf.save(path, GQA, random_params(GQA), max_shard_bytes=60_000, extra={"eos_token_id": 1})
    tokenizers.write(path, found, eos_token="<|end|>")
    (path / "generation_config.json").write_text("{}")
    return path


@pytest.mark.parametrize("name, file", [(name, file) for name, (_, files) in READERS.items() for file in files])
def test_links_out_and_pipes_are_refused(model, tmp_path, name, file):
    """In place of each file: nothing of the target is read, and no open waits for a writer."""
    copy, path = tmp_path / "model", tmp_path / "model" / file
    path.parent.mkdir(parents=True)
    (tmp_path / "out").mkdir()
    for each in model.iterdir():
        (copy / each.name).write_bytes(each.read_bytes())
    if name.startswith("peft"):
        (copy / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    path.unlink(missing_ok=True)
    (tmp_path / "private").write_text('{"secret": "word"}')
    for make, fault in (
        (lambda: path.symlink_to(tmp_path / "private"), "got a link to"),
        (lambda: os.mkfifo(path), "got a folder, a pipe"),
    ):
        make()
        with pytest.raises(ValueError, match=f"{file}: {fault}") as raised:
            READERS[name][0](copy)
        assert "word" not in str(raised.value) and not any(
            "word" in x.read_text() for x in (tmp_path / "out").iterdir()
        )
        path.unlink()


def test_copies_are_read_by_no_more_people(model, tmp_path):
    """A file that its owner alone reads stays so in OUT, and another has the mode of any new file."""
    copy = tmp_path / "model"
    copy.mkdir()
    (tmp_path / "out").mkdir()
    for name, mode in (("tokenizer.json", 0o600), ("tokenizer_config.json", 0o644), ("merges.txt", 0o444)):
        (copy / name).write_text("x")
        (copy / name).chmod(mode)
    for _ in range(2):  # over what is there
        assert set(exported.copy_companions(copy, tmp_path / "out")) == {p.name for p in copy.iterdir()}
    usual = 0o666 & ~_umask()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {
        "tokenizer.json": 0o600 & usual,
        "tokenizer_config.json": 0o644 & usual,
        "merges.txt": usual & 0o644,
    }


def _umask() -> int:
    os.umask(found := os.umask(0))
    return found


def test_a_snapshot_of_the_cache_is_read(model, tmp_path):
    """As huggingface_hub lays it out, by a link to the snapshot too."""
    snapshot, blobs = tmp_path / "models--a" / "snapshots" / "rev", tmp_path / "models--a" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for number, each in enumerate(model.iterdir()):
        (blobs / str(number)).write_bytes(each.read_bytes())
        (snapshot / each.name).symlink_to(Path("../../blobs") / str(number))
    (tmp_path / "named").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "named"):
        assert hf.load(folder)[0] == GQA and tokenizer.text(folder).eos == 0
        (tmp_path / "out").mkdir(exist_ok=True)
        assert "tokenizer.json" in exported.copy_companions(folder, tmp_path / "out")
        assert not (tmp_path / "out" / "tokenizer.json").is_symlink()
