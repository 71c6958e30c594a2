"""Quantisers composed of books: a mesh equals one process with one collective an update, and all transforms hold."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, grad_and_value, jvp, vmap

import shard
from fquant import jit, random, tree
from fquant.vq import mean
from fquant.vq.composite import beam
from tests.helpers import ranks
from tests.helpers.vq.family import DIM, LEARN, STATES
from tests.helpers.vq.peers import assert_close, drawn

SPLITS = [[13, 3], [13, 0, 3]]  # examples of each rank
MORE_SPLITS = [[8, 8], [0, 16], [5, 5, 6], [0, 0, 16]]
QUICK = ("shared", "simvq")  # to capture
slow = lambda cases: [pytest.param(case, marks=pytest.mark.slow, id=str(case)) for case in cases]


def data():
    """Return all examples [16 5 dim], two of them not finite, and a mask."""
    x = drawn(16, 5, DIM)
    x[3, 2, 1] = x[9] = torch.nan
    return x, torch.arange(80).reshape(16, 5) % 7 > 0


def step(name, state, x, mask, row_offset, psum):
    """Return losses, codes, the state after an update that restarts dead codes, and the number of collectives."""
    verbs = STATES[name][0]
    more = {"draw": True, "row_offset": row_offset} if name in LEARN else {}
    got = verbs.apply(state, x, random.key(5), mask, **more)
    stats, losses = got.stats, got.losses
    if name in LEARN:
        with shard.traffic() as seen:
            stats, losses = psum((got.stats, got.losses))
        state = verbs.update(state, stats, threshold=1.2)
        calls = len(seen.calls)
    else:
        state, losses, calls = verbs.update(state, stats), psum(losses), 1
    return {n: mean(m) for n, m in losses.items()}, got.codes, state, calls


def on_a_rank(split):
    mesh, axes, rank = shard.mesh(fsdp=len(split)), ("dp", "fsdp"), dist.get_rank()
    start = sum(split[:rank])
    x, mask = (t[start : start + split[rank]] for t in data())
    examples, rows = (shard.rows(n, mesh, axes) for n in (len(x), mask.sum()))
    found = {}
    for name, (_, make) in STATES.items():
        row_offset = examples if "hierarchical" in name else rows
        losses, codes, state, calls = step(name, make(), x, mask, row_offset, lambda t: shard.psum(t, mesh, axes))
        found[name] = losses, codes, tree.leaves(state), calls
    return found


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("split", SPLITS + slow(MORE_SPLITS), ids=str)
def test_a_mesh_is_one_process(split):
    got = ranks.run(len(split), on_a_rank, split)
    for name, (_, make) in STATES.items():
        losses, codes, state, _ = step(name, make(), *data(), None, lambda t: t)
        for found in got:
            assert_close(found[name][0], losses, 1e-6)
            assert_close(found[name][2], tree.leaves(state), 1e-6)
            assert found[name][3] == 1, name
        joined = tree.map(lambda *parts: torch.cat(parts), *(found[name][1] for found in got))
        assert all(torch.equal(*both) for both in zip(tree.leaves(joined), tree.leaves(codes), strict=True)), name


def test_updates_move_what_they_are_of():
    for name in LEARN:
        state = STATES[name][1]()
        after = step(name, state, *data(), None, lambda t: t)[2]
        assert any(not torch.equal(*both) for both in zip(tree.leaves(state), tree.leaves(after), strict=True)), name


def clean(n=4):
    return drawn(n, 5, DIM, seed=8)


def loss(name, state, x):
    got = STATES[name][0].apply(state, x)
    return (got.x * torch.linspace(-1, 1, DIM)).sum() + sum(mean(m).sum() for m in got.losses.values())


@pytest.mark.parametrize("name", STATES)
def test_transforms(name):
    (verbs, make), x = STATES[name], clean()
    state = make()
    # vmap over examples
    whole, each = verbs.apply(state, x), vmap(lambda x: verbs.apply(state, x))(x)
    assert_close(each.x, whole.x, 1e-6)
    assert all(torch.equal(*both) for both in zip(tree.leaves(each.codes), tree.leaves(whole.codes), strict=True))
    codes = vmap(lambda x: verbs.encode(state, x))(x)
    assert all(torch.equal(*both) for both in zip(tree.leaves(codes), tree.leaves(whole.codes), strict=True))
    slopes = vmap(grad(lambda x: loss(name, state, x)))(x)
    assert_close(slopes, torch.stack([grad(lambda x: loss(name, state, x))(one) for one in x]), 1e-5)
    # forward mode against reverse mode
    v, by = drawn(*x.shape, seed=9), grad(lambda state, x: loss(name, state, x), (0, 1))(state, x)
    dv = tree.map(lambda t: drawn(*t.shape, seed=t.numel() + 1), state)
    forwards = jvp(lambda state, x: loss(name, state, x), (state, x), (dv, v))[1]
    backwards = sum((a * b).sum() for a, b in zip(tree.leaves(by), tree.leaves((dv, v)), strict=True))
    assert_close(forwards, backwards, 1e-4)


@pytest.mark.parametrize("name", [*QUICK, *slow(name for name in STATES if name not in QUICK)])
def test_captured(name):
    verbs, state, x, key = STATES[name][0], STATES[name][1](), clean(), random.key(3)

    def run(state, x, key):
        slope, value = grad_and_value(lambda s, x: loss(name, s, x), (0, 1))(state, x)
        got = verbs.apply(state, x, key, **({"draw": True} if name in LEARN else {}))
        more = {"threshold": 1.2} if name in LEARN else {}
        return slope, value, got.x, verbs.decode(state, got.codes), verbs.update(state, got.stats, **more)

    eager, captured = run(state, x, key), jit(run)(state, x, key)
    assert all(torch.equal(*both) for both in zip(tree.leaves(eager), tree.leaves(captured), strict=True))


def test_a_beam_is_captured_and_mapped():
    for name in ("residual", "implicit"):
        state, x = STATES[name][1](), clean()
        whole = beam.encode(state, x, 3)
        assert torch.equal(jit(lambda state, x: beam.encode(state, x, 3))(state, x), whole)
        assert torch.equal(vmap(lambda x: beam.encode(state, x, 3))(x), whole)  # noqa: B023


def test_trainable_parts_alone_are_differentiated():
    for name in ("hierarchical", "simvq"):
        state = STATES[name][1]()
        slope = grad(lambda params: loss(name, replace(state, params=params), clean()))(state.params)  # noqa: B023
        assert all(t.abs().max() > 0 for t in tree.leaves(slope))
