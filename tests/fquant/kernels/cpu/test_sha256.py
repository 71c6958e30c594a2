"""fquant.kernels.cpu.sha256: digests by lanes are those of hashlib, for any sizes, on each instruction set."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fquant.kernels import cpu, dispatch
from fquant.kernels.cpu import sha256

SEED = torch.randint(0, 256, (1 << 21,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy().data
EDGES = (0, 1, 54, 55, 56, 57, 63, 64, 65, 118, 119, 120, 121, 127, 128, 129, 183, 184, 1024)  # of the padding


def buffers(sizes):
    return [SEED[i : i + size] for i, size in enumerate(sizes)]


def hashed(parts):
    return [hashlib.sha256(part).digest() for part in parts]


@pytest.fixture(params=cpu.isas())
def isa(request, monkeypatch):
    monkeypatch.setenv("FQUANT_KERNELS", f"cpu:{request.param}")


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 40])
def test_digests_are_those_of_hashlib(isa, count):
    for size in EDGES:
        parts = buffers([size] * count)
        assert sha256.in_lanes(parts) == hashed(parts), size
    parts = buffers([EDGES[i % len(EDGES)] for i in range(count)])
    assert sha256.in_lanes(parts) == hashed(parts)


@given(st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 5000), st.just(1 << 20)), max_size=50))
def test_lanes_take_buffers_of_any_sizes(sizes):
    parts = buffers(sizes)
    assert sha256.in_lanes(parts) == sha256.digests(parts) == dispatch.sha256(parts) == hashed(parts)


def test_bytes_and_writable_memory_are_hashed():
    parts = [memoryview(b"abc"), memoryview(bytearray(100)), torch.arange(9).numpy().data.cast("B")]
    assert sha256.in_lanes(parts) == hashed(parts)
    assert sha256.in_lanes(parts)[0].hex().startswith("ba7816bf8f01cfea414140de5dae2223")  # FIPS 180-2, appendix B.1


def test_threads_hash_beside_each_other():
    groups = [buffers([1000 * i + k for i in range(20)]) for k in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(sha256.in_lanes, groups)) == list(map(hashed, groups))
