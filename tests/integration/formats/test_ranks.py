"""Every known format on a mesh: bytes at rest, rows of tables, and gradients of adapters are those of one process.

One decoder has a matrix of each format, so one step on each number of ranks holds all of them, and every block has
formats of other buffers beside each other. All of it but the packed weights is in float64, so that a wrong byte shows.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad_and_value

import shard
from fquant import dequantize, embedding, jit, lora, quantize, random, tree
from fquant.packed import Packed
from models import decoder
from shard import Rules
from tests.helpers import ranks
from tests.helpers.arrays import equal, randn
from tests.helpers.cases import slow_after
from tests.helpers.formats import KNOWN
from tests.helpers.kernels.block_loop import fitting
from tests.helpers.sharding.meshes import batch, config, loss

pytestmark = pytest.mark.xdist_group("ranks")
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
CFG = replace(config(False), num_layers=-(-len(KNOWN) // len(MATRICES)))
PATHS = [f"layers.{i}.{name}" for i in range(CFG.num_layers) for name in MATRICES]
FORMATS = dict(zip(PATHS, [*KNOWN.values()] * 2, strict=False))  # the last ones are the first again
TOKENS = torch.arange(0, 48, 5)
COUNT = 60.0  # of targets, on all ranks


def model():
    """Return a decoder with a matrix of each format, and adapters of all."""
    params = decoder.init(CFG, random.key(0), torch.float32)
    pack = lambda path, w: quantize(fitting(w, FORMATS[path]), FORMATS[path]) if path in FORMATS else w.double()
    base = tree.map_with_path(pack, params)
    adapters = lora.init(base, r"layers\.\d+\.(q|k|v|o|gate|up|down)", rank=2, key=1, dtype=torch.float64)
    noise = lambda path, t: t + 0.05 * random.normal(random.fold(random.key(2), path), tuple(t.shape), torch.float64)
    return base, tree.map_with_path(noise, adapters)


def tables():
    """Return a table [48 64] of each format whose rows can be read."""
    return {name: quantize(fitting(randn(48, 64), format), format) for name, format in KNOWN.items() if not format.flat}


def on_a_mesh(base, adapters, tables, captured):
    """Return gradients and loss, with the rows of each table that this rank looks up."""
    mesh, rules = shard.mesh(fsdp=dist.get_world_size()), Rules()
    placed, adapters = shard.place((base, adapters), decoder.dims(CFG), rules, mesh, CFG)
    assert equal(shard.collect(placed), base)
    x, y = shard.share(batch(4), mesh, rules)
    step = partial(grad_and_value(loss), count=COUNT, cfg=CFG, comm=shard.comm(mesh, rules))
    args = adapters, shard.local(placed), x, y
    grads, value = step(*args)
    assert not captured or equal(jit(lambda *args: step(*args))(*args), (grads, value))
    rows = {}
    for name, w in tables.items():
        base = shard.local(shard.place({"embed": w}, {"embed": {"": "vocab dim"}}, rules, mesh))
        ids = TOKENS.roll(dist.get_rank())
        rows[name] = embedding(ids, shard.comm(mesh, rules, tokens=len(ids)).rows(base["embed"], ids))
    return shard.reduce(grads, mesh, rules), shard.psum(value, mesh, rules.batch), rows


@pytest.mark.parametrize("n, captured", slow_after(3, [(1, False), (2, False), (3, False), (2, True)]))
def test_a_mesh_is_one_process(n, captured):
    base, adapters = model()
    packed = [x for x in tree.leaves(base, is_leaf=lambda x: isinstance(x, Packed)) if isinstance(x, Packed)]
    assert {p.format.name for p in packed} == set(KNOWN)
    wanted = grad_and_value(loss)(adapters, base, *batch(4), COUNT, CFG)
    for rank, (*got, rows) in enumerate(ranks.run(n, on_a_mesh, base, adapters, tables(), captured)):
        for (path, a), b in zip(tree.items(tuple(got)), tree.leaves(wanted), strict=True):
            assert b.abs().max() > 0, path
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * b.abs().max().item(), msg=f"{path} on {rank}")
        for name, w in tables().items():
            assert torch.equal(rows[name], dequantize(w)[TOKENS.roll(rank)]), name
