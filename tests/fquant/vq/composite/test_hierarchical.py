"""Hierarchical quantisation: equality with vector-quantize-pytorch from the same state; masks, dropout, sharing."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

from fquant import random, tree, vq
from fquant.io import safetensors
from fquant.vq import mean
from fquant.vq.composite import hierarchical
from tests.helpers.vq.peers import assert_close, drawn

with warnings.catch_warnings(action="ignore"):
    import vector_quantize_pytorch as peer

D, K, B = 4, 9, 3
LINE, PLANE = (1, 2, 5, 12), ((1, 1), (2, 3), (4, 6))
CASES = {  # places, our options, the peer's
    "line": ((12,), {"scales": LINE}, {}),
    "line, longer": ((17,), {"scales": LINE, "blend": 0.3}, {"quant_resi": 0.3}),
    "plane": ((4, 6), {"scales": PLANE, "spatial": 2}, {}),
    "plane, a convolution each": (
        (5, 7), {"scales": PLANE, "spatial": 2, "convs": 3, "num_codes": (5, 9, 7)}, {"share_quant_resi": 0}
    ),
    "plane, two": ((5, 7), {"scales": (1, 2, 3, 4, 4), "spatial": 2, "convs": 2}, {"share_quant_resi": 2}),
    "plain": ((12,), {"scales": LINE, "blend": 0.0}, {"quant_resi": 0.0}),
    "volume": ((2, 4, 3), {"scales": (1, 2), "spatial": 3}, {}),
}  # fmt: skip


def spread(state):
    books = [replace(b, codes=c, sums=c.clone()) for i, b in enumerate(state.books)
             for c in [drawn(*b.codes.shape, seed=40 + i)]]  # fmt: skip
    return replace(state, books=books)


def pair(named=None, *, num_codes=K, shared=False, **options) -> Any:
    state = spread(hierarchical.init(3, num_codes, D, shared=shared, **options))
    torch.manual_seed(1)
    with warnings.catch_warnings(action="ignore"):
        them: Any = peer.HierarchicalVQ(
            dim=D, codebook_size=num_codes, scales=options["scales"], shared_codebook=shared, channel_first=False,
            kmeans_init=False, threshold_ema_dead_code=0, decay=0.8, accept_image_fmap=options.get("spatial") == 2,
            accept_3d_fmap=options.get("spatial") == 3, **(named or {}),
        )  # fmt: skip
    for book, quantizer in zip(state.books, quantizers(them), strict=True):
        quantizer._codebook.embed.data.copy_(book.codes[None])
        quantizer._codebook.embed_avg.data.copy_(book.codes[None])
    for conv, phi in zip(state.params, convs(them) if state.params else [], strict=True):
        phi.weight.data.copy_(conv.weight)
        phi.bias.data.copy_(conv.bias)
    return state, them.train()


def quantizers(them):
    return [them.vq] if them.vq is not None else list(them.vqs)


def convs(them):
    return [phi.conv for phi in ([them.phi_shared] if them.phi_shared is not None else them.phi_levels)]


def freeze(them):
    for quantizer in quantizers(them):
        quantizer.freeze_codebook = True  # because averages overwrite tensors saved by autograd, even between scales


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("places, options, named", CASES.values(), ids=CASES)
def test_it_is_the_peers(places, options, named, shared):
    if shared and "num_codes" in options:
        options = {**options, "num_codes": K}
    state, them = pair(named, shared=shared, **options)
    freeze(them)
    x, weight = drawn(B, *places, D), drawn(B, *places, D, seed=3)
    theirs = x.clone().requires_grad_()
    out, codes, loss = them(theirs)
    ((out * weight).sum() + loss).backward()

    def total(params, x):
        got = hierarchical.apply(replace(state, params=params), x)
        commitment = mean(got.losses["commitment"]).mean()
        return (got.x * weight).sum() + commitment, (got, commitment)

    (by_params, by_x), (got, commitment) = grad(total, (0, 1), has_aux=True)(state.params, x)
    for one, other, again in zip(got.codes, codes, hierarchical.encode(state, x), strict=True):
        assert torch.equal(one, other) and torch.equal(one, again)
    assert len(codes[-1].unique()) > 3
    decoded = them.eval().get_output_from_indices(codes, places)
    assert_close((got.x, hierarchical.decode(state, codes, places)), (out.detach(), decoded.detach()))
    assert_close((commitment, by_x), (loss.detach(), theirs.grad))
    for one, other in zip(by_params, convs(them) if by_params else [], strict=True):
        assert_close((one.weight, one.bias), (other.weight.grad, other.bias.grad))


def test_averages_are_the_peers():
    state, them = pair(scales=LINE)
    for step in range(5):
        x = drawn(B, 12, D, seed=step)
        out, codes, _ = them(x)
        got = hierarchical.apply(state, x)
        assert all(torch.equal(one, other) for one, other in zip(got.codes, codes, strict=True))
        assert_close(got.x, out.detach())
        state = hierarchical.update(state, got.stats)
        for book, quantizer in zip(state.books, quantizers(them), strict=True):
            code = quantizer._codebook
            assert_close(
                (book.codes, book.counts, book.sums),
                tuple(t[0] for t in (code.embed, code.cluster_size, code.embed_avg)),
            )


def test_a_shared_book_learns_once_from_all_cells():
    """In the peer one scale's averages move the codes that the next scale of the same batch is compared with."""
    one = spread(hierarchical.init(3, K, D, LINE, blend=0.0))
    four = replace(one, books=one.books * 4)
    x = drawn(B, 12, D)
    got, apart = hierarchical.apply(one, x), hierarchical.apply(four, x)
    assert torch.equal(got.x, apart.x)
    stats = vq.add(*apart.stats.books)
    assert_close(got.stats.books, [stats])
    assert_close(hierarchical.update(one, got.stats).books[0], vq.ema(one.books[0], stats))
    assert [float(s.kept) for s in apart.stats.books] == [B * n for n in LINE]


@pytest.mark.parametrize("lengths", [(12, 12, 12), (12, 5, 1)])
@pytest.mark.parametrize("shared", [False, True])
def test_masks_are_the_peers(lengths, shared):
    state, them = pair(scales=LINE, shared=shared)
    freeze(them)
    x, mask = drawn(B, 12, D), vq.mask(torch.tensor(lengths), 12)
    out, codes, loss = them(x, lens=torch.tensor(lengths))
    dirty = torch.where(mask[..., None], x, torch.nan)
    got = hierarchical.apply(state, dirty, mask=mask)
    for one, other, again in zip(got.codes, codes, hierarchical.encode(state, dirty, mask), strict=True):
        assert torch.equal(one, other) and torch.equal(one, again)
    assert_close((got.x, mean(got.losses["commitment"]).mean()), (out.detach(), loss.detach()))
    assert sum(s.kept for s in got.stats.books) == sum((c >= 0).sum() for c in codes) and got.stats.lost == 0
    assert all(s.lost == 0 for s in got.stats.books)
    slope = grad(lambda x: hierarchical.apply(state, x, mask=mask).x.sum())(dirty)
    assert slope.isfinite().all() and not slope[~mask].any() and slope[mask].any()


@pytest.mark.parametrize("shared", [False, True])
def test_rows_that_are_not_finite_are_as_masked_out(shared):
    state = spread(hierarchical.init(0, K, D, PLANE, spatial=2, shared=shared))
    x, mask = drawn(B, 4, 6, D), torch.ones(B, 4, 6, dtype=torch.bool)
    mask[0, :, 4:], mask[1, 2, 2], mask[2] = False, False, False
    bad = torch.where(mask[..., None], x, torch.inf)
    got, wanted = hierarchical.apply(state, bad), hierarchical.apply(state, x, mask=mask)
    assert_close((got.x, got.losses, got.stats.books), (wanted.x, wanted.losses, wanted.stats.books), 0.0)
    assert got.stats.lost == (~mask).sum() and wanted.stats.lost == 0
    assert all((codes[2] == -1).all() for codes in got.codes) and not got.x[2].any()
    assert_close(hierarchical.decode(state, got.codes, (4, 6)) * mask[..., None], got.x)


def test_a_cell_is_the_mean_of_its_rows():
    """A naive loop over scales and cells gives the same, with a mask."""
    state = spread(hierarchical.init(0, K, D, (1, 3, 8), blend=0.0))
    x, mask = drawn(2, 8, D).double(), torch.rand(2, 8, generator=torch.Generator().manual_seed(3)) > 0.4
    got, left = hierarchical.apply(state, x.float(), mask=mask), x.clone()
    for size, codes in zip((1, 3, 8), got.codes, strict=True):
        q = torch.zeros(2, size, D, dtype=torch.float64)
        for b in range(2):
            for cell in range(size):
                among = [i for i in range(cell * 8 // size, -(-(cell + 1) * 8 // size)) if mask[b, i]]
                if among:
                    far = (state.books[0].codes - left[b, among].mean(0)).square().sum(-1)
                    assert codes[b, cell] == far.argmin()
                    q[b, cell] = state.books[0].codes[far.argmin()]
                else:
                    assert codes[b, cell] == -1
        left = left - F.interpolate(q.mT, size=8, mode="linear").mT
    assert_close(got.x.double(), torch.where(mask[..., None], x - left, 0), 1e-5)


def test_nested_dropout_leaves_the_last_scales_out():
    state = spread(hierarchical.init(0, K, D, LINE, dropout=0.7, least=2, shared=False))
    x, seen = drawn(B, 12, D), []
    for seed in range(40):
        key = random.key(seed)
        depth = int(hierarchical.draw_depth(state, key))
        seen.append(depth)
        got = hierarchical.apply(state, x, key)
        short = replace(state, scales=LINE_OF(depth), books=state.books[:depth], dropout=0.0)
        wanted = hierarchical.apply(short, x)
        assert all(torch.equal(*both) for both in zip(got.codes, wanted.codes, strict=False))
        assert all((codes == -1).all() for codes in got.codes[depth:])
        assert torch.equal(got.x, wanted.x)
        assert_close(hierarchical.decode(state, got.codes), got.x)
        assert_close(got.losses["commitment"].sum[:depth], wanted.losses["commitment"].sum)
        assert not got.losses["commitment"].count[depth:].any()
        after = hierarchical.update(state, got.stats)
        assert all(
            torch.equal(a.counts, b.counts) for a, b in zip(after.books[depth:], state.books[depth:], strict=True)
        )
    assert set(seen) == {2, 3, 4} and 5 <= seen.count(4) <= 20
    each = hierarchical.apply(state, x, depth=torch.tensor([2, 4, 3]))
    for i, depth in ((0, 2), (2, 3)):
        alone = hierarchical.apply(state, x[i], depth=torch.tensor(depth))
        assert_close(each.x[i], alone.x, 1e-6)  # a convolution of one example sums in another order
        assert all(torch.equal(one[i], other) for one, other in zip(each.codes, alone.codes, strict=True))


def LINE_OF(depth):
    return tuple((n,) for n in LINE[:depth])


@pytest.mark.parametrize("shared", [False, True])
def test_dead_codes_start_at_cells(shared):
    state = spread(hierarchical.init(0, 5, D, (1, 4, 12), shared=shared, blend=0.0))
    x = drawn(20, 12, D)
    got = hierarchical.apply(state, x, random.key(1), draw=True)
    after = hierarchical.update(state, got.stats, threshold=1e4)
    cells, left = [], x
    for i, n in enumerate((1, 4, 12)):
        cells.append(F.adaptive_avg_pool1d(left.mT, n).mT.reshape(-1, D))
        each = [c if j == i else torch.full_like(c, -1) for j, c in enumerate(got.codes)]
        left = left - hierarchical.decode(state, each)
    for i, book in enumerate(after.books):
        among = torch.cat(cells) if shared else cells[i]
        found = torch.cdist(book.codes.double(), among.double()).min(1)
        assert (book.counts == 1e4).all() and found.values.max() < 1e-5 and len(set(found.indices.tolist())) == 5


def test_any_dims_go_before_the_places_and_files_keep_it(tmp_path):
    state = spread(hierarchical.init(0, K, D, PLANE, spatial=2, convs=2, shared=False))
    x = drawn(2, 3, 4, 6, D)
    got = hierarchical.apply(state, x)
    assert [tuple(c.shape) for c in got.codes] == [(2, 3, *s) for s in PLANE]
    alone = hierarchical.apply(state, x[1, 2])
    assert_close(alone.x, got.x[1, 2], 1e-6)
    assert torch.equal(alone.codes[2], got.codes[2][1, 2])
    none = hierarchical.apply(state, x[:0])
    assert none.x.shape == hierarchical.decode(state, none.codes).shape == (0, 3, 4, 6, D)
    assert hierarchical.apply(state, x.bfloat16()).x.dtype is torch.bfloat16
    safetensors.save(tmp_path / "a", {"state": state, "stats": got.stats})
    back = safetensors.load(tmp_path / "a")
    assert tree.structure(back["state"]) == tree.structure(state)
    assert_close(hierarchical.update(back["state"], back["stats"]), hierarchical.update(state, got.stats), 0.0)


STATE = hierarchical.init(0, K, D, LINE)
WRONG = {
    "spatial": (lambda: hierarchical.init(0, K, D, LINE, spatial=4), "spatial is 4; wanted 1, 2 or 3"),
    "scales": (lambda: hierarchical.init(0, K, D, ((1, 2),)), r"are \(\(1, 2\),\); wanted at least one, each of 1"),
    "no scales": (lambda: hierarchical.init(0, K, D, ()), "wanted at least one"),
    "smaller": (lambda: hierarchical.init(0, K, D, (2, 1)), r"scale \(1,\) follows \(2,\); wanted none smaller"),
    "sizes": (lambda: hierarchical.init(0, (3, 4), D, (1, 2)), r"num_codes is \(3, 4\); wanted one number"),
    "number": (lambda: hierarchical.init(0, (3,), D, (1, 2), shared=False), "wanted 2, one for each scale"),
    "blend": (lambda: hierarchical.init(0, K, D, LINE, blend=2.0), r"blend is 2.0, .* wanted \[0, 1\]"),
    "convs": (lambda: hierarchical.init(0, K, D, LINE, convs=5), "convs 5, .* 1 to 4"),
    "last dim": (lambda: hierarchical.apply(STATE, drawn(2, 12, 5)), r"x is \(2, 12, 5\); wanted 4 in the last dim"),
    "dims": (lambda: hierarchical.apply(STATE, drawn(4)), r"x is \(4,\); wanted \[... places dim\]"),
    "mask": (lambda: hierarchical.apply(STATE, drawn(2, 12, D), mask=torch.ones(3).bool()), r"mask is \(3,\) beside x"),
    "depth": (lambda: hierarchical.apply(STATE, drawn(2, 12, D), depth=torch.ones(3).long()), r"depth is torch.int64"),
    "key": (lambda: hierarchical.apply(STATE, drawn(2, 12, D), torch.zeros(2).long()), r"key is \(2,\)"),
    "codes": (lambda: hierarchical.decode(STATE, [torch.zeros(2, 1).long(), torch.zeros(2, 3).long()]), r"codes.1 are"),
    "many": (lambda: hierarchical.decode(STATE, [torch.zeros(2, 1).long()] * 5), "got codes of 5 scales for places"),
    "stats": (lambda: hierarchical.update(STATE, hierarchical.Levels([], torch.zeros(()))), "got stats of 0 books"),
}  # fmt: skip


@pytest.mark.parametrize("f, message", WRONG.values(), ids=WRONG)
def test_contradictions_are_refused(f, message):
    with pytest.raises(ValueError, match=message):
        f()
