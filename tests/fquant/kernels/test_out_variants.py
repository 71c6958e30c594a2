"""The ``out`` overloads of ops: the same bits as without on every backend, and errors for results that do not fit."""

import pytest
import torch

from fquant import NF4_DQ, quantize
from fquant.compile.memory.out_variants import OURS
from fquant.kernels import grouped_ops  # noqa: F401  (registers the ops)
from fquant.kernels.dispatch import VARIABLE
from fquant.kernels.ops import attention, decoding, moments, nll, norm, ordered_matmul, silu, sums_by_code  # noqa: F401
from fquant.packed import buffers
from tests.helpers.arrays import randn
from tests.helpers.kernels.moments import FORMATS, steps

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def arguments(name, dtype):
    """Return the arguments of each op."""
    x, g = randn(5, 64).to(dtype), randn(5, 48, seed=1).to(dtype)
    w = quantize(randn(48, 64, seed=2), NF4_DQ)
    packed = (buffers(w), w.format.text, w.shape, w.dtype)
    q, k, v = (randn(2, heads, 7, 8, seed=i).to(dtype) for i, heads in enumerate((4, 2, 2)))
    y, lse = attention.attention(q, k, v)
    _, scale = norm.rms_norm(x, x[0], 1e-5)
    narrow = torch.float32 if dtype is torch.float64 else dtype
    targets = torch.tensor([1, 2, -100, 5, 63])
    counts, many = torch.tensor([2, 0, 3]), quantize(randn(3, 48, 64, seed=3), NF4_DQ)
    stack = (counts, buffers(many), many.format.text, many.shape, many.dtype)
    return {
        "matmul": (x, *packed), "matmul_t": (g, *packed),
        "nll": (x, targets, -100), "nll_backward": (x, targets, -100, None),
        "rms_norm": (x, x[0], 1e-5), "rms_norm_backward": (x.flip(0), x, x[0], scale),
        "silu": (x,), "silu_derivative": (x,),
        "attention": (q, k, v, None, None, None, None, False, randn(2, 4, seed=3).to(lse.dtype)),
        "attention_backward": (q.flip(0), y, lse, q, k, v, None),
        "turn": (x, 32), "root": (x.abs().float(),),
        "grouped_matmul": (x, *stack), "grouped_matmul_t": (g, *stack),
        "grouped_mm": (x, counts, randn(3, 48, 64).to(dtype), False), "grouped_outer": (g, x, counts),
        "cached_attention": (q[:, :, 0], *(t.transpose(1, 2) for t in (k, v)), torch.tensor([3, 9]), None, 2.0),
        "adam_update": next(steps("adamw", FORMATS["8"], (5, 70), narrow, "nearest", True))[1],
        "momentum_update": next(steps("lion", FORMATS["4"], (5, 70), narrow, "nearest", True))[1],
        "dense_matmul": (x, randn(40, 64, seed=4).to(dtype)), "ordered_matmul": (x, randn(40, 64, seed=4).to(dtype).mT),
        "sums_by_code": (q[0].to(lse.dtype), torch.arange(28).view(4, 7) % 6 - 1, 5),
    }[name]  # fmt: skip


def results(name, args):
    op = getattr(torch.ops.fquant, name).default
    made = op(*args)
    return [made] if isinstance(made, torch.Tensor) else list(made)


def write(name, args, out):
    getattr(torch.ops.fquant, name).out(*args, **{f"out{i}": t for i, t in enumerate(out)})


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OURS)
def test_the_same_bits_where_they_are_wanted(monkeypatch, name, dtype, backend):
    monkeypatch.setenv(VARIABLE, backend)
    args = arguments(name, dtype)
    want = results(name, args)
    out = [torch.full_like(t, float("nan") if t.is_floating_point() else 7) for t in want]
    where = [t.data_ptr() for t in out]
    write(name, args, out)
    assert all(torch.equal(t, w) for t, w in zip(out, want, strict=True)) and where == [t.data_ptr() for t in out]


@pytest.mark.parametrize("name", OURS)
def test_what_does_not_fit_is_refused_and_not_written(name):
    args = arguments(name, torch.float32)
    for wrong in (
        lambda t: t.new_full((*t.shape[:-1], t.shape[-1] + 1), 7.0),
        lambda t: torch.full_like(t, 7.0, dtype=torch.bfloat16),
        lambda t: t.new_full((*t.shape, 2), 7.0)[..., 0],
    ):
        out = [torch.full_like(t, 7.0) for t in results(name, args)]
        out[0] = wrong(out[0])
        with pytest.raises(ValueError, match="a result was to go into .*; wanted contiguous"):
            write(name, args, out)
        assert bool((out[0] == 7).all())
