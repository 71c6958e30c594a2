"""A mesh of one rank equals no mesh, bit for bit: over gloo on the host, and over NCCL on a CUDA device."""

from functools import partial

import pytest
import torch
from torch.func import grad_and_value

import shard
from fquant import NF4_DQ, jit, lora, quantize, tree
from models import decoder
from shard import Rules
from shard.device_mesh import AXES
from shard.passes.deduplicate import deduplicate_gathers
from shard.passes.prefetch import prefetch_gathers
from tests.helpers import ranks
from tests.helpers.devices.placing import elsewhere, on
from tests.helpers.qlora_step import CFG, start, step, tokens_of
from tests.helpers.sharding.bundles import same_bits
from tests.helpers.sharding.meshes import batch, config, loss, mesh_of_one

pytestmark = pytest.mark.xdist_group("ranks")


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
    with mesh_of_one(device) as mesh:
        cfg, base, adapters = model()
        there = partial(on, device)
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
        return [*same, torch.equal(got[1], wanted[1])], names


def test_one_rank_is_no_mesh(device):
    ((same, names),) = ranks.run(1, in_both_ways, device)
    assert all(same) and names == ["gloo", "gloo" if device.type == "cpu" else "nccl"]


PASSES = (shard.passes.regather_blocks(), deduplicate_gathers(budget=1 << 16), prefetch_gathers(2))


def captured(device):
    """Return whether a captured step with passes over its gathers has the bits of one without a mesh."""
    with mesh_of_one(device) as mesh:
        adapters, state, base = start()
        plain = on(device, [adapters, state, base])
        placed, own = shard.place((base, adapters), decoder.dims(CFG), Rules(), mesh, CFG)
        comm, tokens = shard.comm(mesh, Rules()), tokens_of(0).to(device)
        options = {"comm": comm, "reduce": lambda x: shard.reduce(x, mesh)}
        whole = jit(lambda *args: step(*args, **options), passes=PASSES)
        mine = own, on(device, state), shard.local(placed)
        same = []
        for _ in range(3):
            wanted, got = step(*plain, tokens), whole(*mine, tokens)
            same += [same_bits(*pair) for pair in zip(got, wanted, strict=True)]
            plain[:2], mine = wanted[:2], (*got[:2], mine[2])
        return same, elsewhere(got, device)


def test_a_captured_step_of_one_rank_is_that_of_no_mesh(device):
    ((same, away),) = ranks.run(1, captured, device)
    assert same == [True] * 9 and away == []
