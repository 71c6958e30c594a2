"""Sharded embedding: its rows equal those of the gathered table in every bit and transform, for fewer bytes."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, grad_and_value, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import shard
from fquant import FP4, INT4_ZERO, INT8, LOCAL, NF4, NF4_DQ, cost, jit, lora, quantize, random, remat, tree
from fquant.communication import Loadable, LookedUpRows, identity
from fquant.packed_linear import embedding
from models import decoder
from models.blocks import cross_entropy
from models.config import Config
from shard import Rules, bundle, sharded_embedding
from shard.bundle import Buffer
from shard.passes.deduplicate import deduplicate_gathers
from shard.passes.prefetch import prefetch_gathers
from tests.helpers import ranks
from tests.helpers.arrays import named
from tests.helpers.cases import slow_after
from tests.helpers.sharding.meshes import any_bits, drawn, padded

pytestmark = pytest.mark.xdist_group("ranks")

# --- the part of a row in a part of the bytes -------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 64, 13])
@pytest.mark.parametrize("size", [1, 4, 7, 24, 50, 200])
def test_parts_of_rows_add_up(offset, size):
    """Parts of every size, some shorter than a row, add up to the bytes of the table."""
    buffer = Buffer("", torch.uint8, (9, 7), offset)
    whole = torch.randint(1, 256, (offset + 63 + 20,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    table, ids = whole[offset : offset + 63].reshape(9, 7), torch.tensor([8, 0, 3, 3, 4, 7, 1, 2, 6, 5])
    parts = [sharded_embedding._found(part, i * size, buffer, ids) for i, part in enumerate(whole.split(size))]
    assert torch.equal(torch.stack(parts).sum(0), table[ids])
    assert (torch.stack(parts) != 0).sum(0).max() == 1  # no byte comes twice


# --- tables -----------------------------------------------------------------------------------------------------------


TABLES = {
    "f32": lambda: drawn(300, 24),
    "bf16, odd rows": lambda: any_bits(301, 5),
    "f64, a column": lambda: drawn(211, 1).double(),
    "nf4": lambda: quantize(drawn(257, 128).bfloat16(), NF4),
    "nf4, short blocks": lambda: quantize(drawn(257, 100), NF4),
    "fp4": lambda: quantize(drawn(200, 64), FP4),
    "int8": lambda: quantize(drawn(200, 64), INT8),
    "int4_zero": lambda: quantize(drawn(200, 64), replace(INT4_ZERO, block=32)),
    "nf4_dq": lambda: quantize(drawn(256, 128), NF4_DQ),
}
WHOLE = ("nf4_dq",)  # gathered: its scales have no rows
MOST = 8


def asked(rank, total):
    """Return the ids of a rank: some twice, the first and the last, or none."""
    wanted = ([[0, total - 1], [5, 5], [total // 2, total // 2 + 1], [total // 3, 1]], [[7], [total - 1]], [[], []])
    return torch.tensor(wanted[rank % 3], dtype=torch.int64)


def looked_up(name):
    n, rank = dist.get_world_size(), dist.get_rank()
    table = TABLES[name]()
    total = tree.leaves(table)[0].shape[0]
    mesh, rules = shard.mesh(fsdp=n), Rules()
    placed = shard.local(shard.place(table, {"": dims_of(table)}, rules, mesh))
    comm, seen = shard.comm(mesh, rules, tokens=MOST), []
    for ids in (asked(rank, total), asked(rank + 1, total).int(), torch.tensor(total - 1 - rank)):
        with shard.traffic() as traffic:
            rows = comm.rows(placed, ids)
        assert isinstance(rows, LookedUpRows) == (n > 1 and name not in WHOLE)
        got, want = embedding(ids, rows), embedding(ids, table)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert torch.equal(bundle.raw(got), bundle.raw(want)), (name, ids)
        seen.append(traffic.calls)
    return seen, placed.layout.size


def dims_of(table):
    return {path: " ".join(f"d{i}" for i in range(t.ndim)) for path, t in tree.items(table)}


@pytest.mark.parametrize("n", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5))])
@named("name", TABLES)
def test_rows_are_those_of_the_table(name, n):
    row = sum(t.nbytes // t.shape[0] for t in tree.leaves(TABLES[name]()) if t.ndim)
    for seen, size in ranks.run(n, looked_up, name):
        calls = [("all_gather", n * MOST * 4, n), ("reduce_scatter", n * MOST * row, n)]
        calls = [] if n == 1 else [("all_gather", size, n)] if name in WHOLE else calls
        assert seen == [calls] * 3


def test_what_is_less():
    """True exactly if the bytes of rows are fewer, and False for buffers without separate rows."""
    layout = bundle.plan(torch.empty(100, 16, device="meta"), 2)
    assert (
        layout.size == 6400
        and sharded_embedding.is_less(layout, 2, 47)
        and not sharded_embedding.is_less(layout, 2, 48)
    )  # 68 bytes each
    assert sharded_embedding.is_less(layout, 4, 23) and not sharded_embedding.is_less(layout, 4, 24)
    for strange in (torch.empty(100), (torch.empty(100, 4), torch.empty(99, 4)), {}, torch.empty(0, 4)):
        assert not sharded_embedding.is_less(bundle.plan(strange, 2), 2, 1)
    flat = quantize(drawn(64, 64), replace(NF4, flat=True))
    assert not sharded_embedding.is_less(bundle.plan(flat, 2), 2, 1)


def rows_for(ids, captured):
    """Look up rows on this rank, whose ids are the last of ``ids``, or those of all."""
    mesh, rules = shard.mesh(fsdp=2), Rules()
    placed = shard.local(shard.place(drawn(300, 24), {"": {"": "vocab embed"}}, rules, mesh))
    comm = shard.comm(mesh, rules, tokens=4)
    rows = lambda placed, ids: embedding(ids, comm.rows(placed, ids))
    return (jit(rows) if captured else rows)(placed, torch.tensor(ids[dist.get_rank() % len(ids)]))


def refused():
    mesh, rules = shard.mesh(fsdp=2), Rules()
    comm = shard.comm(mesh, rules, tokens=4)
    with pytest.raises(TypeError, match="this comm opens bundles"):
        comm.rows(type("Other", (Loadable,), {})(), torch.tensor([0]))
    with pytest.raises(ValueError, match="tokens is 0; wanted at least 1, or None"):
        shard.comm(mesh, rules, tokens=0)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("ids", [[[300, 0]], [[-1, 0]], [[0, 1], [0, 300]], [[0, 1], [0, 2**40]]], ids=str)
def test_ids_outside_of_the_table_are_refused_on_every_rank(ids, captured):
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, rows_for, ids, captured)
    assert all("index out of range" in failure.message for failure in caught.value.failures.values())
    assert "IndexError" in [failure.type for failure in caught.value.failures.values()]


def test_what_is_refused():
    many = "5 tokens are looked up, and this comm is for at most 4 a rank; make it with tokens=5 or more"
    for captured in (False, True):
        with pytest.raises(ranks.RankFailure, match=many):
            ranks.run(2, rows_for, [[1, 2, 3, 4, 5]], captured)
    ranks.run(2, refused)
    assert torch.equal(torch.stack(ranks.run(2, rows_for, [[7, 8]], False)), drawn(300, 24)[7:9].expand(2, -1, -1))


def rows_of_runs(runs, most):
    """Look up rows of several runs, under vmap; a rank has a row more than the one before."""
    mesh, rules, n = shard.mesh(fsdp=3), Rules(), dist.get_rank() + 1
    table = drawn(300, 24)
    placed = shard.local(shard.place(table, {"": {"": "vocab embed"}}, rules, mesh))
    comm = shard.comm(mesh, rules, tokens=most, by_row=True)
    ids = torch.randint(0, 300, (runs, n, 5), generator=torch.Generator().manual_seed(n))
    one = lambda placed, ids: embedding(ids, comm.rows(placed, ids))
    two = vmap(vmap(one, (None, 0)), (None, 0))
    for f, given in ((two, ids), (jit(two), ids), (vmap(two, (None, 0)), ids.expand(3, *ids.shape))):
        assert torch.equal(f(placed, given), table[given])


def test_runs_around_rows_have_room_of_their_own():
    ranks.run(3, rows_of_runs, 2, 15)
    with pytest.raises(ranks.RankFailure, match="30 tokens are looked up, and this comm is for at most 28 a rank"):
        ranks.run(3, rows_of_runs, 2, 14)


# --- a decoder --------------------------------------------------------------------------------------------------------


def config(tied):
    return Config(
        vocab=1024, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden=128, max_positions=64,
        tied=tied,
    )  # fmt: skip


EMBEDS = {"dense": identity, "packed": partial(quantize, format=NF4)}
SEQ = 8


def model(embed, tied, dora=False):
    cfg = config(tied)
    base = tree.map(lambda t: 3 * t, decoder.init(cfg, random.key(0)))
    base = tree.map_at(r"layers\.\d+\.(q|k|v|o|gate|up|down)", partial(quantize, format=NF4_DQ), base)
    base = tree.map_at("embed", EMBEDS[embed], base)
    adapters = lora.init(base, r"layers\.\d+\.(q|down)|embed", rank=3, key=1, dora=dora)
    draw = torch.Generator().manual_seed(3)
    return cfg, base, tree.map(lambda t: t + 0.05 * torch.randn(t.shape, generator=draw), adapters)


def batch(rows):
    tokens = torch.randint(0, 1024, (rows, SEQ + 1), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], tokens[:, 1:]


def loss(adapters, base, x, y, cfg, comm=LOCAL):
    return cross_entropy(decoder.forward(lora.attach(base, adapters), x, cfg, comm), y, 7.0)


def tangent(adapters):
    return tree.map(lambda t: torch.linspace(-1, 1, t.numel(), dtype=t.dtype).reshape(t.shape), adapters)


def embedded(adapters, base, x, comm):
    return embedding(x, comm.rows(lora.attach(base, adapters).embed, x))


def wave(adapters, base, x, comm):
    """Return a loss of the embedding alone, which the backward recomputes."""
    return comm.wrap(partial(embedded, comm=comm))(adapters, base, x).sin().sum()


def of_embed(f):
    """Restrict a transform to the embedding and its adapters."""
    return lambda adapters, *rest: f({"embed": adapters["embed"]}, *rest)


TRANSFORMS = {
    "value": lambda a, b, x, y, cfg, comm: loss(a, b, x, y, cfg, comm),
    "grad": lambda a, b, x, y, cfg, comm: grad_and_value(loss)(a, b, x, y, cfg, comm),
    "examples": lambda a, b, x, y, cfg, comm: vmap(grad(partial(loss, cfg=cfg, comm=comm)), (None, None, 0, 0))(
        a, b, x[:2], y[:2]
    ),
    "adapters": lambda a, b, x, y, cfg, comm: vmap(grad(partial(loss, cfg=cfg, comm=comm)), (0, None, None, None))(
        lora.stack([a, tree.map(torch.neg, a)]), b, x, y
    ),
    "both": lambda a, b, x, y, cfg, comm: vmap(partial(loss, cfg=cfg, comm=comm), (0, None, 0, 0))(
        lora.stack([a, tree.map(torch.neg, a)]), b, x[:2], y[:2]
    ),
    "jvp": of_embed(lambda a, b, x, y, cfg, comm: jvp(lambda a: embedded(a, b, x, comm).sin(), (a,), (tangent(a),))),
    "remat": of_embed(lambda a, b, x, y, cfg, comm: grad(wave)(a, b, x, comm)),
    "grad of grad": of_embed(
        lambda a, b, x, y, cfg, comm: grad(
            lambda a: sum((g * g).sum() for g in tree.leaves(grad(wave)(a, b, x, replace(comm, wrap=remat2))))
        )(a)
    ),
    "make_fx": of_embed(lambda a, b, x, y, cfg, comm: traced(a, b, x, comm)),
    "jit": lambda a, b, x, y, cfg, comm: jit(grad_and_value(loss))(a, b, x, y, cfg, comm),
    "scheduled": lambda a, b, x, y, cfg, comm: jit(
        grad_and_value(loss), passes=(deduplicate_gathers(), prefetch_gathers())
    )(a, b, x, y, cfg, comm),
    "regather": lambda a, b, x, y, cfg, comm: jit(
        grad_and_value(loss), passes=(shard.passes.regather_blocks(), prefetch_gathers())
    )(a, b, x, y, cfg, replace(comm, wrap=identity)),
}
remat2 = partial(remat, order=2)


def traced(a, b, x, comm):
    f = lambda a, b, x: tree.leaves(grad(lambda a, b, x: embedded(a, b, x, comm).sin().sum())(a, b, x))
    return make_fx(f, tracing_mode="fake")(a, b, x)(a, b, x)


def both_ways(embed, tied, dora, names):
    """Compare transforms of a table that is looked up with those of one that is gathered; ranks have up to 3 rows."""
    n = dist.get_world_size()
    cfg, base, adapters = model(embed, tied, dora)
    mesh, rules = shard.mesh(fsdp=n), Rules()
    base, adapters = shard.place((base, adapters), decoder.dims(cfg), rules, mesh, cfg)
    base, (x, y) = shard.local(base), shard.share(batch(3 * n - 1), mesh, rules)
    most = shard.max_local_rows(3 * n - 1, mesh, rules)
    assert len(x) <= most <= 3
    ways = shard.comm(mesh, rules, tokens=3 * SEQ), shard.comm(mesh, rules)
    for name in names:
        calls, found = [], []
        for comm in ways:
            with shard.traffic() as traffic:
                found.append(TRANSFORMS[name](adapters, base, x, y, cfg, comm))
            calls.append(traffic)
        got, want = map(tree.leaves, found)
        assert len(got) == len(want) and any(t.count_nonzero() for t in want)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b), name
        if n > 1:
            less = not (tied and name == "scheduled")  # keep gathers the table and the head that it is once anyway
            assert (calls[0].sent < calls[1].sent) == less and calls[0].count("reduce_scatter") > 0, name


FEW = ("grad", "examples", "jvp", "regather")
MAPPED = ("examples", "adapters", "both")


@pytest.mark.parametrize(
    ("n", "embed", "tied", "dora", "names"),
    slow_after(
        1,
        [
            (2, "dense", False, False, FEW),
            (3, "packed", False, True, ("grad",)),
            *(
                pytest.param(n, embed, tied, dora, tuple(TRANSFORMS), marks=pytest.mark.slow)
                for n in (1, 2, 3)
                for embed, tied, dora in (("dense", True, False), ("packed", False, False), ("dense", False, True))
            ),
        ],
    ),
)
def test_every_transform(n, embed, tied, dora, names):
    if torch.__version__ < "2.13":  # which cannot vmap view(dtype)
        names = tuple(name for name in names if name not in MAPPED)
    ranks.run(n, both_ways, embed, tied, dora, names, timeout=240)


def stepped(tied):
    """Compare the collectives of a captured step with their prediction; return its gradients, loss and collectives."""
    n = dist.get_world_size()
    cfg, base, adapters = model("dense", tied)
    mesh, rules = shard.mesh(fsdp=n), Rules()
    placed, adapters = shard.place((base, adapters), decoder.dims(cfg), rules, mesh, cfg)
    x, y = shard.share(batch(3 * n - 1), mesh, rules)
    comm = shard.comm(mesh, rules, tokens=3 * SEQ)
    given = adapters, shard.local(placed), x, y, cfg, comm
    step = jit(grad_and_value(loss), passes=(prefetch_gathers(),))
    step(*given)
    with shard.traffic() as traffic:
        found = step(*given)
    predicted = cost(grad_and_value(loss), *given, passes=(prefetch_gathers(),))
    assert sum(c.sent for c in predicted.collectives) == traffic.sent
    assert sum(c.payload for c in predicted.collectives) == traffic.payload()
    return *shard.reduce(found, mesh, rules), traffic.calls


@pytest.mark.parametrize(("n", "tied"), [(2, True), pytest.param(3, False, marks=pytest.mark.slow)])
def test_a_step_sends_rows_and_is_that_of_one_process(n, tied):
    cfg, base, adapters = model("dense", tied)
    want, value = grad_and_value(loss)(adapters, base, *batch(3 * n - 1), cfg)
    embed, final, layers = padded(base.embed, n), padded(base.final, n), [padded(x, n) for x in base.layers]
    head = [embed] if tied else []  # gathered, forward and again in its recompute
    gathered = [n * 3 * SEQ * 4, *layers, *head, final, *head, final, *layers[::-1]]
    for grads, got, calls in ranks.run(n, stepped, tied, timeout=120):
        tree.map(partial(torch.testing.assert_close, rtol=1e-3, atol=1e-5), grads, want)
        torch.testing.assert_close(got, value)
        rows = ("reduce_scatter", n * 3 * SEQ * 64 * 4, n)
        assert sorted(calls) == sorted([("all_gather", size, n) for size in gathered] + [rows])
    assert math.prod(base.embed.shape) * 4 > rows[1] + gathered[0]
