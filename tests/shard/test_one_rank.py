"""A mesh of one rank equals no mesh, bit for bit: over gloo on the host, and over NCCL on a CUDA device."""

import os
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.func import grad_and_value

import shard
from fquant import NF4_DQ, lora, quantize, tree
from models import decoder
from shard import Rules
from shard.device_mesh import AXES
from tests.helpers import ranks
from tests.helpers.devices.placing import elsewhere
from tests.helpers.sharding.bundles import same_bits
from tests.helpers.sharding.meshes import batch, config, loss

pytestmark = pytest.mark.xdist_group("ranks")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def model():
    cfg = config(tied=False)
    draw = lambda t: 0.1 * torch.randn(t.shape, generator=torch.Generator().manual_seed(t.numel()))
    base = tree.map_at(
        r"layers\.\d+\.(q|k|v|o|gate|up|down)", partial(quantize, format=NF4_DQ), tree.map(draw, decoder.shapes(cfg))
    )
    adapters = lora.init(base, r"layers\.\d+\.(q|v)", rank=2, key=0)
    return cfg, base, tree.map(lambda t: t + 0.01, adapters)


def in_both_ways(device):
    """Return whether all results have equal bits, and the names of the backends."""
    dist.destroy_process_group()
    with mock.patch.dict(os.environ):
        for name in VARIABLES:
            os.environ.pop(name, None)
        mesh = shard.mesh(device=device, fsdp=1)
    cfg, base, adapters = model()
    there = lambda x: tree.map(lambda t: t.to(device), x)
    x, y = there(batch(3))
    count = there((y != -100).sum())
    wanted = grad_and_value(loss)(there(adapters), there(base), x, y, count, cfg)
    placed, own = shard.place((base, adapters), decoder.dims(cfg), Rules(), mesh, cfg)
    local, comm = shard.local(placed), shard.comm(mesh, Rules(), tokens=64)
    grads, value = grad_and_value(loss)(own, local, x, y, count, cfg, comm)
    got = shard.reduce(grads, mesh), shard.psum({"value": value}, mesh, AXES)["value"]
    group, ones = mesh.get_group("fsdp"), torch.ones(6, device=device)
    for collective in (shard.all_gather, shard.reduce_scatter, shard.all_reduce, shard.enter, shard.exit):
        assert torch.equal(collective(ones, group), ones), collective
    first, total = shard.rows(5, mesh, "fsdp")
    assert (first.item(), total.item()) == (0, 5)
    again, back = shard.replicate(adapters, mesh), shard.collect(placed)
    assert elsewhere((placed, own, local, got, again, back, first, total), shard.device_of(mesh)) == []
    same = [same_bits(*pair) for pair in ((got[0], wanted[0]), (again, there(adapters)), (back, there(base)))]
    names = [group._get_backend(torch.device(kind)).name() for kind in ("cpu", device.type)]
    shard.close()
    return [*same, torch.equal(got[1], wanted[1])], names


def test_one_rank_is_no_mesh(device):
    ((same, names),) = ranks.run(1, in_both_ways, device)
    assert all(same) and names == ["gloo", "gloo" if device.type == "cpu" else "nccl"]
