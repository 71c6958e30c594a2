"""Tests of fquant.io.name_patterns: PEFT's own rule as oracle."""

import re
import time

import pytest
from peft.utils.other import get_pattern_key

from fquant.io import linear_regex
from fquant.io.name_patterns import is_fixed, lookup

NAMES = [
    "model.layers.0.self_attn.q_proj", "model.layers.10.self_attn.q_proj", "model.layers.1.mlp.down_proj", "q_proj",
    "model-layers.0.self_attn.q_proj", "model.layersX0.self_attn.q_proj", "deep.proj", "very.deep.proj", "proj", "",
]  # fmt: skip
TABLES = {
    "names": {"q_proj": 1, "down_proj": 2, "proj": 3},
    "the first that fits": {"self_attn.q_proj": 1, "q_proj": 2, "layers.0.self_attn.q_proj": 3},
    "dots are any character": {"layers.0.self_attn.q_proj": 1, "model.layers.0.self_attn.q_proj": 2},
    "escaped": {re.escape(name): i for i, name in enumerate(NAMES) if name},
    "expressions": {r"model\.layers\.(0|1)\..*": 1, r"^q_proj": 2, r".*\d.*q_proj": 3, "proj": 4},
    "mixed order": {r"[a-z_]+": 1, "q_proj": 2, r"layers.\d+.self_attn.q_proj": 3},
    "fixed before others": {"q_proj": 1, r".*": 2},
    "alternatives": {"q_proj|down_proj": 1, "deep.proj|proj": 2},
    "nothing": {},
    "an empty key": {"": 1},
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_values_are_those_of_peft(table):
    value_of = lookup(table, 0)
    for name in NAMES:
        assert value_of(name) == table.get(get_pattern_key(table.keys(), name), 0), name


def test_thousands_of_names_are_fast():
    names = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(40) for j in range(100)]
    begin = time.perf_counter()
    value_of = lookup({re.escape(name): i for i, name in enumerate(names)}, 0)
    assert [value_of(name) for name in names] == list(range(4000))
    value_of = lookup({name: i for i, name in enumerate(names)}, 0)
    assert [value_of(name) for name in names[-500:]] == list(range(3500, 4000))
    assert time.perf_counter() - begin < 3


def test_thousands_of_hostile_keys_are_refused(monkeypatch):
    begin = time.perf_counter()
    monkeypatch.setattr(linear_regex, "MOST_STEPS", 2_000_000)
    with pytest.raises(ValueError, match="over 2000000 steps"):
        lookup({f"({i}(.*a?)*)*b": i for i in range(20_000)}, 0)("a" * 500)
    assert time.perf_counter() - begin < 20


def test_a_bad_key_is_named():
    with pytest.raises(ValueError, match=r"^\(\?i\)q: got the group \(\?i at character 1"):
        lookup({"q": 1, "(?i)q": 2}, 0)
    with pytest.raises(ValueError, match=r"got an unbalanced '\)'"):
        lookup({")(.": 1}, 0)
    assert is_fixed("h.layers") and is_fixed(r"a\.b") and not is_fixed("h.*") and not is_fixed("(h)")
