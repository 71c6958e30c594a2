"""Tests of fquant.autodiff: our autograd Functions lose no tangent of nested forward mode, and no mode of a call."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jvp, vmap
from torch.overrides import TorchFunctionMode

from fquant import NF4, dequantize, jit, linear, quantize, remat, scan
from fquant.autodiff import has_derivatives, is_mapped
from fquant.kernels.reference.causal_attention import dense
from fquant.vq.precision import matmul
from models import blocks, fused_cross_entropy
from models.attention import attention
from models.norm import rms_norm
from tests.helpers.arrays import equal, named, normal

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


class _Loud(TorchFunctionMode):
    """Doubles every sine."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


def layer(x, w):
    return torch.sin(x @ w / 4).float() * (3 if torch.empty(0).is_meta else 1)


MODES_OF_A_CALL = {
    "autocast": lambda: autocast,
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "a function mode": _Loud,
    "another default device": lambda: torch.device("meta"),
}
LOOP = lambda x, ws: layer(layer(x, ws[0]), ws[1])
BLOCKS = {
    "remat": lambda x, ws: remat(layer)(remat(layer)(x, ws[0]), ws[1]),
    "remat, order 2": lambda x, ws: remat(layer, order=2)(remat(layer, order=2)(x, ws[0]), ws[1]),
    "scan": lambda x, ws: scan(lambda x, w: (layer(x, w), ()), x, ws)[0],
}
OF = {
    "grad": lambda f: lambda ws, x: grad(lambda ws: f(ws, x).sum())(ws),
    "vmap of grad": lambda f: lambda ws, x: vmap(grad(lambda ws, row: f(ws, row).sum()), (None, 0))(ws, x),
    "grad of vmap": lambda f: lambda ws, x: grad(lambda ws: vmap(f, (None, 0))(ws, x).sum())(ws),
    "jvp": lambda f: lambda ws, x: jvp(lambda ws: f(ws, x), (ws,), (ws.cos(),))[1],
    "autograd": lambda f: lambda ws, x: torch.autograd.grad(f(ws := ws.clone().requires_grad_(), x).sum(), ws)[0],
}


@named("of", OF)
@named("block", BLOCKS)
@named("modes", MODES_OF_A_CALL)
def test_a_block_is_computed_again_in_the_modes_of_its_call(modes, block, of):
    """Its backward runs where torch has left them, and autocast too if the function has."""

    def within(block):
        def f(ws, x):
            with MODES_OF_A_CALL[modes]():
                return block(x, ws).square()

        return OF[of](f)

    ws, x = normal(2, 16, 16, seed=6, dtype=torch.float32), normal(5, 3, 16, seed=7, dtype=torch.float32)
    plain = OF[of](lambda ws, x: LOOP(x, ws).square())(ws, x)
    with autocast if modes == "no autocast" else nullcontext():
        wanted = within(LOOP)(ws, x)
        got = within(BLOCKS[block])(ws, x)
        if of == "grad of vmap" and block != "scan":  # remat adds the gradients of rows afterwards, in float32
            bound = 0.01 if "autocast" in modes else 1e-6
            torch.testing.assert_close(got, wanted, rtol=0, atol=bound * float(wanted.abs().max()))
        else:
            assert equal(got, wanted)
        assert equal(jit(within(BLOCKS[block]))(ws, x), got)
    assert not equal(plain, wanted) or modes == "no autocast"


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


def test_has_derivatives_sees_every_transform_but_vmap():
    def seen(transform, *args, outside=lambda x: x):
        found = []
        transform(lambda x: found.append(has_derivatives(x)) or (x * x).sum())(*map(outside, args))
        return found[0]

    x, plain, mapped = torch.ones(3, 2), lambda f: f, lambda f: vmap(f)
    pushed = lambda f: lambda x: jvp(f, (x,), (x,))
    assert not any(seen(of, x) for of in (plain, mapped, lambda f: vmap(vmap(f))))
    assert all(seen(of, x) for of in (grad, lambda f: vmap(grad(f)), lambda f: grad(lambda x: vmap(f)(x).sum())))
    assert seen(pushed, x) and seen(lambda f: pushed(vmap(f)), x)
    for of in (plain, mapped):
        assert seen(of, x, outside=lambda x: x.clone().requires_grad_())
        with torch.no_grad():
            assert not seen(of, x, outside=lambda x: x.clone().requires_grad_())
        with forward_ad.dual_level():
            assert seen(of, x, outside=lambda x: forward_ad.make_dual(x, x))
