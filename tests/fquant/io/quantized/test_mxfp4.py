"""Tests of fquant.io.quantized.mxfp4 against the decoder of transformers."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fquant.io import quantized
from tests.helpers.quantized_tensors import assert_loads, integers

NAME = "model.layers.0.mlp.experts.gate_up_proj"
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def weight(experts=3, out=10, width=96, low=0, high=252):
    tensors = {
        f"{NAME}_blocks": integers(0, 256, experts, out, width // 32, 16).to(torch.uint8),
        f"{NAME}_scales": integers(low, high, experts, out, width // 32, seed=2).to(torch.uint8),
    }
    # theirs is [experts in out]
    return tensors, convert_moe_packed_tensors(*tensors.values(), dtype=torch.bfloat16).mT.contiguous()


@pytest.mark.parametrize("low, high", [(100, 140), (0, 252)])
def test_a_stack_of_experts(low, high):
    tensors, decoded = weight(low=low, high=high)
    p = assert_loads(CONFIG, tensors, decoded, NAME)
    assert p.codes.shape == (3, 10, 48) and p.scale.shape == (3, 10, 3)


def test_one_matrix():
    tensors, decoded = weight(1)
    assert_loads(CONFIG, {name: t[0] for name, t in tensors.items()}, decoded[0], NAME)


def test_a_dense_weight_has_no_parts():
    method = quantized.method(CONFIG)
    assert quantized.names(method, f"{NAME}_bias", {f"{NAME}_bias", *weight()[0]}) == ()
    assert quantized.names(method, "lm_head.weight", {"lm_head.weight"}) == ()


FAULTS = {
    "no scales": ({"scales": None}, "_scales: missing, wanted uint8"),
    "scales NaN": ({"scales": torch.full((3, 10, 3), 255, dtype=torch.uint8)}, "_scales: got values that are NaN"),
    "scales f32": ({"scales": torch.ones(3, 10, 3)}, r"_scales: got float32 \[3, 10, 3\], wanted uint8"),
    "blocks flat": ({"blocks": torch.zeros(3, 10, 48, dtype=torch.uint8)}, r"_blocks: got uint8 \[3, 10, 48\], wanted"),
}


@pytest.mark.parametrize("changed, message", FAULTS.values(), ids=FAULTS)
def test_refuses(changed, message):
    tensors = weight()[0] | {f"{NAME}_{name}": t for name, t in changed.items()}
    tensors = {name: t for name, t in tensors.items() if t is not None}
    with pytest.raises(ValueError, match=rf"^{NAME}{message}"):
        quantized.load(quantized.method(CONFIG), NAME, tensors, (3, 10, 96), torch.bfloat16)


def test_refuses_short_blocks():
    with pytest.raises(ValueError, match="_blocks: rows of 80 elements, wanted whole blocks of 32"):
        quantized.like(quantized.method(CONFIG), NAME, weight()[0], (3, 10, 80), torch.bfloat16)
