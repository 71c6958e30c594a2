"""SimVQ, residual SimVQ and grouped residuals against vector-quantize-pytorch from the same state."""

import random as python_random
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.func import grad

from fquant import cost, jit, random, tree, vq
from fquant.io import safetensors
from fquant.vq import mean
from fquant.vq.codebook import simvq
from fquant.vq.composite import grouped, residual
from fquant.vq.scalar import projection_layers
from tests.helpers.vq.peers import assert_close, drawn
from tests.helpers.vq.residual_books import STE
from tests.helpers.vq.simvq import D, K, pair

with warnings.catch_warnings(action="ignore"):
    import vector_quantize_pytorch as peer
MAPS = {"linear": {}, "narrow": {"frozen_dim": 4}, "hidden": {"hidden": (9, 7)}}
PATHS = {"rotation": ({}, vq.rotation), "straight-through": (STE, vq.straight_through)}


def slopes(them):
    linear = [layer for layer in them.code_transform if isinstance(layer, torch.nn.Linear)]
    return [projection_layers.Dense(one.weight.grad, None if one.bias is None else one.bias.grad) for one in linear]


@pytest.mark.parametrize("named, path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("options", MAPS.values(), ids=MAPS)
def test_it_is_the_peers(options, named, path):
    state, them = pair(named | {"input_to_quantize_commit_loss_weight": 0.3, "commitment_weight": 2.0}, **options)
    x, weight = 0.4 * drawn(3, 15, D), drawn(3, 15, D, seed=3)
    theirs = x.clone().requires_grad_()
    out, codes, loss = them(theirs)
    ((out * weight).sum() + loss).backward()

    def total(params, x):
        got = simvq.apply(replace(state, params=params), x, gradient=path)
        return (got.x * weight).sum() + 2 * (mean(got.losses["codebook"]) + 0.3 * mean(got.losses["commitment"])), got

    (by_params, by_x), got = grad(total, (0, 1), has_aux=True)(state.params, x)
    assert torch.equal(got.codes, codes) and torch.equal(simvq.encode(state, x), codes) and len(codes.unique()) > 4
    decoded = simvq.decode(state, codes)
    assert_close((got.x, decoded), (out.detach(), them.indices_to_codes(codes).detach()))
    assert torch.equal(got.x, decoded)
    assert_close(2 * (mean(got.losses["codebook"]) + 0.3 * mean(got.losses["commitment"])), loss.detach())
    assert_close(by_x, theirs.grad)
    assert_close(by_params, slopes(them))
    assert_close(simvq.code_vectors(state), them.codebook.detach())
    every = lambda s: simvq.apply(s, x).x.sum() + simvq.decode(s, codes).sum() + simvq.code_vectors(s).square().sum()
    assert not grad(every)(state).frozen.any()


def test_it_starts_as_theirs():
    state = simvq.init(0, 4000, 16)
    them: Any = peer.SimVQ(16, 4000)
    assert abs(state.frozen.std() / them.frozen_codebook.std() - 1) < 0.02 and abs(state.frozen.mean()) < 0.01
    assert state.params[0].bias is None and 0.99 / 4 < state.params[0].weight.abs().max() <= 1 / 4


def test_rows_that_do_not_count_are_nowhere():
    state = simvq.init(0, K, D, hidden=(5,))
    x, mask = drawn(5, 8, D), torch.arange(40).reshape(5, 8) % 3 > 0
    x[1, 5, 2], x[2, 1] = torch.nan, torch.inf
    keep = mask & x.isfinite().all(-1)
    got, wanted = simvq.apply(state, x, mask=mask), simvq.apply(state, x[keep])
    assert_close((got.x[keep], got.codes[keep], got.losses), (wanted.x, wanted.codes, wanted.losses))
    assert not got.x[~keep].any() and (got.codes[~keep] == -1).all() and not simvq.decode(state, got.codes)[~keep].any()
    assert [int(n) for n in tree.leaves(got.stats)] == [int(keep.sum()), int((~mask).sum()), 2]
    slope = grad(lambda x: simvq.apply(state, x, mask=mask).x.sum())(x)
    assert slope.isfinite().all() and not slope[~keep].any()
    assert simvq.update(state, got.stats) is state


@pytest.mark.parametrize("seed", [None, 0, 3])
def test_residuals_are_the_peers(seed):
    state = residual.init_simvq(1, K, D, 4, dropout=seed is not None)
    them: Any = peer.ResidualSimVQ(dim=D, num_quantizers=4, codebook_size=K, quantize_dropout=seed is not None)
    for mine, yours in zip(state.layers, them.layers, strict=True):
        yours.frozen_codebook = mine.frozen.clone()
        yours.code_transform.weight.data.copy_(mine.params[0].weight)
    depth = None if seed is None else torch.tensor(python_random.Random(seed).randrange(0, 4) + 1)
    x, weight = 0.4 * drawn(3, 15, D), drawn(3, 15, D, seed=3)
    theirs = x.clone().requires_grad_()
    out, codes, losses = them(theirs, rand_quantize_dropout_fixed_seed=seed)
    ((out * weight).sum() + losses.sum()).backward()

    def total(layers, x):
        got = residual.apply(replace(state, layers=layers), x, depth=depth)
        loss = mean(got.losses["codebook"]) + 0.25 * mean(got.losses["commitment"])
        return (got.x * weight).sum() + loss.sum(), (got, loss)

    (by_layers, by_x), (got, loss) = grad(total, (0, 1), has_aux=True)(state.layers, x)
    assert torch.equal(got.codes, codes)
    assert_close((got.x, loss, by_x), (out.detach(), losses.detach(), theirs.grad))
    assert_close(residual.decode(state, codes), them.get_output_from_indices(codes).detach())
    for mine, yours in zip(by_layers, them.layers, strict=True):
        wanted = yours.code_transform.weight.grad
        assert_close(mine.params[0].weight, torch.zeros(D, D) if wanted is None else wanted)
    assert residual.update(state, got.stats) is state


def test_a_large_codebook_is_never_beside_all_rows():
    state, x = simvq.init(0, 30000, 8), drawn(3000, 8)

    def step(state, x):
        return grad(lambda p: mean(simvq.apply(replace(state, params=p), x).losses["codebook"]))(state.params)

    assert_close(jit(step)(state, x), step(state, x), 0.0)
    assert cost(step, state, x).peak < 4 * 30000 * 3000 / 20  # a twentieth of the bytes of all distances


# --- grouped


def groups(**options):
    made = [lambda key, i=i: scattered(residual.init_books(key, 9, 4, 3, **options), i) for i in range(2)]
    return grouped.init(0, made)


def scattered(state, seed):
    return tree.map(lambda t: t + 0.5 * drawn(*t.shape, seed=seed) * (t.ndim > 1), state)


@pytest.mark.parametrize("train", [False, True])
def test_groups_are_the_peers(train):
    state = groups()
    with warnings.catch_warnings(action="ignore"):
        them: Any = peer.GroupedResidualVQ(dim=8, groups=2, num_quantizers=3, codebook_size=9, **STE).train(train)
    for mine, yours in zip(state.groups, them.rvqs, strict=True):
        for book, layer in zip(mine.layers, yours.layers, strict=True):
            layer._codebook.embed.data.copy_(book.codes[None])
            layer._codebook.embed_avg.data.copy_(book.sums[None])
    x = drawn(3, 15, 8)
    out, codes, losses = them(x)
    got = grouped.apply(state, x, gradient=vq.straight_through)
    assert torch.equal(got.codes.movedim(-2, 0), codes) and torch.equal(grouped.encode(state, x), got.codes)
    assert_close((got.x, grouped.decode(state, got.codes)), (out.detach(), out.detach()))
    if train:
        assert_close(mean(got.losses["commitment"]), losses.detach())
        after = grouped.update(state, got.stats)
        for mine, yours in zip(after.groups, them.rvqs, strict=True):
            for book, layer in zip(mine.layers, yours.layers, strict=True):
                assert_close(book.codes, layer._codebook.embed[0])
    else:
        assert_close(grouped.decode(state, got.codes), them.get_output_from_indices(codes))


def test_groups_are_dropped_together_and_drawn_apart():
    state, x, seen = groups(dropout=True), drawn(40, 8), set()
    for seed in range(12):
        key = random.key(seed)
        got = grouped.apply(state, x, key)
        depth = int(residual.draw_depth(state.groups[0], key))
        seen.add(depth)
        assert torch.equal((got.codes >= 0).sum(-1), torch.full((40, 2), depth))
        assert torch.equal(grouped.decode(state, got.codes), got.x)
    assert seen == {1, 2, 3}
    same = grouped.Grouped([state.groups[0]] * 2)
    twice = grouped.apply(same, torch.cat([x[:, :4]] * 2, -1), random.key(0), temperature=1.0, depth=torch.tensor(3))
    assert not torch.equal(twice.codes[:, 0], twice.codes[:, 1])
    given = grouped.apply(state, x, codes=twice.codes)
    assert torch.equal(given.codes, twice.codes)


def test_round_trip_through_a_file(tmp_path):
    for state, verbs in ((groups(), grouped), (simvq.init(0, K, 8, hidden=(3,)), simvq)):
        safetensors.save(tmp_path / "a", state)
        back = safetensors.load(tmp_path / "a")
        assert tree.structure(back) == tree.structure(state)
        x = drawn(9, 8)
        assert torch.equal(verbs.encode(back, x), verbs.encode(state, x))


SIM, PAIR, BOOKS = simvq.init(0, K, D), groups(), lambda key: residual.init_books(key, 4, 3, 2)
WRONG = {
    "codes": (lambda: simvq.init(0, 0, D), ValueError, r"num_codes is 0 and widths are \(6, 6\); wanted at least 1"),
    "hidden": (lambda: simvq.init(0, K, D, hidden=(0,)), ValueError, r"widths are \(6, 0, 6\)"),
    "last dim": (lambda: simvq.apply(SIM, drawn(2, 5)), ValueError, r"simvq.apply: x is \(2, 5\); wanted 6"),
    "last dim, encode": (lambda: simvq.encode(SIM, drawn(2, 5)), ValueError, r"x: got shape \(2, 5\) for a book of 6"),
    "given": (
        lambda: simvq.apply(SIM, drawn(2, D), codes=torch.zeros(3).long()), ValueError, r"codes are \(3,\) for x"
    ),
    "no groups": (lambda: grouped.init(0, []), ValueError, "there are no groups; wanted at least 1"),
    "a book": (
        lambda: grouped.init(0, [BOOKS, lambda key: vq.init(key, 3, 3)]), TypeError, "groups.1 is a Book; wanted a Re"
    ),
    "layers": (
        lambda: grouped.init(0, [BOOKS, lambda key: residual.init_books(key, 4, 3, 3)]), ValueError,
        r"groups.1 has \(layers, dropout, cutoff, multiple\) \(3, False, 0, 1\); wanted those of the first, \(2, False"
    ),
    "groups of x": (lambda: grouped.encode(PAIR, drawn(2, 7)), ValueError, r"x is \(2, 7\); wanted 8 .* \[4, 4\] of"),
    "groups of codes": (
        lambda: grouped.decode(PAIR, torch.zeros(3, 3).long()), ValueError, r"codes are \(3, 3\); wanted \[... 2 la"
    ),
    "stats": (lambda: grouped.update(PAIR, []), ValueError, "got stats of 0 groups; wanted 2"),
}  # fmt: skip


@pytest.mark.parametrize("f, error, message", WRONG.values(), ids=WRONG)
def test_contradictions_are_refused(f, error, message):
    with pytest.raises(error, match=message):
        f()
