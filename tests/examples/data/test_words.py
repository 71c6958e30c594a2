"""examples.data.words against tokenizers: the same tokens, for every expression, and for every character."""

import random
import sys
import unicodedata

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from examples.data import encode, words
from examples.data.sources import stdlib_sources
from tests.helpers.cases import slow_after
from tests.helpers.data.chats import LLAMA_3
from tests.helpers.tokenizers import byte_level

QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KINDS = {"GPT-2": None, "Llama 3": LLAMA_3, "Qwen 2": QWEN_2, "o200k": O200K}


def encoder(tokenizer, typed=False):
    return words.Encoder(tokenizer, typed, words.Words(tokenizer), words.expression(tokenizer))


def samples():
    generator = random.Random(0)
    letters = "ab Z09 \n\r\t'sSſtré²½Ⅷ٣中文ñ\u0301\u200d👍🏽\x1c\x85\xa0\u2028\u3000_-(){}/<|>"
    mixed = ["".join(generator.choices(letters, k=60)) for _ in range(400)]
    source = [text[:2000] for _, text in stdlib_sources()[::40]]
    return [*mixed, *source, "", " ", "\n\n", "don't DON'T 1234567  x\n\n  y ", "ⱥ<think>b<|end|>"]


@pytest.mark.parametrize("kind", slow_after(2, KINDS))
def test_the_same_tokens(kind):
    tokenizer = byte_level(KINDS[kind], nfc=kind == "Qwen 2", size=500)
    ours = encoder(tokenizer)
    assert ours.ascii is not None
    for text in [*samples(), *samples()]:  # the second time from memory
        assert np.frombuffer(ours.encode(text), np.int32).tolist() == tokenizer.encode(text).ids, text


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_character_is_cut_alike(kind):
    """Each assigned character, between a letter, a digit, a sign and a space, is in the class of Oniguruma."""
    pattern = words.translated(KINDS[kind] or words.GPT2)
    split = pre_tokenizers.Split(Regex(KINDS[kind] or words.GPT2), "isolated")
    points = (chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000)
    known = [c for c in points if unicodedata.category(c) != "Cn"]
    for i in range(0, len(known), 2000):
        text = "".join(f"a{c}b 1{c}2 -{c}- {c} " for c in known[i : i + 2000])
        assert pattern.findall(text) == [part for part, _ in split.pre_tokenize_str(text)]


def without(tokenizer, **changes):
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


LEFT = {
    "a normalizer": without(byte_level(), normalizer=normalizers.Lowercase()),
    "a prefix space": without(byte_level(), pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "a look-behind": byte_level(r"(?<=a)b|[\s\S]"),
    "another model": Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
}


@pytest.mark.parametrize("tokenizer", LEFT.values(), ids=LEFT)
def test_what_is_not_understood_is_left_to_tokenizers(tokenizer):
    ours = encoder(tokenizer)
    assert ours.ascii is None and ours.parts("a b") is None
    assert np.frombuffer(ours.encode("a b A"), np.int32).tolist() == tokenizer.encode("a b A").ids


def test_unassigned_characters_and_unnormal_text_are_left():
    ours = encoder(byte_level(LLAMA_3, nfc=True))
    assert ours.parts("a\u0378") is None and ours.parts("e\u0301") is None and ours.parts("é") is not None


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(words, "KNOWN", 5)
    tokenizer = byte_level()
    ours = encoder(tokenizer)
    text = " ".join(map(str, range(50)))
    assert np.frombuffer(ours.encode(text), np.int32).tolist() == tokenizer.encode(text).ids and len(ours.words) <= 5


@pytest.mark.parametrize("fast", [True, False])
def test_tokens_that_count_against_offsets(fast):
    """With and without the memory of words, the tokens that have a character within a span count."""
    tokenizer = byte_level(LLAMA_3)
    ours = encoder(tokenizer)
    if not fast:
        ours.ascii = ours.expression = None
    generator = random.Random(1)
    text = "ask: the quick<|end|>brown 👍 fox's\n\n tail<|end|>\nüber & ñandú"
    offsets = tokenizer.encode(text).offsets
    for _ in range(200):
        spans = [tuple(sorted(generator.sample(range(len(text) + 1), 2))) for _ in range(2)]
        found = encode.flagged(ours, text, spans, False)
        assert (found & encode.TOKEN).tolist() == tokenizer.encode(text).ids
        # an encoding's offsets leave out the space before a word, which belongs to its token
        spaced = [(a - 1 if a and text[a - 1] == " " and b - a else a, b) for a, b in offsets]
        wanted = [any(a < d and b > c for c, d in spans) for a, b in spaced]
        exact = [any(a < d and b > c for c, d in spans) for a, b in offsets]
        assert all(w == f or e == f for w, f, e in zip(wanted, (found < 0).tolist(), exact, strict=True))
