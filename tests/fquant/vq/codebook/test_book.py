"""Codebooks: initial values, encoding and decoding against naive loops, and refused arguments."""

from dataclasses import replace

import pytest
import torch

from fquant import random, tree, vq
from fquant.io import safetensors
from fquant.vq.codebook import rows as rows_module

K, D = 13, 5
NAN, INF = float("nan"), float("inf")


def rows(*shape, seed=0):
    return random.normal(random.fold(random.key(21), seed), shape)


def book(heads=None, **options):
    made = vq.init(1, K, D, heads=heads, **options)
    if options.get("metric") == "cosine":
        return made
    codes = rows(*made.codes.shape, seed=9)
    return replace(made, codes=codes, sums=codes.clone())


def nearest(codes, x, metric, top=1):
    """Return the nearest codes of one row by a loop, the lowest index of equals first."""
    far = [float((x.double() - c.double()).square().sum()) for c in codes]
    if metric == "cosine":
        far = [-float(x.double() @ c.double()) for c in codes]
    return sorted(range(len(codes)), key=lambda i: (far[i], i))[:top]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
@pytest.mark.parametrize("heads", [None, 1, 3])
def test_encode_is_the_naive_loop(heads, metric, dtype):
    b, x = book(heads, metric=metric), rows(2, 4, *([heads] if heads else []), D).to(dtype)
    got, few = vq.encode(b, x), vq.encode(b, x, top=4)
    assert got.dtype == torch.int64 and got.shape == x.shape[:-1] and few.shape == (*x.shape[:-1], 4)
    for at in torch.cartesian_prod(*map(torch.arange, x.shape[:-1])).tolist():
        codes = b.codes[at[-1]] if heads else b.codes
        assert few[tuple(at)].tolist() == nearest(codes, x[tuple(at)], metric, 4)
        assert got[tuple(at)] == few[tuple(at)][0]


@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 3, 4)])
@pytest.mark.parametrize("heads", [None, 2])
def test_any_dims_go_before_the_last(lead, heads):
    b = book(heads)
    x = rows(*lead, *([heads] if heads else []), D)
    codes = vq.encode(b, x)
    assert codes.shape == x.shape[:-1]
    decoded = vq.decode(b, codes)
    assert decoded.shape == x.shape and decoded.dtype == torch.float32
    each = b.codes if heads is None else None
    for at, code in zip(decoded.reshape(-1, D), codes.reshape(-1).tolist(), strict=True):
        if each is not None:
            assert torch.equal(at, each[code])
    out = vq.apply(b, x)
    assert torch.equal(out.codes, codes) and torch.equal(out.x, decoded)


def test_heads_are_books_beside_each_other():
    b, x = book(3), rows(6, 3, D)
    codes = vq.encode(b, x)
    for i in range(3):
        one = tree.map(lambda t, i=i: t[i], b)
        assert torch.equal(vq.encode(one, x[:, i]), codes[:, i])
        assert torch.equal(vq.decode(one, codes[:, i]), vq.decode(b, codes)[:, i])


def test_of_equally_near_codes_the_lowest_index_counts():
    b = book()
    codes = torch.stack([torch.tensor([float(i % 3), 0, 0, 0, 1]) for i in range(K)])
    b = replace(b, codes=codes)
    x = torch.tensor([[0.0, 0, 0, 0, 1], [2, 0, 0, 0, 0], [1.5, 0, 0, 0, 1], [-1, 0, 0, 0, 9]])
    assert vq.encode(b, x).tolist() == [0, 2, 1, 0]
    assert vq.encode(b, x, top=4)[0].tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_row_that_is_not_finite_has_no_code(bad):
    b, x = book(), rows(4, D)
    x[2, 1] = bad
    codes = vq.encode(b, x)
    assert codes[2] == -1 and (codes[[0, 1, 3]] >= 0).all()
    assert not vq.decode(b, codes)[2].any()
    assert (vq.encode(b, x, top=3)[2] == -1).all()
    assert vq.sample(b, x, random.key(0))[2] == -1


def test_cosine_codes_and_rows_are_of_unit_length():
    b = book(metric="cosine")
    torch.testing.assert_close(b.codes.norm(dim=-1), torch.ones(K))
    x = rows(20, D)
    assert torch.equal(vq.encode(b, x), vq.encode(b, 1000 * x))
    out = vq.apply(b, x)
    torch.testing.assert_close(out.x.norm(dim=-1), torch.ones(20))
    assert torch.equal(vq.apply(b, torch.zeros(1, D)).codes, torch.tensor([0]))
    free = replace(b, codes=3 * b.codes, learnable=True)
    torch.testing.assert_close(vq.decode(free, torch.arange(K)).norm(dim=-1), torch.ones(K))
    assert torch.equal(vq.encode(free, x), vq.encode(b, x))


@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e-5, 1.0, 1e10, 1e25, 1e37])
def test_a_row_of_any_length_has_its_direction(size):
    """A row shorter than 1e-6 counts as that long; squares of long rows overflow float32."""
    b, x = book(metric="cosine"), rows(40, D)
    x = x / x.double().norm(dim=-1, keepdim=True).float()
    out = vq.apply(b, size * x)
    assert torch.equal(out.codes, vq.encode(b, x))
    one, many = (vq.stats(b, t, torch.arange(40) % K) for t in (x, size * x))
    torch.testing.assert_close(many.sums, min(1.0, size / 1e-6) * one.sums, rtol=1e-5, atol=1e-6)
    if size >= 1e-6:
        torch.testing.assert_close(vq.mean(out.losses["commitment"]), vq.mean(vq.apply(b, x).losses["commitment"]))
        slope = torch.func.grad(lambda x: vq.mean(vq.apply(b, x).losses["commitment"]))
        torch.testing.assert_close(size * slope(size * x), slope(x), rtol=1e-4, atol=1e-6)


def test_affine_dims_that_hardly_vary_have_a_variance_all_the_same():
    b, x = book(affine=True), rows(400, D)
    x[:, 1], b.codes[:, 2] = 3.0, 0.5
    b = vq.shift(b, vq.moments(b, x))
    seen, spread = vq.code_vectors(b), b.codes.double().std(0, correction=0)
    assert (seen[:, 1].double().std(correction=0) / 1e-5**0.5 - 1).abs() < 1e-4
    torch.testing.assert_close(seen[:, 1].mean(), torch.tensor(3.0))
    torch.testing.assert_close(seen[:, 2], x[:, 2].mean().expand(K), rtol=1e-4, atol=1e-4)
    row, codes = vq.code_vectors(b)[3], b.codes[3].clone()
    codes[2] += 1e-4  # its variance of zero counts as 1e-5
    moved = vq.code_vectors(replace(b, codes=b.codes.index_copy(0, torch.tensor([3]), codes[None])))[3]
    torch.testing.assert_close((moved - row)[2] / 1e-4, x[:, 2].std(correction=0) / 1e-5**0.5, rtol=1e-2, atol=0)
    assert (spread[[0, 1, 3, 4]] > 0.1).all()


def test_affine_codes_have_the_mean_and_variance_of_rows():
    b = book(affine=True)
    assert torch.equal(vq.code_vectors(b), b.codes)  # before the first rows
    x = 7 * rows(400, D) + 30
    b = vq.shift(b, vq.moments(b, x))
    seen = vq.code_vectors(b).double()
    torch.testing.assert_close(seen.mean(0), x.double().mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(seen.var(0, correction=0), x.double().var(0, correction=0), rtol=1e-4, atol=0)
    codes = vq.encode(b, x)
    assert codes.tolist() == [nearest(vq.code_vectors(b), row, "euclidean")[0] for row in x]
    assert torch.equal(vq.decode(b, codes), vq.code_vectors(b)[codes])
    same = vq.shift(b, vq.moments(b, x[:0]))
    assert all(torch.equal(p, q) for p, q in zip(tree.leaves(b), tree.leaves(same), strict=True))


def test_moments_leave_out_what_does_not_count():
    for heads in (None, 2):
        b = book(heads, affine=True)
        x = 1000 + rows(6, 7, *([heads] if heads else []), D)
        mask = vq.mask(torch.tensor([7, 3, 0, 1, 7, 2]), 7)
        want = vq.moments(b, x[mask])
        x = torch.where(mask.reshape(6, 7, *[1] * (x.ndim - 2)), x, NAN)
        got = vq.moments(b, x, mask)
        for one, other in zip(tree.leaves(got), tree.leaves(want), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=0)
        wide = x[mask].double()
        of = vq.shift(b, got).affine
        assert of is not None
        var = of.row_var.double()
        torch.testing.assert_close(
            var, wide.var(0, correction=0), rtol=1e-5, atol=0
        )  # the mean is a thousand times larger
        x[0, 0] = INF
        assert (vq.moments(b, x, mask).number == want.number - 1).all()


def test_the_learnable_book_alone_has_a_gradient():
    for learnable in (False, True):
        b = book(learnable=learnable)
        f = lambda codes, b=b: vq.decode(replace(b, codes=codes), torch.tensor([3, 3, -1, 0])).sum()
        g = torch.func.grad(f)(b.codes)
        assert g.sum(-1).tolist() == ([D, 0, 0, 2 * D] + [0] * (K - 4) if learnable else [0] * K)


def test_a_start_depends_on_the_key_alone():
    one, two = vq.init(5, K, D), vq.init(random.key(5), K, D)
    assert torch.equal(one.codes, two.codes) and not torch.equal(one.codes, vq.init(6, K, D).codes)
    assert vq.init(0, K, D, heads=4).codes.shape == (4, K, D)
    heads = vq.init(0, K, D, heads=2)
    assert not torch.equal(heads.codes[0], heads.codes[1])


def test_samples_are_as_likely_as_their_logits_say():
    b, x = book(), rows(1, D).expand(20000, D)
    got = vq.sample(b, x, random.key(3), temperature=0.7).bincount(minlength=K) / 20000
    far = (x[0].double() - b.codes.double()).norm(dim=-1)
    want = (-far / 0.7).softmax(0)
    assert (got - want).abs().max() < 4 * (want * (1 - want) / 20000).sqrt().max()
    cold = vq.sample(b, rows(50, D), random.key(3), temperature=1e-4)
    assert torch.equal(cold, vq.encode(b, rows(50, D)))


@pytest.mark.parametrize("heads", [None, 2])
def test_a_sample_depends_on_the_number_of_the_row_and_not_on_the_rows_beside_it(heads, monkeypatch):
    b, x, key = book(heads), rows(40, *([heads] if heads else []), D), random.key(3)
    whole = vq.sample(b, x, key)
    if heads:
        assert not torch.equal(whole[:, 0], vq.sample(b, x[:, :1].expand_as(x), key)[:, 1])
    number = torch.arange(40) if heads is None else torch.arange(40)[:, None].expand(40, heads)
    assert torch.equal(whole[25:], vq.sample(b, x[25:], key, number=number[25:]))
    monkeypatch.setattr(rows_module, "TILE", 4 * K * 7)
    assert torch.equal(whole, vq.sample(b, x, key))


def test_codes_that_are_set_stay():
    """The next step of vector-quantize-pytorch discards them, because its sums are of the codes before."""
    for options in ({}, {"metric": "cosine"}, {"heads": 2}):
        b = vq.init(1, K, D, **options)
        x, new = rows(200, *b.codes.shape[:-2], D), rows(*b.codes.shape, seed=4)
        b = vq.ema(b, vq.apply(b, x).stats)
        got = vq.restart(b, new)
        new = torch.nn.functional.normalize(new, dim=-1) if "metric" in options else new
        torch.testing.assert_close(got.codes, new)
        after = vq.ema(got, vq.apply(got, x[:0]).stats)
        torch.testing.assert_close(after.codes, new, rtol=1e-5, atol=1e-6)
        gone = vq.ema(replace(b, codes=new), vq.apply(b, x[:0]).stats)
        assert (gone.codes - new).abs().max() > 0.1
        again = vq.ema(got, vq.apply(got, x).stats)
        fresh = vq.Book(new, torch.ones(new.shape[:-1]), new, b.metric)
        torch.testing.assert_close(again.codes, vq.ema(fresh, vq.apply(fresh, x).stats).codes)
    assert vq.restart(b, new.double()).codes.dtype is torch.float32


def test_round_trip_through_a_file(tmp_path):
    for b in (book(), book(2, metric="cosine"), book(learnable=True, affine=True)):
        part = vq.apply(b, rows(9, *b.codes.shape[:-2], D), random.key(1), draw=True).stats
        safetensors.save(tmp_path / "a", {"book": b, "part": part})  # between two batches of one update
        got = safetensors.load(tmp_path / "a")
        assert tree.structure(got) == tree.structure({"book": b, "part": part})
        more = vq.apply(b, rows(9, *b.codes.shape[:-2], D, seed=1)).stats
        after = [vq.update(c, vq.add(s, more), threshold=1.0) for c, s in ((b, part), (got["book"], got["part"]))]
        for one, other in zip(*map(tree.leaves, after), strict=True):
            assert torch.equal(one, other)


def test_codes_that_were_found_elsewhere():
    b, x = book(), rows(20, D)
    second = vq.encode(b, x, top=2)[:, 1]
    second[3] = -1
    x[5] = NAN
    out = vq.apply(b, x, codes=second, gradient=vq.straight_through)
    want = torch.where(torch.arange(20) == 5, -1, second)
    assert torch.equal(out.codes, want) and torch.equal(out.x, vq.decode(b, want))
    assert torch.equal(out.stats.sums, vq.stats(b, x, want).sums) and out.stats.lost == 2
    live = want >= 0
    wanted = (b.codes[want[live]] - x[live]).square().mean()
    torch.testing.assert_close(vq.mean(out.losses["commitment"]), wanted)
    nearest = vq.apply(b, x)
    same = vq.apply(b, x, codes=vq.encode(b, x))
    assert all(torch.equal(p, q) for p, q in zip(tree.leaves(nearest), tree.leaves(same), strict=True))


def test_the_best_few_of_a_codebook_of_each_row():
    b, x, given = book(), rows(9, D), rows(9, 2, seed=3)
    f = lambda codes, given: codes * (1 + given[..., :1]) + given[..., 1:]
    few = vq.encode_among(b, x, f, given, top=4)
    for i in range(9):
        assert few[i].tolist() == nearest(f(b.codes, given[i]), x[i], "euclidean", 4)
    assert torch.equal(few[:, 0], vq.encode_among(b, x, f, given))
    x[2, 1], x[5] = NAN, INF
    for top in (None, 3):
        gone = (vq.encode_among(b, x, f, given, top=top).reshape(9, -1) == -1).all(1)
        assert gone.nonzero()[:, 0].tolist() == [2, 5]


BAD_INIT = {
    "no codes": ({"num_codes": 0}, "num_codes is 0; wanted at least 1"),
    "no dims": ({"dim": 0}, "dim is 0; wanted at least 1"),
    "no heads": ({"heads": 0}, "heads is 0; wanted at least 1"),
    "metric": ({"metric": "l1"}, "metric is 'l1'; wanted one of euclidean, cosine"),
    "affine": ({"metric": "cosine", "affine": True}, "affine is True with metric 'cosine'.*; use metric='euclidean'"),
}


@pytest.mark.parametrize("options, message", BAD_INIT.values(), ids=BAD_INIT)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        vq.init(**({"key": 0, "num_codes": K, "dim": D} | options))


X = rows(4, D)
BAD = {
    "last dim": (lambda: vq.encode(book(), rows(4, 6)), ValueError, r"x: got shape \(4, 6\) for a book of 5 dims"),
    "no dims": (
        lambda: vq.encode(book(), torch.tensor(1.0)),
        ValueError,
        r"x: got shape \(\); .* wanted \[... 5\]|x: got",
    ),
    "heads": (lambda: vq.encode(book(3), rows(4, 2, D)), ValueError, r"x: got shape \(4, 2, 5\) .* wanted \[... 3 5\]"),
    "integers": (lambda: vq.encode(book(), X.long()), TypeError, "x: got torch.int64; wanted a tensor of floats"),
    "top": (lambda: vq.encode(book(), X, top=14), ValueError, "top is 14 for a book of 13 codes; wanted 1 to 13"),
    "top 0": (lambda: vq.encode(book(), X, top=0), ValueError, "top is 0"),
    "code": (
        lambda: vq.decode(book(), torch.tensor([3, 13])),
        IndexError,
        "codes: got 13 for a book of 13; wanted 0 to 12",
    ),
    "below": (lambda: vq.decode(book(), torch.tensor([-2])), IndexError, "codes: got -2 for a book of 13"),
    "code of heads": (
        lambda: vq.decode(book(2), torch.tensor([[0, 13]])),
        IndexError,
        "codes: got 13 for a book of 13",
    ),
    "one head": (
        lambda: vq.decode(book(2), torch.zeros(3, 1).long()),
        ValueError,
        r"wanted \[... 2\], a code for each",
    ),
    "floats": (lambda: vq.decode(book(), torch.zeros(3)), TypeError, "codes: got torch.float32; wanted int64"),
    "int32": (lambda: vq.decode(book(), torch.zeros(3).int()), TypeError, "codes: got torch.int32"),
    "temperature": (
        lambda: vq.sample(book(), X, random.key(0), 0.0),
        ValueError,
        "temperature is 0.0; wanted one above",
    ),
    "given": (lambda: vq.encode_among(book(), X, max, rows(3, 2)), ValueError, r"given: got shape \(3, 2\) for x"),
    "among heads": (
        lambda: vq.encode_among(book(2), rows(4, 2, D), max, X),
        ValueError,
        "a book of 2 heads; .* use vmap",
    ),
    "not affine": (
        lambda: vq.shift(book(), vq.moments(book(), X)),
        ValueError,
        "the book is not affine; .*affine=True",
    ),
    "decay": (
        lambda: vq.shift(book(affine=True), vq.moments(book(), X), 1.0),
        ValueError,
        "row_decay is 1.0; wanted 0 <=",
    ),
    "lengths": (lambda: vq.mask(torch.tensor([3, 5]), 4), ValueError, "lengths: got 3 to 5; wanted 0 to 4"),
    "loss": (
        lambda: vq.apply(book(), X, losses=("l2",)),
        ValueError,
        "losses: got 'l2'; wanted some of commitment, cross",
    ),
    "cold": (
        lambda: vq.apply(book(), X, temperature=-1.0),
        ValueError,
        "temperature is -1.0; wanted 0 for the nearest",
    ),
    "codes and warmth": (
        lambda: vq.apply(book(), X, random.key(0), temperature=1.0, codes=torch.zeros(4).long()),
        ValueError,
        r"x: got codes \(4,\) at temperature 1.0 for rows \(4, 5\); wanted a code for each, and temperature 0",
    ),
    "codes of fewer rows": (
        lambda: vq.apply(book(), X, codes=torch.zeros(1).long()),
        ValueError,
        r"x: got codes \(1,\) at temperature 0.0",
    ),
    "top among": (lambda: vq.encode_among(book(), X, max, X, top=0), ValueError, "top is 0 for a book of 13 codes"),
    "no key": (lambda: vq.apply(book(), X, draw=True), ValueError, "key is None with draw=True and temperature=0.0"),
    "codes to start at": (
        lambda: vq.restart(book(), rows(4, D)),
        ValueError,
        r"codes: got shape \(4, 5\); wanted \(13, 5\), as the",
    ),
    "mask": (
        lambda: vq.apply(book(), X, mask=torch.ones(3).bool()),
        ValueError,
        r"mask is \(3,\) beside x \(4, 5\)",
    ),
    "mask of all": (lambda: vq.apply(book(), X, mask=torch.ones(4, 5).bool()), ValueError, "mask is "),
    "float mask": (lambda: vq.apply(book(), X, mask=torch.ones(4)), TypeError, "mask is torch.float32; wanted bool"),
}


@pytest.mark.parametrize("f, error, message", BAD.values(), ids=BAD)
def test_bad_arguments(f, error, message):
    with pytest.raises(error, match=message):
        f()


def test_codes_beyond_the_book_fail_in_a_capture_too():
    import fquant

    for b in (book(), book(2)):
        decode = fquant.jit(lambda b, codes: vq.decode(b, codes))
        heads = b.codes.shape[:-2]
        good = torch.tensor(3).expand(4, *heads).contiguous()
        assert torch.equal(decode(b, good), vq.decode(b, good))
        for wrong in (K, -2):
            with pytest.raises(IndexError):
                decode(b, torch.tensor(wrong).expand(4, *heads).contiguous())
