"""Gradients through sums over ranks, as of a step inside an outer loss: those of one process, or an error."""

import math

import pytest
import torch
import torch.distributed as dist

import shard
from fquant import jit, tree
from shard import Rules
from tests.helpers import ranks
from tests.helpers.arrays import named

pytestmark = pytest.mark.xdist_group("ranks")

META = {
    "start": {"w": torch.linspace(-0.5, 0.7, 4, dtype=torch.float64), "b": torch.tensor(0.1, dtype=torch.float64)},
    "log_lr": torch.tensor([-0.7, -1.1], dtype=torch.float64),  # of two inner steps: met after the sum
    "scale": torch.tensor(1.3, dtype=torch.float64),  # of the inner loss: met before the sum
}


def examples(rows, seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 5, generator=draw, dtype=torch.float64)


def square(p, rows, scale=1.0):
    return ((torch.tanh(rows[:, :4] @ p["w"] + p["b"]) - rows[:, 4]) ** 2).sum() * scale


def trained(meta, rows, summed, enter=lambda x: x):
    """Take two steps whose gradients are summed over ranks; return the parameters."""
    p = meta["start"]
    for log_lr in meta["log_lr"]:
        grads = torch.func.grad(square)(enter(p), rows, enter(meta["scale"]))
        lr = log_lr.exp() / 7
        p = tree.map(lambda p, g, lr=lr: p - lr * g, p, summed(grads))
    return p


def outer(meta, rows, part, whole, ranks, summed):
    """Return this rank's term of a loss: that of its ``part`` of held-out rows, and its share of those of ``whole``."""
    p = trained(meta, rows, summed)
    return square(p, part) + (square(p, whole) + (meta["log_lr"] ** 2).sum() + p["w"].sin().prod()) / ranks


def through(axes):
    """Return what the cases of a meta-gradient give on this mesh."""
    mesh, n = shard.mesh(**axes), dist.get_world_size()
    rows, part = (shard.share(examples(n, seed), mesh, Rules()) for n, seed in ((7, 0), (5, 1)))
    whole = examples(3, 2)
    partial = lambda g: shard.reduce(g, mesh, cotangent="partial")
    total = lambda x: shard.psum(x, mesh, Rules().batch)
    f = lambda meta, summed, *given: outer(meta, *(given or (rows, part, whole)), n, summed)
    found = {name: partial(torch.func.grad(f)(META, s)) for name, s in (("reduce", partial), ("psum", total))}
    dot = lambda x: sum((a * a.cos()).sum() for a in tree.leaves(x))
    found["second order"] = total(torch.func.grad(lambda m: dot(total(torch.func.grad(f)(m, partial))) / n)(META))
    found["jvp"] = total(torch.func.jvp(lambda m: f(m, lambda g: shard.reduce(g, mesh)), (META,), (META,))[1])
    captured = jit(lambda m, *given: partial(torch.func.grad(f)(m, partial, *given)))
    found["captured"] = captured(META, rows, part, whole)
    if over := shard.device_mesh.groups(mesh, Rules().batch):  # with the same loss on all ranks
        every = lambda verb: lambda x: tree.map(lambda t: verb(t, over[0]), x)
        copies = lambda m: square(trained(m, rows, every(shard.exit), every(shard.enter)), whole)
        found["exit"] = torch.func.grad(copies)(META)
    return found


def in_one_process():
    rows, part, whole, same = examples(7, 0), examples(5, 1), examples(3, 2), lambda x: x
    f = lambda meta: outer(meta, rows, part, whole, 1, same)
    dot = lambda x: sum((a * a.cos()).sum() for a in tree.leaves(x))
    first = torch.func.grad(f)(META)
    return dict.fromkeys(("reduce", "psum", "captured"), first) | {
        "second order": torch.func.grad(lambda m: dot(torch.func.grad(f)(m)))(META),
        "jvp": torch.func.jvp(f, (META,), (META,))[1],
        "exit": torch.func.grad(lambda m: square(trained(m, rows, same), whole))(META),
    }


@pytest.mark.parametrize("axes", [{"fsdp": 1}, {"fsdp": 2}, {"dp": 3}], ids=str)
def test_a_gradient_through_a_sum_equals_one_process(axes):
    wanted = in_one_process()
    for found in ranks.run(math.prod(axes.values()), through, axes):
        for name, got in found.items():
            for a, b in zip(tree.leaves(got), tree.leaves(wanted[name]), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


UNTYPED = {
    "reduce": lambda p, mesh, rows: shard.reduce(torch.func.grad(square)(p, rows), mesh),
    "ordered": lambda p, mesh, rows: shard.ordered.grad_and_value(
        lambda p, row: square(p, row[None]), mesh, Rules(), rows=4
    )(p, [rows])[0],
}


def untyped(name, captured):
    mesh = shard.mesh(fsdp=2)
    step = lambda p, rows: tree.map(torch.sub, p, UNTYPED[name](p, mesh, rows))
    constant = lambda p, rows: tree.map(lambda p, g: p - g.detach(), p, UNTYPED[name](p, mesh, rows))
    args = META["start"], shard.share(examples(4, 0), mesh, Rules())
    gradient = lambda step: torch.func.grad(lambda p, rows: square(step(p, rows), rows))
    assert tree.leaves(gradient(constant)(*args))[0].abs().max() > 0  # nothing flows through the sum
    (jit(gradient(step)) if captured else gradient(step))(*args)


@pytest.mark.parametrize("captured", [False, True])
@named("name", UNTYPED)
def test_a_gradient_through_a_sum_without_a_type_raises(name, captured):
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, untyped, name, captured, timeout=20)
    failures = caught.value.failures
    assert {rank: f.type for rank, f in failures.items()} == dict.fromkeys(range(2), "ValueError")
    assert all("cotangent='partial'" in f.message for f in failures.values())


def test_an_unknown_cotangent_is_refused():
    with pytest.raises(ValueError, match="cotangent is 'replicated'; wanted 'partial' or None"):
        shard.reduce({}, None, cotangent="replicated")
