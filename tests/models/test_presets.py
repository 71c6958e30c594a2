"""Presets: the published numbers of parameters, and configs that transformers reads."""

import json

import pytest

from fquant import tree
from models import decoder
from models.hf.config import from_hf, to_hf
from models.presets import PRESETS

# Of the safetensors files; Qwen's model cards say 0.6, 1.7, 4.0, 8.2, 14.8 and 32.8 billion.
PARAMETERS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}


@pytest.mark.parametrize("name", PRESETS)
def test_preset(name):
    cfg = PRESETS[name]
    assert sum(t.numel() for t in tree.leaves(decoder.shapes(cfg))) == PARAMETERS[name]
    assert from_hf(json.loads(json.dumps(to_hf(cfg)))) == cfg and cfg.qk_norm == name.startswith("qwen")
