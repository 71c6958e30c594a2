"""Tests of fquant.autodiff: nested forward mode loses no tangent in any of our autograd Functions."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jvp, vmap

from fquant import NF4, dequantize, jit, linear, quantize, remat
from fquant.autodiff import is_mapped
from fquant.kernels.reference.causal_attention import dense
from fquant.vq.precision import matmul
from models import blocks, fused_cross_entropy
from models.attention import attention
from models.norm import rms_norm
from tests.helpers.arrays import named, normal

PACKED = quantize(normal(8, 64, dtype=torch.float32), NF4)
W = dequantize(PACKED).double()
X, G, TARGETS = normal(5, 64, seed=1), normal(64, seed=2), torch.arange(5)
Q, K, V = (normal(2, 5, 2, 4, seed=seed) for seed in (3, 4, 5))
turned = lambda *tensors: [t.transpose(1, 2) for t in tensors]
autocast = torch.autocast("cpu", torch.bfloat16)
wave = lambda x: (x.sin() @ W.mT).square()

CASES = {  # a function of a number t, and the same in plain tensor operations
    "linear": (lambda t: linear(t * t * X, PACKED).sin(), lambda t: (t * t * X @ W.mT).sin()),
    "norm": (lambda t: rms_norm(X + t * t, G * t, 1e-6), lambda t: F.rms_norm(X + t * t, [64], G * t, 1e-6)),
    "swiglu": (lambda t: blocks.swiglu(X * t, X + t), lambda t: F.silu(X * t) * (X + t)),
    "attention": (
        lambda t: attention(t * t * Q, K + t, V * t).transpose(1, 2),
        lambda t: dense(*turned(t * t * Q, K + t, V * t))[0],
    ),
    "head": (
        lambda t: fused_cross_entropy.cross_entropy(t * t * X, W * t, TARGETS),
        lambda t: F.cross_entropy(t * t * X @ (W * t).mT, TARGETS),
    ),
    "within autocast": (autocast(lambda t: matmul(t * t * X, W.mT * t)), lambda t: t * t * X @ (W.mT * t)),
    "remat": (lambda t: remat(wave)(t * t * X), lambda t: wave(t * t * X)),
    "remat, order 2": (lambda t: remat(wave, order=2)(t * t * X), lambda t: wave(t * t * X)),
}
once = lambda f: lambda t: jvp(f, (t,), (torch.ones_like(t),))[1]
MODES = {
    "jvp": once,
    "jvp of jvp": lambda f: once(once(f)),
    "three times": lambda f: once(once(once(f))),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(f)),
    "hessian": lambda f: hessian(lambda t: f(t).sin().sum()),
    "jacfwd of jacfwd of grad": lambda f: jacfwd(jacfwd(grad(lambda t: f(t).sin().sum()))),
}


@named("case", CASES)
@named("mode", MODES)
def test_forward_mode_around_forward_mode(case, mode):
    t, (ours, plain) = torch.tensor(0.7, dtype=torch.float64), CASES[case]
    wanted = MODES[mode](plain)(t)
    assert 2 * wanted.count_nonzero() > wanted.numel()
    if case == "remat" and mode in ("hessian", "jacfwd of jacfwd of grad"):
        with pytest.raises(RuntimeError, match="gives first derivatives only"):
            MODES[mode](ours)(t)
    else:
        torch.testing.assert_close(MODES[mode](ours)(t), wanted)


def test_a_captured_function_of_dual_tensors_is_the_function_itself():
    """A replay writes into planned memory, which carries no tangents."""
    f = lambda x: ((x * 2 + 1).sin() @ x, F.silu(x * 3).sum())
    x, dx = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0))
    captured, both = jit(f), jvp(f, (x,), (dx,))
    captured(x)
    with forward_ad.dual_level():
        duals = [forward_ad.unpack_dual(t) for t in captured(forward_ad.make_dual(x, dx))]
        plain = [forward_ad.unpack_dual(t) for t in captured(x)]
    torch.testing.assert_close([(dual.primal, dual.tangent) for dual in duals], [*zip(*both, strict=True)])
    assert all(t.tangent is None for t in plain) and len(captured.traced) == 1


def test_is_mapped_sees_through_other_transforms():
    seen = []
    f = lambda x, w: seen.extend([is_mapped(x), is_mapped(w), is_mapped(x * w)]) or (x * w).sum()
    x, w = torch.ones(3, 2), torch.ones(2)
    f(x[0], w)
    vmap(f, (0, None))(x, w)
    vmap(grad(f), (0, None))(x, w)
    assert seen == [False] * 3 + [True, False, True] * 2
