"""k-means: Lloyd's iterations against a naive loop, empty clusters, masks, and the objective of faiss."""

from dataclasses import replace

import pytest
import torch

from fquant import jit, random, tree, vq
from fquant.vq.codebook import kmeans as module

D = 3
NAN = float("nan")


def rows(*shape, seed=0):
    return random.normal(random.fold(random.key(61), seed), shape)


def start(book, x, key):
    """Return the rows at which k-means starts."""
    none = torch.zeros(x.shape[:-1], dtype=torch.int64)
    drawn = vq.stats(book, x, none, key=random.fold(key, "start")).drawn
    assert drawn is not None
    return drawn


def lloyd(means, x, iterations):
    means, x = means.double(), x.double()
    for _ in range(iterations):
        mine = torch.stack([(means - row).square().sum(-1) for row in x]).argmin(1)
        counts = mine.bincount(minlength=len(means))
        means = torch.stack([x[mine == k].mean(0) if counts[k] else means[k] for k in range(len(means))])
    return means, counts


def split(codes, counts):
    return module._split(codes, counts, counts == 0)


def distortion(book, x):
    return float((x - vq.decode(book, vq.encode(book, x))).square().sum(-1).mean())


@pytest.mark.parametrize("heads", [None, 2])
def test_without_splitting_it_is_lloyds_loop(heads):
    book, x, key = vq.init(0, 8, D, heads=heads), rows(90, *([heads] if heads else []), D), random.key(1)
    got = vq.kmeans(book, x, key, 6, split=False)
    begin = start(book, x, key)
    for h in range(heads or 1):
        means, counts = lloyd(begin[h] if heads else begin, x[:, h] if heads else x, 6)
        torch.testing.assert_close((got.codes[h] if heads else got.codes).double(), means, rtol=1e-5, atol=1e-6)
        assert torch.equal(got.counts[h] if heads else got.counts, counts.float()) and counts.min() > 0
    assert torch.equal(got.sums, got.codes * got.counts[..., None])


def test_an_empty_cluster_keeps_its_mean_and_has_the_count_of_a_new_code():
    """vector-quantize-pytorch moves it to zero with the next average."""
    x = torch.tensor([[0.0, 0, 0], [0, 0, 0], [0, 0, 0], [9, 0, 0]])
    got = vq.kmeans(vq.init(0, 4, D), x, random.key(0), 3, split=False)
    assert sorted(got.counts.tolist()) == [1, 1, 1, 3] and sorted(got.codes[:, 0].tolist()) == [0, 0, 0, 9]
    after = vq.ema(got, vq.stats(got, x, vq.encode(got, x)))
    torch.testing.assert_close(after.codes, got.codes, rtol=1e-4, atol=0)


def moved(book, x, split):
    """Return ``book`` after one iteration."""
    return replace(book, codes=module._means(book, vq.stats(book, x, vq.encode(book, x)), split))


def test_empty_clusters_are_put_beside_large_ones():
    far = torch.tensor([[0.0, 0, 0], [100, 0, 0], [0, 100, 0]])
    x = torch.cat([far[0] + rows(400, D), far[1] + rows(40, D, seed=1), far[2] + rows(9, D, seed=2)])
    book = vq.init(0, 8, D)
    from_one = replace(book, codes=torch.cat([far + 1, 500 + rows(5, D)]))  # five far from every row
    found = vq.stats(from_one, x, vq.encode(from_one, x))
    assert (found.counts == 0).sum() == 5
    parted = from_one
    for step in range(12):
        parted = moved(parted, x, split=step < 11)
    kept = from_one
    for _ in range(12):
        kept = moved(kept, x, split=False)
    assert (vq.stats(parted, x, vq.encode(parted, x)).counts > 0).all()
    assert distortion(parted, x) < 0.6 * distortion(kept, x)


def test_splitting_moves_two_apart_and_leaves_the_rest():
    codes, counts = rows(6, D), torch.tensor([5.0, 0, 1, 9, 0, 3])
    got = split(codes, counts)
    torch.testing.assert_close((got[1] + got[3]) / 2, codes[3])
    torch.testing.assert_close((got[4] + got[0]) / 2, codes[0])
    assert (got[1] != got[3]).all() and torch.equal(got[[2, 5]], codes[[2, 5]])
    alone = split(codes, torch.tensor([1.0, 0, 1, 1, 0, 2]))  # only one has rows to share
    assert (alone != codes).any(-1).tolist() == [False, True, False, False, False, True]
    assert torch.equal(split(codes, torch.ones(6)), codes)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_what_is_split_is_of_unit_length_and_nothing_is_after_the_last_iteration(metric):
    x, book = torch.cat([rows(1, D).expand(30, D), rows(6, D, seed=1)]), vq.init(0, 12, D, metric=metric)
    once, kept = (vq.kmeans(book, x, random.key(2), 1, split=split) for split in (True, False))
    assert torch.equal(once.codes, kept.codes) and (vq.stats(kept, x, vq.encode(kept, x)).counts == 0).any()
    found = vq.stats(book, x, torch.zeros(36, dtype=torch.int64))
    means = module._means(book, found, split=True)
    assert ((means - book.codes).abs().amax(-1) > 1e-5).sum() == 2
    if metric == "cosine":
        torch.testing.assert_close(means.norm(dim=-1), torch.ones(12), rtol=1e-6, atol=0)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_masked_and_broken_rows_do_not_count(metric):
    x, mask, key = rows(12, 10, D), vq.mask(torch.arange(12) % 11, 10), random.key(3)
    book = vq.init(0, 6, D, metric=metric)
    whole = vq.kmeans(book, x[mask], key)
    broken = torch.where(mask[..., None], x, NAN)
    got = vq.kmeans(book, broken, key, mask=mask)
    for one, other in zip(tree.leaves(got), tree.leaves(whole), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    broken[1, 0] = NAN
    assert all(t.isfinite().all() for t in tree.leaves(vq.kmeans(book, broken, key, mask=mask)))
    if metric == "cosine":
        torch.testing.assert_close(got.codes.norm(dim=-1), torch.ones(6))


def test_one_sum_an_iteration_and_one_for_the_start():
    """Count the sums of one process; ranks are in ``test_mesh``."""
    for iterations in (1, 4):
        sums = []
        vq.kmeans(
            vq.init(0, 10, D), rows(40, D), random.key(2), iterations, psum=lambda t, sums=sums: sums.append(t) or t
        )
        sizes = [sum(leaf.numel() for leaf in tree.leaves(one)) for one in sums]
        assert sizes == [10 * (2 * D + 2) + 2] + [10 * (D + 1) + 2] * iterations


def test_captured_it_is_the_same_to_the_bit():
    book, x, key = vq.init(0, 10, D), rows(120, D), random.key(2)
    f = lambda book, x, key: vq.kmeans(book, x, key, 4)
    for one, other in zip(tree.leaves(jit(f)(book, x, key)), tree.leaves(f(book, x, key)), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="kmeans: got 6 rows for 10 codes"):
        jit(f)(book, x[:6], key)
    masked = jit(lambda book, x, key, mask: vq.kmeans(book, x, key, 1, mask=mask, split=False))
    # The number of kept rows cannot be seen in a capture: 4 codes start at the book's.
    got = masked(book, x, key, torch.arange(120) < 6)
    assert (
        got.counts.sum() >= 10 and len(set(map(tuple, book.codes.tolist())) & set(map(tuple, got.codes.tolist()))) >= 4
    )


@pytest.mark.slow
def test_the_objective_is_no_worse_than_that_of_faiss():
    faiss = pytest.importorskip("faiss", reason="faiss-cpu is not installed")
    x = rows(8192, 16) * torch.linspace(0.2, 2, 16)
    ours, theirs = [], []
    for seed in range(5):
        ours.append(distortion(vq.kmeans(vq.init(0, 128, 16), x, random.key(seed), 25), x))
        them = faiss.Kmeans(16, 128, niter=25, seed=seed + 1, min_points_per_centroid=1, max_points_per_centroid=10**6)
        them.train(x.numpy())
        codes = torch.from_numpy(them.centroids)
        theirs.append(distortion(replace(vq.init(0, 128, 16), codes=codes), x))
    assert sum(ours) <= 1.002 * sum(theirs)  # seeds differ by more


B, X = vq.init(0, 8, D), rows(20, D)
BAD = {
    "fewer rows": (
        lambda: vq.kmeans(B, X[:7], random.key(0)),
        "kmeans: got 7 rows for 8 codes; .*use more rows",
    ),
    "no rows": (lambda: vq.kmeans(B, X[:0], random.key(0)), "kmeans: got 0 rows for 8 codes"),
    "fewer kept": (
        lambda: vq.kmeans(B, X, random.key(0), mask=torch.arange(20) < 5),
        "kmeans: got 5 rows for 8 codes",
    ),
    "fewer of all": (
        lambda: vq.kmeans(B, X[:3], random.key(0), row_offset=(0, torch.tensor(7))),
        "kmeans: got 7 rows for 8 codes",
    ),
    "iterations": (lambda: vq.kmeans(B, X, random.key(0), 0), "iterations is 0; wanted at least 1"),
    "same numbers": (
        lambda: vq.kmeans(B, X, random.key(0), psum=lambda t: tree.map(lambda s: 2 * s, t)),
        "stats: got 2 rows of one number; .*row_offset=shard.rows",
    ),
}


@pytest.mark.parametrize("f, message", BAD.values(), ids=BAD)
def test_bad_arguments(f, message):
    with pytest.raises(ValueError, match=message):
        f()
