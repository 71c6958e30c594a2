"""PEFT's directories of (IA)³: refusals by name. Equality with PEFT is in tests/models/test_soft_prompts."""

import json

import pytest
import torch

from fquant.adapted.nodes import Ia3
from fquant.io import peft, peft_ia3, safetensors
from tests.helpers.arrays import assert_equal

ADAPTERS = {"k": Ia3(outputs=torch.arange(3.0)), "down": Ia3(inputs=torch.arange(5.0))}


def written(folder, tensors=None, **settings):
    """Write the adapters, then change tensors and settings."""
    peft_ia3.save(folder, ADAPTERS, lambda path: f"layer.{path}_proj")
    content = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(content | settings))
    if tensors is not None:
        safetensors.write(folder / "adapter_model.safetensors", tensors)
    return folder


def load(folder):
    return peft_ia3.load(folder, lambda module: module.removeprefix("layer.").removesuffix("_proj"))


def test_round_trip(tmp_path):
    assert_equal(load(written(tmp_path)), dict(sorted(ADAPTERS.items())) | ADAPTERS)
    assert_equal(load(written(tmp_path, feedforward_modules=".*down_proj"))["down"], ADAPTERS["down"])


NAME = "base_model.model.layer.k_proj.ia3_l"


@pytest.mark.parametrize("tensors, settings, fault", [
    (None, {"peft_type": "LORA"}, r"peft_type: got 'LORA', wanted 'IA3'"),
    (None, {"modules_to_save": ["lm_head"]}, r"modules_to_save: got \['lm_head'\], wanted it absent"),
    (None, {"fan_in_fan_out": True}, "fan_in_fan_out: got True"),
    (None, {"feedforward_modules": [3]}, "feedforward_modules: got"),
    (None, {"feedforward_modules": []}, r"down_proj.ia3_l: got .* \(1, 5\), wanted floats \[out 1\], it is not"),
    (None, {"feedforward_modules": "((a+)+)+"}, "feedforward_modules"),
    ({}, {}, "got no tensors, wanted those of at least one module"),
    ({NAME: torch.ones(3)}, {}, r"k_proj.ia3_l: got .* \(3,\), wanted floats \[out 1\]"),
    ({NAME: torch.ones(3, 1, dtype=torch.int64)}, {}, r"k_proj.ia3_l: got .*int64.* wanted floats"),
    ({NAME + ".weight": torch.ones(3, 1)}, {}, "got an unknown tensor, wanted base_model.model.<module>.ia3_l"),
])  # fmt: skip
def test_files_that_do_not_fit(tensors, settings, fault, tmp_path):
    with pytest.raises(ValueError, match=fault):
        load(written(tmp_path, tensors, **settings))


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="layer.down_proj: got no path, or that of another module"):
        peft_ia3.load(written(tmp_path), lambda module: None)
    with pytest.raises(TypeError, match="k: got Ia3, wanted a Lora"):
        peft.save(tmp_path, ADAPTERS, str)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="feedforward_modules: got"):
        peft.load(tmp_path, str)
    with pytest.raises(ValueError, match="got the module m of another adapter, wanted its own"):
        peft_ia3.save(tmp_path, ADAPTERS, lambda path: "m")
    with pytest.raises(ValueError, match="got no adapters, wanted at least one"):
        peft_ia3.save(tmp_path, {}, str)
