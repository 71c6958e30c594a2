"""The digest: its formula by Python's integers, every single flipped bit, and pairs that simple sums would miss."""

import random

import pytest
import torch

from shard.integrity import digest, hashing

MASK = (1 << 64) - 1
SIZES = 5, 3, hashing.RUN, hashing.RUN + 1, 7, 0, 2  # bytes


def key(n):
    """SplitMix64 as in its paper, made odd."""
    x = (n + 1) * 0x9E3779B97F4A7C15 & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return (x ^ x >> 31) | 1


def by_hand(data):
    """The sum in Python's integers, of words with a sign."""
    end = len(data) // 4 * 4
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, end, 4)]
    rows = [words[i : i + hashing.ROW] for i in range(0, len(words), hashing.ROW)]
    if end < len(data):
        rows.append([int.from_bytes(data[end:].ljust(4, b"\0"), "little", signed=True)])
    total = sum(key(hashing.ROW + i) * sum(key(j) * w for j, w in enumerate(row)) for i, row in enumerate(rows))
    return total & MASK


@pytest.mark.parametrize("n", [0, 1, 3, 4, 7, 1000, 4096, 4097, 4100, 20002])
@pytest.mark.parametrize("at_a_time", [1, 3])
def test_the_formula(n, at_a_time, monkeypatch):
    """Also of bytes that no view of words can begin at, and of several rows at a time, as on a device."""
    monkeypatch.setattr(hashing, "ROW", 1024)
    monkeypatch.setattr(hashing, "HOST", torch.device("meta" if at_a_time > 1 else "cpu"))
    monkeypatch.setattr(hashing, "AT_A_TIME", at_a_time)
    data = random.Random(n).randbytes(n)
    whole = torch.tensor([0, *data], dtype=torch.uint8, device="cpu")
    assert int(digest(whole[1:])) & MASK == by_hand(data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_it_is_that_of_the_bytes_in_order(dtype):
    t = torch.arange(24, device="cpu").reshape(4, 6).to(dtype)
    assert digest(t.T) == digest(t.T.contiguous()) == digest(t.T.contiguous().view(torch.uint8))
    assert dtype == torch.bool or digest(t.T) != digest(t)


def test_every_single_flipped_bit_is_found():
    data = torch.tensor(list(random.Random(0).randbytes(515)), dtype=torch.uint8, device="cpu")
    right, found = int(digest(data)), set()
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        found.add(int(digest(data)))
        data[bit // 8] ^= 1 << bit % 8
    assert right not in found and len(found) == 8 * len(data) and int(digest(data)) == right


def test_changes_that_cancel_in_a_sum_are_found():
    """Two sign bits, two words that change places, and rows that do."""
    x = torch.arange(3 * hashing.ROW, dtype=torch.int32, device="cpu")
    seen = {int(digest(x))}
    for a, b in ((0, 1), (5, hashing.ROW + 5), (1, 2 * hashing.ROW)):
        signs, swapped = x.clone(), x.clone()
        signs[[a, b]] ^= -(1 << 31)
        swapped[[a, b]] = x[[b, a]]
        seen |= {int(digest(signs)), int(digest(swapped))}
    seen.add(int(digest(x.view(3, -1)[[1, 0, 2]])))
    assert len(seen) == 8


def test_small_tensors_are_hashed_together():
    many = [torch.full((n,), n % 251, dtype=torch.uint8, device="cpu") for n in SIZES]
    runs = list(hashing.runs(many))
    assert [len(run) for run in runs] == [8, hashing.RUN, hashing.RUN + 1, 9]
    assert torch.equal(torch.cat(runs), torch.cat(many))
