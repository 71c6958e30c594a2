"""Tests of fquant.lazy: planning reads nothing, and reading gives the same values."""

import pytest
import torch

from fquant import lazy, lora, packed, tree
from fquant.format import NF4_DQ
from fquant.lazy import Lazy
from fquant.packed import Packed, dequantize, quantize
from tests.helpers.arrays import same_bits
from tests.helpers.formats import KNOWN


def source(w, log, stamp="w"):
    return Lazy(lambda: log.append(stamp) or w, w.to("meta"), lambda: stamp)


W = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))


def test_map_reads_late_and_plans_early():
    log = []
    x = lazy.map(lambda t: t[:2] * 2, source(W, log))
    assert log == [] and x.like.is_meta and x.like.shape == (2, 100)
    assert torch.equal(x.read(), W[:2] * 2) and log == ["w"]
    assert x.stamp() == "w"  # a derived Lazy keeps the stamp of its source
    twice = lazy.map(lambda t: t.bfloat16(), x)
    assert twice.like.dtype == torch.bfloat16 and log == ["w"]
    x.read()
    assert log == ["w", "w"]  # nothing is kept


@pytest.mark.parametrize("format", KNOWN.values(), ids=KNOWN)
def test_quantising_by_rows_changes_no_byte(format, monkeypatch):
    """Read a few rows at a time where the format allows it; the last part is shorter."""
    monkeypatch.setattr(packed, "PIECE", 7 * 300 * 4)
    w, seen = torch.randn(40, 300, generator=torch.Generator().manual_seed(1)), []
    w[3] = w[20] = 0.0
    lazily = Lazy(lambda: seen.append("all") or w, w.to("meta"), str, lambda rows: seen.append(rows.start) or w[rows])
    got, wanted = quantize(lazily, format), quantize(w, format)
    assert tree.structure(got.like) == tree.structure(wanted)
    assert all(map(same_bits, tree.leaves(got.read()), tree.leaves(wanted)))
    assert seen == ([0, 7, 14, 21, 28, 35] if format.rows_alone else ["all"])
    assert got.rows is None


@pytest.mark.parametrize("format", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("by_rows", [False, True])
def test_what_is_quantised_on_a_device_has_the_bytes_of_the_host(format, by_rows, device, monkeypatch):
    """GPUs learn vectors in another order, and the last bit of a mean is another there: these have other bytes."""
    monkeypatch.setattr(packed, "PIECE", 7 * 300 * 4)
    monkeypatch.setattr(packed, "LARGE_PIECE", 11 * 300 * 4)
    w = torch.randn(40, 300, generator=torch.Generator().manual_seed(2))
    w[3] = w[20] = 0.0
    w[5] *= 1e-30
    there = w.to(device)
    lazily = Lazy(lambda: there, w.to("meta"), rows=(lambda rows: there[rows]) if by_rows else None, device=device)
    got, wanted = quantize(lazily, format), quantize(w, format)
    assert got.device == device
    read = got.read()
    assert {leaf.device for leaf in tree.leaves(read)} == {device}
    centred = format.center or (format.scale is not None and format.scale.center)
    back = tree.map(lambda t: t.cpu(), read)
    if device.type == "cpu" or not (format.vectors or centred):
        assert all(map(same_bits, tree.leaves(back), tree.leaves(wanted)))
    elif centred:
        torch.testing.assert_close(dequantize(back), dequantize(wanted), rtol=1e-2, atol=1e-3)


def test_an_error_by_rows_names_the_row_of_the_whole(monkeypatch):
    monkeypatch.setattr(packed, "PIECE", 1000)
    w = W.repeat(5, 1)
    w[23, 7] = float("nan")
    lazily = Lazy(lambda: w, w.to("meta"), rows=lambda rows: w[rows])
    with pytest.raises(ValueError, match="1 of 3000 values are NaN or infinite, the first at row 23, column 7"):
        quantize(lazily, NF4_DQ).read()


def test_the_default_stamp_is_empty():
    assert Lazy(lambda: W, W.to("meta")).stamp() == ""


def test_a_lazy_is_an_opaque_leaf():
    params = {"a": source(W, []), "b": [torch.ones(2)]}
    assert tree.paths(params) == ["a", "b.0"]
    assert tree.leaves(params)[0] is params["a"]


def test_read_and_like_of_a_tree():
    log = []
    params = {"a": source(W, log, "a"), "b": [quantize(source(W, log, "b"), NF4_DQ), torch.ones(2)], "n": [W]}
    like = lazy.like(params)
    assert log == []
    assert (
        all(t.is_meta for t in tree.leaves(like)) and like["b"][0].format == NF4_DQ and like["b"][0].shape == (6, 100)
    )
    real = lazy.read(params)
    assert sorted(log) == ["a", "b"]
    assert torch.equal(real["a"], W) and real["n"][0] is W and real["b"][1] is params["b"][1]
    assert isinstance(real["b"][0], Packed)
    assert torch.equal(dequantize(real["b"][0]), dequantize(quantize(W, NF4_DQ)))
    assert tree.structure(like) == tree.structure(real)
    for a, b in zip(tree.leaves(like), tree.leaves(real), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_an_error_of_reading_has_its_path():
    bad = W.clone()
    bad[1, 2] = torch.nan
    params = {"layers": [{"q": quantize(source(W, []), NF4_DQ)}, {"q": quantize(source(bad, []), NF4_DQ)}]}
    with pytest.raises(
        ValueError, match=r"^layers\.1\.q: 1 of 600 values are NaN or infinite, the first at row 1, column 2"
    ):
        lazy.read(params)


def test_adapters_are_planned_without_reading():
    log = []
    adapters = lora.init({"q": quantize(source(W, log), NF4_DQ)}, "q", rank=2)
    assert log == [] and adapters["q"].a.shape == (2, 100) and adapters["q"].b.shape == (6, 2)


def test_stacks_are_read_part_by_part():
    """A stack holds a part at a time; quantised, its parts are packed one by one."""
    log = []
    stack = lazy.stack([source(W + i, log, f"w{i}") for i in range(3)])
    packed = quantize(stack, NF4_DQ)
    assert log == [] and stack.like.shape == (3, 6, 100) and len(stack.parts) == len(packed.parts) == 3
    assert torch.equal(stack.read(), torch.stack([W, W + 1, W + 2])) and log == ["w0", "w1", "w2"]
    got, wanted = packed.read(), tree.map(lambda *t: torch.stack(t), *[quantize(W + i, NF4_DQ) for i in range(3)])
    assert tree.structure(got) == tree.structure(wanted) == tree.structure(packed.like)
    assert all(map(torch.equal, tree.leaves(got), tree.leaves(wanted)))
    assert lazy.map(lambda t: t[0], stack).parts == () and stack.stamp() == lazy.stack(stack.parts).stamp()
    assert stack.stamp() != lazy.stack(stack.parts[::-1]).stamp()


def test_rows_are_concatenated():
    log = []
    rows = lazy.concatenate([source(W, log, "a"), source(W[:2], log, "b")])
    assert log == [] and rows.like.shape == (8, 100) and torch.equal(rows.read(), torch.cat([W, W[:2]]))
    assert rows.stamp() != source(W, log, "a").stamp()
    assert lazy.concatenate([one := source(W, log)]) is one


def test_parts_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"part 1 of a stack is \[\(torch.float32, \(5, 100\)\)\], want .*\(6, 100\)"):
        lazy.stack([source(W, []), source(W[:5], [])])
    for other in (W.bfloat16(), W[:, :50]):
        with pytest.raises(ValueError, match="tensors of rows have .*, want one dtype and width"):
            lazy.concatenate([source(W, []), source(other, [])])
