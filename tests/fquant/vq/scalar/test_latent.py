"""Latent quantisation: equality with vector-quantize-pytorch where that is right, and the paper's losses."""

import math
from dataclasses import replace

import pytest
import torch
from torch.func import grad
from vector_quantize_pytorch import LatentQuantize

from fquant import tree
from fquant.vq import mean
from fquant.vq.scalar import latent
from tests.helpers.vq.latent import LEVELS, both
from tests.helpers.vq.peers import assert_close, drawn, theirs

CASES = {
    "plain": {},
    "codebooks": {"num_codebooks": 3},
    "projected": {"dim": 7},
    "projected to codebooks": {"dim": 7, "num_codebooks": 2},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_is_the_peers(options):
    """The peer puts the last dim second, and takes the losses behind the second projection."""
    peer, state = both(options)
    x, weight = drawn(3, 40, state.dim, size=0.4), drawn(3, 40, state.dim, seed=3)
    assert_close(state.params.values, [v.detach() for v in peer.values_per_latent])
    x_peer, codes, loss = peer(x.mT)
    got = latent.apply(state, x)
    assert torch.equal(got.codes, codes.long()) and torch.equal(latent.encode(state, x), got.codes)
    assert_close(
        (got.x, latent.decode(state, got.codes)), (x_peer.mT.detach(), peer.indices_to_codes(codes).mT.detach())
    )
    if state.params.projections is None:
        assert_close(0.1 * mean(got.losses["commitment"]) + 0.1 * mean(got.losses["quantisation"]), loss.detach())
    of_x, of_ends = theirs(peer, lambda p, x: (p(x.mT)[0].mT * weight).sum(), x)
    slope = grad(lambda x, p: (latent.apply(replace(state, params=p), x).x * weight).sum(), (0, 1))(x, state.params)
    assert_close((slope[0], slope[1].projections), (of_x, of_ends))
    assert all(v.eq(0).all() for v in slope[1].values)


def test_losses_train_what_they_are_for():
    """Each loss moves its own side. The peer's two losses are of the output: they cancel, and values never move."""
    _, state = both({})
    x = drawn(50, 4, size=0.4)
    q = latent.decode(state, latent.encode(state, x))
    count = x.numel()

    def loss(name, x, values):
        params = replace(state.params, values=values)
        return mean(latent.apply(replace(state, params=params), x).losses[name])

    of_x, of_values = grad(loss, (1, 2))("commitment", x, state.params.values)
    assert_close(of_x, 2 * (x - q) / count)
    assert all(v.eq(0).all() for v in of_values)
    of_x, of_values = grad(loss, (1, 2))("quantisation", x, state.params.values)
    assert of_x.eq(0).all()
    for i, (values, slope) in enumerate(zip(state.params.values, of_values, strict=True)):
        wanted = [2 * (q[:, i] - x[:, i])[q[:, i] == v].sum() / count for v in values]
        assert_close(slope, torch.stack(wanted))
    peer = LatentQuantize(levels=list(LEVELS), dim=4)
    there = x[None].mT.clone().requires_grad_()
    peer(there)[2].backward()
    assert there.grad is not None and there.grad.abs().max() < 1e-9
    assert all(v.grad is None for v in peer.values_per_latent)


def test_codes_and_decode_are_those_of_the_values_as_they_are():
    """Codes follow learned values. The peer maps codes and values as if none had been learned."""
    state = latent.init(0, (3, 7))
    values = [torch.tensor([0.9, -0.2, 0.1]), torch.linspace(-3, 3, 7)]
    state = replace(state, params=replace(state.params, values=values))
    x = torch.tensor([[0.0, -2.9], [0.6, 0.4], [-5.0, 100.0]])
    codes = latent.encode(state, x)
    assert codes.tolist() == [2 + 3 * 0, 0 + 3 * 3, 1 + 3 * 6]
    assert_close(latent.decode(state, codes), torch.tensor([[0.1, -3.0], [0.9, 0.0], [-0.2, 3.0]]))
    assert torch.equal(latent.apply(state, x).x, latent.decode(state, codes))


@pytest.mark.parametrize("levels", [(15,), (5, 22), (24, 29)], ids=str)
def test_any_number_of_levels_has_its_codes(levels):
    """The peer truncates 8.9999999 to 8 for 15, 22, 24, 26, 27, 29 ... levels."""
    state, x = latent.init(0, levels), torch.rand(2000, len(levels), generator=torch.Generator().manual_seed(0)) - 0.5
    digits = [(x[:, i, None] - v).abs().argmin(-1) for i, v in enumerate(state.params.values)]
    wanted = sum(digit * math.prod(levels[:i]) for i, digit in enumerate(digits))
    assert torch.equal(latent.encode(state, x), wanted)
    assert not torch.equal(LatentQuantize(levels=list(levels), dim=len(levels))(x[None].mT)[1][0].long(), wanted)


def test_rows_that_do_not_count_are_nowhere():
    _, state = both({"dim": 7})
    state = tree.map_at(r"params\.values", lambda values: [v + 0.05 for v in values], state)  # so that none is zero
    x, mask = drawn(5, 8, 7), torch.arange(40).reshape(5, 8) % 3 > 0
    x[1, 3, 2], x[2, 0] = math.nan, math.inf
    keep = mask & x.isfinite().all(-1)

    def loss(params, x, mask=None):
        got = latent.apply(replace(state, params=params), x, mask=mask)
        return got.x.square().sum() + mean(got.losses["commitment"]) + mean(got.losses["quantisation"])

    got, wanted = latent.apply(state, x, mask=mask), latent.apply(state, x[keep])
    assert_close((got.x[keep], got.codes[keep]), (wanted.x, wanted.codes))
    assert got.x[~keep].eq(0).all() and got.codes[~keep].eq(-1).all()
    assert torch.equal(latent.decode(state, got.codes), got.x)
    for name in got.losses:
        assert_close(mean(got.losses[name]), mean(wanted.losses[name]))
    assert_close(grad(loss)(state.params, x, mask), grad(loss)(state.params, x[keep]))
    assert grad(loss, 1)(state.params, x, mask)[~keep].eq(0).all()
    assert [int(n) for n in tree.leaves(got.stats)] == [int(keep.sum()), int((~mask).sum()), int((mask & ~keep).sum())]


WRONG = {
    "one level": (dict(levels=(5, 1)), r"levels are \(5, 1\); .* from 2 to 65536"),
    "no codebooks": (dict(num_codebooks=0), "num_codebooks 0; wanted at least 1"),
    "a bias of nothing": (dict(bias=True), "options of a projection, but dim is that of the scalars, 4"),
}


@pytest.mark.parametrize("options, message", WRONG.values(), ids=WRONG)
def test_contradictions_are_refused(options, message):
    with pytest.raises(ValueError, match="latent.init: .*" + message):
        latent.init(0, **{"levels": LEVELS, **options})
