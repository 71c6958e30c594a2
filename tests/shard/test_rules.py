"""Rules and tables of dims: errors name the entry that does not fit the mesh or the tree."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fquant import NF4_DQ, lazy, quantize
from models import decoder
from models.config import Config
from shard import Rules
from shard.rules import check_dims, check_rules
from tests.helpers.devices.placing import on

MESH: Any = SimpleNamespace(mesh_dim_names=("dp", "fsdp"))


@pytest.mark.parametrize(
    "rules",
    [Rules(), Rules(block=None), Rules(batch=()), Rules(batch="dp", block="dp"), Rules(("fsdp", "dp"))],
)
def test_rules_that_fit(rules):
    check_rules(rules, MESH)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (Rules(block="tp"), "rule block: the mesh has no axis 'tp'; wanted some of dp, fsdp"),
        (Rules(batch=("dp", "data")), "rule batch: the mesh has no axis 'data'; wanted some of dp, fsdp"),
        (Rules(batch="data"), "rule batch: the mesh has no axis 'data'; wanted some of dp, fsdp"),
    ],
)
def test_rules_that_do_not_fit_are_refused(rules, message):
    with pytest.raises(ValueError) as caught:
        check_rules(rules, MESH)
    assert str(caught.value) == message


def test_one_axis_is_a_tuple_of_one():
    assert Rules("dp") == Rules(("dp",)) == Rules(batch="dp") and hash(Rules("dp")) == hash(Rules(("dp",)))
    assert Rules("fsdp").batch == ("fsdp",) and repr(Rules("dp")) == repr(Rules(("dp",)))


@pytest.mark.parametrize(
    ("given", "type_", "message"),
    [
        ({"batch": ("dp", "dp")}, ValueError, "rule batch: an axis stands twice in ('dp', 'dp'); wanted each once"),
        ({"block": ("fsdp",)}, TypeError, "rule block: got ('fsdp',); wanted one axis, such as 'fsdp', or None"),
    ],
)
def test_rules_of_no_mesh_are_refused_when_they_are_made(given, type_, message):
    with pytest.raises(type_) as caught:
        Rules(**given)
    assert str(caught.value) == message


def tree_and_dims():
    params = {"embed": torch.zeros(6, 4), "layers": [{"q": quantize(torch.ones(2, 64), NF4_DQ), "norm": torch.ones(4)}]}
    return params, {"embed": {"": "vocab embed"}, "layers.0": {"q": "heads embed", "norm": "embed"}}


def test_dims_that_name_every_weight(device):
    params, dims = tree_and_dims()
    check_dims(dims, on(device, params))
    check_dims(dims, lazy.like(params))


@pytest.mark.parametrize("tied", [True, False])
def test_dims_of_the_decoder(tied):
    cfg = Config(
        vocab=96, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden=128, norm_eps=1e-5,
        rope_theta=10000.0, rope_scaling=None, max_positions=64, tied=tied, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    check_dims(decoder.dims(cfg), decoder.shapes(cfg))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p, d: d["layers.0"].pop("norm"),
            "layers.0.norm: dims['layers.0'] does not name its dims; it names q; add it",
        ),
        (
            lambda p, d: d.pop("layers.0"),
            "layers.0.q.codes: no block of dims has it; the blocks are embed; add its block",
        ),
        (lambda p, d: p.update(extra=torch.ones(2)), "extra: no block of dims has it; the blocks are embed, layers.0"),
        (lambda p, d: d["layers.0"].update(norm="a b"), "layers.0.norm: got 2 names, 'a b'; wanted 1 for (4,)"),
        (lambda p, d: d["layers.0"].update(q="heads"), "layers.0.q: got 1 names, 'heads'; wanted 2 for (2, 64)"),
        (
            lambda p, d: d["layers.0"].update(k="a"),
            "layers.0.k: dims['layers.0'] names 'k', which is not there; correct or remove it (layers.0.k: no",
        ),
        (
            lambda p, d: d.update({"layers.1": {"q": "a b"}}),
            "dims['layers.1']: the tree has no such block; correct its path or remove the entry (layers.1: no '1' here",
        ),
        (
            lambda p, d: d.update({"layers": {"1": "a"}}),
            "dims['layers.0']: is inside the block 'layers'; wanted separate blocks; name its dims there",
        ),
        (
            lambda p, d: (d.pop("layers.0"), d.update({"layers": {"0": "a"}})),
            "layers.0: got dims of a dict; wanted those of each weight inside",
        ),
    ],
)
def test_dims_that_do_not_fit_are_refused_by_path(change, message, device):
    params, dims = tree_and_dims()
    change(params, dims)
    with pytest.raises(ValueError) as caught:
        check_dims(dims, on(device, params))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("entry", ["vocab embed", {"": ["vocab", "embed"]}, None])
def test_dims_of_another_form_are_refused(entry):
    params, dims = tree_and_dims()
    with pytest.raises(TypeError) as caught:
        check_dims(dims | {"embed": entry}, params)
    wanted = f"dims['embed']: got {entry!r}; wanted names by path in the block, such as {{'w': 'out in'}}"
    assert str(caught.value) == wanted


OF_OTHER_TYPES = {
    "batch": (lambda: Rules(3), "rule batch: axes: got 3; wanted the name of an axis"),
    "no name": (lambda: Rules(""), "rule batch: axes: got ''; wanted the name of an axis"),
    "resident": (lambda: Rules(offload="block", resident=3), "rule resident: 3 is no regular expression"),
    "dims": (lambda: check_dims([1], {}), "dims: got [1]; wanted names by path of a block"),
    "block": (lambda: check_dims({3: {"": "a"}}, {}), "dims: got {3: {'': 'a'}}; wanted names by path of a block"),
    "names": (lambda: check_dims({"head": "foo bar"}, {}), "dims['head']: got 'foo bar'; wanted names by path in"),
    "path": (lambda: check_dims({"head": {3: "a b"}}, {}), "dims['head']: got {3: 'a b'}; wanted names by path in"),
}


@pytest.mark.parametrize("call, message", OF_OTHER_TYPES.values(), ids=OF_OTHER_TYPES)
def test_arguments_of_other_types(call, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        call()
