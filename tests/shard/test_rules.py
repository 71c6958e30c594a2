"""Rules and names of dims: what does not fit the mesh or the tree is refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fquant import NF4_DQ, lazy, quantize
from models import decoder
from models.config import Config
from shard import Rules
from shard import rules as rules_module

MESH: Any = SimpleNamespace(mesh_dim_names=("dp", "fsdp"))


@pytest.mark.parametrize(
    "rules", [Rules(), Rules(block=None), Rules(batch=()), Rules(batch=("dp",), block="dp"), Rules(("fsdp", "dp"))]
)
def test_rules_that_fit(rules):
    rules_module.check(rules, MESH)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Rules(block="tp"), "rule block: the mesh has no axis 'tp'; wanted some of dp, fsdp"),
        (Rules(batch=("dp", "data")), "rule batch: the mesh has no axis 'data'; wanted some of dp, fsdp"),
        (Rules(batch=("dp", "dp")), "rule batch: an axis stands twice in ('dp', 'dp'); wanted each once"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules, message):
    with pytest.raises(ValueError) as caught:
        rules_module.check(rules, MESH)
    assert str(caught.value) == message


def tree_and_dims():
    params = {"embed": torch.zeros(6, 4), "layers": [{"q": quantize(torch.ones(2, 64), NF4_DQ), "norm": torch.ones(4)}]}
    return params, {"embed": {"": "vocab embed"}, "layers.0": {"q": "heads embed", "norm": "embed"}}


def test_dims_that_name_every_weight():
    params, dims = tree_and_dims()
    rules_module.check_dims(dims, params)
    rules_module.check_dims(dims, lazy.like(params))


@pytest.mark.parametrize("tied", [True, False])
def test_dims_of_the_decoder(tied):
    cfg = Config(
        vocab=96, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden=128, norm_eps=1e-5,
        rope_theta=10000.0, rope_scaling=None, max_positions=64, tied=tied, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    rules_module.check_dims(decoder.dims(cfg), decoder.shapes(cfg))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, d: d["layers.0"].pop("norm"), "layers.0.norm: its dims have no names; the named weights are embed"),
        (lambda p, d: d.pop("layers.0"), "layers.0.q.codes: its dims have no names; the named weights are embed"),
        (lambda p, d: d["layers.0"].update(norm="a b"), "layers.0.norm: shape (4,) has 1 dims, and ['a', 'b'] names 2"),
        (lambda p, d: d["layers.0"].update(q="heads"), "layers.0.q: shape (2, 64) has 2 dims, and ['heads'] names 1"),
        (lambda p, d: d["layers.0"].update(k="a"), "dims name a weight that is not there: layers.0.k: no 'k' here"),
        (
            lambda p, d: d.update({"layers.1": {"q": "a b"}}),
            "dims name a weight that is not there: layers.1.q: no '1.q'",
        ),
        (lambda p, d: p.update(extra=torch.ones(2)), "extra: its dims have no names"),
        (lambda p, d: d.update({"layers": {"0": "a"}}), "layers.0: dims name a dict; wanted the weights inside"),
    ],
)
def test_dims_that_do_not_fit_are_refused_by_path(change, message):
    params, dims = tree_and_dims()
    change(params, dims)
    with pytest.raises(ValueError) as caught:
        rules_module.check_dims(dims, params)
    assert str(caught.value).startswith(message)
