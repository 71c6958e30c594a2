"""Weights of learned vectors in every place of a packed weight: files, captured steps, adapters, meshes."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad_and_value

import shard
from fquant import AQ_2X8, AQ_3X8, LOCAL, cost, dequantize, embedding, jit, linear, lora, quantize, random, tree
from fquant.io import bnb, safetensors
from fquant.packed import Packed
from models import decoder
from models.blocks import cross_entropy
from models.fused_cross_entropy import cross_entropy as head_loss
from shard import Rules, bundle, sharded_embedding
from tests.helpers import ranks
from tests.helpers import transform_table as table
from tests.helpers.cases import slow_after
from tests.helpers.formats import alike
from tests.helpers.qlora_step import CFG, OPT, TARGETS, copied, equal, replays, step, tokens_of
from tests.helpers.sharding.meshes import batch, config
from tests.helpers.sharding.meshes import loss as mesh_loss

IN_BLOCKS = r"layers\.\d+\.(q|k|v|o|gate|up|down)"
BLOCKS = replace(AQ_2X8, block=64)


def normal(name, *shape):
    return random.normal(random.fold(random.key(13), name), shape)


def packed(x):
    return isinstance(x, Packed)


# --- files and sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [AQ_2X8, AQ_3X8, BLOCKS], ids=lambda f: f.text)
def test_files(format, tmp_path):
    params = {"layers": [{"q": quantize(normal("w", 24, 96).bfloat16(), format)}], "norm": torch.ones(3)}
    safetensors.save(tmp_path / "a.safetensors", params)
    assert set(safetensors.header(tmp_path / "a.safetensors").tensors) == {
        "layers.0.q.codes", "layers.0.q.scale", "layers.0.q.vectors", "norm"
    }  # fmt: skip
    back = safetensors.load(tmp_path / "a.safetensors")
    assert equal(back, params) and back["layers"][0]["q"].format == format
    with pytest.raises(ValueError, match="q.weight: bitsandbytes keeps 8-bit weights as int8 .* got Format"):
        bnb.save(params["layers"][0]["q"], "q.weight")


def test_buffers_and_bits_per_element():
    p = quantize(normal("w", 24, 192), BLOCKS)
    assert tree.paths(p) == ["codes", "scale", "vectors"]
    bits = lambda format, n: 8 * tree.nbytes(quantize(torch.empty(n, n, device="meta"), format)) / n**2
    assert 2 < bits(AQ_2X8, 4096) < 2.02 and 3 < bits(AQ_3X8, 4096) < 3.03


# --- captured ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb, transform", [("linear", "vmap_weights"), ("linear", "grad"), ("embedding", "vmap_all")])
def test_captured_is_eager(verb, transform):
    replays(partial(table.TRANSFORMS[transform], table.VERBS[verb][0]), *table.arguments(verb, AQ_3X8))


def test_a_captured_step_trains_adapters():
    """Equal to the uncaptured step bit for bit, and the loss falls."""
    base = tree.map_at(IN_BLOCKS, partial(quantize, format=AQ_2X8), decoder.init(CFG, random.key(0)))
    adapters = lora.init(base, TARGETS, rank=2, alpha=4, key=1)
    state = OPT.init(adapters)
    captured, losses = jit(step, donate=("adapters", "state")), []
    ours = [copied(adapters), copied(state)]
    for _ in range(8):
        *ours, mine = captured(ours[0], ours[1], base, tokens_of(0))
        adapters, state, value = step(adapters, state, base, tokens_of(0))
        assert equal([*ours, mine], [adapters, state, value])
        losses.append(value.item())
    assert losses[-1] < 0.9 * losses[0] and len(captured.traced) == 1


def test_gradients_of_adapters_are_those_beside_dense_weights():
    base = tree.map_at(IN_BLOCKS, partial(quantize, format=AQ_3X8), decoder.init(CFG, random.key(0)))
    adapters = tree.map_with_path(
        lambda path, t: t + 0.1 * normal(path, *t.shape), lora.init(base, TARGETS, rank=2, key=1)
    )
    dense = dequantize(base)
    wide = lambda x: tree.map(lambda t: t if packed(t) else t.double(), x, is_leaf=packed)

    def loss(adapters, base):
        logits = decoder.forward(lora.attach(base, adapters), tokens_of(0)[..., :-1], CFG, LOCAL)
        return cross_entropy(logits, tokens_of(0)[..., 1:])

    got, wanted = (grad_and_value(loss)(wide(adapters), wide(b)) for b in (base, dense))
    for a, b in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
        assert a.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * b.abs().max().item())
    only = lambda x: {path: tree.get(x, path) for path in adapters}
    assert equal(only(lora.merge(base, adapters)), only(lora.merge(dense, adapters)))


def test_a_head_of_vectors():
    w, x = quantize(normal("w", 96, 64), AQ_2X8), normal("x", 10, 64).double()
    targets = random.permutation(random.key(1), 96)[:10]
    loss = lambda x, w: head_loss(x, w, targets)
    got, wanted = grad_and_value(loss)(x, w), grad_and_value(loss)(x, dequantize(w).double())
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_cost_is_that_of_the_dense_product():
    x = torch.empty(16, 256, device="meta")
    w = torch.empty(512, 256, device="meta")
    found, dense = cost(linear, x, quantize(w, AQ_2X8)), cost(linear, x, w)
    assert found.flops == dense.flops == 2 * 16 * 256 * 512
    assert found.arguments == x.nbytes + 512 * 64 + 512 * 4 + 2 * 256 * 8 * 4 and found.peak < dense.peak / 2


# --- on a mesh --------------------------------------------------------------------------------------------------------


def model():
    cfg = config(tied=True)
    base = tree.map(lambda t: 3 * t, decoder.init(cfg, random.key(0), torch.float32))
    base = tree.map_at(IN_BLOCKS, partial(quantize, format=AQ_3X8), base)
    adapters = lora.init(base, r"layers\.\d+\.(q|down)|embed", rank=3, key=1)
    noise = lambda path, t: t.double() + 0.05 * normal(path, *t.shape)
    wide = tree.map(lambda x: x if packed(x) else x.double(), base, is_leaf=packed)
    return cfg, wide, tree.map_with_path(noise, adapters)


def on_a_mesh():
    cfg, base, adapters = model()
    n = dist.get_world_size()
    mesh, rules = shard.mesh(fsdp=n), Rules()
    base, adapters = shard.place((base, adapters), decoder.dims(cfg), rules, mesh, cfg)
    x, y = shard.share(batch(5), mesh, rules)
    grads, value = grad_and_value(mesh_loss)(
        adapters, shard.local(base), x, y, 64, cfg, shard.comm(mesh, rules, tokens=48)
    )
    return shard.reduce(grads, mesh, rules), shard.psum(value, mesh, rules.batch)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("n", slow_after(1, [2, 3]))
def test_a_mesh_is_one_process(n):
    cfg, base, adapters = model()
    x, y = batch(5)
    wanted = grad_and_value(mesh_loss)(adapters, base, x, y, 64, cfg)
    for got in ranks.run(n, on_a_mesh):
        for a, b in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * b.abs().max().item())


def looked_up(rows):
    """Look up rows of a table of vectors on a mesh; its list of vectors is not a row, for any number of rows."""
    w = quantize(normal("w", rows, 64), AQ_2X8)
    mesh, rules = shard.mesh(fsdp=dist.get_world_size()), Rules()
    base = shard.local(shard.place({"embed": w}, {"embed": {"": "vocab dim"}}, rules, mesh))
    ids = torch.arange(4) % rows
    comm = shard.comm(mesh, rules, tokens=4)
    return embedding(ids, comm.rows(base["embed"], ids)), dequantize(w)[ids]


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("rows", [2, 300])
def test_rows_of_a_table(rows):
    layout = bundle.plan(quantize(normal("w", rows, 64), AQ_2X8), 2)
    assert sharded_embedding.num_rows(layout.buffers) == 0 and not sharded_embedding.is_less(layout, 1, 1)
    assert all(alike(*pair) for pair in ranks.run(2, looked_up, rows))
