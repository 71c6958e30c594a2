"""The gradient of logits is written over the logits on the host, with the same bits, where nothing reads them later."""

import pytest
import torch
from torch.func import grad, grad_and_value

from fquant import cost, jit, tree
from fquant.compile.trace import trace
from fquant.kernels.ops import nll
from models import fused_cross_entropy
from models.blocks import IGNORE
from tests.helpers.formats import alike

ROWS, VOCAB, DIM = 48, 96, 24
X, W = torch.linspace(-3, 3, ROWS * DIM).sin().reshape(ROWS, DIM), torch.linspace(-9, 9, VOCAB * DIM).cos()
W = W.reshape(VOCAB, DIM)
TARGETS = torch.arange(ROWS) * 7 % VOCAB
TARGETS[::5] = IGNORE
slopes = lambda logits, targets: nll.nll_backward(logits, targets, IGNORE)


def over_logits(f, *args, **options):
    """Count the gradients of losses that are written over the logits."""
    g = trace(lambda args: f(*args), args, **options).module.graph
    return len([node for node in g.nodes if str(node.target) == "fquant.nll_backward.out"])


def loss(x, w, targets, chunk=16):
    return fused_cross_entropy.cross_entropy(x, w, targets, chunk=chunk)


def scaled(x, w, targets):
    """A loss whose gradient of the weight recomputes logits, and has a factor for each row."""
    return (fused_cross_entropy.token_losses(x, w, targets, chunk=16) * torch.arange(1.0, ROWS + 1)).sum()


def with_odd_rows(x):
    x = x.clone()
    x[3], x[7, 2], x[11] = float("nan"), float("inf"), 1e30
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("change", [torch.clone, with_odd_rows], ids=["usual rows", "NaN and infinities"])
@pytest.mark.parametrize("f", [loss, scaled])
def test_bits_are_those_of_the_function(f, change, dtype):
    x, w = change(X).to(dtype), W.to(dtype)
    both = grad_and_value(f, argnums=(0, 1))
    captured = jit(both)
    for _ in range(2):
        (got, value), (wanted, same) = captured(x, w, TARGETS), both(x, w, TARGETS)
        assert all(map(alike, (*got, value), (*wanted, same)))
    assert over_logits(grad(f), x, w, TARGETS) == ROWS // 16
    assert not over_logits(grad(f), x, w, TARGETS, fuse=False)


def test_logits_take_memory_once():
    x, w = torch.randn(64, 8), torch.randn(4096, 8)
    f, targets = grad(lambda x, w, targets: loss(x, w, targets, chunk=64)), torch.arange(64)
    one, before = 64 * 4096 * 4, cost(f, x, w, targets, fuse=False)
    after = cost(f, x, w, targets)
    assert before.peak - before.arguments >= 2 * one > 1.1 * (after.peak - after.arguments) >= 1.1 * one


KEPT = {
    "are an argument": (lambda logits, targets: slopes(logits, targets), False),
    "are returned": (lambda x, targets: (logits := x * 2, slopes(logits, targets))[::-1], False),
    "are read later": (lambda x, targets: slopes(logits := x * 2, targets)[1] * logits, False),
    "are a view of something else": (lambda x, targets: slopes((x * 2)[::2], targets[::2]), False),
    "are float64": (lambda x, targets: slopes(x.double() * 2, targets), False),
    "are dead": (lambda x, targets: slopes(x * 2, targets), True),
    "are dead, and losses not read": (lambda x, targets: slopes(x * 2, targets)[1].sum(0), True),
}


@pytest.mark.parametrize("f, is_over", KEPT.values(), ids=KEPT)
def test_only_dead_logits_are_written_over(f, is_over):
    x = torch.linspace(-4, 4, ROWS * VOCAB).reshape(ROWS, VOCAB)
    given, captured = x.clone(), jit(f)
    for _ in range(2):
        got, wanted = tree.leaves(captured(x, TARGETS)), f(given, TARGETS)
        assert all(map(alike, got, tree.leaves(wanted))) and alike(x, given)
    assert over_logits(f, x, TARGETS) == is_over


def test_a_wrong_target_is_an_error_of_a_replay_too():
    f = jit(lambda x, targets: slopes(x * 2, targets))
    x = torch.linspace(-4, 4, ROWS * VOCAB).reshape(ROWS, VOCAB)
    before, same = f(x, TARGETS), x.clone()
    with pytest.raises(IndexError, match="got target 99 in row 0"):
        f(x, TARGETS.new_full((ROWS,), 99))
    assert alike(x, same) and all(map(alike, f(x, TARGETS), before))
