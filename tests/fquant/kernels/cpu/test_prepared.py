"""Calls that were prepared have the bits of the op, with other memory, settings and values than then."""

import pytest
import torch

from fquant import NF4, NF4_DQ, jit, linear, quantize, tree
from fquant.kernels import dispatch
from fquant.kernels.cpu import prepared
from fquant.kernels.dispatch import VARIABLE
from fquant.kernels.ops import pointwise
from fquant.packed import buffers
from tests.helpers.arrays import randn, same_bits
from tests.helpers.kernels.moments import FORMATS, many

PROGRAM = "mul.bfloat16 0 1; to.float32 2; new 3; over 2"


def product(w, rows, width, dtype):
    return lambda i: (randn(rows, width, seed=i).to(dtype), buffers(w), w.format.text, w.shape, w.dtype)


def cached(dtype, heads=4, sinks=False):
    def made(i):
        q, k, v = randn(2, heads, 24, seed=i), randn(2, 9, 2, 24, seed=i + 7), randn(2, 9, 2, 24, seed=i + 9)
        sink = (randn(2, heads, seed=i + 11),) if sinks else (None,)
        return *(t.to(dtype) for t in (q, k, v)), torch.tensor([i, 12]), None, 2.0, *sink

    return made


def update(rule, formats, dtype, turned=False, key=None):
    """Return a function that makes the arguments of one update, or of some whose gradients are transposed."""

    def made(i):
        active = (i != 1, True, i != 2, i == 3)
        name, args, each = many(rule, FORMATS[formats], (17, 130), dtype, True, key, active)
        return tuple([args[0].mT.contiguous().mT, *args[1:]] if turned else each[i])

    return made


ROW = quantize(randn(48, 128, seed=2), NF4_DQ)
STACK = tree.map(lambda *w: torch.stack(w), *(quantize(randn(48, 128, seed=i), NF4_DQ) for i in range(2)))
PREPARED = {
    "a row": ("matmul", product(ROW, 1, 128, torch.bfloat16)),
    "rows": ("matmul", product(quantize(randn(48, 128, seed=2), NF4), 40, 128, torch.float32)),
    "columns": ("matmul_t", product(ROW, 40, 48, torch.bfloat16)),
    "norm": ("rms_norm", lambda i: (randn(5, 24, seed=i), randn(24, seed=i + 1), 1e-5)),
    "attention": ("cached_attention", cached(torch.bfloat16)),
    "attention with sinks": ("cached_attention", cached(torch.float16, 6, sinks=True)),
    "in order": ("ordered_matmul", lambda i: (randn(40, 70, seed=i), randn(70, 9, seed=i + 1))),
    "batch in order": ("ordered_matmul", lambda i: (randn(3, 20, 300, seed=i).mT, randn(3, 20, 9, seed=i + 1))),
    "dense": ("dense_matmul", lambda i: (randn(2, 64, seed=i), randn(9, 64, seed=i + 1))),
    "update": ("adam_update", update("adam", "8", torch.bfloat16, key=3)),
    "update in float32": ("momentum_update", update("lion", "f32", torch.float32)),
    "updates": ("adam_update", update("adamw", "f32", torch.float32, turned=True)),
}
USUAL = {
    "norm, other dtype": ("rms_norm", lambda i: (randn(5, 24, seed=i), randn(24, seed=i).half(), 1e-5)),
    "gaps": ("rms_norm", lambda i: (randn(5, 48, seed=i)[:, ::2], randn(24, seed=i + 1), 1e-5)),
    "in order, float64": ("ordered_matmul", lambda i: (randn(4, 7, seed=i).double(), randn(7, 9, seed=i).double())),
    "odd width": ("dense_matmul", lambda i: (randn(2, 48, seed=i), randn(9, 48, seed=i + 1))),
    "float64": ("matmul", product(ROW, 3, 128, torch.float64)),
    "updates of codes, turned": ("adam_update", update("adamw", "4", torch.float32, turned=True)),
    "a stack": ("matmul", lambda i: (randn(2, 3, 128, seed=i), buffers(STACK), "nf4_dq", (48, 128), STACK.dtype)),
}


@pytest.mark.parametrize(("name", "make"), [*PREPARED.values(), *USUAL.values()], ids=[*PREPARED, *USUAL])
def test_bits(monkeypatch, name, make):
    packet = getattr(torch.ops.fquant, name)

    def call_with(args):
        made = packet.default(*args)
        made = [made] if isinstance(made, torch.Tensor) else list(made)
        odd = lambda t: torch.full_like(t, float("nan") if t.is_floating_point() else 77).contiguous()
        return made, {f"out{i}": odd(t) for i, t in enumerate(made)}

    call = dispatch.direct(packet.out, (make(1), call_with(make(1))[1]))
    assert call is not None
    quick = prepared.prepare(f"fquant::{name}.out", make(1), call_with(make(1))[1])
    assert (quick is not None) == ((name, make) in PREPARED.values())
    for i, backend in enumerate(("cpu", "cpu:portable", "reference", "cpu")):
        monkeypatch.setenv(VARIABLE, backend)
        dispatch.settle()
        args = make(i)
        wanted, results = call_with(args)
        call(*args, **results)
        assert all(map(same_bits, results.values(), wanted)), backend


def test_programs(monkeypatch):
    read = lambda i: [randn(3, 1, 8, seed=i).bfloat16(), randn(5, 8, seed=i + 1).bfloat16()]
    make = lambda i: (read(i), torch.empty(3, 5, 8, dtype=torch.bfloat16))
    given = (read(0), [make(0)[1]], PROGRAM)
    call = dispatch.direct(pointwise.OP, (given, {}))
    assert call is not None and prepared.prepare("fquant::pointwise", given, {}) is not None
    for i, backend in enumerate(("cpu", "reference", "cpu")):
        monkeypatch.setenv(VARIABLE, backend)
        dispatch.settle()
        both, write = make(i)
        (found,), other = call(both, [write], PROGRAM), torch.empty_like(write)
        (wanted,) = pointwise.OP(both, [other], PROGRAM)
        assert same_bits(found, wanted) and same_bits(write, other)


def test_a_replay_follows_the_variable(monkeypatch):
    """A captured product is computed by the backend of the time of the replay, and not of its trace."""
    w, x = quantize(randn(48, 128, seed=2), NF4_DQ), randn(1, 128)
    f = jit(lambda x, w: linear(x, w) * 2)
    bits = {}
    for backend in ("cpu", "reference", "cpu:portable", "cpu"):
        monkeypatch.setenv(VARIABLE, backend)
        bits[backend] = f(x, w)
        assert same_bits(bits[backend], linear(x, w) * 2), backend
    assert len(f.traced) == 1
