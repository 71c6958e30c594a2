"""Collectives under every transform, against one process that holds all ranks' inputs and sums all ranks' losses."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant.device import HOST
from shard import collectives
from tests.helpers import ranks
from tests.helpers.devices.placing import on
from tests.helpers.sharding.meshes import mesh_of_one

pytestmark = pytest.mark.xdist_group("ranks")

BATCH = 4


def curve(y, w):
    """Mix all elements, so that no derivative up to the second is diagonal or zero."""
    return (y * w).sin().sum() ** 2


# name -> (shape of x on n ranks, shape of w, loss on a rank, losses of all ranks in one process)
CASES = {
    "all_gather": (
        lambda n: (2, 3),
        lambda n: (2 * n, 3),
        lambda x, w, group: curve(collectives.all_gather(x, group), w),
        lambda x, w: [curve(x.flatten(0, 1), v) for v in w],
    ),
    "reduce_scatter": (
        lambda n: (2 * n, 3),
        lambda n: (2, 3),
        lambda x, w, group: curve(collectives.reduce_scatter(x, group), w),
        lambda x, w: [curve(y, v) for y, v in zip(x.sum(0).chunk(len(x)), w, strict=True)],
    ),
    "all_to_all": (
        lambda n: (2 * n, 3),
        lambda n: (2 * n, 3),
        lambda x, w, group: curve(collectives.all_to_all(x, group), w),
        lambda x, w: [curve(torch.cat([other.chunk(len(x))[i] for other in x]), v) for i, v in enumerate(w)],
    ),
    "all_reduce": (
        lambda n: (2, 3),
        lambda n: (2, 3),
        lambda x, w, group: curve(collectives.all_reduce(x, group), w),
        lambda x, w: [curve(x.sum(0), v) for v in w],
    ),
    "enter": (
        lambda n: (2, 3),
        lambda n: (2, 3),
        lambda x, w, group: curve(collectives.enter(x, group), w),
        lambda x, w: [curve(x, v) for v in w],
    ),
    "exit": (
        lambda n: (2, 3),
        lambda n: (2, 3),
        lambda x, w, group: curve(collectives.exit(x * w, group), 1.0),
        lambda x, w: [curve((x * w).sum(0), 1.0)] * len(w),
    ),
}
SHARED = ("enter",)  # x is the same on every rank
SAME = ("exit",)  # the loss is the same on every rank, so it counts once
TRANSFORMS = (
    "value", "grad", "vmap", "vmap last", "vmap grad", "vmap vmap", "jvp", "jvp of jvp", "grad of grad", "hessian",
    "make_fx", "make_fx vmap grad",
)  # fmt: skip


def inputs(name, n):
    """Return x, its tangent, a batch of x, and w: each [ranks ...], or without ranks if all ranks share it."""
    x_shape, w_shape, *_ = CASES[name]
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    of = () if name in SHARED else (n,)
    return draw(*of, *x_shape(n)), draw(*of, *x_shape(n)), draw(BATCH, *of, *x_shape(n)), draw(n, *w_shape(n))


def on_rank(name, group=None, device=HOST):
    n, rank, group = dist.get_world_size(), dist.get_rank(), group or dist.group.WORLD
    x, t, batch, w = on(device, inputs(name, n))
    w = w[rank]
    if name not in SHARED:
        x, t, batch = x[rank], t[rank], batch[:, rank]
    loss = CASES[name][2]

    def f(x, w):
        return loss(x, w, group)

    g = grad(f)
    each = vmap(g, (0, None))
    return {
        "value": f(x, w),
        "grad": g(x, w),
        "vmap": vmap(f, (0, None))(batch, w),
        "vmap last": vmap(f, (-1, None))(batch.movedim(0, -1), w),
        "vmap grad": each(batch, w),
        "vmap vmap": vmap(vmap(f, (None, 0)), (0, None))(batch, torch.stack([w, 2 * w])),
        "jvp": jvp(f, (x, w), (t, torch.zeros_like(w)))[1],
        "jvp of jvp": jvp(lambda x: jvp(lambda x: f(x, w), (x * x,), (x * t,))[1], (x,), (t,))[1],
        "grad of grad": grad(lambda x: (g(x, w) * t).sum())(x),
        "hessian": hessian(f)(x, w),
        "make_fx": make_fx(g, tracing_mode="fake")(x, w)(x, w),
        "make_fx vmap grad": make_fx(each, tracing_mode="fake")(batch, w)(batch, w),
    }


def on_one_rank(name, device):
    with mesh_of_one(device) as mesh:
        return on(HOST, on_rank(name, mesh.get_group("fsdp"), device))


def in_one_process(name, n):
    x, t, batch, w = inputs(name, n)

    def losses(x, w=w):
        return torch.stack(CASES[name][3](x, w))

    def total(x, w=w):
        return losses(x, w)[0] if name in SAME else losses(x, w).sum()

    g = grad(total)
    whole = jacrev(g)(x)
    if name not in SHARED:  # [r ... s ...]: every rank moves its own x at once, so what they do adds up over s
        whole = whole.sum(x.ndim)
    each = vmap(g)(batch)
    return {
        "value": losses(x),
        "grad": g(x),
        "vmap": vmap(losses)(batch).T,
        "vmap last": vmap(losses)(batch).T,
        "vmap grad": each if name in SHARED else each.transpose(0, 1),
        "vmap vmap": torch.stack([vmap(losses)(batch), vmap(lambda x: losses(x, 2 * w))(batch)]).permute(2, 1, 0),
        "jvp": jvp(losses, (x,), (t,))[1],
        "jvp of jvp": jvp(lambda x: jvp(losses, (x * x,), (x * t,))[1], (x,), (t,))[1],
        "grad of grad": grad(lambda x: (g(x) * t).sum())(x),
        "hessian": whole,
        "make_fx": g(x),
        "make_fx vmap grad": each if name in SHARED else each.transpose(0, 1),
    }


PER_LOSS = ("value", "vmap", "vmap last", "vmap vmap", "jvp", "jvp of jvp")  # a number a rank, even where x is shared


@functools.cache
def both(name, n):
    return ranks.run(n, on_rank, name), in_one_process(name, n)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_transforms_against_one_process(name, n, transform):
    assert_same(name, transform, *both(name, n))


@pytest.mark.parametrize("name", CASES)
def test_transforms_on_one_rank(name, device):
    got, wanted = ranks.run(1, on_one_rank, name, device), in_one_process(name, 1)
    for transform in TRANSFORMS:
        assert_same(name, transform, got, wanted)


def assert_same(name, transform, got, wanted):
    """Compare the results of ranks with those of one process."""
    for rank in range(len(got)):
        want = wanted[transform]
        if name not in SHARED or transform in PER_LOSS:
            want = want[rank]
        assert want.abs().min() > 0 or transform == "hessian"
        torch.testing.assert_close(got[rank][transform], want, rtol=1e-10, atol=1e-10)


def duals():
    """Return both sides of <C x, y> = <x, C* y>, whose sums over ranks are equal if C* is the dual of C."""
    n, group = dist.get_world_size(), dist.group.WORLD
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    pairs = {
        "all_gather": (collectives.all_gather, collectives.reduce_scatter, draw(2, 3), draw(2 * n, 3)),
        "reduce_scatter": (collectives.reduce_scatter, collectives.all_gather, draw(2 * n, 3), draw(2, 3)),
        "all_reduce": (collectives.all_reduce, collectives.all_reduce, draw(2, 3), draw(2, 3)),
        "all_to_all": (collectives.all_to_all, collectives.all_to_all, draw(2 * n, 3), draw(2 * n, 3)),
    }
    return {name: ((c(x, group) * y).sum(), (x * d(y, group)).sum()) for name, (c, d, x, y) in pairs.items()}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_duals(n):
    got = ranks.run(n, duals)
    for name in got[0]:
        left, right = (sum(rank[name][i] for rank in got) for i in (0, 1))
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


def counted():
    group = dist.group.WORLD
    x, rows = torch.ones(10, 3), torch.ones(4 * dist.get_world_size(), dtype=torch.float64)
    with collectives.traffic() as outer:
        with collectives.traffic() as t:
            grad(lambda x: collectives.all_gather(x, group).sum())(x)
            vmap(lambda x: collectives.all_reduce(x, group))(torch.ones(7, 2))
            collectives.reduce_scatter(rows, group)
            collectives.enter(x, group)
        collectives.exit(x, group)
    collectives.exit(x, group)
    return t.calls, t.count("all_gather"), t.payload("all_gather"), t.payload(), t.sent, len(outer.calls)


@pytest.mark.parametrize("n", [2, 3])
def test_traffic_counts_calls_payload_and_bytes_sent(n):
    for calls, count, gathered, payload, sent, outer in ranks.run(n, counted):
        assert calls == [
            ("all_gather", n * 10 * 3 * 4, n),
            ("reduce_scatter", n * 10 * 3 * 4, n),
            ("all_reduce", 7 * 2 * 4, n),
            ("reduce_scatter", n * 4 * 8, n),
        ]
        assert (count, gathered) == (1, n * 120)
        assert payload == 2 * n * 120 + 56 + n * 32
        # Around a ring a rank passes on all parts but one: its own of a gather, and both ways of a sum.
        assert sent == 2 * (n - 1) * 120 + 2 * 56 * (n - 1) // n + (n - 1) * 32
        assert outer == len(calls) + 1


def refused():
    group, seen = dist.group.WORLD, []
    for f, x in (
        (collectives.reduce_scatter, torch.ones(3)),
        (collectives.reduce_scatter, torch.ones(())),
        (collectives.all_gather, torch.ones(())),
    ):
        with pytest.raises(ValueError) as caught:
            f(x, group)
        seen.append(str(caught.value))
    return seen


def test_bad_shapes_are_refused():
    for seen in ranks.run(2, refused):
        assert seen == [
            "reduce_scatter got 3 rows for 2 ranks; pad to a multiple",
            "reduce_scatter got a scalar; wanted at least one dim to scatter along",
            "all_gather got a scalar; wanted at least one dim to gather along",
        ]
