"""Tests of fquant.io.files.digests: a file that is damaged anywhere is refused by its name, and rows are verified."""

import hashlib
import random
import re

import pytest
import safetensors.torch as peer
import torch
from hypothesis import given
from hypothesis import strategies as st

from fquant import NF4_DQ, lora, quantize, tree
from fquant import random as fquant_random
from fquant.io import lazy_tree, safetensors
from fquant.io.files import digests
from fquant.lazy import Lazy
from tests.helpers.arrays import same_bits

PIECE = digests.PIECE


def weight(*shape):
    return fquant_random.normal(fquant_random.key(len(shape)), shape)


TREE = {
    "state": {"adapters": {"layers.0.q": lora.Lora(weight(4, 24), weight(16, 4))}, "done": torch.tensor(3)},
    "base": {"w": quantize(weight(8, 256), NF4_DQ), "norm": weight(24).bfloat16(), "none": weight(0, 3)},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of all writers: trees, trees leaf by leaf, and named tensors."""
    out = tmp_path_factory.mktemp("written")
    safetensors.save(out / "state", TREE)
    lazy_tree.save(out / "base", TREE["base"])
    safetensors.write(out / "named", {"a": torch.arange(7), "b": Lazy(lambda: torch.ones(3), torch.ones(3))})
    return out


def content(path):
    """The names and tensors of a file, and its structure."""
    found = safetensors.header(path)
    structure = tree.paths(safetensors.load(path)) if safetensors.TREE in found.metadata else None
    return structure, found.metadata, {name: safetensors.read(found, name) for name in found.tensors}


def equal(a, b):
    return a[:2] == b[:2] and a[2].keys() == b[2].keys() and all(same_bits(t, b[2][name]) for name, t in a[2].items())


@pytest.mark.parametrize("name", ["state", "base", "named"])
def test_a_flipped_bit_is_refused(folder, tmp_path, name):
    raw, path, draw = (folder / name).read_bytes(), tmp_path / "copy", random.Random(name)
    path.write_bytes(raw)
    content(path)
    head = 8 + int.from_bytes(raw[:8], "little")
    bits = [*range(64), *draw.choices(range(64, 8 * head), k=500), *draw.choices(range(8 * head, 8 * len(raw)), k=400)]
    for bit in bits:
        spoilt = bytearray(raw)
        spoilt[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoilt)
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: "):
            content(path)


@pytest.mark.parametrize("name", ["state", "base", "named"])
def test_a_file_that_is_cut_or_torn_is_refused(folder, tmp_path, name):
    """Cut at random places, with zeros in place of its end, or with the end of another file."""
    raw, path, draw = (folder / name).read_bytes(), tmp_path / "copy", random.Random(name)
    safetensors.write(path, {"w": weight(9000)})
    other, right = path.read_bytes(), content(folder / name)
    for length in [*range(9), *draw.choices(range(9, len(raw)), k=400)]:
        for spoilt in (raw[:length], raw[:length] + bytes(len(raw) - length), raw[:length] + other[length : len(raw)]):
            path.write_bytes(spoilt)
            if spoilt == raw:  # it ends in zeros
                assert equal(content(path), right)
                continue
            with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: "):
                content(path)


def test_the_piece_is_named(tmp_path):
    w = torch.arange(PIECE // 4 * 3 + 5, dtype=torch.int32)
    safetensors.write(tmp_path / "x", {"a": torch.ones(3), "w": w})
    found = safetensors.header(tmp_path / "x")
    entry = found.tensors["w"]
    at = entry.start + 2 * PIECE
    with (tmp_path / "x").open("r+b") as file:
        file.seek(at + 77)
        file.write(b"\xff")
    wanted = f"x: w: got bytes {at} to {at + PIECE} that differ from those that were written, .*; the file is damaged"
    with pytest.raises(ValueError, match=wanted):
        safetensors.read(found, "w")
    assert same_bits(safetensors.read(found, "a"), torch.ones(3))
    rows = PIECE // 4
    for part in (slice(0, 2 * rows), slice(3 * rows, None), slice(3, 3), slice(7, 2 * rows)):
        assert same_bits(safetensors.read(found, "w", part), w[part])
    for part in (slice(2 * rows - 1, 2 * rows + 1), slice(3 * rows - 1, 3 * rows), slice(0, 3 * rows + 1)):
        with pytest.raises(ValueError, match=wanted):
            safetensors.read(found, "w", part)


def test_rows_read_their_pieces_alone(tmp_path):
    w = torch.arange(3 * PIECE, dtype=torch.uint8).reshape(-1, 1024)
    safetensors.write(tmp_path / "x", {"w": w})
    found = safetensors.header(tmp_path / "x")
    with (tmp_path / "x").open("r+b") as file:
        file.truncate(found.tensors["w"].stop - 1)
    assert same_bits(safetensors.read(found, "w", slice(1000, 2048)), w[1000:2048])
    with pytest.raises(ValueError, match="w: got 1 bytes too few; the file changed since it was opened"):
        safetensors.read(found, "w", slice(1000, 2049))


@given(st.lists(st.integers(0, 5 * PIECE // 2), max_size=6), st.booleans())
def test_pieces_do_not_depend_on_how_bytes_come(sizes, waits):
    data = memoryview(bytes(range(251)) * (sum(sizes) // 251 + 1))[: sum(sizes)]
    with digests.Digests() as one, digests.Digests() as parts:
        one.add(data)
        for size in sizes:
            parts.add(data[:size])
            data = data[size:]
            if waits:
                parts.wait()
        found = one.close()
        assert found == parts.close() and len(found) * digests.WIDTH == digests.width(sum(sizes))


def test_files_without_digests_are_read(folder, tmp_path):
    """What another program writes, and what it writes again without our metadata."""
    for name in ("named", "state"):
        tensors = content(folder / name)[2]
        peer.save_file({k: t.clone() for k, t in tensors.items()}, tmp_path / name, {"format": "pt"})
        found = safetensors.header(tmp_path / name)
        assert not found.digests and all(same_bits(safetensors.read(found, k), t) for k, t in tensors.items())


def test_another_program_that_keeps_the_metadata_is_refused(folder, tmp_path):
    with peer.safe_open(folder / "named", "pt") as file:
        metadata = file.metadata()
    peer.save_file({"a": torch.arange(7), "b": torch.zeros(3)}, tmp_path / "x", metadata)
    with pytest.raises(ValueError, match="x: .*or another program changed it and kept its metadata, remove"):
        content(tmp_path / "x")
    metadata.pop(digests.KEY)
    peer.save_file({"a": torch.arange(7), "b": torch.zeros(3)}, tmp_path / "x", metadata)
    assert content(tmp_path / "x")[2]["b"].sum() == 0


def test_a_stamp_stands_for_all_bytes(tmp_path):
    stamps = []
    for i in (0, 0, 1):
        w = torch.zeros(100_000, dtype=torch.uint8)
        w[50_003] = i  # outside the windows that are sampled of other files
        safetensors.write(tmp_path / "x", {"w": w})
        stamps.append(safetensors.stamp(safetensors.header(tmp_path / "x"), "w"))
    assert stamps[0] == stamps[1] != stamps[2]


def test_a_file_on_a_device_is_verified(folder, tmp_path, device):
    w = weight(3, PIECE // 8)
    safetensors.write(tmp_path / "x", {"w": w})
    found = safetensors.header(tmp_path / "x")
    for rows in (slice(None), slice(1, 3)):
        assert same_bits(safetensors.read(found, "w", rows, device).cpu(), w[rows])
    with (tmp_path / "x").open("r+b") as file:
        file.seek(found.tensors["w"].stop - 1)
        file.write(b"\x01")
    with pytest.raises(ValueError, match="w: got bytes"):
        safetensors.read(found, "w", slice(1, 3), device)


def test_digests_of_large_tensors_are_found_by_threads(monkeypatch):
    monkeypatch.setattr(digests, "SHARE", PIECE)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # a worker of the tests may have one
    tensors = [memoryview(bytes(range(256)) * (n * 1000)) for n in (0, 1, 5, 17, 40)]
    head = safetensors.layout({str(i): torch.empty(len(t), dtype=torch.uint8) for i, t in enumerate(tensors)})[0]
    several = digests.filled(head, tensors)
    monkeypatch.setattr(digests, "SHARE", 1 << 60)
    assert several == digests.filled(head, tensors)
    at = digests.begin(several)
    assert several[at : at + digests.WIDTH].decode() == hashlib.sha256(tensors[1]).hexdigest()[: digests.WIDTH]
