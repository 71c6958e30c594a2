"""Tests of fquant.io.gguf: the gguf package reads our files and we read its, and damaged files are refused."""

import random
import struct

import gguf as theirs
import numpy as np
import pytest
import torch

from fquant.io import gguf, gguf_writer
from fquant.io.gguf_blocks import KINDS, decode, encode
from fquant.io.gguf_writer import Source

VALUES = {
    "general.architecture": "llama", "text": "zwölf ⁂", "empty": "", "yes": True, "no": False, "small": 7,
    "negative": -7, "large": 1 << 40, "low": -(1 << 40), "real": 0.1,
    "texts": ["a", "", "ß"], "integers": [1, -2, 3], "reals": [0.5, -1.25],
}  # fmt: skip


def source(kind, shape, seed=0):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return Source(kind, shape, lambda: w), w


def write(path, kinds=tuple(KINDS), values=VALUES):
    tensors = {f"blk.{i}.{kind}.weight": source(kind, (3, 512), i) for i, kind in enumerate(kinds)}
    tensors["vector"] = source("f32", (5,))
    tensors["experts"] = source("f16", (2, 3, 7))
    gguf_writer.write(path, values, {name: its for name, (its, _) in tensors.items()})
    return {name: (its.kind, w) for name, (its, w) in tensors.items()}


def test_the_package_reads_our_file(tmp_path):
    tensors = write(tmp_path / "a.gguf")
    reader = theirs.GGUFReader(tmp_path / "a.gguf")
    for key, item in VALUES.items():
        got = reader.fields[key].contents()
        assert np.float32(item) == got if isinstance(item, float) else got == item, key
    assert [t.name for t in reader.tensors] == list(tensors)
    for t in reader.tensors:
        kind, w = tensors[t.name]
        assert t.tensor_type == KINDS[kind].code and [*t.shape][::-1] == [*w.shape]
        assert t.data_offset % 32 == 0
        wanted = encode(w.reshape(-1, w.shape[-1]), kind).numpy().ravel()
        assert np.array_equal(np.ascontiguousarray(t.data).view(np.uint8).ravel(), wanted)


def test_we_read_our_file(tmp_path):
    tensors = write(tmp_path / "a.gguf")
    header = gguf.header(tmp_path / "a.gguf")
    assert {key: item for key, item in header.values.items() if key != "real"} == {
        key: item for key, item in VALUES.items() if key != "real"
    }
    assert list(header.tensors) == list(tensors)
    for name, (kind, w) in tensors.items():
        rows = encode(w.reshape(-1, w.shape[-1]), kind)
        assert torch.equal(gguf.read(header, name), decode(rows, kind).reshape(w.shape))
        assert torch.equal(gguf.read_bytes(header, name, slice(0, 1)), rows[:1])


def test_we_read_the_packages_file(tmp_path):
    writer = theirs.GGUFWriter(tmp_path / "a.gguf", "qwen3")
    writer.add_uint8("u8", 255)
    writer.add_int16("i16", -5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_array("texts", ["a", "b"])
    w = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    kind = theirs.GGMLQuantizationType.Q8_0
    writer.add_tensor("w", theirs.quants.quantize(w, kind), raw_dtype=kind)
    writer.add_tensor("v", w[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = gguf.header(tmp_path / "a.gguf")
    wanted = {"general.architecture": "qwen3", "u8": 255, "i16": -5, "f64": 0.1, "yes": True, "texts": ["a", "b"]}
    assert header.values == wanted
    assert np.array_equal(
        gguf.read(header, "w").numpy(), theirs.quants.dequantize(theirs.quants.quantize(w, kind), kind)
    )
    assert np.array_equal(gguf.read(header, "v").numpy(), w[0])


def test_one_tensor_is_read_at_a_time_and_reported(tmp_path):
    events = []

    def read(name):
        events.append(f"read {name}")
        return torch.ones(2, 32)

    tensors = {name: Source("q8_0", (2, 32), lambda name=name: read(name)) for name in "abc"}
    gguf_writer.write(tmp_path / "a.gguf", {}, tensors, lambda name: events.append(f"done {name}"))
    assert events == ["read a", "done a", "read b", "done b", "read c", "done c"]


def test_a_failure_leaves_the_old_file(tmp_path):
    (tmp_path / "a.gguf").write_text("old")

    def read():
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        gguf_writer.write(tmp_path / "a.gguf", {}, {"w": Source("f32", (2,), read)})
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"] and (tmp_path / "a.gguf").read_text() == "old"


def test_an_interrupted_file_is_continued(tmp_path):
    """What is written is read again only to compare a sample, and of another source it is refused."""
    reads = []

    def sources(fails=None, off=0.0):
        def read(i):
            reads.append(i)
            if i == fails:
                raise OSError("gone")
            return torch.full((40, 256), i + off)

        return {f"t{i}": Source("q4_k" if i % 2 else "f32", (40, 256), lambda i=i: read(i)) for i in range(10)}

    path = tmp_path / "a.gguf"
    gguf_writer.write(path, {"k": 1}, sources())
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(OSError, match="gone"):
        gguf_writer.write(path, {"k": 1}, sources(fails=8))
    assert not path.exists()
    with pytest.raises(ValueError, match="a.gguf.part: got the file of an interrupted run"):
        gguf_writer.write(path, {"k": 1}, sources())
    with pytest.raises(ValueError, match="a.gguf.part: got a file with another beginning"):
        gguf_writer.write(path, {"k": 2}, sources(), resume=True)
    with pytest.raises(ValueError, match="a.gguf.part: t0 has other values than its source; remove the file"):
        gguf_writer.write(path, {"k": 1}, sources(off=0.5), resume=True)
    seen = []
    del reads[:]
    gguf_writer.write(path, {"k": 1}, sources(), seen.append, resume=True)
    assert path.read_bytes() == whole and [p.name for p in tmp_path.iterdir()] == ["a.gguf"]
    assert reads == [0, 2, 4, 6, 8, 9] and seen == [f"t{i}" for i in range(10)]


UNWRITABLE = {
    "kind": ({}, Source("q5_1", (2, 32), lambda: torch.ones(2, 32)), "w: got kind 'q5_1'; wanted one of f32"),
    "width": ({}, Source("q8_0", (2, 33), lambda: torch.ones(2, 33)), "w: width 33 is not a multiple of the 32"),
    "dims": ({}, Source("f32", (1,) * 5, lambda: torch.ones(1)), "w: got shape .*; wanted 1 to 4 dims"),
    "empty": ({}, Source("f32", (0, 2), lambda: torch.ones(0, 2)), "w: got shape .*; wanted 1 to 4 dims, none empty"),
    "other shape": ({}, Source("f32", (2, 2), lambda: torch.ones(4)), r"w: got torch.float32 \(4,\); wanted floats"),
    "integers": ({}, Source("f32", (4,), lambda: torch.ones(4).int()), "w: got torch.int32"),
    "nan": ({}, Source("f32", (4,), lambda: torch.full((4,), float("nan"))), "w: f32: got a weight that is NaN"),
    "big": ({"a": 1 << 64}, None, "a: got 18446744073709551616; wanted a bool, a number of 64 bits"),
    "infinite": ({"a": float("inf")}, None, "a: got inf; wanted a finite number"),
    "object": ({"a": {}}, None, "a: got {}; wanted a bool"),
    "mixed": ({"a": [1, "b"]}, None, "a: got a list that is not all texts, floats or integers"),
    "empty list": ({"a": []}, None, "a: got an empty list; leave the key out"),
    "surrogate": ({"a": "\ud800"}, None, "a: got '.*', which is no Unicode text"),
}


@pytest.mark.parametrize("values, tensor, fault", UNWRITABLE.values(), ids=UNWRITABLE)
def test_unwritable(tmp_path, values, tensor, fault):
    with pytest.raises((ValueError, TypeError), match=fault):
        gguf_writer.write(tmp_path / "a.gguf", values, {"w": tensor} if tensor else {})
    assert not list(tmp_path.iterdir())


u32, u64 = (lambda n: struct.pack("<I", n)), (lambda n: struct.pack("<Q", n))
text = lambda s: u64(len(s)) + s
start = lambda tensors=0, values=0: b"GGUF" + u32(3) + u64(tensors) + u64(values)
info = lambda name, dims, code, offset: text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(code) + u64(offset)
pad = lambda raw, size=0: raw.ljust(-(-len(raw) // 32) * 32, b"\0") + b"\0" * size
HOSTILE = {
    "empty": (b"", "got a header that wants 4 bytes at byte 0, wanted at most the 0 left"),
    "magic": (b"GGML" + bytes(40), "got another beginning than 'GGUF'"),
    "a zip": (b"PK\3\4" + bytes(40), "got another beginning than 'GGUF'"),
    "version": (b"GGUF" + u32(2) + bytes(16), "got version 2; wanted 3"),
    "big endian": (b"GGUF\0\0\0\3" + bytes(16), "got version 50331648; wanted 3"),
    "cut short": (start()[:20], "the file is cut short or damaged"),
    "many tensors": (start(1 << 60), "got 1152921504606846976 tensors; wanted at most"),
    "many values": (start(0, 1 << 60), "got 1152921504606846976 values; wanted at most"),
    "long key": (start(0, 1) + u64(1 << 62), "got a key of 4611686018427387904 bytes; wanted at most"),
    "key beyond the end": (start(0, 1) + u64(1 << 20), "wants 1048576 bytes at byte 32, wanted at most the 0 left"),
    "no UTF-8": (start(0, 1) + text(b"\xff") + u32(4) + u32(1), "got a key that is no UTF-8"),
    "key twice": (start(0, 2) + 2 * (text(b"a") + u32(4) + u32(1)), "got the key 'a' twice"),
    "type": (start(0, 1) + text(b"a") + u32(13), "a: got a value of type 13"),
    "truth": (start(0, 1) + text(b"a") + u32(7) + b"\2", "a: got the truth value 2"),
    "long array": (start(0, 1) + text(b"a") + u32(9) + u32(0) + u64(1 << 61), "a: got an array of 2305843009213693952"),
    "array of texts": (
        start(0, 1) + text(b"a") + u32(9) + u32(8) + u64(9) + text(b"x"),
        "a: got an array of 9 elements",
    ),
    "array of arrays": (start(0, 1) + text(b"a") + u32(9) + u32(9) + u64(1), "a: got an array of type 9"),
    "alignment": (
        pad(start(0, 1) + text(b"general.alignment") + u32(4) + u32(0)),
        "general.alignment: got 0; wanted a multiple of 8",
    ),
    "alignment, text": (pad(start(0, 1) + text(b"general.alignment") + u32(8) + text(b"x")), "got 'x'; wanted a mult"),
    "dims": (start(1) + info(b"w", [1] * 5, 0, 0), "w: got 5 dims; wanted 1 to 4"),
    "kind": (start(1) + info(b"w", [32], 3, 0), "w: got tensors of type 3; wanted 0 .f32."),
    "no elements": (start(1) + info(b"w", [0], 0, 0), "w: got shape .*; wanted at least one"),
    "overflow": (start(1) + info(b"w", [1 << 32, 1 << 32], 0, 0), "less than 2.62 elements"),
    "width": (start(1) + info(b"w", [33], 8, 0), "w: width 33 is not a multiple of the 32"),
    "beyond the end": (pad(start(1) + info(b"w", [1 << 40], 0, 0)), "w: got data up to byte .*; the file is cut short"),
    "offset": (pad(start(1) + info(b"w", [8], 0, 32), 64), "w: got data at byte 96, wanted 64"),
    "name twice": (pad(start(2) + info(b"w", [8], 0, 0) + info(b"w", [8], 0, 32), 64), "w: got two tensors"),
    "overlap": (pad(start(2) + info(b"w", [8], 0, 0) + info(b"v", [8], 0, 0), 64), "v: got data at byte"),
    "surplus": (pad(start(1) + info(b"w", [8], 0, 0), 64), "got 128 bytes, wanted 96; the file is damaged"),
}


@pytest.mark.parametrize("raw, fault", HOSTILE.values(), ids=HOSTILE)
def test_hostile(tmp_path, raw, fault):
    (tmp_path / "a.gguf").write_bytes(raw)
    with pytest.raises(ValueError, match=fault) as caught:
        gguf.header(tmp_path / "a.gguf")
    assert str(caught.value).startswith(str(tmp_path / "a.gguf")) and len(str(caught.value)) < 1000


def test_mutations_are_read_or_refused(tmp_path):
    """Change, cut or repeat bytes of the header of a file: the result is read, or refused by one ValueError."""
    write(tmp_path / "a.gguf", ("f32", "q4_k"))
    raw, draw = (tmp_path / "a.gguf").read_bytes(), random.Random(0)
    path = tmp_path / "b.gguf"
    refused = 0
    for _ in range(1000):
        changed = bytearray(raw)
        at = draw.randrange(700)
        match draw.randrange(4):
            case 0:
                changed[at] = draw.randrange(256)
            case 1:
                changed[at : at + 8] = struct.pack("<Q", draw.choice((0, 1, 1 << 31, 1 << 40, (1 << 64) - 1)))
            case 2:
                del changed[at : at + draw.randrange(1, 9)]
            case 3:
                del changed[draw.randrange(len(changed)) :]
        path.write_bytes(changed)
        try:
            header = gguf.header(path)
            for name in header.tensors:
                gguf.read(header, name)
        except ValueError:
            refused += 1
    assert refused > 500


def test_a_file_that_became_shorter(tmp_path):
    write(tmp_path / "a.gguf")
    header = gguf.header(tmp_path / "a.gguf")
    with open(tmp_path / "a.gguf", "r+b") as file:
        file.truncate(2000)
    with pytest.raises(ValueError, match="experts: got 84 bytes too few; the file changed"):
        gguf.read(header, "experts")
    with pytest.raises(ValueError, match="got no tensor 'x'; wanted one of 9: blk.0.f32.weight"):
        gguf.read(header, "x")
