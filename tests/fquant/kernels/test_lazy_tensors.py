"""Lazy tensors, whose memory does not hold their values: kernels get plain copies.

Torch negates or conjugates some tensors when they are read. Some second derivatives and tangents are zero tensors
without memory.
"""

import pytest
import torch
from torch.func import grad, hessian, jvp, vmap

from fquant import INT8, NF4, NF4_DQ, dequantize, jit, linear, lora, quantize, random
from models.attention import attention
from models.fused_cross_entropy import cross_entropy
from models.norm import rms_norm
from models.swiglu import gated
from tests.helpers.devices.placing import on
from tests.helpers.formats import alike

pytestmark = pytest.mark.usefixtures("twice")
X = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
W = quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), NF4_DQ)
DENSE = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
TARGETS = torch.tensor([1, 2, 0, 5, 7, 3])
ADAPTERS = lora.init({"w": W}, "w", rank=2, alpha=4, key=random.key(0))
VERBS = {
    "linear": lambda x, w, adapters, d, t: linear(x, w),
    "linear of one row": lambda x, w, adapters, d, t: linear(x[:1], w),
    "linear, dense": lambda x, w, adapters, d, t: linear(x, d),
    "linear, bfloat16": lambda x, w, adapters, d, t: linear(x.bfloat16(), w),
    "linear, adapted": lambda x, w, adapters, d, t: linear(x, lora.attach({"w": w}, adapters)["w"]),
    "gated": lambda x, w, adapters, d, t: gated(x, x.flip(0)),
    "norm": lambda x, w, adapters, d, t: rms_norm(x, d[0], 1e-5),
    "norm by it": lambda x, w, adapters, d, t: rms_norm(d, x[0], 1e-5),
    "attention": lambda x, w, adapters, d, t: attention(*(x.reshape(1, 2, 6, 32),) * 3),
    "head": lambda x, w, adapters, d, t: cross_entropy(x[None], d, t[None]),
    "elementwise": lambda x, w, adapters, d, t: (x * 2 + 1, x * x + 2, x.mT * 2 - 1),
}
LAZY = {
    "negative": (torch._neg_view, torch.neg),
    "imaginary": (lambda t: torch.complex(t, t).conj().imag, torch.neg),
    "zeros": (lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device), torch.zeros_like),
}


def same(a, b):
    a, b = (x if isinstance(x, tuple) else (x,) for x in (a, b))
    return len(a) == len(b) and all(map(alike, a, b))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("lazy", LAZY)
def test_a_verb_reads_the_values(verb, lazy, device):
    made, plain = LAZY[lazy]
    f, (x, *rest) = VERBS[verb], on(device, [X, W, ADAPTERS, DENSE, TARGETS])
    mapped = vmap(lambda x: f(x.expand(6, 64), *rest))
    wanted = f(plain(x), *rest)
    assert same(f(made(x), *rest), wanted)
    assert same(mapped(made(x)[:, None]), mapped(plain(x)[:, None]))
    captured = jit(f)
    for first in (made, plain):  # a trace of the one is replayed with the other
        assert same(captured(first(x), *rest), wanted) and same(captured(made(x), *rest), wanted)
    assert len(captured.traced) == 1


@pytest.mark.parametrize("form", [NF4, NF4_DQ, INT8], ids=lambda form: form.name)
@pytest.mark.parametrize("lazy", LAZY)
def test_quantising_reads_the_values(form, lazy, device):
    made, plain = LAZY[lazy]
    x = X.to(device)
    assert alike(dequantize(quantize(made(x), form)), dequantize(quantize(plain(x), form)))


def test_derivatives_whose_zeros_are_nowhere():
    """The second derivative of a magnitude is such a zero, and so is a missing tangent."""
    w = quantize(torch.randn(64, 64, generator=torch.Generator().manual_seed(3)), NF4)
    loss = lambda x: linear(linear(x, w).abs(), w).square().sum() + linear(x, w).abs().sum()
    dense = dequantize(w)
    wanted = hessian(lambda x: ((x @ dense.mT).abs() @ dense.mT).square().sum() + (x @ dense.mT).abs().sum())(X[:1])
    torch.testing.assert_close(hessian(loss)(X[:1]), wanted, rtol=1e-4, atol=1e-3 * wanted.abs().max().item())
    twice = grad(lambda x: grad(loss)(x).square().sum())
    other = grad(lambda x: grad(lambda x: loss(x) + 0 * x.abs().sum())(x).square().sum())
    assert twice(X).isfinite().all() and torch.equal(twice(X), other(X))
    tangent = lambda x, w: jvp(lambda y: linear(y.sign() * y, w).sum(), (x,), (torch.ones_like(x),))[1]
    assert alike(jit(tangent)(X, w), tangent(X, w))
