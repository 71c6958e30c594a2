"""Mixtures of experts on a mesh: sharded bytes of packed stacks, and shares of a batch, as in one process."""

import dataclasses
from functools import partial

import pytest
import torch
from torch.func import grad_and_value

import shard
from fquant import LOCAL, NF4, NF4_DQ, jit, lora, quantize, remat, tree
from fquant.packed import Packed
from models import decoder
from shard import Rules
from tests.helpers import ranks
from tests.helpers.cases import slow_after
from tests.helpers.hf_models import CONFIGS, random_params
from tests.helpers.sharding.bundles import same_bits
from tests.helpers.sharding.meshes import batch
from tests.helpers.sharding.meshes import loss as mesh_loss

pytestmark = pytest.mark.xdist_group("ranks")
CFG = dataclasses.replace(CONFIGS["qwen3_moe, dense layers, windows"], num_layers=2)


def model(how):
    """Return packed weights, adapters of all kinds, in float64; stacks are packed whole, or an expert at a time."""
    each = lambda w: tree.map(lambda *t: torch.stack(t), *[quantize(matrix, NF4_DQ) for matrix in w])
    params = tree.map_at(r"layers\.\d+\.[qkvo]", partial(quantize, format=NF4), random_params(CFG))
    pack = each if how == "each" else partial(quantize, format=NF4_DQ)
    base = tree.map_at(r"layers\.0\.(gate_up|down)", pack, params)
    adapters = lora.init(base, r"layers\.0\.(gate_up|q|router)", rank=3, key=1)
    adapters |= lora.init(base, r"layers\.0\.down", rank=3, key=1, shared=True)
    is_packed = lambda x: isinstance(x, Packed)
    wide = tree.map(lambda x: x if is_packed(x) else x.double(), base, is_leaf=is_packed)
    return wide, tree.map(lambda t: t.double() + 0.02, adapters)


def on_a_mesh(axes, how):
    base, adapters = model(how)
    mesh, rules = shard.mesh(**axes), Rules()
    placed, adapters = shard.place((base, adapters), decoder.dims(CFG), rules, mesh, CFG)
    assert same_bits(shard.collect(placed), base)
    x, y = shard.share(batch(6), mesh, rules)
    comm, count, local = shard.comm(mesh, rules), float((batch(6)[1] >= 0).sum()), shard.local(placed)
    step = lambda comm: grad_and_value(partial(mesh_loss, cfg=CFG, comm=comm))
    plain, remade = (step(c)(adapters, local, x, y, count) for c in (comm, dataclasses.replace(comm, wrap=remat)))
    captured = jit(lambda *args: step(comm)(*args, count))(adapters, local, x, y)
    assert all(map(torch.equal, tree.leaves(captured), tree.leaves(plain)))
    return [shard.reduce(found, mesh) for found in (plain, remade)]


MESHES = [("each", {"fsdp": 2}), ("each", {"dp": 2}), ("whole", {"fsdp": 2}), ("whole", {"fsdp": 3})]


@pytest.mark.parametrize("how, axes", slow_after(1, MESHES))
def test_steps_equal_those_of_one_process(how, axes):
    base, adapters = model(how)
    x, y = batch(6)
    wanted = grad_and_value(mesh_loss)(adapters, base, x, y, float((y >= 0).sum()), CFG, LOCAL)
    for of_rank in ranks.run(next(iter(axes.values())), on_a_mesh, axes, how):
        for found in of_rank:
            for a, b in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
                assert b.abs().max() > 0
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
