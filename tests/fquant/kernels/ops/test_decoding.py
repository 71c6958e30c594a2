"""Attention to the slots of a cache and products of few rows: float64 of the formula as the oracle, every backend."""

import pytest
import torch
from torch.func import vmap

from fquant import linear
from fquant.kernels import dispatch
from fquant.kernels.cpu.library import isas
from fquant.kernels.ops import decoding
from fquant.kernels.reference import causal_attention
from fquant.kernels.reference import decoding as reference
from tests.helpers.arrays import randn
from tests.helpers.kernels.calls import nodes
from tests.helpers.kernels.decoding import OPTIONS, assert_right, drawn

BACKENDS = ["reference", *(f"cpu:{isa}" for isa in isas())]
SIZES = [(1, 256, 4, 32, 64), (3, 77, 2, 6, 16), (2, 40, 1, 5, 24), (2, 130, 3, 3, 8), (1, 1, 1, 9, 130)]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, request.param)
    return request.param


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_attention_is_the_formula(backend, size, dtype):
    *tensors, sinks = drawn(*size, dtype)
    for options in OPTIONS:
        some = options.get("scale"), options.get("cap"), sinks if options.get("sinks") else None
        assert_right(*tensors, *some)


def test_the_formula_is_causal_attention():
    """The last token of a sequence sees all slots."""
    q, k, v = (randn(2, heads, 9, 16, seed=i) for i, heads in enumerate((6, 2, 2)))
    want, _ = causal_attention.dense(q, k, v)
    got = reference.cached_attention(q[:, :, -1], k.transpose(1, 2), v.transpose(1, 2), torch.tensor([8, 8]))
    torch.testing.assert_close(got, want[:, :, -1])


def test_slots_behind_the_position_are_not_read(backend):
    q, k, v, position, _ = drawn(*SIZES[1])
    want = decoding.cached_attention(q, k, v, position)
    seen = torch.arange(77) <= position[:, None]
    k, v = (t.masked_fill(~seen[..., None, None], 1e30) for t in (k, v))
    assert torch.equal(decoding.cached_attention(q, k, v, position), want)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("rows, out, width", [(1, 33, 64), (3, 50, 128), (7, 101, 192), (4, 64, 100), (0, 5, 64)])
def test_products_of_few_rows(backend, rows, out, width, dtype):
    x, w = randn(rows, width).to(dtype), randn(out, width, seed=1).to(dtype)
    exact = x.double() @ w.double().mT
    got = decoding.dense_matmul(x, w)
    assert got.dtype is dtype and got.shape == (rows, out)
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=ROUNDING[dtype] * width**0.5)


def test_a_row_has_the_same_bits_beside_any_others():
    x, w = randn(4, 128).bfloat16(), randn(50, 128, seed=1).bfloat16()
    whole = decoding.dense_matmul(x, w)
    assert all(torch.equal(decoding.dense_matmul(x[i : i + 1], w)[0], whole[i]) for i in range(4))


def test_linear_takes_it_for_large_weights_alone():
    """Few rows, no derivatives and a weight of 2**20 elements; the result is that of torch within rounding."""
    large, small, x = randn(2048, 512), randn(64, 512), randn(2, 512)
    used = lambda *args: "fquant.dense_matmul" in nodes(lambda x, w: linear(x, w), *args)
    assert used(x, large) and used(x[0], large) and used(x[None], large)
    assert not used(x, small) and not used(randn(5, 512), large)
    torch.testing.assert_close(linear(x[None], large), (x @ large.mT)[None], rtol=0, atol=2e-4)
    moving = x.clone().requires_grad_()
    linear(moving, large).sum().backward()
    torch.testing.assert_close(moving.grad, large.sum(0).expand(2, -1), rtol=0, atol=1e-3)
    slope = torch.func.grad(lambda x: linear(x, large).sum())(x)
    torch.testing.assert_close(slope, large.sum(0).expand(2, -1), rtol=0, atol=1e-3)


def test_vmap():
    q, k, v, position, sinks = (torch.stack([t, t.flip(0)]) for t in drawn(*SIZES[1]))
    got = vmap(lambda *args: decoding.cached_attention(*args[:4], None, None, args[4]))(q, k, v, position, sinks)
    for i in range(2):
        want = decoding.cached_attention(q[i], k[i], v[i], position[i], None, None, sinks[i])
        assert torch.equal(got[i], want)


FAULTS = {
    "wanted [b h e] and [b s k e], h a multiple of k": lambda q, k, v, p: (q[:, :3], k, v, p),
    "wanted k (3, 77, 2, 16)": lambda q, k, v, p: (q, k[:2], v, p),
    "wanted position (3,)": lambda q, k, v, p: (q, k, v, p[:1]),
    "got cap 0.0; wanted a positive number or None": lambda q, k, v, p: (q, k, v, p, None, 0),
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults(message):
    with pytest.raises(ValueError) as error:
        decoding.cached_attention(*FAULTS[message](*drawn(*SIZES[1])[:4]))
    assert message in str(error.value)


def test_faults_of_kinds():
    q, k, v, position, _ = drawn(*SIZES[1])
    with pytest.raises(TypeError, match="cached_attention got position torch.int32 beside q torch.float32"):
        decoding.cached_attention(q, k, v, position.int())
    with pytest.raises(TypeError, match="a gradient through cached_attention was asked for; it computes values only"):
        decoding.cached_attention(q.requires_grad_(), k, v, position)
    with pytest.raises(ValueError, match=r"dense_matmul got x \(2, 3, 4\) and w \(4, 4\); wanted \[m in\] and"):
        decoding.dense_matmul(torch.ones(2, 3, 4), torch.ones(4, 4))
    with pytest.raises(TypeError, match="dense_matmul got w torch.float64 beside x torch.float32"):
        decoding.dense_matmul(torch.ones(3, 4), torch.ones(4, 4).double())
