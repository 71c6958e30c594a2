"""Beam search: exhaustive with enough candidates, else equal to the peer; implicit codebooks equal the peer's."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.func import grad

from fquant import random, tree, vq
from fquant.io import safetensors
from fquant.vq import mean
from fquant.vq.codebook import implicit
from fquant.vq.codebook import rows as rows_module
from fquant.vq.codebook.rows import unit
from fquant.vq.composite import beam, residual
from tests.helpers.vq.peers import assert_close, drawn
from tests.helpers.vq.qinco import D, qinco
from tests.helpers.vq.residual_books import STE, STRAIGHT, pair, same_state

STATES = {
    "books": lambda: residual.init_books(0, (4, 3, 5), D),
    "cosine": lambda: residual.init_books(0, (4, 3, 5), D, metric="cosine"),
    "shared": lambda: residual.init_books(0, 4, D, 3, shared=True),
    "projected": lambda: residual.init_books(0, (4, 3, 5), D, dim=7),
    "implicit": lambda: residual.init_implicit(0, (4, 3, 5), D, depth=2),
    "implicit, cosine": lambda: residual.init_implicit(0, (4, 3, 5), D, metric="cosine"),
    "simvq": lambda: residual.init_simvq(0, (4, 3, 5), D, hidden=(8,)),
}


def spread(name):
    """Return a state whose codes are as far from each other as rows are."""
    state = STATES[name]()
    if "cosine" in name:
        return state
    at = r"layers\.\d+(\.book)?\.codes" if name != "simvq" else r"layers\.\d+\.frozen"
    return tree.map_at(at, lambda codes: drawn(*codes.shape, seed=len(codes)), state)


@pytest.mark.parametrize("weights", [None, (0.0, 0.0, 1.0), (1.0, 0.5, 2.0)], ids=str)
@pytest.mark.parametrize("name", STATES)
def test_with_room_for_all_choices_it_is_exhaustive(name, weights):
    state = spread(name)
    x = drawn(12, state.dim)
    sizes = [residual.verbs_of(layer).table(layer)[0] for layer in residual.layers_of(state)]  # type: ignore[misc]
    start = residual.project_in("", state, x, None)[0]
    best = torch.full((12,), torch.inf)
    wanted = torch.zeros(12, 3, dtype=torch.int64)
    for choice in itertools.product(*map(range, sizes)):
        codes = torch.tensor(choice).expand(12, 3)
        each = residual.decode_layers(state, codes)
        left = start[:, None] - torch.cat([torch.zeros_like(each[:, :1]), each.cumsum(1)[:, :-1]], 1)
        left = unit(left) if "cosine" in name else left
        cost = (((left - each) ** 2).mean(-1) * torch.tensor(weights or (1.0, 1.0, 1.0))).sum(-1)
        wanted = torch.where((cost < best)[:, None], codes, wanted)
        best = torch.minimum(cost, best)
    found = beam.encode(state, x, 20, weights)
    if name == "shared" and weights is not None and not weights[0]:  # sums of a shared book's codes tie
        found, wanted = found.sort(-1).values, wanted.sort(-1).values
    assert torch.equal(found, wanted)
    assert torch.equal(beam.encode(state, x, 1, weights), residual.encode(state, x))


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("width", [2, 4])  # the peer fails for more than there are codes
@pytest.mark.parametrize("of", [{}, {"metric": "cosine"}, {"num_codes": (9, 12, 4)}, {"dim": 8}], ids=str)
def test_it_is_the_peers(of, width, train):
    weights = [1.0, 0.5, 2.0, 1.0][: len(of.get("num_codes", range(4)))]
    state, them = pair(named=STE | {"beam_size": width, "beam_score_quantizer_weights": weights}, **of)
    x, weight = drawn(3, 11, state.dim), drawn(3, 11, state.dim, seed=5)
    them.train(train)
    theirs = x.clone().requires_grad_()
    out, codes, losses = them(theirs)
    found = beam.encode(state, x, width, weights)
    assert torch.equal(found, codes)
    got = residual.apply(state, x, codes=found, **STRAIGHT)
    assert torch.equal(got.codes, codes)
    assert_close((got.x, mean(got.losses["commitment"])), (out.detach(), losses.detach()))
    if train:

        def loss(x):
            got = residual.apply(state, x, codes=found, **STRAIGHT)
            return (got.x * weight).sum() + mean(got.losses["commitment"]).sum()

        assert_close(grad(loss)(x), torch.autograd.grad((out * weight).sum() + losses.sum(), theirs)[0])
        after = residual.update(state, got.stats)
        same_state(replace(after, layers=after.layers[:1]), them)  # the only layer that learns in the peer
        left = residual.project_in("", state, x, None)[0]
        for book, new, q, some in zip(
            state.layers, after.layers, residual.decode_layers(state, codes).unbind(-2), codes.unbind(-1), strict=True
        ):
            assert_close(vq.ema(book, vq.stats(book, left, some)), new)
            left = left - q
    plain = residual.decode(state, residual.encode(state, x))
    if not of:
        assert (residual.decode(state, found) - x).square().mean() < (plain - x).square().mean()


@pytest.mark.parametrize("name", STATES)
def test_frozen_books_stay_and_are_searched_alike(name):
    """A state stays frozen without ``update``. Under a beam vector-quantize-pytorch moves frozen codes all the same."""
    state = spread(name)
    before, x = tree.map(torch.clone, state), drawn(40, state.dim)
    codes = beam.encode(state, x, 3)
    drawing = {} if name == "simvq" else {"draw": True}
    got = residual.apply(state, x, random.key(2), codes=codes, **drawing)
    after = residual.update(state, got.stats, **({} if name == "simvq" else {"threshold": 1.5}))
    assert_close(state, before, 0.0)
    assert torch.equal(got.codes, codes) and torch.equal(beam.encode(state, x, 3), codes)
    assert_close(got.x, residual.decode(before, codes))
    if name != "simvq":  # because only gradients move SimVQ
        assert not torch.equal(beam.encode(after, x, 3), codes)


def test_a_frozen_step_is_the_peers():
    state, them = pair(named=STE | {"beam_size": 3})
    x = drawn(3, 11, state.dim)
    out, codes, losses = them(x, freeze_codebook=True)
    found = beam.encode(state, x, 3)
    got = residual.apply(state, x, codes=found, **STRAIGHT)
    assert torch.equal(found, codes)
    assert_close((got.x, mean(got.losses["commitment"])), (out.detach(), losses.detach()))
    assert not torch.equal(them.layers[0]._codebook.embed[0], state.layers[0].codes)  # the peer moved it all the same


def test_rows_are_searched_some_at_a_time(monkeypatch):
    state, x = spread("implicit"), drawn(3, 40, D)
    x[1, 2, 3] = torch.nan
    whole = beam.encode(state, x, 6)
    assert (whole[1, 2] == -1).all() and (whole >= 0).sum() == 119 * 3
    monkeypatch.setattr(rows_module, "TILE", 4 * 4 * 36 * D * 7)
    assert torch.equal(whole, beam.encode(state, x, 6))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "named, asked", [(STE, STRAIGHT), ({}, {}), (STE | {"quant_grad_frac": 0.2}, STRAIGHT | {"grad_frac": 0.2})]
)
def test_implicit_codebooks_are_the_peers(named, asked, masked):
    state, them, taken = qinco(named)
    x, weight = drawn(2, 15, D, seed=8), drawn(2, 15, D, seed=3)
    mask = vq.mask(torch.tensor([15, 4]), 15) if masked else None
    theirs = x.clone().requires_grad_()
    out, codes, losses = them(theirs, mask=mask)
    ((out * weight).sum() + losses.sum()).backward()

    def loss(state, x):
        got = residual.apply(state, x, mask=mask, **asked)
        return (got.x * weight).sum() + mean(got.losses["commitment"]).sum(), got

    (by_state, by_x), got = grad(loss, (0, 1), has_aux=True)(state, x)
    assert torch.equal(got.codes, codes)
    assert_close((got.x, mean(got.losses["commitment"])), (out.detach(), losses.detach()))
    assert_close(by_x, theirs.grad)
    wanted = taken(lambda t: t.grad)
    for one, other in zip(by_state.layers, wanted, strict=True):
        assert_close(
            (one if isinstance(one, vq.Book) else one.book).codes,
            (other if isinstance(other, vq.Book) else other.book).codes,
        )
        if isinstance(one, implicit.Implicit):
            assert_close(one.net, other.net)
    if not masked:
        assert torch.equal(residual.encode(state, x), codes)
        assert_close(residual.decode(state, codes), them.get_output_from_indices(codes).detach())
        assert_close(residual.decode(state, codes[..., :2]), residual.decode_layers(state, codes)[..., :2, :].sum(-2))


def test_implicit_codebooks_start_dead_codes_again_and_travel_in_files(tmp_path):
    state = spread("implicit")
    x, key = drawn(40, D), random.key(3)
    got = residual.apply(state, x, key, draw=True)
    after = residual.update(state, got.stats, threshold=5.0)
    dead = residual.update(state, got.stats).layers[2].book.counts < 5
    assert dead.any() and ((after.layers[2].book.codes != state.layers[2].book.codes).any(-1) == dead).all()
    safetensors.save(tmp_path / "a", after)
    back = safetensors.load(tmp_path / "a")
    assert tree.structure(back) == tree.structure(after)
    assert torch.equal(residual.encode(back, x), residual.encode(after, x))


STATE = STATES["books"]()
WRONG = {
    "beam": (lambda: beam.encode(STATE, drawn(2, D), 0), ValueError, "beam is 0; wanted at least 1"),
    "weights": (lambda: beam.encode(STATE, drawn(2, D), 2, (1.0,)), ValueError, "1 weights for 3 layers; wanted one"),
    "scalars": (lambda: beam.encode(residual.init_lfq(0, 3, 2), drawn(2, 3), 2), TypeError, "layers.0 is a LFQ"),
    "last dim": (lambda: beam.encode(STATE, drawn(2, 4), 2), ValueError, r"beam.encode: x is \(2, 4\); wanted 5"),
    "depth": (lambda: implicit.init(0, 4, 3, depth=-1), ValueError, "depth is -1 and hidden 3; wanted at least 0"),
    "key": (
        lambda: residual.apply(STATES["implicit"](), drawn(2, D), draw=True), ValueError, "key is None with draw=True"
    ),
    "gumbel": (
        lambda: residual.apply(STATES["implicit"](), drawn(2, D), gradient=vq.gumbel), ValueError, "gumbel: got no book"
    ),
}  # fmt: skip


@pytest.mark.parametrize("f, error, message", WRONG.values(), ids=WRONG)
def test_contradictions_are_refused(f, error, message):
    with pytest.raises(error, match=message):
        f()
