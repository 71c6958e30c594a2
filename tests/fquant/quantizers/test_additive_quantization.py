"""Tests of fquant.quantizers.additive_quantization: scales, search and means against float64, importance, errors."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from fquant import random, tree
from fquant.format import AQ_2X8, AQ_3X8, NF4, Vectors
from fquant.kernels.additive_codebooks import look_up
from fquant.lazy import Lazy
from fquant.packed import Packed, dequantize, quantize
from fquant.quantizers import additive_quantization
from tests.helpers.formats import alike

ONE = replace(AQ_2X8, name="one", vectors=Vectors(4, 1))
BLOCKS = replace(AQ_3X8, block=32)
formats = pytest.mark.parametrize("format", [AQ_2X8, AQ_3X8, ONE, BLOCKS], ids=["aq_2x8", "aq_3x8", "one", "blocks"])


def normal(name, *shape):
    return random.normal(random.fold(random.key(11), name), shape)


def weight(*shape):
    """Draw rows of many sizes with elements of many magnitudes."""
    w = normal("w", *shape) * normal("size", *shape).exp()
    return w * torch.linspace(0.1, 3, w[..., :1].numel()).reshape(*shape[:-1], 1)


def groups(p, w, importance=None):
    """Return in float64 the groups of w in units of its scales, the weights of elements, and p's values."""
    how, (*_, width) = p.format.vectors, p.shape
    block = p.format.block or width
    scale = p.scale.double().repeat_interleave(block, -1)[..., :width]
    pad = partial(torch.nn.functional.pad, pad=(0, -width % how.dim))
    near = torch.ones(p.shape, dtype=torch.float64) if importance is None else importance.double().expand(p.shape)
    split = lambda t: pad(t).reshape(-1, how.dim)
    return split(w.double() / scale), split(near), split(look_up(p.codes, p.vectors, p.format)[..., :width].double())


def list_of(p):
    """Return the vectors f64[stages 256 D]."""
    assert p.vectors is not None
    return p.vectors.double().view(p.format.vectors.stages, 256, p.format.vectors.dim)


def beam(x, near, tables, width):
    """Return the least error of a group x [D] that a beam finds, one candidate at a time."""
    kept = [(0.0, x)]
    for i, table in enumerate(tables):
        found = []
        for _, left in kept:
            error = (near * (left - table).square()).sum(-1)
            found += [(error[k].item(), left - table[k]) for k in error.argsort()[:width].tolist()]
        kept = sorted(found, key=lambda one: one[0])[: width if i < len(tables) - 1 else 1]
    return kept[0][0]


@pytest.mark.parametrize("weighted", [False, True], ids=["", "importance"])
@pytest.mark.parametrize("width", [64, 77])
@formats
def test_codes_are_those_of_a_search_in_float64(format, width, weighted):
    w = weight(160, width)
    importance = normal("i", width).square() if weighted else None
    p = quantize(w, format, importance)
    x, near, chosen = groups(p, w, importance)
    tables = list_of(p)
    got = (near * (x - chosen).square()).sum(-1)
    for row in range(0, len(x), 29):
        found = beam(x[row], near[row], tables, additive_quantization.BEAM)
        assert got[row].item() == pytest.approx(found, rel=1e-4, abs=1e-5 * near[row].max().item()), row


@pytest.mark.parametrize("weighted", [False, True], ids=["", "importance"])
@formats
def test_the_last_stage_is_the_nearest(format, weighted):
    w = weight(40, 64)
    importance = normal("i", 40, 64).square() if weighted else None
    p = quantize(w, format, importance)
    x, near, chosen = groups(p, w, importance)
    tables, stages = list_of(p), format.vectors.stages
    others = chosen - tables[-1][p.codes.reshape(-1, stages)[:, -1].long()]
    every = (near[:, None] * (x[:, None] - others[:, None] - tables[-1]).square()).sum(-1)
    got = (near * (x - chosen).square()).sum(-1)
    torch.testing.assert_close(got, every.min(1).values, rtol=1e-4, atol=1e-5)


def test_the_search_is_nearly_exhaustive():
    """Compare with all 65536 sums; a greedy choice of each stage in turn is much worse."""
    w = normal("w", 64, 512)
    p = quantize(w, AQ_2X8)
    x, _, chosen = (t[::64] for t in groups(p, w))
    first, second = list_of(p)
    sums = (first[:, None] + second).flatten(0, 1)
    best = torch.cdist(x, sums).min(1).values.square().mean().item()
    left = x - first[torch.cdist(x, first).argmin(1)]
    greedy = torch.cdist(left, second).min(1).values.square().mean().item()
    got = (x - chosen).square().sum(-1).mean().item()
    assert best <= got <= 1.1 * best and got < 0.95 * greedy


def test_every_step_lowers_the_error(monkeypatch):
    w, found = normal("w", 128, 512), {}
    for rounds, width in itertools.product((0, 3), (1, 4)):
        monkeypatch.setattr(additive_quantization, "ROUNDS", rounds)
        monkeypatch.setattr(additive_quantization, "BEAM", width)
        found[rounds, width] = (w - dequantize(quantize(w, AQ_2X8))).square().mean().item()
    assert found[3, 4] < found[0, 4] < found[0, 1] and found[3, 4] < found[3, 1] < found[0, 1]


@pytest.mark.parametrize("format, scalar", [(AQ_2X8, 0.1175), (AQ_3X8, 0.03454)], ids=["aq_2x8", "aq_3x8"])
def test_better_than_any_table_of_numbers(format, scalar):
    """Compare at equal bits on normal weights with Max, Quantizing for minimum distortion, 1960, table 1."""
    w = normal("w", 128, 512)
    assert (w - dequantize(quantize(w, format))).square().mean() < 0.95 * scalar * w.square().mean()


@formats
def test_means_of_groups(format):
    """Each stage moves in turn to the means of the others' residuals, with rows weighted by their size."""
    w = weight(200, 64)
    stages, scale = format.vectors.stages, additive_quantization.scales(w, format)
    some = additive_quantization._pick(torch.arange(w.numel() // format.vectors.dim), w, scale, format, None)
    vectors = additive_quantization._vectors(some, stages, random.key(0))
    codes = additive_quantization._search(some, vectors)
    moved = additive_quantization._refined(some, codes, vectors)
    x, size = some.x.double(), some.mass.double()
    torch.testing.assert_close(
        size[:, 0].sqrt(), (scale / scale.max()).repeat_interleave(len(x) // scale.numel()).double()
    )
    of = lambda table, stage: table[stage].double()[codes[:, stage].long()]
    for stage in range(stages):
        left = x - sum(of(moved if i < stage else vectors, i) for i in range(stages) if i != stage)
        for code in range(0, 256, 5):
            mine = codes[:, stage] == code
            wanted = (left * size)[mine].sum(0) / size[mine].sum() if mine.any() else vectors[stage, code].double()
            torch.testing.assert_close(moved[stage, code].double(), wanted, rtol=1e-4, atol=1e-5)
    error = lambda table: ((x - sum(of(table, i) for i in range(stages))).square() * size).sum()
    assert error(moved) <= error(vectors)


# --- scales -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 1e-42, 1e-20, 1e30], ids=str)
@pytest.mark.parametrize("format", [AQ_2X8, replace(AQ_2X8, block=32)], ids=["row", "block"])
def test_scales_are_root_mean_squares(format, size, monkeypatch):
    monkeypatch.setattr(additive_quantization, "CHUNK", 20)  # some rows at a time
    w = normal("w", 9, 77) * size
    w[3] = 0
    block = format.block or 77
    wanted = torch.stack([part.double().square().mean(-1).sqrt() for part in w.split(block, -1)], -1)
    torch.testing.assert_close(additive_quantization.scales(w, format).double(), wanted, rtol=1e-5, atol=3e-45)


@formats
def test_rows_of_zeros_and_of_any_size(format):
    w = normal("w", 12, 77)
    w[4] = 0
    w = w * torch.tensor([1e-30, 1, 1e25, 1e-8] * 3)[:, None]
    got = dequantize(quantize(w, format))
    assert got.isfinite().all() and not got[4].any()
    error = (w.double() - got).square().sum(-1) / w.double().square().sum(-1).clamp(min=1e-300)
    assert error.max() < 0.7  # few groups weigh anything in the means, but every one is searched for


# --- what it is given -------------------------------------------------------------------------------------------------


@formats
def test_fewer_groups_than_vectors_are_all_kept(format):
    w = weight(6, 32)
    torch.testing.assert_close(dequantize(quantize(w, format)), w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(40, 77), (3, 20, 64), (1, 4096)], ids=str)
@formats
def test_shapes_and_dtypes(format, shape, dtype):
    w = weight(*shape).to(dtype)
    p = quantize(w, format)
    stages, dim = format.vectors.stages, format.vectors.dim
    assert p.codes.shape == (*shape[:-1], -(-shape[-1] // dim) * stages) and p.codes.dtype == torch.uint8
    assert p.scale.shape == (*shape[:-1], -(-shape[-1] // format.block) if format.block else 1)
    assert [(t.shape, t.dtype) for t in tree.leaves(p)[2:]] == [((stages * 256 * dim,), torch.float32)]
    assert p.scale.dtype == torch.float32
    wide = quantize(w.float(), format)
    assert all(map(alike, tree.leaves(p), tree.leaves(wide)))
    assert dequantize(p).dtype == dtype and alike(dequantize(p), dequantize(wide).to(dtype))
    assert alike(dequantize(quantize(w.T.contiguous().T if w.ndim == 2 else w, format)), dequantize(p))


def test_the_same_again_and_of_some_of_the_groups(monkeypatch):
    w = normal("w", 256, 128)
    whole = quantize(w, AQ_2X8)
    assert all(map(alike, tree.leaves(whole), tree.leaves(quantize(w, AQ_2X8))))
    monkeypatch.setattr(additive_quantization, "SAMPLE", 2048)
    some = quantize(w, AQ_2X8)
    assert not torch.equal(some.vectors, whole.vectors)
    error = lambda p: (w - dequantize(p)).square().mean()
    assert error(whole) < error(some) < 1.6 * error(whole)
    numbers = additive_quantization._sample(random.key(0), 4096)
    assert torch.equal(numbers // 2, torch.arange(2048)) and 900 < (numbers % 2).sum() < 1150


def test_meta_and_lazy():
    w, importance = weight(12, 77).bfloat16(), normal("i", 77).square()
    p, meta = quantize(w, AQ_3X8, importance), quantize(w.to("meta"), AQ_3X8, importance.to("meta"))
    assert tree.structure(p) == tree.structure(meta)
    assert all(b.is_meta and a.shape == b.shape and a.dtype == b.dtype
               for a, b in zip(tree.leaves(p), tree.leaves(meta), strict=True))  # fmt: skip
    assert dequantize(meta).is_meta and dequantize(meta).shape == w.shape
    lazy = quantize(Lazy(lambda: w, w, lambda: "stamp"), AQ_3X8, importance)
    assert isinstance(lazy, Lazy) and all(map(alike, tree.leaves(lazy.read()), tree.leaves(p)))


# --- importance -------------------------------------------------------------------------------------------------------


def test_importance_lowers_the_error_of_outputs():
    """Use correlated inputs, larger in some columns than in others."""
    w = normal("w", 128, 256)
    mix = torch.eye(256) + 0.3 * normal("mix", 256, 256) / 16
    x = (normal("x", 2000, 256) @ mix) * torch.linspace(-2, 2, 256).exp()[random.permutation(random.key(0), 256)]
    importance = x.square().mean(0)
    of_outputs = lambda p: ((x @ (w - dequantize(p)).T).square().sum() / (x @ w.T).square().sum()).item()
    of_weights = lambda p: (w - dequantize(p)).square().sum().item()
    plain, aware = quantize(w, AQ_2X8), quantize(w, AQ_2X8, importance)
    assert of_outputs(aware) < 0.6 * of_outputs(plain) and of_weights(aware) > of_weights(plain)
    whole = quantize(w, AQ_2X8, importance.expand(w.shape))
    assert all(map(alike, tree.leaves(aware), tree.leaves(whole)))


def test_importance_of_ones_and_of_nothing():
    w = weight(64, 64)
    error = lambda p, some=slice(None): (w - dequantize(p))[:, some].square().sum().item()
    plain = quantize(w, AQ_2X8)
    assert error(quantize(w, AQ_2X8, torch.ones(64))) == pytest.approx(error(plain), rel=0.1)
    half = torch.arange(64) % 8 < 4  # as if vectors were of 4 elements
    assert error(quantize(w, AQ_2X8, half.float()), half) < 0.2 * error(plain, half)
    rows = torch.ones(64, 64)
    rows[32:] = 1e-6  # of which vectors learn nothing
    aware = quantize(w, AQ_2X8, rows)
    assert (w - dequantize(aware))[:32].square().sum() < 0.8 * (w - dequantize(plain))[:32].square().sum()


W = torch.ones(4, 16)
BAD = {
    "no vectors": ((W, NF4, torch.ones(16)), "nf4 has no use for importance; leave it out, or quantize to a format of"),
    "shape": ((W, AQ_2X8, torch.ones(4)), r"importance: got float32 \(4,\) on cpu; wanted floats \(16,\) or \(4, 16\)"),
    "integers": ((W, AQ_2X8, torch.ones(16, dtype=torch.int64)), r"importance: got int64 \(16,\) on cpu; wanted"),
    "device": ((W, AQ_2X8, torch.ones(16, device="meta")), r"importance: got float32 \(16,\) on meta; wanted floats"),
    "negative": ((W, AQ_2X8, torch.linspace(-1, 1, 16)), "importance: got a value that is negative or not finite"),
    "infinite": ((W, AQ_2X8, torch.full((16,), torch.inf)), "importance: got a value that is negative or not finite"),
    "zeros": ((W, AQ_2X8, torch.zeros(16)), "importance: got a value that is .* or zeros only; wanted"),
}  # fmt: skip


@pytest.mark.parametrize("given, message", BAD.values(), ids=BAD)
def test_importance_refused(given, message):
    with pytest.raises(ValueError, match=message):
        quantize(*given)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@formats
def test_values_that_are_not_finite(format, bad):
    w = weight(4, 100)
    w[2, 70] = bad
    message = "^layers.q: 1 of 400 values are NaN or infinite, the first at row 2, column 70; a quantised weight must"
    with pytest.raises(ValueError, match=message):
        tree.map_at("layers.q", partial(quantize, format=format), {"layers": {"q": w}})


FORMATS = {
    "bits": (
        dict(bits=4, block=64),
        "mine: (codes without a table are int8, so bits is 8 and not 4|bits is 4; a code)",
    ),
    "table": (dict(table=(0.0,) * 256), "mine: learned vectors do not combine with table; leave it out"),
    "scale": (dict(scale=NF4), "mine: learned vectors do not combine with scale; leave it out"),
    "flat": (dict(flat=True), "mine: learned vectors do not combine with flat; leave it out"),
    "center": (dict(center=True), "mine: learned vectors do not combine with center; leave it out"),
    "block": (dict(block=32, vectors=Vectors(5, 2)), "mine: block is 32; wanted whole vectors of 5 elements"),
}


@pytest.mark.parametrize("change, message", FORMATS.values(), ids=FORMATS)
def test_what_a_format_of_vectors_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        replace(AQ_2X8, name="mine", **change)


@pytest.mark.parametrize("sizes", [(0, 2), (8, 0), (-1, 1)])
def test_vectors_of_no_size(sizes):
    with pytest.raises(ValueError, match=r"vectors: (dim|stages) is (0|-1); wanted at least 1"):
        Vectors(*sizes)


def test_a_packed_array_of_vectors_is_a_packed_array():
    assert isinstance(quantize(weight(4, 16), AQ_2X8), Packed)
    assert AQ_2X8.text == "aq_2x8" and replace(AQ_3X8, block=64).text == "aq_3x8:64"


def test_the_search_starts_as_before_the_renaming_of_formats(monkeypatch):
    """The key's text holds the format's former name, so adapters trained beside older codes still fit."""
    w, texts, fold = weight(2, 96), [], random.fold
    monkeypatch.setattr(random, "fold", lambda key, data: texts.append(data) or fold(key, data))
    for format in (AQ_2X8, replace(AQ_3X8, block=32)):
        quantize(w, format)
    assert [text for text in texts if isinstance(text, str)] == ["vq2", "sample", "vq3:32", "sample"]
