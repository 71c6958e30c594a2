"""Tests of fquant.io.lazy_tree against fquant.io.safetensors, whose files it writes and reads."""

from functools import partial

import pytest
import torch

from fquant import dequantize, lazy, quantize, random, tree
from fquant.format import AQ_2X8, FP8, INT4_ZERO, INT8, NF4_DQ
from fquant.io import lazy_tree, safetensors
from fquant.lazy import Lazy
from fquant.packed import Packed
from tests.helpers.arrays import same_bits

FOUND = [NF4_DQ, INT8, INT4_ZERO, FP8, AQ_2X8]


def weight(i, shape=(24, 130), dtype=torch.bfloat16):
    return random.normal(random.key(i), shape).to(dtype)


def source(w, log=None):
    return Lazy(lambda: (None if log is None else log.append(1)) or w, w.to("meta"), lambda: "stamp")


def params(log=None):
    packed = {f.name: quantize(source(weight(i), log), f) for i, f in enumerate(FOUND)}
    return {"layers": [packed, {"norm": weight(7, (5,))}], "embed": source(weight(8), log), "here": weight(9)}


@pytest.fixture
def written(tmp_path):
    log, seen = [], []
    lazy_tree.save(tmp_path / "lazy", params(log), seen.append)
    return tmp_path, log, seen


def test_the_file_is_that_of_the_tree_in_memory(written):
    folder, log, seen = written
    safetensors.save(folder / "whole", lazy.read(params()))
    assert (folder / "lazy").read_bytes() == (folder / "whole").read_bytes()
    assert len(log) == len(FOUND) + 1  # a source is read once, though its buffers are in several places
    assert seen == tree.paths(params())
    assert {path.name for path in folder.iterdir()} == {"lazy", "whole"}


def test_what_is_opened_is_lazy_and_equal(written):
    folder, _, _ = written
    opened, wanted = lazy_tree.lazy(folder / "lazy"), lazy.read(params())
    assert all(isinstance(x, Lazy) for x in tree.leaves(opened)) and tree.paths(opened) == tree.paths(params())
    for path, x in tree.items(opened):
        right = tree.get(wanted, path)
        read = x.read()
        assert tree.paths(x.like) == tree.paths(read) == tree.paths(right)
        assert all(like.is_meta for like in tree.leaves(x.like))
        assert all(map(same_bits, tree.leaves(read), tree.leaves(right)))
        if isinstance(right, Packed):
            assert (read.format, read.shape, read.dtype) == (right.format, right.shape, right.dtype)
            assert same_bits(dequantize(x).read(), dequantize(right))
    assert all(map(same_bits, tree.leaves(safetensors.load(folder / "lazy")), tree.leaves(wanted)))


def test_the_stamp_tells_contents_apart(tmp_path):
    stamps = []
    for i in (1, 1, 2):
        lazy_tree.save(tmp_path / "file", {"w": quantize(weight(i), NF4_DQ)})
        stamps.append(lazy_tree.lazy(tmp_path / "file")["w"].stamp())
    assert stamps[0] == stamps[1] != stamps[2]


def test_a_tree_that_is_one_leaf(tmp_path):
    lazy_tree.save(tmp_path / "file", {"w": weight(1)})
    assert same_bits(lazy_tree.lazy(tmp_path / "file")["w"].read(), weight(1))


WRONG = {
    "dtype": (weight(1).float(), "w: got torch.float32 (24, 130), wanted the announced torch.bfloat16 (24, 130)"),
    "packed": (quantize(weight(1), NF4_DQ), "w.codes: got a buffer that its like lacks, wanted none"),
}


@pytest.mark.parametrize("got, fault", WRONG.values(), ids=WRONG)
def test_a_lazy_that_reads_something_else(tmp_path, got, fault):
    with pytest.raises(ValueError, match="got") as found:
        lazy_tree.save(tmp_path / "file", {"w": Lazy(lambda: got, weight(1).to("meta"))})
    assert fault in str(found.value) and not list(tmp_path.iterdir())


def test_an_interrupted_file_is_continued(tmp_path):
    """Leaves that are written are read again only to compare them; the old file stays until the new one is whole."""
    path, log = tmp_path / "file", []
    safetensors.save(path, {"w": weight(1)})
    before = path.read_bytes()

    def fails(i):
        raise OSError("disk gone")

    broken = {"all": params(log), "w": Lazy(partial(fails, 1), weight(1).to("meta"))}
    whole = {"all": params(log), "w": source(weight(1), log)}
    with pytest.raises(OSError, match="disk gone"):
        lazy_tree.save(path, broken)
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="file.part: got the file of an interrupted run"):
        lazy_tree.save(path, whole)
    other = {"all": params(), "w": weight(1).float()}
    with pytest.raises(ValueError, match="file.part: got a file with another beginning"):
        lazy_tree.save(path, other, resume=True)
    changed = {"all": params() | {"embed": source(weight(3))}, "w": weight(1)}
    with pytest.raises(ValueError, match="all.embed: got other values than those of an interrupted run"):
        lazy_tree.save(path, changed, resume=True)
    seen = []
    del log[:]
    lazy_tree.save(path, whole, seen.append, resume=True)
    assert len(log) <= 5  # four of eight to compare, and the last
    safetensors.save(tmp_path / "whole", lazy.read(whole))
    assert path.read_bytes() == (tmp_path / "whole").read_bytes() and seen == tree.paths(whole)


def test_buffers_that_contradict_their_shape(tmp_path):
    p = quantize(weight(1), NF4_DQ)
    for wrong in (Packed(p.codes[:-1], p.scale, p.format, p.shape, p.dtype), Packed(p.codes.float(), *partial_of(p))):
        safetensors.save(tmp_path / "file", {"w": wrong})
        with pytest.raises(ValueError, match=r"w: .*file: nf4_dq.*codes .*wanted.*; write the file again"):
            lazy_tree.lazy(tmp_path / "file")


def partial_of(p):
    return p.scale, p.format, p.shape, p.dtype


def test_a_file_without_a_tree(tmp_path):
    safetensors.write(tmp_path / "file", {"w": weight(1)})
    with pytest.raises(ValueError, match=r"file: got no 'fquant.tree' in its metadata"):
        lazy_tree.lazy(tmp_path / "file")
