"""Concatenations without a copy: the bits of those with one, and which of them need none."""

import pytest
import torch
from torch.func import grad

from fquant import jit
from tests.helpers.arrays import equal, randn

X, Y = randn(16, 16), randn(16, 16, seed=1)
CASES = {  # a function of two matrices, and the copies that are left
    "products": (lambda x, y: torch.cat([x @ y, y @ x]) @ x, 0),
    "stack": (lambda x, y: torch.stack([x @ y, y @ x, x @ x]).sqrt().sum(0) @ x, 0),
    "views": (lambda x, y: torch.cat([(x @ y).view(1, 4, 64), (y @ x).view(1, 4, 64)], 1).sum(2) @ x[:8], 0),
    "programs": (lambda x, y: torch.cat([x * 2 + y, (x - y) * 3]) @ y, 0),
    "written before": (lambda x, y: torch.cat([(x @ y).mul_(2).add_(x), (y @ x).neg_()]) @ y, 0),
    "written over": (lambda x, y: (torch.cat([x @ y, y @ x]) * 2 + 1) @ y, 0),
    "read before": (lambda x, y: ((z := x @ y), (s := z.sum(0)), torch.cat([z, y @ x]) @ s)[-1], 0),
    "inside another": (lambda x, y: torch.cat([torch.cat([x @ y, y @ x]), x @ x]) @ y, 1),
    "gradients of parts": (
        lambda x, y: grad(lambda x: sum((part @ y).sin().sum() for part in x.split([4, 8, 4])))(x @ y) @ y, 0,
    ),
    "other dim": (lambda x, y: torch.cat([x @ y, y @ x], 1) @ torch.cat([x, y]), 2),
    "read behind": (lambda x, y: ((z := x @ y), torch.cat([z, y @ x]) @ z)[-1], 1),
    "twice": (lambda x, y: ((z := x @ y), torch.cat([z, z]) @ y)[-1], 1),
    "given": (lambda x, y: torch.cat([x, x @ y]) @ y, 1),
    "returned": (lambda x, y: torch.cat([x @ y, y @ x]), 1),
    "a part is returned": (lambda x, y: ((z := x @ y), torch.cat([z, y @ x]) @ y), 1),
    "turned": (lambda x, y: torch.cat([(x @ y).mT, y @ x]) @ y, 1),
    "a slice": (lambda x, y: torch.cat([(x @ y)[:8], y @ x]) @ y, 1),
    "cast": (lambda x, y: torch.cat([(x @ y).double(), y.double() @ x.double()]).float() @ y, 1),
    "not aligned": (lambda x, y: torch.cat([x[:3, :5] @ y[:5, :5], y[:4, :4] @ x[:4, :5]]) @ y[:5], 1),
    "empty": (lambda x, y: torch.cat([x @ y, x[:0] @ y]) @ y, 1),
    "one": (lambda x, y: torch.cat([x @ y]) @ y, 0),
}  # fmt: skip


@pytest.mark.parametrize(("f", "copies"), CASES.values(), ids=CASES)
def test_bits_and_copies(f, copies):
    with_peak = lambda x, y: (f(x, y), (x.flatten()[:, None] @ y.flatten()[None]).exp().sum())
    captured = jit(with_peak)
    for i in range(4):
        assert equal(captured(X + i, Y), with_peak(X + i, Y))
    assert copied(captured) == copies


def copied(captured):
    """Return the number of concatenations that the plan of the one trace computes."""
    (traced,) = captured.traced.values()
    assert traced.placed is not None
    return sum(str(node.target).startswith(("aten.cat", "aten.stack")) for node in traced.placed.module.graph.nodes)


def test_memory_is_that_of_the_whole():
    x, sizes = randn(256, 256), []
    for f in (lambda x: torch.cat([x @ x, x.mT @ x]) @ x, lambda x: torch.cat([x, x.mT @ x]) @ x):
        captured = jit(lambda x, f=f: f(x).sum())
        captured(x)
        (traced,) = captured.traced.values()
        sizes.append(traced.placed.nbytes // (4 * 256 * 256))
    assert sizes == [4, 4]  # the whole and the result; the other part is copied, before the result


@pytest.mark.parametrize("waits", [False, True])
def test_a_whole_that_waits_for_its_last_part_is_copied(waits):
    """Its memory would be held while the most memory is."""

    def f(x, w):
        first = x[:64] @ x
        y = (x @ w).exp() @ w.mT
        return torch.cat([first if waits else x[:64] @ x, y]).sum()

    captured, x, w = jit(f), randn(256, 256) / 16, randn(256, 1024, seed=1) / 16
    for _ in range(2):
        assert equal(captured(x, w), f(x, w))
    assert copied(captured) == waits
