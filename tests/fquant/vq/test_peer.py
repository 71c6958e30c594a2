"""The codebook beside vector-quantize-pytorch 1.32: from one state, equal outputs, codes, losses, gradients and state.

Cases in which that library is wrong have oracles in the other files.
"""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from einops import rearrange
from torch.func import grad

from fquant import random, tree, vq

with warnings.catch_warnings(action="ignore"):
    import vector_quantize_pytorch as peer
    from vector_quantize_pytorch.vector_quantize_pytorch import kmeans as peer_kmeans

B, N, D, K = 3, 20, 8, 24
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def rows(*shape, seed=0):
    return 0.5 * random.normal(random.fold(random.key(11), seed), shape)


def pair(dim=D, heads=None, metric="euclidean", learnable=False, affine=False, **options):
    """Return a book and a peer with its codes, which are spread like rows, so that many are in use."""
    book = vq.init(3, K, dim, heads=heads, metric=metric, learnable=learnable, affine=affine)
    if metric == "euclidean":
        codes = rows(*book.codes.shape, seed=77)
        book = replace(book, codes=codes, sums=codes.clone())
    options = {"heads": heads or 1, "separate_codebook_per_head": heads is not None, "codebook_dim": dim} | options
    with warnings.catch_warnings(action="ignore"):
        them: Any = peer.VectorQuantize(
            dim * options["heads"],
            K,
            use_cosine_sim=metric == "cosine",
            learnable_codebook=learnable,
            ema_update=not learnable,
            affine_param=affine,
            **options,
        )
    them._codebook.embed.data.copy_(book.codes if heads else book.codes[None])
    them._codebook.embed_avg.data.copy_(them._codebook.embed.data)
    return book, them.train()


def split(x, heads):
    return x if heads is None else rearrange(x, "... (h d) -> ... h d", h=heads)


def weighed(x):
    """Return a scalar with a different gradient for every number of x."""
    return (x * torch.linspace(-1, 2, x.numel()).reshape(x.shape)).sum()


def state(book):
    front = (lambda t: t) if book.codes.ndim == 3 else (lambda t: t[None])
    return {"embed": front(book.codes), "cluster_size": front(book.counts), "embed_avg": front(book.sums)}


def same_state(book, them):
    for name, ours in state(book).items():
        torch.testing.assert_close(
            ours, getattr(them._codebook, name).detach(), **CLOSE, msg=lambda m, n=name: f"{n}: {m}"
        )


STE, DIRECT = {"rotation_trick": False}, {"rotation_trick": False, "route_gradients_to_input": False}
CASES = {  # options of both, of the peer alone, and of our apply
    "rotation": ({}, {}, {}),
    "straight-through": ({}, STE, {"gradient": vq.straight_through}),
    "no gradient": ({}, DIRECT, {"gradient": vq.direct}),
    "cosine": ({"metric": "cosine"}, {}, {}),
    "cosine, straight-through": ({"metric": "cosine"}, STE, {"gradient": vq.straight_through}),
    "heads": ({"heads": 2}, {}, {}),
    "heads, cosine": ({"heads": 3, "metric": "cosine"}, STE, {"gradient": vq.straight_through}),
    "learnable": ({"learnable": True}, {}, {}),
    "learnable, straight-through": ({"learnable": True}, STE, {"gradient": vq.straight_through}),
    "learnable heads": ({"heads": 2, "learnable": True}, {}, {}),
    "directional": (
        {"learnable": True},
        {"directional_reparam": True, "directional_reparam_variance": 0.0, "threshold_ema_dead_code": 1e-9},
        {"gradient": partial(vq.directional, variance=0.0), "losses": ()},
    ),
    "gumbel": (
        {},
        DIRECT | {"straight_through": True, "sample_codebook_temp": 0.3},
        {"gradient": partial(vq.gumbel, temperature=0.3)},
    ),
    "gumbel, cosine": (
        {"metric": "cosine"},
        DIRECT | {"straight_through": True, "sample_codebook_temp": 0.3},
        {"gradient": partial(vq.gumbel, temperature=0.3)},
    ),
    "cross entropy": ({}, {"commitment_use_cross_entropy_loss": True}, {"losses": ("cross_entropy",)}),
    "cross entropy, cosine": (
        {"metric": "cosine"},
        {"commitment_use_cross_entropy_loss": True},
        {"losses": ("cross_entropy",)},
    ),
    "cross entropy, heads": (
        {"heads": 2},
        {"commitment_use_cross_entropy_loss": True},
        {"losses": ("cross_entropy",)},
    ),
    "diversity": (
        {},
        {"codebook_diversity_loss_weight": 1.0, "codebook_diversity_temperature": 100.0},
        {"losses": ("commitment", "diversity")},
    ),
    "diversity, heads": (
        {"heads": 2},
        {"codebook_diversity_loss_weight": 1.0},
        {"losses": ("commitment", "diversity")},
    ),
    "orthogonal": (
        {"learnable": True},
        {"orthogonal_reg_weight": 1.0},
        {"losses": ("commitment", "orthogonal")},
    ),
    "orthogonal, heads": (
        {"learnable": True, "heads": 2},
        {"orthogonal_reg_weight": 1.0},
        {"losses": ("commitment", "orthogonal")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_step(name):
    """Compare one step: output, codes, loss, gradients of rows and codes, and the state after it."""
    options, peer_options, apply_options = CASES[name]
    book, them = pair(**options, **peer_options)
    heads = options.get("heads")
    x = rows(B, N, D * (heads or 1))
    theirs = x.clone().requires_grad_()
    # Frozen first: the peer writes its average over tensors that autograd saved, which changes its gradients.
    wanted, codes, loss = them(theirs, freeze_codebook=not options.get("learnable"))
    parameter = [them._codebook.embed] if options.get("learnable") else []
    grads = torch.autograd.grad(weighed(wanted) + loss, [theirs, *parameter], allow_unused=True)

    def ours(x, book):
        out = vq.apply(book, split(x, heads), **apply_options)
        loss = sum((vq.mean(one) for one in out.losses.values()), torch.zeros(()))
        return weighed(out.x.flatten(2)) + loss, (out, loss)

    (dx, dbook), (out, total) = grad(ours, (0, 1), has_aux=True)(x, book)
    torch.testing.assert_close(out.x.flatten(2), wanted.detach(), **CLOSE)
    assert torch.equal(out.codes, codes)
    torch.testing.assert_close(total, loss.detach().reshape(()), **CLOSE)
    torch.testing.assert_close(dx, grads[0], rtol=1e-5, atol=1e-5 * float(grads[0].abs().max()))
    if parameter:
        front = dbook.codes if heads else dbook.codes[None]
        torch.testing.assert_close(front, grads[1], rtol=1e-5, atol=1e-5 * float(grads[1].abs().max()))
    else:
        assert not dbook.codes.any()
        them(x)
        same_state(vq.update(book, out.stats), them)


RUNS = {
    "plain": {},
    "slow": {"decay": 0.99, "eps": 1e-3},
    "cosine": {"metric": "cosine"},
    "heads": {"heads": 2},
    "cosine heads": {"heads": 2, "metric": "cosine"},
    "affine": {"affine": True},
}


@pytest.mark.parametrize("name", RUNS)
def test_twenty_steps(name):
    options = {"decay": 0.8, "eps": 1e-5} | RUNS[name]
    book, them = pair(**options, rotation_trick=False)
    step = {"decay": options["decay"], "eps": options["eps"]}
    for i in range(20):
        x = rows(B, N, D * options.get("heads", 1), seed=i) + 0.005 * i
        theirs, codes, loss = them(x)
        given = split(x, options.get("heads"))
        if options.get("affine"):
            book = vq.shift(book, vq.moments(book, given))
        out = vq.apply(book, given)
        assert torch.equal(out.codes, codes), i
        torch.testing.assert_close(out.x.flatten(2), theirs.detach(), **CLOSE)
        torch.testing.assert_close(vq.mean(out.losses["commitment"]), loss.detach().reshape(()), **CLOSE)
        book = vq.update(book, out.stats, **step)
        same_state(book, them)
    assert vq.perplexity(out.stats.counts).min() > 5  # several codes are in use
    them.eval()
    x = rows(B, N, D * options.get("heads", 1), seed=99)
    if not options.get("affine"):  # the peer moves its averages in evaluation too
        codes = vq.encode(book, split(x, options.get("heads")))
        wanted, theirs, _ = them(x)
        assert torch.equal(codes, theirs)
        torch.testing.assert_close(vq.decode(book, codes).flatten(2), wanted, **CLOSE)


def test_affine_quantises_with_the_averages_of_this_step():
    book, them = pair(affine=True, rotation_trick=False)
    x = 3 * rows(B, N, D) + 1
    them(x)
    book = vq.shift(book, vq.moments(book, x))
    names = ("batch_mean", "batch_variance", "codebook_mean", "codebook_variance", "seen")
    for name, one in list(zip(names, tree.leaves(book.affine), strict=True))[:4]:
        torch.testing.assert_close(one, getattr(them._codebook, name)[0, 0], **CLOSE)
    them(x + 1)
    book = vq.update(book, vq.apply(book, x).stats)  # the means of codes are those of the current book
    book = vq.shift(book, vq.moments(book, x + 1))
    assert book.affine is not None
    torch.testing.assert_close(book.affine.code_mean, them._codebook.codebook_mean[0, 0], **CLOSE)
    torch.testing.assert_close(book.affine.row_var, them._codebook.batch_variance[0, 0], **CLOSE)


@pytest.mark.parametrize("lengths", [(20, 20, 20), (20, 7, 1), (3, 0, 11)])
def test_masked_rows(lengths):
    book, them = pair(rotation_trick=False)
    x, mask = rows(B, N, D), vq.mask(torch.tensor(lengths), N)
    theirs = x.clone().requires_grad_()
    wanted, codes, loss = them(theirs, lens=torch.tensor(lengths))
    g = torch.autograd.grad(weighed(wanted) + loss, theirs)[0]
    out = vq.apply(book, x, mask=mask, gradient=vq.straight_through)
    assert torch.equal(out.codes, codes) and not out.x[~mask].any()
    torch.testing.assert_close(out.x, wanted.detach(), **CLOSE)
    torch.testing.assert_close(vq.mean(out.losses["commitment"]), loss.detach(), **CLOSE)
    f = lambda x: (lambda o: weighed(o.x) + vq.mean(o.losses["commitment"]))(
        vq.apply(book, x, mask=mask, gradient=vq.straight_through)
    )
    torch.testing.assert_close(grad(f)(x), g, **CLOSE)
    same_state(vq.update(book, out.stats), them)


@pytest.mark.parametrize("weight", ["zeros and ones", "fractions", "of the stats"])
def test_weights_of_the_average(weight):
    book, them = pair(rotation_trick=False)
    x = rows(B, N, D)
    w = {"zeros and ones": (torch.arange(K) % 2).float(), "fractions": torch.linspace(0, 1, K)}.get(weight)
    them(x, ema_update_weight=(lambda s, n: (n > 3).float()) if w is None else w)
    stats = vq.apply(book, x).stats
    book = vq.ema(book, stats, weight=(stats.counts > 3).float() if w is None else w)
    same_state(book, them)


def test_accumulated_stats():
    book, them = pair(rotation_trick=False)
    parts = [rows(B, N, D, seed=i) for i in range(3)]
    for i, x in enumerate(parts):
        them(x, accum_ema_update=i < 2)
    same_state(vq.ema(book, vq.add(*(vq.apply(book, x).stats for x in parts))), them)


def test_codes_made_of_sums_later():
    book, them = pair(rotation_trick=False, manual_ema_update=True)
    for i in range(3):
        x = rows(B, N, D, seed=i)
        them(x)
        before, book = book, vq.move(book, vq.apply(book, x).stats)
        assert torch.equal(before.codes, book.codes)
        same_state(book, them)
    them._codebook.update_ema()
    same_state(vq.refresh(book), them)


def test_codes_that_are_given():
    book, them = pair()
    x, given = rows(B, N, D), torch.randint(-1, K, (B, N), generator=torch.Generator().manual_seed(2))
    _, loss = them(x, indices=given)
    torch.testing.assert_close(vq.mean(vq.cross_entropy(book, x, given)), loss.detach(), **CLOSE)
    for metric in ("euclidean", "cosine"):
        book, them = pair(metric=metric, rotation_trick=False)
        them.update_indices(x, given.clamp(min=0))
        same_state(vq.ema(book, vq.stats(book, x, given.clamp(min=0))), them)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_the_best_few(metric):
    book, them = pair(metric=metric)
    x = rows(B, N, D)
    assert torch.equal(vq.encode(book, x, top=5), them.eval()(x, topk=5)[1])


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_a_codebook_of_each_row(metric):
    """Transform codes by a row, as implicit neural codebooks do."""
    book, them = pair(metric=metric)
    x, given, mix = rows(B, N, D), rows(B, N, 3, seed=1), rows(D + 3, D, seed=2)

    def f(codes, given):
        codes, given = torch.broadcast_tensors(codes, given @ torch.ones(3, D))[0], given
        both = torch.cat([codes, given.expand(*codes.shape[:-1], 3)], -1)
        return codes + (both @ mix).tanh()

    theirs = lambda embed: f(embed[:, None, None], given[None, :, :, None].expand(1, B, N, K, 3))
    wanted, codes, _ = them.eval()(x, codebook_transform_fn=theirs)
    ours = vq.encode_among(book, x, f, given)
    assert torch.equal(ours, codes)
    chosen = f(vq.decode(book, ours), given)
    chosen = torch.nn.functional.normalize(chosen, dim=-1) if metric == "cosine" else chosen
    torch.testing.assert_close(chosen, wanted, **CLOSE)


def test_shared_heads_are_more_rows():
    book, _ = pair()
    with warnings.catch_warnings(action="ignore"):
        them: Any = peer.VectorQuantize(3 * D, K, heads=3, codebook_dim=D, rotation_trick=False)
    them._codebook.embed.data.copy_(book.codes[None])
    them._codebook.embed_avg.data.copy_(book.codes[None])
    x = rows(B, N, 3 * D)
    wanted, codes, loss = them(x)
    out = vq.apply(book, split(x, 3))
    assert torch.equal(out.codes, codes)
    torch.testing.assert_close(out.x.flatten(2), wanted.detach(), **CLOSE)
    torch.testing.assert_close(vq.mean(out.losses["commitment"]), loss.detach().reshape(()), **CLOSE)
    same_state(vq.update(book, out.stats), them)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_kmeans_from_the_same_rows(metric):
    x = rows(400, D)
    x = torch.nn.functional.normalize(x, dim=-1) if metric == "cosine" else x
    key = random.key(4)
    book = vq.init(0, K, D, metric=metric)
    none = torch.zeros(400, dtype=torch.int64)
    start = vq.stats(book, x, none, key=random.fold(key, "start")).drawn
    assert start is not None
    means, counts = peer_kmeans(
        x[None], K, 7, use_cosine_sim=metric == "cosine", sample_fn=lambda samples, num: start[None]
    )
    got = vq.kmeans(book, x, key, 7, split=False)
    assert (counts > 0).all() and torch.equal(got.counts, counts[0].float())
    torch.testing.assert_close(got.codes, means[0], **CLOSE)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_the_step_after_a_start_by_kmeans(metric):
    """The peer averages its result once, before the first step."""
    x, key, book = rows(400, D), random.key(4), vq.init(0, K, D, metric=metric)
    with warnings.catch_warnings(action="ignore"):
        them: Any = peer.VectorQuantize(
            D, K, kmeans_init=True, kmeans_iters=7, use_cosine_sim=metric == "cosine", rotation_trick=False
        )
    start = vq.stats(book, x, torch.zeros(400, dtype=torch.int64), key=random.fold(key, "start")).drawn
    assert start is not None
    them._codebook.sample_fn = lambda samples, num: start[None]
    wanted, codes, loss = them.train()(x[None])
    book = vq.refresh(vq.kmeans(book, x, key, 7, split=False))
    out = vq.apply(book, x)
    assert torch.equal(out.codes, codes[0]) and len(codes.unique()) == K
    torch.testing.assert_close(out.x, wanted[0].detach(), **CLOSE)
    torch.testing.assert_close(vq.mean(out.losses["commitment"]), loss.detach().reshape(()), **CLOSE)
    same_state(vq.update(book, out.stats), them)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_dead_codes_that_start_at_the_same_rows(metric):
    book, them = pair(metric=metric, rotation_trick=False, threshold_ema_dead_code=2.0)
    for i in range(4):
        x = rows(B, N, D, seed=i)
        out = vq.apply(book, x, random.key(i), draw=True)
        them._codebook.replace_sample_fn = lambda samples, num, drawn=out.stats.drawn: drawn[None, :num]
        wanted, codes, _ = them(x)
        assert torch.equal(out.codes, codes)
        torch.testing.assert_close(out.x, vq.decode(book, codes), **CLOSE)
        torch.testing.assert_close(out.x, wanted.detach(), **CLOSE)
        dead = int((vq.ema(book, out.stats).counts < 2).sum())
        book = vq.update(book, out.stats, threshold=2.0)
        assert 0 < dead < K
        same_state(book, them)


def test_the_start_is_as_wide_as_theirs():
    with warnings.catch_warnings(action="ignore"):
        theirs = peer.VectorQuantize(64, 1024).codebook
    ours = vq.init(1, 1024, 64)
    bound = (6 / (1024 * 64)) ** 0.5
    assert ours.codes.abs().max() <= bound and theirs.abs().max() <= bound
    assert ours.codes.abs().max() > 0.999 * bound and abs(ours.codes.mean()) < 0.01 * bound
    torch.testing.assert_close(ours.codes.std(), theirs.std(), rtol=0.01, atol=0)
    assert torch.equal(ours.sums, ours.codes) and torch.equal(ours.counts, torch.ones(1024))
