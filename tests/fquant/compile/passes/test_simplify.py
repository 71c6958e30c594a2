"""Ops that change a tensor's own shape, in captured graphs: replaced by views, with the same results."""

import pytest
import torch
from torch.func import grad, jvp

from fquant import jit, linear
from tests.helpers.arrays import randn
from tests.helpers.formats import alike
from tests.helpers.graphs import llama_step

pytestmark = pytest.mark.usefixtures("twice")


def squeezed(x):
    y = x @ x.mT
    kept = y.view(1, 4, 4)
    y.unsqueeze_(0)
    z = y.squeeze(0)
    y.squeeze_(0).mul_(2)
    return kept + 1, z @ y, y.t_().softmax(-1), y.transpose_(0, 1).sum(0)


def of_an_alias(x):
    y = x.detach()
    y.unsqueeze_(0)
    z = x.view(x.shape)
    z.transpose_(0, 1)
    return y * 2, x * 3, z @ x


def over_and_over(x):
    f = lambda x, w: linear(x, w).sin() * 2  # of one row, whose product torch squeezes in place
    x = x[0]
    w = torch.outer(x, x)
    return jvp(lambda x, w: jvp(f, (x, w), (x, w))[1], (x, w), (x, w)), grad(lambda w: f(x, w).sum())(w)


@pytest.mark.parametrize("f", [squeezed, of_an_alias, over_and_over])
@pytest.mark.parametrize("fuse", [True, False])
def test_a_tensor_that_is_seen_otherwise_is_a_view(f, fuse):
    """Replay twice: a planned tensor is made once, so no replay may change its shape."""
    captured = jit(f, fuse=fuse)
    for seed in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        got, wanted = captured(x), f(x.clone())
        leaves = torch.utils._pytree.tree_leaves
        assert all(map(alike, leaves(got), leaves(wanted))) and x.shape == (4, 4)
    assert len(captured.traced) == 1


SCALES = {  # a function of x f[4 4] and a small s f[4], and how many products with numbers are left
    "twice": (lambda x, s: (x * (s * 3)) @ (x + s * 3), 1),
    "of equal ones": (lambda x, s: (x * (s * 3 * 5)) @ (x + s * 3 * 5), 2),
    "views": (lambda x, s: (x * (s[:2] * 3).sum()) @ (x + (s[:2] * 3).sum()), 1),
    "other numbers": (lambda x, s: (x * (s * 3)) @ (x + s * 3.5), 2),
    "signs of zero": (lambda x, s: (x / (s * 0.0)) @ (x / (s * -0.0)), 2),
    "one is written": (lambda x, s: (x * (s * 3).neg_()) @ (x + s * 3), 2),
    "both are returned": (lambda x, s: (s * 3, s * 3, x @ x), 2),
    "an argument is written": (lambda x, s: ((t := s + 1), (a := t * 3), t.add_(1), a + t * 3)[3], 2),
    "large": (lambda x, s: (x.repeat(64, 64) * 3).sum(0) + (x.repeat(64, 64) * 3).sum(1), 2),
}  # fmt: skip


@pytest.mark.parametrize(("f", "products"), SCALES.values(), ids=SCALES)
def test_a_small_tensor_is_computed_once(f, products):
    captured = jit(f, fuse=False)
    for seed in range(3):
        x, s = randn(4, 4, seed=seed), randn(4, seed=seed + 9)
        got, wanted = captured(x, s), f(x, s.clone())
        leaves = torch.utils._pytree.tree_leaves
        assert all(map(alike, leaves(got), leaves(wanted)))
        assert len({t.data_ptr() for t in leaves(got)}) == len(leaves(got))
    (traced,) = captured.traced.values()
    numbers = [node for node in traced.module.graph.nodes if str(node.target).startswith("aten.mul")]
    assert sum(isinstance(node.args[1], int | float) for node in numbers) == products


@pytest.mark.parametrize("ordered", [False, True])
def test_no_unused_view_is_left(ordered):
    """Torch's interpreter, which records CUDA graphs, would keep it and its memory to the end of a step."""
    with llama_step.captured(2, seq=64, ordered=ordered) as captured:
        nodes = [n for n in captured.module.graph.nodes if n.op == "call_function" and not n.users]
    assert all(n.target._schema.is_mutable for n in nodes), [n.format_node() for n in nodes]
