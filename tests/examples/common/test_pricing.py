"""Tests of examples.common.pricing: a job whose base is given is cut to the layers that are traced."""

import dataclasses

import pytest

import shard
from examples.common import pricing
from examples.common.command_line import parse_targets, quantised
from fquant import INT4, NF4_DQ, quantize, tree
from models import decoder
from tests.helpers.hf_models import CONFIGS

FAMILIES = ("grouped", "qwen3", "gemma3", "phi3", "qwen3_moe, dense layers, windows")


def sizes(job, axes, device=None):
    """Return figures that take no trace: bytes of the arguments of a step by kind."""
    with shard.abstract_mesh(**axes) as mesh:
        args = pricing.arguments(job, mesh)
    state = args["state"]
    held = {"base": args["base"], "adapters": state.trained, "moments": state.moments}
    return {(name,): tree.nbytes(x) for name, x in held.items()}


def mixed(params):
    """Pack the layers in two formats, and leave some weights dense."""
    return tree.map_at(r"layers\.\d*[02468]\.o", lambda w: quantize(w, INT4), params)


BASES = {"dense": lambda x: x, "packed": lambda x: quantised(x, NF4_DQ), "mixed": mixed}


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("count", [1, 5, 7, 8, 14])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_is_cut_with_the_config(family, count, base, ordered, monkeypatch):
    monkeypatch.setattr(pricing, "figures", sizes)
    monkeypatch.setattr(pricing, "total", dict)
    tied = bool(count % 2)
    cfg = dataclasses.replace(CONFIGS[family], num_layers=count, tied=tied, full_layers=(), dense_layers=())
    given = BASES[base](decoder.shapes(cfg))
    targets = parse_targets("all", cfg)
    job = pricing.Job(cfg, NF4_DQ, targets, 4, 2, 32, base=given, ordered=ordered)
    assert pricing.price(job, {"fsdp": 2}) == sizes(job, {"fsdp": 2})


def test_a_step_of_unlike_layers_is_traced_whole(monkeypatch):
    """Figures of the whole step are asked for if layers differ in what they are made of, or in what they do."""
    asked = []
    monkeypatch.setattr(pricing, "figures", lambda job, *_: asked.append(job.cfg.num_layers) or {("a", len(asked)): 1})
    monkeypatch.setattr(pricing, "total", dict)
    cfg = dataclasses.replace(CONFIGS["grouped"], num_layers=9)
    job = pricing.Job(cfg, NF4_DQ, ("q",), 4, 2, 32, base=mixed(decoder.shapes(cfg)))
    for one, wanted in ((job, [9]), (dataclasses.replace(job, base=None), [4, 5, 9])):
        asked.clear()
        pricing.price(one, {"fsdp": 2})
        assert asked == wanted
