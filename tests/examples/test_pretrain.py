"""Pretraining: the corpus, packed batches, refusals, and the shipped model."""

import ast
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from examples import pretrain
from models import hf

SHIPPED = Path(pretrain.__file__).parent / "model"


@pytest.mark.slow
def test_documents():
    texts = pretrain.documents()
    assert len(texts) == len(set(texts)) > 5000
    assert any(text.startswith("json.dumps(obj, *, skipkeys=False") for text in texts)
    assert any(text.startswith("json.decoder.JSONDecoder.raw_decode(self, s, idx=0)\n\nDecode") for text in texts)
    names = {text.split("\n")[0].split("(")[0] for text in texts}
    assert "json" in names and "lambda" in names
    assert not any(name.startswith(("test.", "site-packages", "unittest.test.")) for name in names)


def test_documented():
    source = '''
"""Of the module."""
async def f(a, *, b=1):
    """Of f."""
    def inner():
        """Inside."""
class C:
    def g(self):
        """
        Of g.

            indented
        """
    def undocumented(self): ...
'''
    assert list(pretrain._documented(ast.parse(source), "m")) == [
        "m\n\nOf the module.",
        "m.f(a, *, b=1)\n\nOf f.",
        "m.f.inner()\n\nInside.",
        "m.C.g(self)\n\nOf g.\n\n    indented",
    ]


def test_pack():
    tokens, segments = pretrain.pack([[5, 6], [7], [8, 9, 10]], seq=4)  # 0 5 6 0 7 | 7 0 8 9 10
    assert tokens.tolist() == [[0, 5, 6, 0, 7], [7, 0, 8, 9, 10]]
    assert segments.tolist() == [[1, 1, 1, 2, 2], [0, 1, 1, 1, 1]]


def test_batches_are_a_function_of_the_seed():
    encoded = [[i + 1] * 3 for i in range(20)]

    def first(seed, count):
        source = pretrain.batches(encoded, pretrain.Options(Path(), seq=8, batch=2, seed=seed))
        return torch.stack([next(source)[0] for _ in range(count)])

    assert torch.equal(first(0, 9), first(0, 9)) and not torch.equal(first(0, 9), first(1, 9))
    assert first(0, 9).shape == (9, 2, 9)


def test_out_in_use(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="not empty, want a new folder; choose another"):
        pretrain.main(pretrain.Options(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.slow
def test_shipped_model():
    assert {p.name for p in SHIPPED.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    assert sum(p.stat().st_size for p in SHIPPED.iterdir()) < 12e6
    cfg, params = hf.load(SHIPPED)
    assert cfg == pretrain.CONFIG and params.embed.dtype == torch.bfloat16
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == cfg.vocab and tokenizer.token_to_id(pretrain.END) == 0
    text = "def naïve(x):\n\treturn '∑' * x  # 日本\r\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    # It has learnt: far below the log(4096) = 8.3 nats a token of a model that has not.
    encoded = [one.ids for one in tokenizer.encode_batch(pretrain.documents()[:2000:40])]
    assert pretrain.evaluate(params, *pretrain.pack(encoded, 256)) < 4.5
