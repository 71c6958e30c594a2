"""Recipes of quantised training on a mesh: gradients are the sum of those of each rank's share, in one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad

import shard
from fquant import INT4, INT8_ROW, LOCAL, jit, quantized_training, tree
from fquant.quantized_training import RECIPES, FakeQuantization
from models import decoder
from shard import Precision, Rules, wire
from tests.helpers import ranks
from tests.helpers.sharding import training
from tests.helpers.sharding.meshes import config
from tests.helpers.sharding.training import PASSES

pytestmark = pytest.mark.xdist_group("ranks")
CFG, ROWS = config(True), 6
PROJECTIONS = r"layers\.\d+\.(q|k|v|o|gate|up|down)"
ALL = {**RECIPES, "qat": FakeQuantization(INT4, INT8_ROW)}


def loss(params, x, y, count, recipe, comm=LOCAL):
    return training.loss(quantized_training.attach(params, PROJECTIONS, recipe), x, y, count, CFG, comm)


def on_mesh(precision, captured):
    """Return the whole gradient of each recipe: scales of tensors and of gradients are those of a rank's own rows."""
    mesh, rules, (x, y, count) = shard.mesh(fsdp=dist.get_world_size()), Rules(), training.rows(ROWS)
    p = shard.local(shard.place(training.params(CFG, torch.float32), decoder.dims(CFG), rules, mesh, CFG, precision))
    comm, mine, out = shard.comm(mesh, rules, recompute=not captured), shard.share((x, y), mesh, rules), {}
    for name, recipe in ALL.items():
        step = lambda p, x, y, count, recipe=recipe: shard.reduce(grad(loss)(p, x, y, count, recipe, comm), mesh, rules)
        step = jit(step, passes=PASSES, recompute=False) if captured else step
        out[name] = shard.whole(step(p, *mine, count), mesh, rules)
    return out


def of_shares(n, recipe):
    x, y, count = training.rows(ROWS)
    f, params = partial(loss, recipe=recipe), training.params(CFG, torch.float32)
    each = [grad(f)(params, *mine, count) for mine in zip(x.tensor_split(n), y.tensor_split(n), strict=True)]
    return tree.map(lambda *ts: sum(ts), *each)


@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "captured"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_gradients_are_those_of_the_shares(n, captured):
    """A rounding that turns the other way, because a sum was taken in another order, moves few gradients a little."""
    found = ranks.run(n, on_mesh, Precision(torch.float32), captured, timeout=240)[0]
    for name, recipe in ALL.items():
        for (path, a), b in zip(tree.items(found[name]), tree.leaves(of_shares(n, recipe)), strict=True):
            assert b.abs().max() > 0, (name, path)
            off, size = (a - b).norm(), b.norm()
            assert off <= (1e-6 if n == 1 and not captured else 2e-2) * size, (name, path, float(off / size))


def test_weights_that_travel_in_int8_have_a_recipe_too():
    exact, sent = (ranks.run(2, on_mesh, Precision(torch.float32, wire=w), False)[0] for w in (None, wire.INT8))
    for name in ALL:
        a, b = (torch.cat([t.reshape(-1) for t in tree.leaves(x[name])]) for x in (exact, sent))
        assert 0.9 < torch.cosine_similarity(a, b, dim=0) and not torch.equal(a, b), name
