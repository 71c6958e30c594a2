"""Tests of fquant.io.linear_regex: Python's ``re`` as oracle, and expressions that it does not survive."""

import random
import re
import time

import pytest

from fquant.io import linear_regex
from fquant.io.linear_regex import matcher

NAMES = [
    "model.layers.0.self_attn.q_proj", "model.layers.11.self_attn.v_proj", "model.layers.1.mlp.down_proj", "head",
    "model.visual.blocks.3.attn.qkv", "language_model.model.layers.7.mlp.experts.31.up_proj", "q_proj", "",
]  # fmt: skip
# Expressions of PEFT's documentation and issues, of Unsloth and of fine-tuning recipes for vision models.
COMMON = [
    r".*\.(q_proj|v_proj)", ".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$", r".*\.[qv]_proj", "(.*).q_proj",
    "head", r"^(?!.*visual).*(?:q_proj|k_proj|down_proj).*", r"model\.layers\.(1[0-9]|[0-9])\..*proj",
    r".*\b(mlp|attn)\b.*",
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|ffn|dense).*?(?:v_proj|up_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:k_proj|v_proj|down_proj)))",
    r"^(?:(?=.*layers)(?!.*experts)).*proj$", r"[^.]+", r"\w+\.\w+", r".*\d{2,3}.*",
    r"(model\.)?(layers\.\d+\.)*.*q_proj",
]  # fmt: skip


@pytest.mark.parametrize("text", COMMON)
def test_common_expressions_match_as_in_re(text):
    matches = matcher(text)
    assert [matches(name) for name in NAMES] == [re.fullmatch(text, name) is not None for name in NAMES]


def draw(rng, depth):
    """A random expression of the grammar."""
    kind = rng.random()
    if depth == 0 or kind < 0.35:
        return rng.choice(
            ["a", "b", r"\.", ".", r"\d", "[ab]", "[^a.]", r"\w", "^", "$", r"\b", "1", r"[a-c\d]", r"\W"]
        )
    if kind < 0.6:
        return draw(rng, depth - 1) + draw(rng, depth - 1)
    if kind < 0.7:
        return f"({draw(rng, depth - 1)}|{draw(rng, depth - 1)})"
    if kind < 0.78:
        return f"(?{rng.choice(':=!')}{draw(rng, depth - 1)})"
    repeats = ["*", "+", "?", "*?", "+?", "??", "{2}", "{0,2}", "{1,}", "{2,3}?"]
    return f"(?:{draw(rng, depth - 1)}){rng.choice(repeats)}"


def test_random_expressions_match_as_in_re():
    rng, checked = random.Random(0), 0
    for _ in range(1500):
        text = draw(rng, 4)
        try:
            rule = re.compile(text)
        except re.error:
            continue
        matches = matcher(text)
        for _ in range(8):
            name = "".join(rng.choice("ab.1c") for _ in range(rng.randrange(9)))
            assert matches(name) == (rule.fullmatch(name) is not None), (text, name)
            checked += 1
    assert checked > 8000


HOSTILE = [
    r"(.*a?)*b",
    r"(a+)+b",
    r"(a|a)*b",
    r"((a*)*)*b",
    r"(\w+\s?)*b",
    r".*.*.*.*.*.*.*.*b",
    r"(?=(a+)+b).*",
    r"(a?){200}a{200}b",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_expression_takes_long(text):
    matches, begin = matcher(text), time.perf_counter()
    assert not any(matches("a" * n) for n in range(0, 1000, 100))
    assert time.perf_counter() - begin < 3


REFUSED = {
    r"(a)\1": r"the escape \1", r"(?P<x>a)": "the group (?P", r"(?<=a)b": "the group (?<", "(?i)a": "the group (?i",
    "(": "a missing ')'", ")": "an unbalanced ')'", "a)b": "an unbalanced ')'", "*": "a quantifier '*' of nothing",
    "a**": "a second quantifier '*'", "a++": "a second quantifier '+'", "a{2}{3}": "a second quantifier '{'",
    "a{": "'{'", "a{3,2}": "the repetition {3,2}", "a{9999}": "the repetition {9999}", "[a": "a class without its ']'",
    "[b-a]": "the range b-a", "[[:alpha:]]": "a class without its ']', or with a '['", "a\\": "the escape \\",
    r"\N{DASH}": "the escape \\N", "(" * 25 + ")" * 25: "groups nested deeper than 20",
    "(" * 30_000: "an expression of 30000 characters", "((a{1000}){1000}){1000}": "over 4000 states",
    "a|" * 4999: "over 4000 states",
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_other_syntax_is_refused_in_one_short_line(text):
    with pytest.raises(ValueError, match=re.escape("got " + REFUSED[text])) as caught:
        matcher(text)
    assert len(str(caught.value)) < 220 and "\n" not in str(caught.value)


def test_long_names_and_many_steps_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="got a name of 1001 characters, wanted at most 1000 in one line"):
        matcher(".*")("a" * 1001)
    with pytest.raises(ValueError, match="wanted at most 1000 in one line"):
        matcher(".*")("a\nb")
    monkeypatch.setattr(linear_regex, "MOST_STEPS", 2_000)
    matches = matcher(r"(?!.*b)(a|aa)+")
    with pytest.raises(ValueError, match="over 2000 steps at .*; list the names instead"):
        [matches("a" * n) for n in range(100)]
