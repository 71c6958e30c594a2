"""Residuals of books: equality with vector-quantize-pytorch from the same state; sharing, dropout and masks."""

import math
import random as python_random
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.func import grad

from fquant import random, tree, vq
from fquant.io import safetensors
from fquant.vq import mean
from fquant.vq.composite import residual
from tests.helpers.vq.peers import assert_close, drawn, ours, theirs
from tests.helpers.vq.residual_books import STE, STRAIGHT, B, D, K, L, N, make, pair, same_state

with warnings.catch_warnings(action="ignore"):
    import vector_quantize_pytorch as peer
CASES = {  # options of the state, further ones of the peer, options of our apply
    "rotation": ({}, {}, {}),
    "straight-through": ({}, STE, STRAIGHT),
    "no gradient": ({}, STE | {"route_gradients_to_input": False}, {"gradient": vq.direct}),
    "cosine": ({"metric": "cosine"}, STE, STRAIGHT),
    "sizes": ({"num_codes": (12, 5, 7)}, {}, {}),
    "projected": ({"dim": 9}, {}, {}),
    "a part of the gradient": ({}, {"quant_grad_frac": 0.3}, {"grad_frac": 0.3}),
    "all of the gradient, learnable": (
        {"learnable": True},
        STE | {"quant_grad_frac": 1.0, "route_gradients_to_input": False},
        {"gradient": vq.direct, "grad_frac": 1.0},
    ),
    "learnable": ({"learnable": True}, {}, {}),
    "learnable, projected": ({"learnable": True, "dim": 5}, STE, STRAIGHT),
    "shared": ({"shared": True}, {}, {}),
    "cross entropy": ({}, {"commitment_use_cross_entropy_loss": True}, {"losses": ("cross_entropy",)}),
    "two losses": (
        {},
        {"codebook_diversity_loss_weight": 1.0, "codebook_diversity_temperature": 100.0},
        {"losses": ("commitment", "diversity")},
    ),
}


@pytest.mark.parametrize("of, named, asked", CASES.values(), ids=CASES)
def test_a_step_is_the_peers(of, named, asked):
    state, them = pair(named=named, **of)
    x, weight = drawn(B, N, state.dim), drawn(B, N, state.dim, seed=3)
    them_now = partial(them, freeze_codebook=not of.get("learnable"))  # averages overwrite what autograd saved
    x_peer, codes, losses = them_now(x.clone().requires_grad_())
    got = residual.apply(state, x, **asked)
    assert torch.equal(got.codes, codes) and torch.equal(residual.encode(state, x), codes)
    assert_close((got.x, residual.decode(state, got.codes)), (x_peer.detach(), x_peer.detach()))
    assert_close(sum(mean(loss) for loss in got.losses.values()), losses.detach())
    assert_close(residual.decode_layers(state, codes).unbind(-2), them.get_codes_from_indices(codes).detach().unbind())

    def of_peer(_, x):
        out, _, losses = them_now(x)
        return (out * weight).sum() + losses.sum()

    def of_ours(state, x):
        got = residual.apply(state, x, **asked)
        return (got.x * weight).sum() + sum(mean(loss).sum() for loss in got.losses.values())

    assert_close(ours(state, of_ours, x), theirs(them, of_peer, x))
    slopes = grad(lambda state: of_ours(state, x))(state)
    for book, layer in zip(slopes.layers, them.layers, strict=False):
        if of.get("learnable"):
            assert_close(book.codes, layer._codebook.embed.grad[0])
        else:
            assert not book.codes.any()
    if not of.get("learnable") and not of.get("shared"):
        them(x)
        same_state(residual.update(state, got.stats), them)


@pytest.mark.parametrize("options", [{}, {"metric": "cosine"}, {"num_codes": (9, 4), "dim": 8}], ids=str)
def test_ten_steps_are_the_peers(options):
    state, them = pair(named=STE | {"decay": 0.7}, **options)
    for i in range(10):
        x = drawn(B, N, state.dim, seed=i)
        out, codes, losses = them(x)
        got = residual.apply(state, x)
        assert torch.equal(got.codes, codes), i
        assert_close((got.x, mean(got.losses["commitment"])), (out.detach(), losses.detach()))
        state = residual.update(state, got.stats, decay=0.7)
        same_state(state, them)
    assert all(vq.perplexity(stats.counts) > 2 for stats in got.stats)


def test_a_shared_book_learns_from_all_layers_as_from_one_batch():
    state, them = pair(shared=True)
    book, x = state.layers[0], drawn(B, N, D)
    got = residual.apply(state, x)
    left = x[..., None, :] - residual.decode_layers(state, got.codes).cumsum(-2)
    left = torch.cat([x[..., None, :], left[..., :-1, :]], -2)  # [b n layers d]
    with warnings.catch_warnings(action="ignore"):
        one: Any = peer.VectorQuantize(D, K)
    one._codebook.embed.data.copy_(book.codes[None])
    one._codebook.embed_avg.data.copy_(book.codes[None])
    one.train().update_indices(left.flatten(1, 2), got.codes.flatten(1, 2))
    after = residual.update(state, got.stats)
    assert len(got.stats) == len(after.layers) == 1 and got.stats[0].counts.sum() == B * N * L
    assert_close(
        (after.layers[0].codes, after.layers[0].counts), (one._codebook.embed[0], one._codebook.cluster_size[0])
    )
    them(x)  # its averages move once a layer, as ours do with one ``move`` a layer
    for i in range(L):
        book = vq.move(book, vq.stats(book, left[..., i, :], got.codes[..., i]))
    assert_close(vq.refresh(book).codes, them.layers[0]._codebook.embed[0])


@pytest.mark.parametrize("shared", [False, True])
def test_dead_codes_start_at_what_layers_are_given(shared):
    state = make(shared=shared)
    state = replace(state, layers=[replace(book, counts=torch.zeros(K)) for book in state.layers])
    x, key = drawn(50, D), random.key(4)
    got = residual.apply(state, x, key, draw=True)
    left = [x]
    for q in residual.decode_layers(state, got.codes).unbind(-2):
        left.append(left[-1] - q)
    after = residual.update(replace(state), got.stats, threshold=30.0)
    for i, book in enumerate(after.layers):
        among = torch.cat(left[:L]) if shared else left[i]
        found = torch.cdist(book.codes[book.counts == 30].double(), among.double()).min(1)
        assert found.values.max() < 1e-4 and len(set(found.indices.tolist())) == len(found.indices) > 5
        assert not shared or len(set((found.indices // 50).tolist())) > 1


@pytest.mark.parametrize("cutoff, multiple", [(0, 1), (2, 1), (1, 2)])
def test_dropout_is_the_peers(cutoff, multiple):
    named = {"quantize_dropout_cutoff_index": cutoff, "quantize_dropout_multiple_of": multiple}
    state, them = pair(named=STE | named, dropout=True, cutoff=cutoff, multiple=multiple)
    x = drawn(B, N, D)
    for seed in range(6):
        last = python_random.Random(seed).randrange(cutoff, L)
        depth = -(-(last + 1) // multiple) * multiple
        out, codes, losses = them(x, rand_quantize_dropout_fixed_seed=seed)
        got = residual.apply(state, x, depth=torch.tensor(depth))
        assert torch.equal(got.codes, codes) and (codes[..., depth:] == -1).all()
        assert_close((got.x, mean(got.losses["commitment"])), (out.detach(), losses.detach()))
        state = residual.update(state, got.stats)
        same_state(state, them)  # omitted layers do not move, so their codes do not expire
    seen = {int(residual.draw_depth(state, random.key(i))) for i in range(40)}
    assert seen == {-(-d // multiple) * multiple for d in range(cutoff + 1, L + 1)}


def test_depths_of_examples_and_drawn_ones():
    state = make(dropout=True)
    x, depth = drawn(B, N, D), torch.tensor([1, 3, 4])
    got = residual.apply(state, x, random.key(0), depth=depth)
    for i in range(B):
        one = residual.apply(replace(state, layers=state.layers[: depth[i]], dropout=False), x[i])
        assert torch.equal(got.x[i], one.x) and torch.equal(got.codes[i, :, : depth[i]], one.codes)
        assert (got.codes[i, :, depth[i] :] == -1).all()
    assert [float(s.counts.sum()) for s in got.stats] == [3 * N, 2 * N, 2 * N, N]
    assert [float(s.lost) for s in got.stats] == [0, N, N, 2 * N]
    key = random.key(9)
    by_key = residual.apply(state, x, key)
    assert torch.equal(by_key.codes, residual.apply(state, x, depth=residual.draw_depth(state, key)).codes)
    assert (residual.apply(state, x).codes >= 0).all()


@pytest.mark.parametrize("lengths", [(20, 20, 20), (20, 7, 1), (3, 0, 11)])
@pytest.mark.parametrize("options", [{}, {"dim": 9}], ids=str)
def test_masked_rows_are_the_peers(options, lengths):
    state, them = pair(named=STE, **options)
    x, mask = drawn(B, N, state.dim), vq.mask(torch.tensor(lengths), N)
    out, codes, losses = them(x, mask=mask)
    got = residual.apply(state, x, mask=mask)
    assert torch.equal(got.codes, codes) and not got.x[~mask].any()
    assert_close((got.x, mean(got.losses["commitment"])), (out.detach(), losses.detach()))
    same_state(residual.update(state, got.stats), them)


@pytest.mark.parametrize("shared", [False, True])
def test_rows_that_do_not_count_are_nowhere(shared):
    state = make(dim=8, shared=shared)
    x, mask, key = drawn(B, N, 8), torch.arange(B * N).reshape(B, N) % 3 > 0, random.key(2)
    clean = residual.apply(state, x[mask], key, draw=True)
    x[~mask] = math.nan
    got = residual.apply(state, x, key, mask, draw=True)
    assert_close((got.x[mask], got.codes[mask]), (clean.x, clean.codes))
    assert_close(got.stats, clean.stats)
    assert got.x[~mask].eq(0).all() and got.codes[~mask].eq(-1).all()
    x[1, 5] = math.inf
    bad = residual.apply(state, x, key, mask, draw=True)
    assert sum(s.lost for s in bad.stats) == L and bad.stats[0].kept == got.stats[0].kept
    slope = grad(lambda x: residual.apply(state, x, mask=mask).x.sum())(x)
    assert slope.isfinite().all() and not slope[~mask].any() and not slope[1, 5].any()


def test_one_direction_for_all_layers():
    """DiVeQ: one noisy direction leads from the input to the sum, and codes get the gradients of the sum."""
    state = make(learnable=True)
    x, key = drawn(B, N, D), random.key(5)
    quiet = {"gradient": vq.direct, "grad_frac": 1.0, "losses": (), "outer": partial(vq.directional, variance=0.0)}
    got = residual.apply(state, x, **quiet)
    assert_close(got.x, residual.decode(state, got.codes))
    slope = grad(lambda s: (residual.apply(s, x, **quiet).x - x).square().sum())(state)
    wanted = grad(lambda s: (residual.decode(s, got.codes) - x).square().sum())(state)
    for one, other in zip(slope.layers, wanted.layers, strict=True):
        assert one.codes.abs().max() > 0.1
        assert_close(one.codes, other.codes, 1e-4)
    noisy = residual.apply(state, x, key, **{**quiet, "outer": vq.directional})
    far = (noisy.x - got.x).norm() / (got.x - x).norm()
    assert 0.02 < far < 0.4 and not torch.equal(
        noisy.x, residual.apply(state, x, random.key(6), **{**quiet, "outer": vq.directional}).x
    )
    mask = torch.arange(B * N).reshape(B, N) > 20
    part = residual.apply(state, x, key, mask, **{**quiet, "outer": vq.directional})
    cut = residual.apply(state, x[mask], key, **{**quiet, "outer": vq.directional})
    assert_close(part.x[mask], cut.x)


@pytest.mark.parametrize("shared", [False, True])
def test_codes_that_are_given_are_what_layers_are_to_find(shared):
    state = make(shared=shared, dim=8)
    x, mask = drawn(B, N, 8), torch.arange(B * N).reshape(B, N) % 4 > 0
    codes = torch.randint(-1, K, (B, N, L), generator=torch.Generator().manual_seed(1))
    got = residual.cross_entropy(state, torch.where(mask[..., None], x, math.nan), codes, mask)
    left = residual.project_in("", state, x, None)[0].double()
    for i, layer in enumerate(residual.layers_of(state)):
        far = (left[..., None, :] - layer.codes.double()).norm(dim=-1)
        live = mask & (codes[..., i] >= 0)
        wanted = -(-far).log_softmax(-1).gather(-1, codes[..., i : i + 1].clamp(min=0))[..., 0][live]
        assert_close(mean(got)[i], wanted.mean().float())
        left = left - vq.decode(layer, codes[..., i])
    own = residual.encode(state, x)
    apart = residual.apply(state, x, losses=("cross_entropy",)).losses["cross_entropy"]
    assert_close(residual.cross_entropy(state, x, own), apart)


def test_more_layers_are_nearer_and_bf16_stays_outside():
    state = make(num_codes=64, dropout=True)
    x = drawn(400, D)
    for _ in range(8):
        state = residual.update(state, residual.apply(state, x).stats)
    codes = residual.encode(state, x)
    errors = [(residual.decode(state, codes[:, : i + 1]) - x).square().mean() for i in range(L)]
    assert all(b < 0.8 * a for a, b in zip(errors, errors[1:], strict=False))
    low = residual.apply(state, x.bfloat16())
    assert low.x.dtype is torch.bfloat16 and all(t.dtype is torch.float32 for t in tree.leaves(low.stats))


def test_round_trip_through_a_file(tmp_path):
    for state in (make(dim=9), make(shared=True, learnable=True), make(num_codes=(3, 9))):
        got = residual.apply(state, drawn(9, state.dim), random.key(1), draw=True)
        safetensors.save(tmp_path / "a", {"state": state, "stats": got.stats})
        back = safetensors.load(tmp_path / "a")
        after = [residual.update(s, t, threshold=1.0) for s, t in ((state, got.stats), (back["state"], back["stats"]))]
        assert tree.structure(after[0]) == tree.structure(after[1])
        assert all(torch.equal(p, q) for p, q in zip(*map(tree.leaves, after), strict=True))


STATE = make()
STATS = residual.apply(STATE, drawn(5, D)).stats
BOOK = vq.init(0, 4, 3)
WRONG = {
    "heads": (lambda: residual.init(0, [vq.init(0, 4, 3, heads=2)]), ValueError, "layers.0 has dim 3, 2 codebooks"),
    "dims": (lambda: residual.init(0, [BOOK, vq.init(0, 4, 2)]), ValueError, "layers.1 has dim 2, .* the first, 3"),
    "kinds": (
        lambda: residual.init(0, [vq.init(0, 4, 4), vq.fsq.init(0, (8, 5, 5, 3))]),
        TypeError,
        "layers.1 is a FSQ beside a Book; wanted all to learn from statistics, or none",
    ),
    "module": (lambda: residual.init(0, [BOOK, torch]), TypeError, "layers.1 is a module; wanted one of .*Book"),
    "shared two": (lambda: residual.init(0, [BOOK, BOOK], shared=2), ValueError, "shared is 2 with 2 layers"),
    "shared sizes": (
        lambda: residual.init_books(0, (4, 5), 3, shared=True),
        ValueError,
        r"num_codes is \(4, 5\) of a shared book; wanted one number",
    ),
    "no number": (lambda: residual.init_books(0, 4, 3), ValueError, "num_codes is 4 and num_layers None; wanted a"),
    "two numbers": (lambda: residual.init_books(0, (4, 5), 3, 3), ValueError, r"is \(4, 5\) and num_layers 3"),
    "grad_frac": (lambda: residual.apply(STATE, drawn(2, D), grad_frac=2.0), ValueError, "grad_frac is 2.0; wanted"),
    "stats": (lambda: residual.update(STATE, STATS[:2]), ValueError, "got stats of 2 layers; wanted 4"),
    "stats of a layer": (
        lambda: residual.update(STATE, [*STATS[:3], vq.stats(BOOK, drawn(2, 3), torch.zeros(2).long())]),
        ValueError,
        r"layers.3: stats: got sums \(4, 3\); wanted \(12, 6\)",
    ),
    "another kind of stats": (
        lambda: residual.update(residual.init_lfq(0, 3, 2), STATS),
        TypeError,
        r"residual.update: got list and options \[\] for layers of LFQ",
    ),
    "options of nothing": (
        lambda: residual.update(s := residual.init_lfq(0, 3, 2), residual.apply(s, drawn(2, 3)).stats, decay=0.5),
        TypeError,
        r"got RowCounts and options \['decay'\] for layers of LFQ",
    ),
    "given": (
        lambda: residual.cross_entropy(STATE, drawn(2, D), torch.zeros(2, 3).long()),
        ValueError,
        r"codes are \(2, 3\); wanted 4 for each row",
    ),
    "codes of two layers": (
        lambda: residual.apply(STATE, drawn(2, D), codes=torch.zeros(2, 2).long()),
        ValueError,
        r"codes are \(2, 2\); wanted 4 for each row of \(2, 6\)",
    ),
    "codes of scalars": (
        lambda: residual.apply(residual.init_lfq(0, 3, 2), drawn(2, 3), codes=torch.zeros(2, 2).long()),
        TypeError,
        "got codes for layers of LFQ; wanted Book",
    ),
    "depth": (lambda: residual.apply(STATE, drawn(2, D), depth=torch.ones(3).long()), ValueError, r"int64 \(3,\)"),
    "key": (lambda: residual.apply(STATE, drawn(2, D), torch.zeros(2).long()), ValueError, r"key is \(2,\) for"),
    "given to scalars": (
        lambda: residual.cross_entropy(residual.init_lfq(0, 3, 2), drawn(2, 3), torch.zeros(2, 2).long()),
        TypeError,
        "layers.0 is a LFQ; wanted a Book",
    ),
    "last dim": (lambda: residual.apply(STATE, drawn(2, 5)), ValueError, r"residual.apply: x is \(2, 5\); wanted 6"),
}  # fmt: skip


@pytest.mark.parametrize("f, error, message", WRONG.values(), ids=WRONG)
def test_contradictions_are_refused(f, error, message):
    with pytest.raises(error, match=message):
        f()
