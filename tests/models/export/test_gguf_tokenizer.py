"""Tests of models.export.gguf_tokenizer: transformers builds the same tokenizer from a GGUF."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from models.export import gguf
from models.export.gguf_tokenizer import SPLITTERS, tokenizer_values
from tests.helpers import tokenizers
from tests.helpers.hf_models import GQA, random_params

KINDS = {
    name: tokenizers.byte_level(expression, whole=name == "llama-bpe", first="<|end|>" if name == "llama-bpe" else None)
    for expression, name in SPLITTERS.items()
}
TEXTS = [*tokenizers.TEXTS[:1], "", "a<|end|>b <think>c", "x\r\n\n y  z", "123456 don't WE'LL", "日本語 ελληνικά 🙂"]


@pytest.mark.filterwarnings("ignore")  # transformers warns of its own deprecations
@pytest.mark.parametrize("name", KINDS)
def test_transformers_makes_the_same_tokens(tmp_path, name):
    cfg = dataclasses.replace(GQA, vocab=320)
    folder = tokenizers.write(
        tmp_path / "hf", KINDS[name], bos_token="<|end|>", eos_token={"content": "<|end|>"}, chat_template="{{ x }}"
    )
    gguf.save(tmp_path / "model.gguf", cfg, random_params(cfg, torch.float16), "f16", folder)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in TEXTS:
        assert (
            theirs(text, add_special_tokens=False).input_ids == KINDS[name].encode(text, add_special_tokens=False).ids
        ), text
    assert theirs.eos_token == "<|end|>" and theirs.chat_template == "{{ x }}"


def test_values(tmp_path):
    tokenizer = KINDS["llama-bpe"]
    values: Any = tokenizer_values(tokenizers.write(tmp_path, tokenizer, bos_token="<|end|>"), 320)
    get = lambda key: values[f"tokenizer.ggml.{key}"]
    count = tokenizer.get_vocab_size()
    assert get("model") == "gpt2" and get("pre") == "llama-bpe" and len(get("tokens")) == len(get("token_type")) == 320
    assert get("tokens")[:count] == [tokenizer.id_to_token(i) for i in range(count)]
    assert get("tokens")[count:] == [f"[PAD{i}]" for i in range(count, 320)] and get("token_type")[-1] == 5
    types = dict(zip(get("tokens"), get("token_type"), strict=True))
    assert types["<|end|>"] == 3 and types["<think>"] == 4 and types["a"] == 1
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    assert get("merges") == [" ".join(one) for one in merges]
    assert get("add_bos_token") is True and get("bos_token_id") == tokenizer.token_to_id("<|end|>")


def test_merges_as_texts_and_a_template_file(tmp_path):
    tokenizers.write(tmp_path, KINDS["gpt-2"], chat_template="old")
    wanted = tokenizer_values(tmp_path, 320)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["merges"] = [" ".join(one) for one in content["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "chat_template.jinja").write_text("new")
    assert tokenizer_values(tmp_path, 320) == wanted | {"tokenizer.chat_template": "new"}


def unigram():
    return Tokenizer(models.Unigram([("a", 0.0)]))


def changed(**changes):
    tokenizer = tokenizers.byte_level()
    for name, item in changes.items():
        setattr(tokenizer, name, item)
    return tokenizer


REFUSED = {
    "unigram": (unigram(), {}, "tokenizer.json: model.type = 'Unigram' is not supported"),
    "expression": (tokenizers.byte_level("a|b"), {}, "pre_tokenizer: the expression 'a|b' is none of llama.cpp's"),
    "whole words": (tokenizers.byte_level(whole=True), {}, "ignore_merges = True, but llama.cpp's gpt-2 assumes False"),
    "normalizer": (changed(normalizer=normalizers.Lowercase()), {}, "normalizer = {'type': 'Lowercase'} is not supp"),
    "metaspace": (changed(pre_tokenizer=pre_tokenizers.Metaspace()), {}, "pre_tokenizer = .*Metaspace.* is not supp"),
    "prefix": (changed(pre_tokenizer=pre_tokenizers.ByteLevel()), {}, "pre_tokenizer = .* is not supported"),
    "special": (KINDS["gpt-2"], {"bos_token": "<s>"}, "tokenizer_config.json: bos_token: got '<s>', which is no token"),
    "special, number": (KINDS["gpt-2"], {"bos_token": 3}, "bos_token: got 3, wanted a text"),
    "templates": (KINDS["gpt-2"], {"chat_template": [{"name": "a"}]}, "chat_template: got several, wanted one"),
}


@pytest.mark.parametrize("tokenizer, options, fault", REFUSED.values(), ids=REFUSED)
def test_refused(tmp_path, tokenizer, options, fault):
    with pytest.raises(ValueError, match=fault):
        tokenizer_values(tokenizers.write(tmp_path, tokenizer, **options), 320)


def test_refused_files(tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json: no such file; give a folder with a tokenizer.json"):
        tokenizer_values(tmp_path, 320)
    tokenizers.write(tmp_path, KINDS["gpt-2"])
    with pytest.raises(ValueError, match="has number 64, wanted 0 to 63; use this model's tokenizer"):
        tokenizer_values(tmp_path, 64)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for key, item, fault in (
        ("vocab", [1], "got no vocabulary"),
        ("vocab", {"a": "1"}, "token 'a' has number '1', wanted 0 to 319"),
        ("vocab", {"a": 1, "b": 1}, "tokens 'b' and 'a' have number 1"),
        ("merges", [["a b", "c"]], "merges: got .'a b c'., wanted two parts"),
    ):
        wrong = content | {"model": content["model"] | {key: item}, "added_tokens": []}
        (tmp_path / "tokenizer.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=fault):
            tokenizer_values(tmp_path, 320)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="tokenizer.json: got bytes that are no UTF-8"):
        tokenizer_values(tmp_path, 320)
    (tmp_path / "tokenizer.json").write_text("[" * 100000)
    with pytest.raises(ValueError, match="tokenizer.json: got no JSON"):
        tokenizer_values(tmp_path, 320)
