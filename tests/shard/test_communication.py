"""A decoder on a mesh: loss and gradients of one process on the whole batch, and no more bytes than its blocks have."""

import math
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, grad_and_value, vmap

import models
import shard
from fquant import FP4, INT4_ZERO, INT8, LOCAL, NF4, NF4_DQ, Packed, jit, lora, quantize, random, tree
from fquant.communication import Loadable, VocabShard, identity
from models import decoder, experts
from models.blocks import IGNORE
from models.fused_cross_entropy import cross_entropy
from models.losses import distillation, preference
from shard import Rules
from tests.helpers import ranks
from tests.helpers.sharding.meshes import batch, config, loss, padded

pytestmark = pytest.mark.xdist_group("ranks")

MESHES = [{"fsdp": 1}, {"fsdp": 2}, {"dp": 2}, {"fsdp": 3}, {"dp": 2, "fsdp": 2}, {"fsdp": 5}, {"dp": 5}]
# What CI takes: 3 rows leave some ranks none.
SOME = [*((axes, 7) for axes in MESHES[:4]), *((axes, 3) for axes in MESHES[4:6])]


def model(tied, dora=False):
    """Return a model in four formats, and adapters that are not zero; dense weights are float64, for tight bounds."""
    cfg = config(tied)
    base = tree.map(lambda t: 3 * t, decoder.init(cfg, random.key(0), torch.float32))
    for pattern, format in ((r"q|k|v", NF4_DQ), (r"o", INT8), (r"gate", NF4), (r"up", INT4_ZERO), (r"down", FP4)):
        base = tree.map_at(rf"layers\.\d+\.({pattern})", partial(quantize, format=format), base)
    adapters = lora.init(base, r"layers\.\d+\.(q|v|o|down)|embed", rank=3, key=1, dora=dora)
    draw = torch.Generator().manual_seed(3)
    packed = lambda x: isinstance(x, Packed)
    base = tree.map(lambda x: x if packed(x) else x.double(), base, is_leaf=packed)
    return cfg, base, tree.map(lambda t: t.double() + 0.05 * torch.randn(t.shape, generator=draw), adapters)


@cache
def in_one_process(tied, dora, rows):
    cfg, base, adapters = model(tied, dora)
    x, y = batch(rows)
    return grad_and_value(loss)(adapters, base, x, y, (y != IGNORE).sum(), cfg)


def on_mesh(axes, tied, dora, rows, rules=None, order=1):
    cfg, base, adapters = model(tied, dora)
    if dist.get_rank():  # the values of rank 0 are the ones that count
        base = tree.map(lambda t: t.to("meta"), base)
    mesh, rules = shard.mesh(**axes), rules or Rules()
    base, adapters = shard.place((base, adapters), decoder.dims(cfg), rules, mesh, cfg)
    x, y = shard.share(batch(rows), mesh, rules)
    count = shard.psum((y != IGNORE).sum(), mesh, rules.batch)
    with shard.traffic() as t:
        grads, value = grad_and_value(loss)(
            adapters, shard.local(base), x, y, count, cfg, shard.comm(mesh, rules, order)
        )
    grads = shard.reduce(grads, mesh, rules)
    return grads, shard.psum(value, mesh, rules.batch), len(x), t.calls


def close(got, want):
    assert tree.structure(got) == tree.structure(want)
    for (path, a), b in zip(tree.items(got), tree.leaves(want), strict=True):
        assert b.abs().max() > 0, path
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=lambda text, path=path: f"{path}: {text}")


@pytest.mark.parametrize(
    ("axes", "rows"),
    [
        pytest.param(axes, rows, id=f"{axes}-{rows}", marks=[] if (axes, rows) in SOME else pytest.mark.slow)
        for axes in MESHES
        for rows in (7, 3)
    ],
)
def test_loss_and_gradients_are_those_of_one_process(axes, rows):
    n = math.prod(axes.values())
    want, value = in_one_process(True, False, rows)
    shares = []
    for grads, got, share, _ in ranks.run(n, on_mesh, axes, True, False, rows):
        close(grads, want)
        torch.testing.assert_close(got, value, rtol=1e-10, atol=0)
        shares.append(share)
    assert sum(shares) == rows and (min(shares) == 0) == (n > rows)


@pytest.mark.parametrize(
    ("dora", "order"),
    [(False, 1), (True, 2), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((False, 2), (True, 1)))],
)
def test_dora_and_an_untied_head(dora, order):
    want, value = in_one_process(False, dora, 5)
    for grads, got, *_ in ranks.run(3, on_mesh, {"fsdp": 3}, False, dora, 5, None, order):
        close(grads, want)
        torch.testing.assert_close(got, value, rtol=1e-10, atol=0)


# What CI takes of order 1; of order 2 it takes the other heads.
COUNTED = [({"fsdp": 3}, False), ({"dp": 2, "fsdp": 2}, True)]


@pytest.mark.parametrize(
    ("axes", "tied", "order"),
    [
        pytest.param(
            axes, tied, order, id=f"{axes}-{tied}-{order}", marks=[] if (axes, tied) in wanted else pytest.mark.slow
        )
        for order, wanted in ((1, COUNTED), (2, [(axes, not tied) for axes, tied in COUNTED]))
        for tied in (False, True)
        for axes in ({"fsdp": 3}, {"dp": 2, "fsdp": 2}, {"fsdp": 2}, {"fsdp": 5})
    ],
)
def test_one_all_gather_a_block_forward_and_one_in_the_recompute(axes, tied, order):
    n = axes["fsdp"]
    _, base, _ = model(tied)
    embed, final = padded(base.embed, n), padded(base.final, n)
    layers = [padded(layer, n) for layer in base.layers]
    head = [embed] if tied else []  # a tied head gathers the embedding once more, and again in its recompute
    forward = [embed, *layers, *head, final]
    backward = [*head, final, *layers[::-1]]
    for *_, calls in ranks.run(math.prod(axes.values()), on_mesh, axes, tied, False, 4, None, order):
        assert calls == [("all_gather", size, n) for size in forward + backward]


@pytest.mark.parametrize(
    ("axes", "rules"),
    [({"fsdp": 2}, Rules(block=None)), ({"dp": 2}, Rules()), ({"fsdp": 1}, Rules()), ({"dp": 2}, Rules(block=None))],
    ids=str,
)
def test_blocks_that_lie_whole_are_not_gathered(axes, rules):
    want, value = in_one_process(True, False, 3)
    for grads, got, _, calls in ranks.run(math.prod(axes.values()), on_mesh, axes, True, False, 3, rules):
        assert calls == []
        close(grads, want)
        torch.testing.assert_close(got, value, rtol=1e-10, atol=0)


def split_over_dp():
    """Split the bytes of blocks over dp."""
    return on_mesh({"dp": 2, "fsdp": 2}, True, False, 5, Rules(block="dp"))


def test_blocks_split_over_dp():
    want, _ = in_one_process(True, False, 5)
    for grads, *_, calls in ranks.run(4, split_over_dp):
        close(grads, want)
        assert calls and {n for _, _, n in calls} == {2}


def per_example(rows):
    cfg, base, adapters = model(True)
    mesh, rules = shard.mesh(fsdp=dist.get_world_size()), Rules()
    placed, adapters = shard.place((base, adapters), decoder.dims(cfg), rules, mesh, cfg)
    comm, local = shard.comm(mesh, rules), shard.local(placed)
    x, y = shard.share(batch(rows), mesh, rules)
    each = vmap(grad(partial(loss, count=1.0, cfg=cfg, comm=comm)), (None, None, 0, 0))(adapters, local, x, y)
    stack = lora.stack([adapters, tree.map(lambda t: -t, adapters)])
    many = vmap(grad(partial(loss, count=1.0, cfg=cfg, comm=comm)), (0, None, None, None))(stack, local, x, y)
    return each, many


@pytest.mark.parametrize("n", [2, 3])
def test_gradients_of_each_example_and_of_each_adapter(n):
    rows = 2 * n
    cfg, base, adapters = model(True)
    x, y = batch(rows)
    g = grad(partial(loss, count=1.0, cfg=cfg))
    got = ranks.run(n, per_example, rows)
    for rank, (each, many) in enumerate(got):
        mine = slice(2 * rank, 2 * rank + 2)
        for i in range(2):
            one = g(adapters, base, x[mine][i], y[mine][i])
            torch.testing.assert_close(
                tree.leaves(tree.map(lambda t, i=i: t[i], each)), tree.leaves(one), rtol=1e-4, atol=1e-5
            )
            sign = tree.map(lambda t, i=i: -t if i else t, adapters)
            want = g(sign, base, x[mine], y[mine])
            torch.testing.assert_close(
                tree.leaves(tree.map(lambda t, i=i: t[i], many)), tree.leaves(want), rtol=1e-4, atol=1e-5
            )


def unattachable():
    cfg, base, adapters = model(True)
    mesh, rules = shard.mesh(fsdp=2), Rules()
    placed = shard.local(shard.place(base, decoder.dims(cfg), rules, mesh, cfg))
    x, y = batch(2)
    wrong = {"layers.1.query": adapters["layers.1.q"]}
    loss(wrong, placed, x, y, 1.0, cfg, shard.comm(mesh, rules))


def test_an_adapter_without_a_weight_is_named():
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, unattachable, timeout=20)
    assert sorted(caught.value.failures) == [0, 1]
    for failure in caught.value.failures.values():
        assert failure.type == "ValueError"
        assert "adapter 'layers.1.query' has no weight to be attached to; there is attn_norm, q, k" in failure.message


# --- losses without a count divide by the numbers of all ranks


def of_decoder(adapters, base, x, y, cfg, comm=LOCAL):
    return decoder.loss(lora.attach(base, adapters), x, y, cfg, comm)


def of_distillation(adapters, base, x, y, cfg, comm=LOCAL):
    return distillation.loss(lora.attach(base, adapters), base, x, y, cfg, comm=comm)


def of_kto(adapters, base, x, y, cfg, comm=LOCAL):
    """Return a sum over sequences, of which a mean over those of all ranks is a part."""
    policy, reference = (
        -decoder.token_losses(params, x, y, cfg, comm).sum(-1) for params in (lora.attach(base, adapters), base)
    )
    point = preference.kto_divergence(policy, reference - 3, comm=comm)
    return preference.kto(policy, reference, torch.arange(len(x)) >= 0, point).sum()


def of_routers(adapters, base, x, y, cfg, comm=LOCAL):
    """Return the balancing loss of a router that reads the head's input, over the targets that count."""
    hidden, _ = decoder.normed(lora.attach(base, adapters), x, cfg, comm)
    scores = hidden.flatten(0, -2)[:, :7]
    return experts.load_balancing_loss([scores, 2 * scores], 3, (y != IGNORE).flatten(), comm)


LOSSES = {f.__name__: f for f in (of_decoder, of_distillation, of_kto, of_routers)}


@cache
def whole_batch(name, rows):
    cfg, base, adapters = model(True)
    return grad_and_value(LOSSES[name])(adapters, base, *batch(rows), cfg)


def without_count(axes, name, rows, options, captured):
    cfg, base, adapters = model(True)
    mesh, rules = shard.mesh(**axes), Rules()
    base, adapters = shard.place((base, adapters), decoder.dims(cfg), rules, mesh)
    comm, (x, y) = shard.comm(mesh, rules, **options), shard.share(batch(rows), mesh, rules)
    step = lambda *args: shard.reduce(grad_and_value(LOSSES[name])(*args, cfg, comm), mesh, rules)
    return (jit(step) if captured else step)(adapters, shard.local(base), x, y)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("axes", "name", "rows", "options", "captured"),
    [
        ({"fsdp": 2}, "of_decoder", 5, {"tokens": 48}, False), ({"dp": 3}, "of_decoder", 2, {}, False),
        ({"fsdp": 3}, "of_distillation", 5, {}, False), ({"fsdp": 2}, "of_kto", 5, {}, False),
        ({"fsdp": 3}, "of_routers", 5, {}, False), ({"fsdp": 2}, "of_decoder", 5, {}, True),
        pytest.param({"fsdp": 1}, "of_decoder", 5, {}, True, marks=SLOW),
        pytest.param({"dp": 2}, "of_kto", 5, {}, True, marks=SLOW),
        pytest.param({"fsdp": 3}, "of_distillation", 2, {"tokens": 16}, True, marks=SLOW),
        pytest.param({"dp": 2, "fsdp": 2}, "of_routers", 7, {}, True, marks=SLOW),
    ],
)  # fmt: skip
def test_a_loss_without_count_is_the_loss_of_one_process(axes, name, rows, options, captured):
    wanted, value = whole_batch(name, rows)
    for grads, got in ranks.run(math.prod(axes.values()), without_count, axes, name, rows, options, captured):
        close(grads, wanted)
        torch.testing.assert_close(got, value, rtol=1e-10, atol=0)


def mapped(rows):
    """Compare vmaps over examples, and over adapters that have batches of their own, with those of one process."""
    cfg, base, adapters = model(True)
    mesh, rules = shard.mesh(fsdp=dist.get_world_size()), Rules()
    placed = shard.local(shard.place(base, decoder.dims(cfg), rules, mesh))
    comm, (x, y) = shard.comm(mesh, rules), batch(rows)
    mine = shard.share((x, y), mesh, rules)
    each = vmap(grad(of_decoder), (None, None, 0, 0, None, None))
    whole = replace(LOCAL, total=identity)  # of a rank that has the whole batch
    wanted = shard.share(each(adapters, base, x, y, cfg, whole), mesh, rules)
    close_to(each(adapters, placed, *mine, cfg, comm), wanted)
    stacked = lora.stack([adapters, tree.map(lambda t: 1.5 * t, adapters)])
    of_adapters = vmap(grad(of_decoder), (0, None, 1, 1, None, None))
    cut = lambda t: torch.stack([t, t.flip(0)], 1)  # [rows adapters t]
    got = of_adapters(stacked, placed, *map(cut, mine), cfg, comm)
    every = (torch.cat([cut(t) for t in z.tensor_split(dist.get_world_size())]) for z in (x, y))
    close_to(shard.reduce(got, mesh, rules), of_adapters(stacked, base, *every, cfg, whole))


def close_to(got, wanted):
    for a, b in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("n", [2, 3])
def test_examples_of_a_vmap_count_alone_and_batches_of_adapters_together(n):
    ranks.run(n, mapped, 5)


def uncounted(captured, name):
    if name in LOSSES:
        cfg, base, adapters = model(True)
        f, given = partial(LOSSES[name], cfg=cfg), (adapters, base, *batch(2))
    else:
        f, given = WITHOUT_COMM[name], (torch.zeros(3, 8), torch.eye(8), torch.zeros(3).long())
    (jit(grad(f)) if captured else grad(f))(*given)


WITHOUT_COMM = {
    "logits": lambda x, w, y: models.cross_entropy(x @ w, y),
    "fused": lambda x, w, y: cross_entropy(x, w, y),
    "per example": lambda x, w, y: vmap(models.cross_entropy)(x @ w, y).sum(),
}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", [*WITHOUT_COMM, *LOSSES])
def test_a_loss_without_a_comm_needs_a_count_on_several_ranks(name, captured):
    ranks.run(1, uncounted, captured, name)
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, uncounted, captured, name, timeout=20)
    messages = [(f.type, f.message[:29]) for f in caught.value.failures.values()]
    assert messages == [("ValueError", "count: missing on one of 2 ra")] * 2


def test_a_split_head_needs_a_count():
    head = VocabShard(torch.zeros(4, 8), Loadable(), 0, 8, 0, 3, lambda t: t, lambda t: t, lambda t: t)
    with pytest.raises(ValueError, match=r"count: missing beside a VocabShard; give count, .* on all ranks"):
        cross_entropy(torch.zeros(3, 8), head, torch.zeros(3).long())
