"""Exports hold a few weights at a time, for any number of layers."""

import dataclasses

import pytest
import torch

from fquant import NF4, NF4_DQ
from models import hf
from models.export import bitsandbytes, compressed_tensors, dense, gguf
from tests.bench import timing
from tests.helpers.hf_models import GQA, random_params

CFG = dataclasses.replace(GQA, dim=256, hidden=512, head_dim=64, num_layers=8)
EXPORTS = {
    "gguf q8_0": lambda at, params: gguf.save(at, CFG, params, "q8_0"),
    "gguf f32": lambda at, params: gguf.save(at, CFG, params, "f32"),
    "nf4": lambda at, params: bitsandbytes.save(at, CFG, params, NF4),
    "nf4_dq": lambda at, params: bitsandbytes.save(at, CFG, params, NF4_DQ),
    "int8": lambda at, params: compressed_tensors.save(at, CFG, params, "int8"),
    "int4": lambda at, params: compressed_tensors.save(at, CFG, params, "int4"),
    "dense": lambda at, params: dense.save(at, CFG, params, torch.bfloat16),
}


FAST = ("gguf q8_0", "nf4_dq")


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in EXPORTS])
def test_memory_is_that_of_a_few_weights(tmp_path, name):
    """Count torch's own allocations, of which the quantisers need several in float32 for each weight."""
    hf.save(tmp_path / "model", CFG, random_params(CFG))
    _, params = hf.lazy(tmp_path / "model")
    largest = 4 * CFG.hidden * CFG.dim
    extra = timing.extra_bytes(lambda: EXPORTS[name](tmp_path / "out", params) or ())
    assert largest <= extra <= 6 * largest
    assert (tmp_path / "model" / hf.SINGLE).stat().st_size > 24 * largest  # three such weights a layer, and more
