"""Quantised gathers on a mesh: weights, gradients, bytes on the wire, and one collective for all scales."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad

import shard
from fquant import jit, tree
from fquant.compile.cost import of
from models import decoder
from shard import Precision
from shard.passes import prefetch_gathers, regather_blocks, schedule
from tests.helpers import ranks
from tests.helpers.sharding import training
from tests.helpers.sharding.bundles import same_bits
from tests.helpers.sharding.meshes import config

pytestmark = pytest.mark.xdist_group("ranks")
WIRES = shard.wire.WIRES.values()
CFG = config(True)


def placed(kind, dense=None):
    mesh, rules = shard.mesh(fsdp=dist.get_world_size()), shard.Rules()
    precision = Precision(torch.bfloat16, wire=kind, dense=dense)
    given = training.params(CFG, torch.float32)
    p = shard.local(shard.place(given, decoder.dims(CFG), rules, mesh, CFG, precision))
    return mesh, rules, p


def opened(kind):
    """Return every block as a step has it, and the collectives that brought the scales."""
    mesh, rules, p = placed(kind)
    with shard.traffic() as t:
        scales = shard.wire_scales(p, mesh, rules)
    comm, x = shard.comm(mesh, rules), shard.scaled(p, scales)
    return comm.load(x.embed), [comm.load(layer) for layer in x.layers], comm.load(x.final), [c[0] for c in t.calls]


@pytest.mark.parametrize("kind", WIRES, ids=shard.wire.WIRES)
def test_weights_have_the_same_bits_on_any_number_of_ranks(kind):
    (*want, none), *_ = ranks.run(1, opened, kind)
    exact = training.params(CFG, torch.float32)
    layers = want[1]
    assert none == []
    for layer, true in zip(layers, exact.layers, strict=True):
        assert torch.equal(layer.attn_norm, true.attn_norm.bfloat16())  # vectors are not quantised
        error = (layer.down.float() - true.down).norm() / true.down.norm()
        assert 1e-3 < error < {"int8": 0.01, "fp8": 0.04, "ternary": 0.6}[kind.name]
    for n in (2, 3):
        for *got, calls in ranks.run(n, opened, kind):
            assert same_bits(got, want)
            assert calls == {"max": ["all_gather"], "mean": ["all_reduce"], None: []}[kind.statistic]


def straight_through(kind):
    """Return gradients of a rank's rows, and of the weights that it opens, had these been the parameters."""
    mesh, rules, p = placed(kind)
    comm, scales = shard.comm(mesh, rules), shard.wire_scales(p, mesh, rules)
    x, y, count = training.rows(6)
    mine = (*shard.share((x, y), mesh, rules), count)
    f = partial(training.loss, cfg=CFG, dtype=torch.bfloat16)
    got = grad(lambda p: f(shard.scaled(p, scales), *mine, comm=comm))(p)
    around = shard.scaled(p, scales)
    weights = tree.map(comm.load, around, is_leaf=lambda b: not isinstance(b, list) and hasattr(b, "layout") or hasattr(b, "bundle"))  # fmt: skip # noqa: E501
    return shard.whole(got, mesh, rules), grad(f)(weights, *mine)


@pytest.mark.parametrize("kind", WIRES, ids=shard.wire.WIRES)
def test_gradients_are_those_of_the_opened_weights(kind):
    found = ranks.run(2, straight_through, kind)
    want = tree.map(lambda *ts: sum(t.float() for t in ts), *(each for _, each in found))
    assert same_bits(found[0][0].layers, want.layers)
    torch.testing.assert_close(found[0][0].embed, want.embed, rtol=0.02, atol=2e-3)


def counted(kind):
    """Return rows of the schedule of a captured step, and what the report says of its gathers."""
    mesh, rules, p = placed(kind, None if kind is None else "embed")
    comm = shard.comm(mesh, rules, recompute=False)
    x, y, count = training.rows(4)

    def step(p, scales, x, y, count):
        f = partial(training.loss, cfg=CFG, comm=comm, dtype=torch.bfloat16)
        return grad(lambda p: f(shard.scaled(p, scales), x, y, count))(p)

    captured = jit(step, passes=(regather_blocks(), prefetch_gathers()), recompute=False)
    captured(p, shard.wire_scales(p, mesh, rules), *shard.share((x, y), mesh, rules), count)
    (traced,) = captured.traced.values()
    rows = [(row.name, row.of, row.nbytes, row.ops) for row in schedule(traced, mesh)]
    return rows, {c.name: c.payload for c in of(traced).collectives}


@pytest.mark.parametrize("n", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_bytes_on_the_wire(n):
    """Of a layer; its vectors travel in bfloat16 and its matrices in 8, 2 or 16 bits, of INT8 a scale for each 256."""
    layer = training.params(CFG, torch.float32).layers[0]
    blocks = {1: 0, 2: 0}
    for t in tree.leaves(layer):
        blocks[t.ndim] += -(-t.numel() // 256)
    for kind in (None, *WIRES):
        rows, payloads = ranks.run(n, counted, kind)[0]
        gathers = [row for row in rows if row[0] == "all_gather"]
        of_layer = {nbytes for _, of, nbytes, _ in gathers if of == "p.layers.0.values"}
        assert len(of_layer) == 1 and payloads["all_gather"] == sum(row[2] for row in gathers)
        assert [of for _, of, _, _ in gathers].count("p.layers.0.values") == 2  # forward and backward
        if kind is None:
            assert of_layer == {n * -(-(blocks[1] + blocks[2]) // n) * 512}
            continue
        code = kind.nbytes + 4 * (kind.statistic is None)
        each, left = -(-(blocks[1] + blocks[2]) // n), blocks[2]
        sizes = []
        for rank in range(n):
            have = min(each, blocks[1] + blocks[2] - rank * each)
            matrices = max(0, min(left, have))
            left -= matrices
            sizes.append(matrices * code + (have - matrices) * 512)
        assert of_layer == {n * -(-max(sizes) // 16) * 16}
        ahead = [ops for _, of, _, ops in gathers if of.startswith("p.layers")]
        assert max(ahead) > 10  # a quantised gather is issued ahead, too
