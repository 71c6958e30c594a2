"""Tests of fquant.io.peft_config: PEFT's choice of modules as oracle, and settings that mean harm."""

import json
import re
import time
from typing import Any

import peft as hf
import pytest
import torch
from peft.tuners.tuners_utils import check_target_module_exists

from fquant.io import peft, peft_config
from fquant.lora import Lora

NAMES = [
    *(f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 1, 10) for x in "qkv"), "model.layers.1.mlp.down_proj",
    "model.layers.1.mlp.experts.0.up_proj", "transformer.h.0.attn.q_proj", "transformer.h.1.attn.c_attn", "lm_head",
    "model.embed_tokens", "q_proj", "0.q_proj", "x.0.q_proj", "model.visual.blocks.1.attn.q_proj", "model.norm",
]  # fmt: skip
CHOICES: dict[str, dict[str, Any]] = {
    "list": {"target_modules": ["q_proj", "lm_head"]},
    "longer names": {"target_modules": ["1.self_attn.q_proj", "attn.q_proj"]},
    "expression": {"target_modules": r".*\.(0|1)\..*(q|k)_proj"},
    "excluded": {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["0.self_attn.q_proj", "attn.q_proj"]},
    "excluded by expression": {"target_modules": r".*_proj", "exclude_modules": r".*(visual|mlp).*"},
    "one layer": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1},
    "layers": {"target_modules": ["q_proj", "up_proj", "c_attn"], "layers_to_transform": [0, 10]},
    "no layers": {"target_modules": ["q_proj"], "layers_to_transform": []},
    "whole names have no layer": {"target_modules": ["q_proj", "x.0.q_proj"], "layers_to_transform": [1]},
    "pattern": {"target_modules": ["q_proj", "c_attn"], "layers_to_transform": [1], "layers_pattern": "h"},
    "patterns": {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["blocks", "layers"]},
    "long pattern": {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "transformer.h"},
    "whole modules": {"target_modules": ["q_proj", "lm_head", "down_proj"], "modules_to_save": ["lm_head", "mlp", "1"]},
}


def settings(folder, **change):
    folder.mkdir(exist_ok=True)
    (folder / peft.CONFIG).write_text(json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"]} | change))
    return peft_config.read(folder / peft.CONFIG)


@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
def test_modules_are_chosen_as_in_peft(tmp_path, options):
    read, theirs = settings(tmp_path, **options), hf.LoraConfig(**options)
    wanted = [name for name in NAMES if check_target_module_exists(theirs, name)]
    assert [name for name in NAMES if read.is_targeted(name)] == wanted and wanted


def test_defaults_are_those_of_peft():
    theirs = hf.LoraConfig()
    for key, (usual, _) in peft_config.READ.items():
        want = getattr(theirs, key)
        assert usual == (None if key == "peft_type" else want), key
    unknown = set(theirs.to_dict()) - set(peft_config.READ) - peft_config.IGNORED
    assert not any(getattr(theirs, key) for key in unknown)  # so a default is never refused


EVIL = r"(.*a?)*b"
HARMFUL = {
    "target_modules": EVIL, "exclude_modules": EVIL, "rank_pattern": {EVIL: 2}, "alpha_pattern": {EVIL: 2},
}  # fmt: skip


@pytest.mark.parametrize("key", HARMFUL)
def test_no_expression_takes_long(tmp_path, key):
    name = "a" * 900 + ".q_proj"
    peft.save(tmp_path, {"q": Lora(torch.ones(2, 4, device="cpu"), torch.ones(4, 2, device="cpu"))}, lambda path: name)
    content = json.loads((tmp_path / peft.CONFIG).read_text()) | {key: HARMFUL[key]}
    (tmp_path / peft.CONFIG).write_text(json.dumps(content))
    begin = time.perf_counter()
    try:
        peft.load(tmp_path, str)
    except ValueError as error:
        assert key == "target_modules" and "target_modules of adapter_config.json does not have it" in str(error)
    assert time.perf_counter() - begin < 2


WRONG = {
    "target_modules": [r"(a)\1", "(" * 9999, "x" * 20_000, [["q"]], {"q": 1}, 5],
    "exclude_modules": ["(?<=a)b", "(?i)a", {}, 1.5],
    "rank_pattern": [{"(?P<x>a)": 2}, {"q": 0}, {"q": 2.0}, {"q": True}, {"q": 1 << 40}, {"q": "8"}, ["q"], "q"],
    "alpha_pattern": [{"*": 2}, {"q": "2"}, {"q": 10**400}, {"q": None}],
    "r": [0, -1, 8.0, True, 1 << 40, "8", None],
    "lora_alpha": [10**400, "8", None, True, [8]],
    "lora_dropout": [1.0, -0.1, "0", 10**400],
    "layers_to_transform": ["1", [1.5], -1, [True], {"a": 1}, [-1]],
    "layers_pattern": ["(h|layers)", "h.*", ["a"] * 17, 5, [1]],
    "modules_to_save": ["lm_head", [1], ["a"] * 1001],
    "target_parameters": ["w", [1], ["a"] * 1001],
    "bias": ["some", True, None],
    "peft_type": ["IA3", None, ["LORA"]],
    "init_lora_weights": ["pissa", "olora", "loftq", "corda", "lora_ga", "pissa_niter_4", 5, ["x" * 500]],
    "x" * 500: ["y" * 500, [1], 1],
}  # fmt: skip


@pytest.mark.parametrize("key", WRONG, ids=lambda key: key[:20])
def test_wrong_values_are_refused_in_one_short_line(tmp_path, key):
    for value in WRONG[key]:
        with pytest.raises(ValueError, match=re.escape(f"{tmp_path / peft.CONFIG}: {key[:80]}: ")) as caught:
            settings(tmp_path, **{key: value})
        text = str(caught.value).removeprefix(str(tmp_path))
        assert len(text) < 400 and "\n" not in text and ": got " in text


def test_what_json_itself_can_do(tmp_path):
    for text in (
        "[" * 100_000,
        '{"a": 1, "a": 2}',
        "[]",
        '{"r": 1e999, "peft_type": "LORA"}',
        '{"r": NaN}',
        "",
        "\x00",
    ):
        (tmp_path / peft.CONFIG).write_text(text)
        with pytest.raises(ValueError, match=re.escape(str(tmp_path / peft.CONFIG))):
            peft_config.read(tmp_path / peft.CONFIG)
