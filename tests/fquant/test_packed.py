"""Tests of fquant.packed: codes and scales equal bitsandbytes' bytes, or those of a naive loop."""

import copy
import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import bitsandbytes.functional as bnb
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fquant import tree
from fquant.communication import AfterLoad
from fquant.format import BLOCKS, DYNAMIC8, FP4, INT4_ZERO, INT8, NF4, NF4_DQ, num_blocks, num_bytes
from fquant.kernels import reference
from fquant.kernels.reference import codec
from fquant.lazy import Lazy
from fquant.packed import FLOATS, Packed, concatenate, dequantize, quantize
from tests.helpers.arrays import named, rng, same_bits

FP4_DQ = replace(FP4, name="fp4_dq", scale=DYNAMIC8)
INT8_64 = replace(INT8, name="int8_64", block=64)
ALL = [NF4, NF4_DQ, FP4, FP4_DQ, INT8, INT8_64]


def weight(*shape, dtype=torch.float32, seed=0):
    """Draw values of many magnitudes, with zeros, ties and a row of zeros."""
    w = torch.randn(shape, generator=rng(seed)) * torch.randn(shape, generator=rng(seed + 1)).exp()
    w.view(-1)[3::17] = 0.0
    w.view(-1)[5::19] = 1.5
    w.view(-1)[6::23] = -0.75
    if len(shape) > 1 and shape[-2] > 2:
        w[..., 1, :] = 0.0
    return w.to(dtype)


def bits(x):
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize]) if x.is_floating_point() else x


@pytest.fixture
def eager():
    """Keep bitsandbytes from compiling its own reference for large blocks."""
    with torch.compiler.set_stance("force_eager"):
        yield


# --- bitsandbytes -----------------------------------------------------------------------------------------------------


@named("dtype", FLOATS)
@named("block", BLOCKS[1:])  # bitsandbytes has no 16
@named("format", [NF4, NF4_DQ, FP4, FP4_DQ])
def test_equals_bitsandbytes(format, block, dtype, eager):
    format = replace(format, block=block)
    w = weight(max(6, 16384 // block), 2 * block, dtype=dtype)
    w[2, :block] = 0.0
    kind, nested = format.name[:3], format.scale is not None
    codes, state = bnb.quantize_4bit(w, blocksize=block, quant_type=kind, compress_statistics=nested)
    strided = torch.stack([w, -w], -1)[..., 0]
    assert not strided.is_contiguous()
    for got in (quantize(w, format), quantize(strided, format), quantize(w.T.contiguous().T, format)):
        assert same_bits(got.codes.reshape(-1, 1), codes)
        if isinstance(got.scale, Packed):
            assert same_bits(got.scale.codes.reshape(-1), state.absmax)
            assert state.state2 is not None and same_bits(got.scale.scale, state.state2.absmax)
            assert same_bits(got.scale.offset, state.offset)
        else:
            assert same_bits(got.scale.reshape(-1), state.absmax)
        # The sign of zeros is not compared: of the second zero of FP4 it depends on the CPU there.
        assert same_bits(dequantize(got) + 0.0, bnb.dequantize_4bit(codes, state).reshape(w.shape) + 0.0)


@named("dtype", FLOATS)
def test_int8_equals_bitsandbytes(dtype):
    w = weight(37, 200, dtype=dtype)
    codes, absmax, _ = bnb.int8_vectorwise_quant(w.half())
    for got in (quantize(w, INT8), quantize(w.T.contiguous().T, INT8)):
        assert same_bits(got.codes, codes)
        assert isinstance(got.scale, torch.Tensor) and same_bits(got.scale[:, 0], absmax)
        assert same_bits(dequantize(replace(got, dtype=torch.float32)), bnb.int8_vectorwise_dequant(codes, absmax))
        assert same_bits(dequantize(got) + 0.0, bnb.int8_vectorwise_dequant(codes, absmax).to(dtype))


@named("dtype", FLOATS)
@named("format", [replace(NF4, flat=True), replace(FP4_DQ, flat=True)])
def test_flat_equals_bitsandbytes(format, dtype):
    w = weight(7, 101, dtype=dtype)
    kind, nested = format.name[:3], format.scale is not None
    codes, state = bnb.quantize_4bit(w, quant_type=kind, compress_statistics=nested)
    got = quantize(w, format)
    assert same_bits(got.codes, codes[:, 0])
    assert same_bits(got.scale.codes if nested else got.scale, state.absmax)
    assert same_bits(dequantize(got) + 0.0, bnb.dequantize_4bit(codes, state) + 0.0)


# --- a naive loop -----------------------------------------------------------------------------------------------------

f32 = np.float32


def naive_block(x, whole, format):
    """Return (codes, absmax, values) of the elements of one block, one at a time."""
    absmax = max(abs(v) for v in x)
    if format.table is not None and not whole:
        absmax = max(absmax, f32(1e-38))  # so it is kept, too, in bitsandbytes
    codes, values = [], []
    for v in x:
        if format.table is None:
            code = int(np.round(v * (f32(127) / absmax))) if absmax else 0  # halves go to even
            values.append(f32(code) * absmax * f32(1 / 127))
        else:
            size = max(absmax, f32(1e-38))
            scaled = min(max(v * (f32(1) / size) if whole else v / size, f32(-1)), f32(1))
            ordered = sorted(range(16), key=lambda i: format.table[i])
            code = ordered[-1]
            for low, high in zip(ordered, ordered[1:], strict=False):
                if scaled <= (f32(format.table[low]) + f32(format.table[high])) / f32(2):
                    code = low
                    break
            values.append(f32(format.table[code]) * absmax)
        codes.append(code)
    return codes, absmax, values


def naive(w, format):
    """Return (bytes, absmax, values) of every row, as nested lists."""
    out = [], [], []
    for row in (w.half() if format.table is None else w).float().tolist():
        row = [f32(v) for v in row]
        block = format.block or len(row)
        codes, absmax, values = [], [], []
        for i in range(0, len(row), block):
            some = naive_block(row[i : i + block], len(row) - i >= block, format)
            codes, absmax, values = codes + some[0], [*absmax, some[1]], values + some[2]
        if format.bits == 4:
            zero = naive_block([f32(0)], True, format)[0]
            padded = codes + zero if len(codes) % 2 else codes
            codes = [16 * high + low for high, low in zip(padded[::2], padded[1::2], strict=True)]
        for part, got in zip(out, (codes, absmax, values), strict=True):
            part.append(got)
    return out


@named("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(4, 64), (3, 65), (5, 100), (4, 31), (3, 1), (1, 130), (3, 161)], ids=str)
@named("format", [NF4, FP4, INT8, INT8_64, replace(NF4, name="nf4_32", block=32)])
def test_equals_a_naive_loop(format, shape, dtype):
    w = weight(*shape, dtype=dtype)
    p = quantize(w, format)
    codes, absmax, values = naive(w, format)
    assert p.codes.tolist() == codes
    assert same_bits(p.scale, torch.tensor(np.array(absmax)))
    assert same_bits(dequantize(p), torch.tensor(np.array(values)).to(dtype))


@named("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5, 100), (90, 161), (3, 7)], ids=str)
@named("format", [NF4_DQ, FP4_DQ])
def test_nested_scales_are_the_plain_ones_quantised(format, shape, dtype):
    """Compare, at any width, with bitsandbytes' 8-bit quantisation of the absmax that the naive loop checks."""
    w = weight(*shape, dtype=dtype)
    p, plain = quantize(w, format), quantize(w, replace(format, scale=None))
    assert same_bits(p.codes, plain.codes)
    flat = plain.scale.reshape(-1)
    codes, state = bnb.quantize_blockwise(flat - flat.mean(), blocksize=256)
    assert same_bits(p.scale.codes.reshape(-1), codes) and same_bits(p.scale.scale, state.absmax)
    absmax = bnb.dequantize_blockwise(codes, state) + flat.mean()
    assert same_bits(dequantize(p), dequantize(replace(plain, scale=absmax.reshape(plain.scale.shape))))


# --- invariants -------------------------------------------------------------------------------------------------------


@given(
    format=st.sampled_from(ALL), block=st.sampled_from([32, 64, 256]), dtype=st.sampled_from(FLOATS),
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=2), width=st.integers(1, 300), seed=st.integers(0, 99),
)  # fmt: skip
def test_buffers(format, block, dtype, shape, width, seed):
    format = format if format.block is None else replace(format, block=block)
    w = weight(*shape, width, dtype=dtype, seed=seed)
    before = w.clone()
    p = quantize(w, format)
    assert same_bits(w, before)
    blocks = (*shape, num_blocks(format, width))
    assert p.codes.dtype is (torch.int8 if format.table is None else torch.uint8)
    assert tuple(p.codes.shape) == (*shape, num_bytes(format, width))
    assert p.format == format and p.shape == tuple(w.shape) and p.dtype == dtype and p.offset is None
    if format.scale is None:
        assert isinstance(p.scale, torch.Tensor)
        assert p.scale.dtype is torch.float32 and tuple(p.scale.shape) == blocks
    else:
        assert isinstance(p.scale, Packed)
        n = p.scale
        assert n.codes.dtype is torch.uint8 and tuple(n.codes.shape) == n.shape == blocks and n.format == DYNAMIC8
        assert n.dtype is torch.float32 and tuple(n.scale.shape) == (math.ceil(math.prod(blocks) / 256),)
        assert n.offset is not None and n.offset.shape == () and n.offset.dtype is torch.float32
    back = dequantize(p)
    assert back.shape == w.shape and back.dtype == dtype
    for other in FLOATS:
        assert same_bits(dequantize(p, other), back.to(other))


@given(
    format=st.sampled_from([NF4, FP4]), block=st.sampled_from([32, 64, 256]), dtype=st.sampled_from(FLOATS),
    rows=st.integers(1, 4), width=st.integers(1, 300), seed=st.integers(0, 99), size=st.sampled_from([0.01, 1.0, 30.0]),
)  # fmt: skip
def test_what_was_quantised_quantises_to_itself(format, block, dtype, rows, width, seed, size):
    p = quantize((torch.randn(rows, width, generator=rng(seed)) * size).to(dtype), replace(format, block=block))
    q = quantize(dequantize(p), p.format)
    assert same_bits(q.scale, p.scale)
    assert torch.equal(dequantize(q), dequantize(p))
    if format is NF4:
        assert same_bits(q.codes, p.codes)
    else:  # FP4 has two zeros: bitsandbytes gives small positive numbers -0, and -0 becomes 0
        assert same_bits(quantize(dequantize(q), p.format).codes, q.codes)


@named("format", ALL)
def test_stacks(format):
    """A stack may be quantised as one array, or stacked afterwards; blocks do not run over its members."""
    w = weight(3, 5, 100)
    whole = quantize(w, format)
    each = [quantize(x, format) for x in w]
    assert torch.equal(whole.codes, torch.stack([p.codes for p in each]))
    if format.scale is None:
        assert same_bits(dequantize(whole), torch.stack([dequantize(p) for p in each]))
    stacked = tree.map(lambda *buffers: torch.stack(buffers), *each)
    assert stacked.shape == (5, 100)
    assert same_bits(dequantize(stacked), torch.stack([dequantize(p) for p in each]))
    assert same_bits(torch.vmap(dequantize)(stacked), dequantize(stacked))


@pytest.mark.parametrize("format", [NF4, NF4_DQ, INT8, INT4_ZERO], ids=lambda f: f.name)
def test_rows_are_concatenated(format):
    """Codes stay, and so do decoded values; formats whose parts share numbers are refused."""
    w = torch.randn(10, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    parts = [quantize(w[:6], format), quantize(w[6:], format)]
    got = concatenate(parts)
    assert got.shape == (10, 128) and got.format == format.plain
    assert torch.equal(got.codes, torch.cat([p.codes for p in parts]))
    assert torch.equal(dequantize(got), torch.cat([dequantize(p) for p in parts]))
    like = concatenate([tree.map(lambda t: t.to("meta"), p) for p in parts])
    assert tree.structure(like) == tree.structure(got)
    for other in (quantize(w[6:], FP4), quantize(w[6:, :64], format), quantize(w[6:].float(), format)):
        with pytest.raises(ValueError, match="got rows of .*, wanted .* as in the first part"):
            concatenate([parts[0], other])
    flat = quantize(w, replace(NF4, flat=True))
    with pytest.raises(ValueError, match="nf4: packed arrays of this format have no common rows; dequantize them"):
        concatenate([flat, flat])


@named("format", ALL)
def test_chunks_change_no_bit_and_bound_the_memory(format, monkeypatch):
    w = weight(70, 100, dtype=torch.bfloat16)
    whole = reference.encode(w, format)
    monkeypatch.setattr(codec, "CHUNK", 1000)

    class Largest(TorchDispatchMode):
        floats = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in tree.leaves(out):
                if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() != w.untyped_storage().data_ptr():
                    if t.dtype not in (torch.uint8, torch.int8):
                        self.floats = max(self.floats, t.numel())
            return out

    with Largest() as largest:
        parts = reference.encode(w, format)
    assert 1000 == largest.floats
    assert all(same_bits(a, b) for a, b in zip(tree.leaves(parts), tree.leaves(whole), strict=True))
    monkeypatch.setattr(codec, "CHUNK", 1)  # never less than a row
    parts = reference.encode(w, format)
    assert all(same_bits(a, b) for a, b in zip(tree.leaves(parts), tree.leaves(whole), strict=True))


# --- bad input, meta and lazy -----------------------------------------------------------------------------------------


def test_int8_beyond_float16():
    assert dequantize(quantize(torch.tensor([[65504.0, 1.0]]), INT8))[0, 0] == 65504.0
    w = torch.tensor([[1.0, -70000.0]])
    with pytest.raises(
        ValueError, match=r"^q: 70000 is beyond float16's 65504, to which int8 rounds first; use another"
    ):
        tree.map_at("q", partial(quantize, format=INT8), {"q": w})
    assert dequantize(quantize(w, NF4))[0, 1] == -70000.0


class Mapped(NamedTuple):
    """A stack of weights to be quantised under vmap."""

    stack: torch.Tensor


BAD = {
    "float64": (torch.ones(2, 2, dtype=torch.float64), TypeError, "got float64; wanted float32, bfloat16, float16"),
    "integers": (torch.ones(2, 2, dtype=torch.int32), TypeError, "got int32; wanted float32, bfloat16, float16"),
    "a list": ([1.0], TypeError, "quantize got a list; wanted a tensor"),
    "quantised already": (quantize(torch.ones(2, 2), NF4), TypeError, "quantize got a Packed; wanted a tensor"),
    "a stack under vmap": (Mapped(torch.ones(3, 2, 2)), RuntimeError, "quantize was called under vmap; quantize each"),
}


@pytest.mark.parametrize("x, error, message", BAD.values(), ids=BAD)
def test_bad_input(x, error, message):
    with pytest.raises(error, match=message):
        torch.vmap(lambda w: quantize(w, NF4))(x.stack) if isinstance(x, Mapped) else quantize(x, NF4)


def test_vmap_over_something_else():
    """A weight that the vmap does not map may be quantised within."""
    w, x = weight(4, 64), weight(3, 64)
    got = torch.vmap(lambda x: dequantize(quantize(w, NF4)) @ x)(x)
    torch.testing.assert_close(got, x @ dequantize(quantize(w, NF4)).T)


def test_a_packed_is_no_tensor():
    p, x = quantize(weight(8, 64), NF4), weight(3, 64)
    for product in (lambda: x @ p, lambda: p @ x):
        with pytest.raises(TypeError, match=r"^a Packed is data and has no @; multiply with fquant.linear\(x, w\)$"):
            product()
    for call in (lambda: torch.nn.functional.linear(x, p), lambda: torch.stack([p, p]), lambda: x.add(p)):
        with pytest.raises(TypeError, match=r"got a Packed, which is data; use fquant.linear\(x, w\), or fquant.deq"):
            call()
    for name in ("float", "half", "to", "cuda", "device", "ndim", "T"):
        with pytest.raises(AttributeError, match=rf"^a Packed is data and has no '{name}'; use fquant.dequantize\(w\)"):
            getattr(p, name)
    with pytest.raises(AttributeError, match="^'Packed' object has no attribute 'code'$"):
        _ = p.code
    assert copy.deepcopy(p).format == NF4 and torch.equal(copy.deepcopy(p).codes, p.codes)


def test_dequantize_a_tree():
    """Every Packed is decoded, and nothing else is touched."""
    p, norm = quantize(weight(8, 64, dtype=torch.bfloat16), NF4_DQ), torch.ones(3)
    params = {"layers": [{"q": p, "norm": norm}], "head": Lazy(lambda: p, tree.map(lambda t: t.to("meta"), p))}
    for dtype in (None, torch.float32):
        dense = dequantize(params, dtype)
        assert same_bits(dense["layers"][0]["q"], dequantize(p, dtype)) and dense["layers"][0]["norm"] is norm
        assert same_bits(dense["head"].read(), dequantize(p, dtype)) and dense["head"].like.is_meta
    assert dequantize(norm) is norm
    for closed, path in ((AfterLoad(p, {}, dict.get), ""), ({"a": [AfterLoad(p, {}, dict.get)]}, "a.0: ")):
        with pytest.raises(ValueError, match=f"^{path}dequantize got a AfterLoad, which is not loaded; use shard.col"):
            dequantize(closed)


@pytest.mark.parametrize("shape", [(6, 128), (3, 5, 100), (7,)], ids=str)
@named("format", [*ALL, replace(FP4_DQ, name="flat", flat=True)])
def test_meta_and_lazy(format, shape):
    w = weight(*shape, dtype=torch.bfloat16)
    if len(shape) == 1 and not format.flat:
        for x in (w, w.to("meta"), Lazy(lambda: w, w.to("meta"))):
            with pytest.raises(ValueError, match=r"got shape \(7,\); wanted a matrix \[out in\], leave norms and"):
                quantize(x, format)
        return
    real, meta = quantize(w, format), quantize(w.to("meta"), format)
    assert tree.structure(real) == tree.structure(meta)
    for a, b in zip(tree.leaves(real), tree.leaves(meta), strict=True):
        assert b.is_meta and a.shape == b.shape and a.dtype == b.dtype
    assert dequantize(meta).is_meta and dequantize(meta).shape == w.shape
    reads = []
    source = Lazy(lambda: reads.append(1) or w, w.to("meta"), lambda: "stamp")
    lazy = quantize(source, format)
    assert not reads and isinstance(lazy, Lazy) and lazy.stamp() == "stamp"
    assert tree.structure(lazy.like) == tree.structure(real) and all(t.is_meta for t in tree.leaves(lazy.like))
    assert all(same_bits(a, b) for a, b in zip(tree.leaves(lazy.read()), tree.leaves(real), strict=True))
    assert len(reads) == 1
