"""Residuals of FSQ and of LFQ: equality with vector-quantize-pytorch where that is right; dropout and masks."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.func import grad
from vector_quantize_pytorch import GroupedResidualFSQ, GroupedResidualLFQ, ResidualFSQ, ResidualLFQ

from fquant import random, tree
from fquant.vq import mean
from fquant.vq.composite import grouped, residual
from fquant.vq.scalar import fsq, lfq, projection_layers
from tests.helpers.vq.peers import assert_close, drawn, ours, projections, theirs

LEVELS = (8, 5, 5, 3)
FSQ = {  # our options, and the peer's
    "plain": ({}, {}),
    "projected": ({"dim": 7}, {"dim": 7}),
    "tanh": ({"hard_clamp": False}, {"bound_hard_clamp": False}),
    "tanh, clamped": (
        {"hard_clamp": False, "clamp": (2.0, 1.0, 1.5, 3.0)},
        {"bound_hard_clamp": False, "soft_clamp_input_value": [2.0, 1.0, 1.5, 3.0]},
    ),
    "rotated": ({"rotation": True, "dim": 5}, {"orthogonal_rotation": True, "dim": 5}),
}
LFQ = {
    "plain": ({}, {}),
    "projected": ({"dim": 7}, {"dim": 7}),
    "clamped": ({"clamp": 1.5}, {"soft_clamp_input_value": 1.5}),
    "spherical": ({"spherical": True}, {"spherical": True}),
    "rotated": ({"rotation": True}, {"orthogonal_rotation": True}),
    "softplus": ({"offset": 2.0, "gamma": 0.5}, {"experimental_softplus_entropy_loss": True, "entropy_loss_offset": 2.0,
                                                  "diversity_gamma": 0.5}),
}  # fmt: skip


def both(kind, options, named):
    torch.manual_seed(1)
    if kind == "fsq":
        peer = ResidualFSQ(levels=list(LEVELS), num_quantizers=4, **named)
        state = residual.init_fsq(0, LEVELS, 4, **options)
    else:
        weights = {"entropy_loss_weight": 1.0, "commitment_loss_weight": 2.0}
        peer = ResidualLFQ(**{"dim": 5, "codebook_size": 32, "num_quantizers": 3, **weights, **named})
        state = residual.init_lfq(0, 5, 3, **options)
    turns = [getattr(layer, "orthogonal_rot", None) for layer in peer.layers]
    layers = [replace(layer, rotation=turn) for layer, turn in zip(state.layers, turns, strict=True)]
    return peer, replace(state, layers=layers, params=projections(peer))


@pytest.mark.parametrize("options, named", FSQ.values(), ids=FSQ)
def test_fsq_is_the_peers(options, named):
    peer, state = both("fsq", options, named)
    x, weight = drawn(3, 40, state.dim), drawn(3, 40, state.dim, seed=3)
    x_peer, codes = peer(x)
    got = residual.apply(state, x)
    assert torch.equal(got.codes, codes.long()) and torch.equal(residual.encode(state, x), got.codes)
    assert_close((got.x, residual.decode(state, got.codes)), (x_peer.detach(), x_peer.detach()))
    if not options.get("rotation"):  # which the peer omits in decoding
        assert_close(residual.decode(state, got.codes), peer.get_output_from_indices(codes).detach())
        assert_close(residual.decode_layers(state, codes).unbind(-2), peer.get_codes_from_indices(codes).unbind())
    assert_close(
        ours(state, lambda s, x: (residual.apply(s, x).x * weight).sum(), x),
        theirs(peer, lambda p, x: (p(x)[0] * weight).sum(), x),
    )


@pytest.mark.parametrize("options, named", LFQ.values(), ids=LFQ)
def test_lfq_is_the_peers(options, named):
    """The temperature keeps probabilities above the peer's floor; the peer does not pass it to its layers."""
    peer, state = both("lfq", options, named)
    for layer in peer.layers:
        layer.forward = warm(layer)
    x, weight = drawn(3, 40, state.dim, size=0.5), drawn(3, 40, state.dim, seed=3)
    x_peer, codes, losses = peer(x)
    got = residual.apply(state, x, inv_temperature=0.5)
    assert torch.equal(got.codes, codes) and torch.equal(residual.encode(state, x), got.codes)
    assert_close((got.x, residual.decode(state, got.codes)), (x_peer.detach(), x_peer.detach()))
    if not options.get("rotation") and not options.get("spherical"):  # both of which the peer omits in decoding
        assert_close(residual.decode(state, got.codes), peer.get_output_from_indices(codes).detach())
    assert_close(mean(got.losses["entropy"]) + 2 * mean(got.losses["commitment"]), losses.detach())

    def of_peer(peer, x):
        x, _, losses = peer(x)
        return (x * weight).sum() + losses.sum()

    def of_ours(state, x):
        got = residual.apply(state, x, inv_temperature=0.5)
        losses = mean(got.losses["entropy"]) + 2 * mean(got.losses["commitment"])
        return (got.x * weight).sum() + losses.sum()

    assert_close(ours(state, of_ours, x), theirs(peer, of_peer, x))


def warm(layer):
    forward = layer.forward
    return lambda x, mask=None: forward(x, inv_temperature=0.5, mask=mask)


@pytest.mark.parametrize("kind", ["fsq", "lfq"])
def test_groups_are_the_peers(kind):
    torch.manual_seed(1)
    if kind == "fsq":
        them: Any = GroupedResidualFSQ(dim=14, groups=2, levels=list(LEVELS), num_quantizers=3)
        one, warmth = partial(residual.init_fsq, levels=LEVELS, num_layers=3, dim=7), {}
    else:
        weights = {"entropy_loss_weight": 1.0, "commitment_loss_weight": 2.0}
        them = GroupedResidualLFQ(dim=14, groups=2, codebook_size=32, num_quantizers=3, **weights)
        one, warmth = partial(residual.init_lfq, bits=5, num_layers=3, dim=7), {"inv_temperature": 0.5}
        for layer in [layer for one in them.rvqs for layer in one.layers]:
            layer.forward = warm(layer)
    state = grouped.init(0, [lambda key, of=of: replace(one(key), params=projections(of)) for of in them.rvqs])
    x, weight = drawn(3, 40, 14, size=0.7), drawn(3, 40, 14, seed=3)
    there = x.clone().requires_grad_()
    wanted, codes, *losses = them(there)
    ((wanted * weight).sum() + sum(loss.sum() for loss in losses)).backward()

    def total(x):
        got = grouped.apply(state, x, **warmth)
        found = [mean(got.losses["entropy"]) + 2 * mean(got.losses["commitment"])] if got.losses else []
        return (got.x * weight).sum() + sum(loss.sum() for loss in found), (got, found)

    slope, (got, found) = grad(total, has_aux=True)(x)
    assert torch.equal(got.codes.movedim(-2, 0), codes.long()) and torch.equal(grouped.encode(state, x), got.codes)
    assert_close((got.x, grouped.decode(state, got.codes)), (wanted.detach(), wanted.detach()))
    assert_close((slope, found), (there.grad, [loss.detach() for loss in losses]))
    assert grouped.update(state, got.stats).groups == state.groups


STATES = {
    "fsq": lambda **options: residual.init_fsq(0, LEVELS, 4, **options),
    "lfq": lambda **options: residual.init_lfq(0, 5, 4, **options),
}


@pytest.mark.parametrize("name", STATES)
def test_more_layers_are_nearer(name):
    state = STATES[name]()
    x = 0.7 * drawn(500, state.dim).tanh()
    codes = residual.encode(state, x)
    near = x if state.clamp is None else torch.tensor(state.clamp) * torch.tanh(x / torch.tensor(state.clamp))
    errors = [(residual.decode(state, codes[:, : i + 1]) - near).square().mean() for i in range(4)]
    assert all(b < 0.5 * a for a, b in zip(errors, errors[1:], strict=False))
    assert_close(residual.decode(state, codes[:, :2]), residual.decode_layers(state, codes)[:, :2].sum(-2))


@pytest.mark.parametrize(
    "cutoff, multiple, depths", [(0, 1, {1, 2, 3, 4}), (2, 1, {3, 4}), (0, 3, {3, 6}), (3, 1, {4})]
)
@pytest.mark.parametrize("name", STATES)
def test_dropout_leaves_the_last_layers_out(name, cutoff, multiple, depths):
    """A drawn depth equals a state with so many layers, in output, gradient and losses."""
    state = STATES[name](dropout=True, cutoff=cutoff, multiple=multiple, dim=6)
    x = drawn(7, 11, 6)
    seen = set()
    for seed in range(12):
        key = random.key(seed)
        depth = int(residual.draw_depth(state, key))
        if depth in seen:
            continue
        seen.add(depth)
        got = residual.apply(state, x, key)
        short = replace(state, layers=state.layers[:depth], dropout=False)
        wanted = residual.apply(short, x, key)
        assert torch.equal(got.codes[..., :depth], wanted.codes) and got.codes[..., depth:].eq(-1).all()
        assert torch.equal(got.x, wanted.x) and torch.equal(residual.decode(state, got.codes), got.x)
        for loss in got.losses:
            kept = mean(got.losses[loss])
            assert_close(kept[:depth], mean(wanted.losses[loss]))
            assert kept[depth:].eq(0).all() and got.losses[loss].count[depth:].eq(0).all()
        slope = [grad(lambda x: residual.apply(s, x, key).x.square().sum())(x) for s in (state, short)]  # noqa: B023
        assert_close(*slope)
    assert seen == depths
    assert (residual.apply(state, x).codes >= 0).all()  # without a key


def test_depths_are_uniform_and_of_their_keys():
    state = STATES["lfq"](dropout=True)
    keys = random.fold(random.key(0), torch.arange(8000))
    depth = residual.draw_depth(state, keys)
    share = torch.bincount(depth, minlength=5)[1:] / 8000
    assert (share - 0.25).abs().max() < 5 * math.sqrt(0.25 * 0.75 / 8000)
    x = drawn(40, 3, 5)
    whole = residual.apply(state, x, keys[:40])
    assert torch.equal((whole.codes >= 0).sum(-1), depth[:40, None].expand(40, 3))
    parts = [residual.apply(state, x[i], keys[:40][i]) for i in (slice(0, 11), slice(11, 40))]
    assert torch.equal(whole.x, torch.cat([part.x for part in parts]))
    alone = residual.apply(state, x[5], keys[5])
    assert torch.equal(whole.x[5], alone.x) and torch.equal(whole.codes[5], alone.codes)


def test_each_layer_draws_numbers_of_its_own():
    state = residual.init_fsq(0, LEVELS, 3, hard_clamp=False, noise_dropout=0.5)
    x, key = drawn(20, 4), random.key(2)
    left, parts = x, []
    for i, layer in enumerate(state.layers):
        parts.append(fsq.apply(layer, left, random.fold(key, i)).x)
        left = left - parts[-1]
    assert_close(residual.apply(state, x, key).x, sum(parts))


@pytest.mark.parametrize("name", STATES)
def test_rows_that_do_not_count_are_nowhere(name):
    state = STATES[name](dim=6)
    x, mask = drawn(5, 8, 6), torch.arange(40).reshape(5, 8) % 3 > 0
    x[1, 3, 2], x[2, 0] = math.nan, math.inf
    keep = mask & x.isfinite().all(-1)
    got, wanted = residual.apply(state, x, mask=mask), residual.apply(state, x[keep])
    assert_close((got.x[keep], got.codes[keep]), (wanted.x, wanted.codes))
    assert got.x[~keep].eq(0).all() and got.codes[~keep].eq(-1).all()
    assert torch.equal(residual.decode(state, got.codes), got.x)
    assert [int(n) for n in tree.leaves(got.stats)] == [int(keep.sum()), int((~mask).sum()), int((mask & ~keep).sum())]
    for loss in got.losses:
        assert_close(mean(got.losses[loss]), mean(wanted.losses[loss]))


ONE, TWO = fsq.init(0, LEVELS, symmetric=True), lfq.init(0, 5)
WRONG = {
    "no layers": (dict(layers=[]), ValueError, "there are no layers"),
    "another kind": (dict(layers=[ONE, projection_layers]), TypeError, "layers.1 is a module; wanted one of FSQ, LFQ"),
    "sizes": (
        dict(layers=[ONE, TWO]),
        ValueError,
        "layers.1 has dim 5, 1 codebooks, .* wanted the dim of the first, 4",
    ),
    "codebooks": (dict(layers=[replace(ONE, num_codebooks=2)]), ValueError, "layers.0 has dim 4, 2 codebooks"),
    "projected": (dict(layers=[fsq.init(0, LEVELS, 6)]), ValueError, "layers.0 has .* projections True; .* takes dim"),
    "cutoff": (dict(dropout=True, cutoff=1), ValueError, "cutoff is 1, multiple 1; wanted a cutoff in .0, 1. and"),
    "multiple": (dict(dropout=True, multiple=0), ValueError, "cutoff is 0, multiple 0; .* a multiple of at least 1"),
    "no dropout": (dict(multiple=2), ValueError, "cutoff and multiple are options of dropout; use dropout=True"),
    "clamp": (dict(clamp=(1.0, 2.0)), ValueError, r"clamp is \(1.0, 2.0\); wanted a positive number, or 4 of them"),
    "clamp, sign": (dict(clamp=-1.0), ValueError, "clamp is -1.0; wanted a positive number"),
    "a bias of nothing": (dict(bias=False), ValueError, "options of a projection, but dim is that of the scalars, 4"),
}


@pytest.mark.parametrize("options, error, message", WRONG.values(), ids=WRONG)
def test_contradictions_are_refused(options, error, message):
    with pytest.raises(error, match="residual.init: .*" + message):
        residual.init(0, **{"layers": [ONE], **options})


def test_contradictions_of_constructors_are_refused():
    with pytest.raises(ValueError, match="residual.init_fsq: clamp beside hard_clamp, .* use hard_clamp=False"):
        residual.init_fsq(0, LEVELS, 3, clamp=1.0)
    with pytest.raises(ValueError, match=r"fsq.init: levels are \(5, 1\); wanted one number a scalar, each from 2 to"):
        residual.init_fsq(0, (5, 1), 3)
    with pytest.raises(ValueError, match=r"residual.decode: codes are \(3, 5\); wanted 1 to 4 in the last dim"):
        residual.decode(STATES["fsq"](), torch.zeros(3, 5, dtype=torch.int64))
    with pytest.raises(IndexError, match=r"lfq.decode: the code at \(2,\) is 32; wanted one in \[0, 32\)"):
        residual.decode(STATES["lfq"](), torch.tensor([[0, 1], [2, 3], [32, 1]]))
