"""Ops that are composed in planned memory: the bits of the op, in every dtype, for views and broadcast arguments."""

import pytest
import torch
from torch.func import grad

from fquant import jit
from fquant.compile.memory.composed import COMPOSED
from tests.helpers.arrays import randn

_aten = torch.ops.aten
X = randn(6, 5)
number = lambda x: 0.7 if x.is_floating_point() else 3  # one that bf16 and f16 do not have
CALLS = {
    _aten.zeros.default: lambda x: torch.zeros(4, 3, dtype=x.dtype),
    _aten.new_zeros.default: lambda x: x.new_zeros(4, 3),
    _aten.ones.default: lambda x: torch.ones(4, 3, dtype=x.dtype),
    _aten.new_ones.default: lambda x: x.new_ones(4, 3),
    _aten.full.default: lambda x: torch.full((4, 3), number(x), dtype=x.dtype),
    _aten.new_full.default: lambda x: x.new_full((4, 3), number(x)),
    _aten.masked_fill.Scalar: lambda x: x.mT.masked_fill((x[:, :1] > 0).mT, -number(x)),
    _aten.masked_fill.Tensor: lambda x: x.masked_fill(x > 0, x.amax()),
    _aten.index_put.default: lambda x: x.index_put((x[:3, 0].abs().long() % 6,), x[:3] * 3, accumulate=True),
    _aten.relu.default: lambda x: x.mT.relu(),
    _aten.mul.Scalar: lambda x: _aten.mul.Scalar(x, number(x)),
    _aten.select_backward.default: lambda x: _aten.select_backward(x[0], (3, 5), 0, -1),
    _aten.slice_backward.default: lambda x: _aten.slice_backward(x, (6, 12), 1, 1, 11, 2),
    _aten.diagonal_backward.default: lambda x: _aten.diagonal_backward(x[0], (7, 6), 1, 0, 1),
    _aten.eye.default: lambda x: torch.eye(4, dtype=x.dtype),
    _aten.eye.m: lambda x: torch.eye(3, 5, dtype=x.dtype),
    _aten.stack.default: lambda x: torch.stack([x.mT, x.mT * 2], dim=-1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("op", CALLS, ids=str)
def test_bits_are_those_of_the_op(op, dtype):
    x = (X * 4).to(dtype)
    f = lambda x: CALLS[op](x).roll(1)  # an op that is not planned, so that this one's result is not returned
    captured = jit(f, fuse=False)
    for i in range(1, 4):
        found, wanted = captured(x * i), f(x * i)
        assert torch.equal(found, wanted) and found.dtype == wanted.dtype and found.stride() == wanted.stride()
    (trace,) = captured.traced.values()
    targets = [node.target for node in trace.placed.module.graph.nodes]
    assert trace.placed.tensors and op not in targets


def test_every_op_has_a_case():
    assert set(CALLS) == COMPOSED


def test_gradients_of_loops():
    """Views of steps in a loop have gradients that are zero elsewhere, each in planned memory."""

    def loss(x):
        state = torch.zeros_like(x[0])
        for row in x.unbind():
            state = torch.tanh(state + row) * state.relu().masked_fill(row > 1, 0.5)
        return (state[1:3] * x[:, 0].sum()).sum()

    captured = jit(grad(loss))
    for i in range(1, 4):
        assert torch.equal(captured(X * i), grad(loss)(X * i))
