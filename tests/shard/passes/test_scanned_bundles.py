"""Bundles under a scan: a capture opens one layer of each kind, and gathers all, with the bits of the plain step."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.func import grad_and_value

import shard
from fquant import NF4_DQ, jit, lora, quantize, random, tree
from models import decoder
from models.blocks import IGNORE
from shard import Rules
from tests.helpers import ranks
from tests.helpers.arrays import equal
from tests.helpers.sharding.meshes import batch, config, loss

pytestmark = pytest.mark.xdist_group("ranks")


def opened_by(num_layers, recompute):
    """Return whether the captured step has the bits of the step, how often it opens a bundle, and its gathers."""
    cfg, mesh, rules, count = replace(config(False), num_layers=num_layers), shard.mesh(fsdp=2), Rules(), 0
    params = decoder.init(cfg, random.key(0), torch.float32)
    base = tree.map_at(r"layers\.\d+\.(q|k|v|o|gate|up|down)", partial(quantize, format=NF4_DQ), params)
    adapters = lora.init(base, r"layers\.\d+\.(q|v|o|down)", rank=3, key=1)
    adapters = tree.map_with_path(
        lambda path, t: t + random.normal(random.fold(random.key(1), path), t.shape), adapters
    )
    base, adapters = shard.place((base, adapters), decoder.dims(cfg), rules, mesh, cfg)
    x, y = shard.share(batch(4), mesh, rules)
    plain = shard.comm(mesh, rules, recompute=recompute)

    def open(x):
        nonlocal count
        count += 1
        return plain.open(x)

    def step(adapters, base, x, y, comm):
        return grad_and_value(partial(loss, cfg=cfg, comm=comm))(adapters, base, x, y, (y != IGNORE).sum())

    captured = jit(step)
    got = captured(adapters, shard.local(base), x, y, replace(plain, open=open))
    (traced,) = captured.traced.values()
    gathers = sum(name.startswith("all_gather") for name in map(str, traced.collectives))
    return equal(got, step(adapters, shard.local(base), x, y, plain)), count, gathers


@pytest.mark.parametrize("recompute", [True, False])
def test_a_capture_opens_one_layer_and_gathers_all(recompute):
    found = [ranks.run(2, opened_by, n, recompute) for n in (3, 6)]
    for of_three, of_six in zip(*found, strict=True):
        assert of_three[0] and of_six[0] and of_three[1] == of_six[1]
        assert of_six[2] - of_three[2] == 3 * (2 if recompute else 1)
