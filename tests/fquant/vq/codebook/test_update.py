"""Updates of a book: stats against a loop in float64, masks, rows that are not finite, and dead codes."""

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch

from fquant import jit, random, tree, vq
from fquant.vq.codebook import rows as module
from tests.helpers.arrays import assert_equal

K, D = 11, 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LOSSES = ("commitment", "cross_entropy", "diversity", "orthogonal")
NAN, INF = float("nan"), float("inf")
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no compiler of C++")
COMPILED = pytest.param(partial(jit, compile=True), marks=needs_compiler)


def rows(*shape, seed=0):
    return random.normal(random.fold(random.key(31), seed), shape)


def book(heads=None, **options):
    made = vq.init(1, K, D, heads=heads, **options)
    codes = made.codes if options.get("metric") == "cosine" else rows(*made.codes.shape, seed=9)
    return replace(made, codes=codes, sums=codes.clone())


def loop(b, x, codes, mask=None):
    """Return counts, sums, and the numbers of kept and lost rows, by a loop over rows."""
    heads = b.codes.shape[0] if b.codes.ndim == 3 else 1
    counts, sums = torch.zeros(heads, K, dtype=torch.float64), torch.zeros(heads, K, D, dtype=torch.float64)
    x, codes, kept, lost = x.double().reshape(-1, heads, D), codes.reshape(-1, heads), 0, 0
    mask = torch.ones(codes.shape, dtype=torch.bool) if mask is None else mask.reshape(-1, 1).expand(codes.shape)
    for row, code, keep in zip(x, codes, mask, strict=True):
        for h in range(heads):
            kept += int(keep[h])
            if keep[h] and (code[h] < 0 or not row[h].isfinite().all()):
                lost += 1
            elif keep[h]:
                counts[h, code[h]] += 1
                sums[h, code[h]] += row[h] / row[h].norm() if b.metric == "cosine" else row[h]
    return counts.reshape(b.counts.shape), sums.reshape(b.sums.shape), kept, lost


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("heads, metric", [(None, "euclidean"), (None, "cosine"), (3, "euclidean"), (3, "cosine")])
def test_stats_are_the_naive_loop(heads, metric, masked, dtype):
    """Heads with masks too, for which vector-quantize-pytorch fails."""
    b = book(heads, metric=metric)
    x = rows(5, 8, *([heads] if heads else []), D)
    codes = torch.randint(-1, K, x.shape[:-1], generator=torch.Generator().manual_seed(3))
    mask = vq.mask(torch.tensor([8, 3, 0, 1, 8]), 8) if masked else None
    x.reshape(-1, D)[::7] = NAN
    x.reshape(-1, D)[5, 2] = INF
    x = x.to(dtype)
    got = vq.stats(b, x, codes, mask)
    counts, sums, kept, lost = loop(b, x, codes, mask)
    assert all(t.dtype == torch.float32 for t in tree.leaves(got)) and lost > 3
    assert torch.equal(got.counts, counts.float()) and (got.kept, got.lost) == (kept, lost)
    torch.testing.assert_close(got.sums, sums.float(), rtol=1e-5, atol=1e-5)
    assert got.counts.sum() == got.kept - got.lost


@pytest.mark.parametrize("where", ["rows", "pads", "everywhere"])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_what_is_not_finite_poisons_nothing(where, metric):
    """One NaN, even in padding, turns every code of vector-quantize-pytorch to NaN."""
    b = book(metric=metric)
    clean = rows(4, 6, D)
    mask = vq.mask(torch.tensor([6, 2, 6, 3]), 6)
    if where == "rows":
        clean[0, 3, 1], clean[2, 0] = NAN, -INF
    elif where == "pads":
        clean[~mask] = NAN
    else:
        clean = torch.full_like(clean, NAN)

    def total(x):
        out = vq.apply(b, x, random.key(0), mask=mask, draw=True, losses=LOSSES)
        return out.x.square().sum() + sum(vq.mean(one) for one in out.losses.values()), out

    grads, (_, out) = torch.func.grad_and_value(total, has_aux=True)(clean)
    after = vq.update(b, out.stats, threshold=2.0)
    for leaf in [grads, out.x, *tree.leaves(out.losses), *tree.leaves(after)]:
        assert leaf.isfinite().all()
    bad = ~clean.isfinite().all(-1)
    assert (out.codes[bad | ~mask] == -1).all() and not grads[bad | ~mask].any() and not out.x[bad | ~mask].any()
    assert out.stats.kept == 17 and out.stats.lost == (bad & mask).sum()


def test_masked_rows_are_rows_that_are_not_there():
    x, mask, key = rows(6, 5, D), vq.mask(torch.tensor([5, 0, 2, 4, 5, 1]), 5), random.key(2)
    for metric in ("euclidean", "cosine"):
        b = book(metric=metric)
        options = {"draw": True, "temperature": 0.5, "gradient": vq.directional, "losses": LOSSES[:2]}
        out = vq.apply(b, x, key, mask=mask, **options)
        cut = vq.apply(b, x[mask], key, **options)
        assert torch.equal(out.codes[mask], cut.codes)  # drawn codes too, because masked rows have no number
        for one, other in zip(tree.leaves((out.stats, out.losses)), tree.leaves((cut.stats, cut.losses)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(out.x[mask], cut.x)


def test_bf16_rows_leave_state_in_f32():
    b, x = book(), rows(300, D).bfloat16()
    out = vq.apply(b, x)
    assert out.x.dtype == torch.bfloat16 and out.losses["commitment"].sum.dtype == torch.float32
    after = vq.update(b, out.stats)
    assert all(t.dtype == torch.float32 for t in tree.leaves(after))
    want = vq.ema(b, vq.stats(b, x.float(), out.codes))
    assert torch.equal(after.codes, want.codes)


def test_stats_of_parts_add_up():
    b, x = book(2), rows(30, 2, D)
    codes = vq.encode(b, x)
    parts = [vq.stats(b, x[at], codes[at]) for at in (slice(0, 7), slice(7, 7), slice(7, 30))]
    whole = vq.stats(b, x, codes)
    for one, other in zip(tree.leaves(vq.add(*parts)), tree.leaves(whole), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert vq.add(parts[0]) is parts[0]


def test_batches_draw_from_the_rows_of_all_of_them():
    b, x, key = book(), rows(30, D), random.key(5)
    codes = vq.encode(b, x)
    whole = vq.stats(b, x, codes, key=key)
    cut = [0, 7, 7, 30]
    parts = [vq.stats(b, x[a:z], codes[a:z], key=key, row_offset=(a, 30)) for a, z in zip(cut, cut[1:], strict=False)]
    assert torch.equal(vq.add(*parts).drawn, whole.drawn) and torch.equal(vq.add(*parts).hits, torch.ones(K))
    bare, first = vq.stats(b, x, codes), vq.stats(b, x[:12], codes[:12], key=key)
    for mixed in (vq.add(bare, first, bare), vq.add(first, bare)):
        assert torch.equal(mixed.drawn, first.drawn)


@pytest.mark.parametrize("total", [11, 12, 25, 1000, 7, 1, 0])
def test_rows_are_drawn_once_each_and_about_as_often(total):
    x = torch.arange(float(total))[:, None].expand(total, D)
    seen = torch.zeros(max(total, 1))
    live = torch.ones(2, total, dtype=torch.bool)
    for i in range(60):
        drawn, hits = module.draw(random.key(i), K, x.expand(2, total, D), None, live, None)
        assert not drawn[hits == 0].any() and (hits.sum(1) == min(total, K)).all()
        for h in range(2):
            some = drawn[h, hits[h] == 1, 0].long()
            assert len(set(some.tolist())) == len(some)
            seen += some.bincount(minlength=max(total, 1))
    mean = 120 * min(K, total) / max(total, 1)
    assert (seen - mean).abs().max() <= 6 * mean**0.5 + 1e-9 * total
    if total > K:
        assert not torch.equal(*drawn)  # each head draws by itself


@pytest.mark.parametrize("total", [K, 7, 110])
def test_any_code_may_get_any_row(total):
    """With few dead codes, or few rows, the drawn rows are not always the first."""
    x, live = torch.arange(1.0, total + 1)[:, None].expand(1, total, D), torch.ones(1, total, dtype=torch.bool)
    first = [module.draw(random.key(i), K, x, None, live, None)[0][0, :, 0] for i in range(60)]
    for code in (0, K - 1):
        rows = torch.stack(first)[:, code]
        assert rows.max() > 0.8 * total and rows[rows > 0].min() < 1 + 0.2 * total
        assert (rows == 0).any() == (total < K)


def test_a_draw_is_that_of_all_rows_whichever_way_they_are_split():
    x, kept = rows(1, 40, D), torch.rand(1, 40, generator=torch.Generator().manual_seed(1)) > 0.4
    live = kept & (torch.arange(40) % 9 != 0)
    total, key = int(kept.sum()), random.key(3)
    whole = module.draw(key, K, x, kept, live, None)
    cut, parts = [0, 0, 13, 14, 40], []
    for a, z in zip(cut, cut[1:], strict=False):
        row_offset = (int(kept[:, :a].sum()), torch.tensor(total))
        parts.append(module.draw(key, K, x[:, a:z], kept[:, a:z], live[:, a:z], row_offset))
    assert torch.equal(sum(p[0] for p in parts), whole[0]) and torch.equal(sum(p[1] for p in parts), whole[1])
    found = {tuple(row.tolist()) for row in whole[0][whole[1] == 1]}
    assert found <= {tuple(row.tolist()) for row in x[live]} and len(found) == int(whole[1].sum()) > 5


@pytest.mark.parametrize("learnable", [False, True])
@pytest.mark.parametrize("heads, metric", [(None, "euclidean"), (2, "cosine")])
def test_dead_codes_start_at_rows_of_the_batch(heads, metric, learnable):
    b = book(heads, metric=metric, learnable=learnable)
    x = rows(50, *([heads] if heads else []), D)
    b = replace(b, counts=torch.where(torch.arange(K) % 3 == 0, 0.0, 100.0).expand(b.counts.shape).clone())
    stats = vq.apply(b, x, random.key(1), draw=True).stats
    plain = vq.update(b, stats)
    after = vq.update(b, stats, threshold=2.0)
    dead = plain.counts < 2
    assert dead.sum() == 4 * (heads or 1) and (plain.codes.equal(b.codes) == learnable)
    for name in ("codes", "counts", "sums"):
        assert torch.equal(getattr(after, name)[~dead], getattr(plain, name)[~dead])
    assert (after.counts[dead] == 2).all() and torch.equal(after.sums[dead], 2 * after.codes[dead])
    points = x / x.norm(dim=-1, keepdim=True) if metric == "cosine" else x
    far = torch.cdist(after.codes[dead], points.reshape(-1, D)).min(1)
    assert far.values.max() < 1e-3 and len(set(far.indices.tolist())) == int(dead.sum())
    again = vq.expire(plain, stats, 2.0, reset=5.0)
    assert (again.counts[dead] == 5).all() and torch.equal(again.codes, after.codes)
    assert torch.equal(again.sums[dead], 5 * after.codes[dead])


def test_a_code_that_has_got_the_threshold_lives():
    b, x = book(), rows(40, D)
    stats = vq.apply(b, x, random.key(1), draw=True).stats
    least = float(stats.counts.median())
    plain, after = vq.update(b, stats, decay=0.0), vq.update(b, stats, decay=0.0, threshold=least)
    moved = (after.codes != plain.codes).any(-1)
    assert torch.equal(moved, stats.counts < least) and (stats.counts == least).any() and moved.any()
    assert torch.equal(after.counts, stats.counts.clamp(min=least))


def test_more_dead_codes_than_rows_wait():
    """As many codes restart as there are rows, each at another; vector-quantize-pytorch repeats rows on a mesh."""
    b = replace(book(), counts=torch.zeros(K))
    x = rows(6, D)
    x[2] = NAN
    stats = vq.apply(b, x, random.key(1), draw=True).stats
    after = vq.expire(b, stats)
    moved = (after.codes != b.codes).any(-1)
    assert moved.sum() == 5 and {tuple(c.tolist()) for c in after.codes[moved]} == {
        tuple(r.tolist()) for i, r in enumerate(x) if i != 2
    }
    assert torch.equal(after.counts, torch.where(moved, 2.0, 0.0))
    none = vq.apply(b, x[:0], random.key(1), draw=True).stats
    assert_equal(vq.expire(b, none), b)


def test_a_dead_code_of_an_affine_book_comes_to_stand_for_its_row():
    b, x = book(affine=True), 5 * rows(40, D) + 3
    b = vq.shift(b, vq.moments(b, x))
    b = replace(b, counts=torch.zeros(K))
    after = vq.expire(b, vq.apply(b, x, random.key(1), draw=True).stats)
    distance = torch.cdist(vq.code_vectors(after), x, compute_mode="donot_use_mm_for_euclid_dist")
    assert distance.min(1).values.max() < 1e-4


def test_an_update_of_no_rows():
    b = book()
    after = vq.update(b, vq.apply(b, rows(0, D)).stats)
    torch.testing.assert_close(after.codes, b.codes, rtol=1e-6, atol=1e-6)
    empty = replace(b, counts=torch.zeros(K), sums=torch.zeros(K, D))
    assert torch.equal(vq.refresh(empty).codes, b.codes)  # not nan


def test_nothing_is_written_over():
    b, x = book(affine=True), rows(20, D)
    before = tree.map(torch.clone, b)
    out = vq.apply(b, x, random.key(0), draw=True)
    first = vq.update(b, out.stats, threshold=1.5)
    assert_equal(b, before)
    assert_equal(
        vq.update(b, vq.apply(b, x, random.key(0), draw=True).stats, threshold=1.5), first
    )  # a recomputation does not update


@pytest.mark.parametrize("options", [{}, {"metric": "cosine"}, {"affine": True}, {"learnable": True}], ids=str)
def test_stats_carry_no_gradient(options):
    """Also not of what an affine book averages; so the gradient of a step with respect to the state is defined."""
    b, x = book(**options), rows(9, D)
    b = vq.shift(b, vq.moments(b, rows(50, D, seed=3))) if b.affine else b
    f = lambda b, x: vq.stats(b, x, vq.encode(b, x), key=random.key(0))
    total = lambda b, x: sum(t.sum() for t in tree.leaves(f(b, x)))
    slopes = torch.func.grad(total, (0, 1))(b, x)
    assert total(b, x) != 0 and all(not t.any() for t in tree.leaves(slopes))
    loss = lambda b, x: vq.mean(vq.apply(b, x).losses["commitment"])
    assert torch.func.grad(loss, (0, 1))(b, x)[1].any()


def test_perplexity():
    counts = torch.zeros(2, K)
    counts[0, :4], counts[1, 7] = 5, 9
    torch.testing.assert_close(vq.perplexity(counts), torch.tensor([4.0, 1.0]))
    assert vq.perplexity(vq.apply(book(), rows(0, D)).stats.counts) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrap", [lambda f: f, jit, COMPILED], ids=["plain", "jit", "compile"])
def test_finite_rows(dtype, wrap):
    """As isfinite and all, which torch.compile keeps; of (x * 0).sum(-1) == 0 it makes True."""
    ends = torch.finfo(dtype)
    special = [0.0, -0.0, 1.0, ends.max, ends.min, ends.tiny, ends.smallest_normal / 2, NAN, INF, -INF]
    x = torch.tensor(special, dtype=dtype)
    x = torch.stack([t.flatten() for t in torch.meshgrid(x, x, x, indexing="ij")], -1)  # [1000 3]
    f = wrap(module.finite)
    assert torch.equal(f(x), x.isfinite().all(-1)) and f(x).sum() == 7**3
    assert torch.equal(module.finite(x.view(10, 100, 3), 2), x.isfinite().view(10, 300).all(-1))


B, X, S = book(), rows(9, D), vq.apply(book(), rows(9, D)).stats
C = vq.encode(B, X)
DRAWN = vq.stats(B, X, C, key=random.key(0))
BAD = {
    "codes of another shape": (
        lambda: vq.stats(B, X, C[:3]),
        r"codes: got torch.int64 \(3,\) for x \(9, 4\); wanted int64, one",
    ),
    "codes of floats": (lambda: vq.stats(B, X, C.float()), "codes: got torch.float32"),
    "last dim": (lambda: vq.stats(B, rows(9, 3), C), r"x: got shape \(9, 3\)"),
    "row_offset alone": (
        lambda: vq.stats(B, X, C, row_offset=(0, 9)),
        "row_offset: got numbers of rows, .* and no key",
    ),
    "where beyond": (
        lambda: vq.stats(B, X, C, key=random.key(0), row_offset=(3, 11)),
        "row_offset: got 9 kept rows from number 3 on, of 11 in all; .* use shard.rows",
    ),
    "row_offset below": (lambda: vq.stats(B, X, C, key=random.key(0), row_offset=(-1, 20)), "from number -1 on, of 20"),
    "where of tensors": (
        lambda: vq.stats(B, X, C, key=random.key(0), row_offset=(torch.tensor(3), torch.tensor(11))),
        "row_offset: got 9 kept rows from number 3",
    ),
    "decay": (lambda: vq.ema(B, S, decay=1.0), "decay is 1.0; wanted 0 <= decay < 1"),
    "eps": (lambda: vq.ema(B, S, eps=0.0), "eps is 0.0; wanted one above 0"),
    "weight": (lambda: vq.ema(B, S, weight=torch.ones(3)), r"weight: got shape \(3,\); wanted \(11,\)"),
    "another book": (lambda: vq.ema(vq.init(0, 5, D), S), r"stats: got sums \(11, 4\); wanted \(5, 4\)"),
    "learnable": (
        lambda: vq.ema(book(learnable=True), S),
        "the book is learnable, its codes move by gradients; use move",
    ),
    "learnable, refreshed": (lambda: vq.refresh(book(learnable=True)), "the book is learnable"),
    "nothing drawn": (lambda: vq.expire(B, S), "stats: got none drawn, .*; give stats a key"),
    "drawn twice": (
        lambda: vq.expire(B, vq.add(DRAWN, DRAWN)),
        "stats: got 2 rows of one number; .*row_offset=shard.rows",
    ),
    "threshold": (
        lambda: vq.update(B, DRAWN, threshold=-1.0),
        "threshold is -1.0 and reset is None; wanted both above 0, or 0",
    ),
    "reset alone": (lambda: vq.update(B, DRAWN, reset=1.0), "threshold is 0.0 and reset is 1.0"),
    "reset": (lambda: vq.expire(B, DRAWN, 2.0, reset=0.0), "reset is 0.0; wanted both above 0"),
}


@pytest.mark.parametrize("f, message", BAD.values(), ids=BAD)
def test_bad_arguments(f, message):
    with pytest.raises(ValueError, match=message):
        f()
