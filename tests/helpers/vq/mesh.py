"""Batches, splits and comparisons for codebooks on ranks."""

from dataclasses import replace

import torch
import torch.distributed as dist

from fquant import random, tree

K, D, ROWS, STEPS = 16, 4, 60, 5
AXES = ("dp", "fsdp")


def batch(step, heads=None, n=ROWS):
    x = random.normal(random.fold(random.key(71), step), (n, *([heads] if heads else []), D))
    return x + 0.05 * step


def spread(book):
    codes = book.codes if book.metric == "cosine" else 30 * book.codes
    return replace(book, codes=codes, sums=codes.clone())


def cut_of(sizes):
    first = sum(sizes[: dist.get_rank()])
    return slice(first, first + sizes[dist.get_rank()])


def same(results, want):
    """Check that ranks are equal to the bit, and equal one process within 1e-6."""
    assert tree.structure(results[0]) == tree.structure(want)
    for got in results[1:]:
        for one, other in zip(tree.leaves(got), tree.leaves(results[0]), strict=True):
            assert torch.equal(one, other)
    for (path, one), other in zip(tree.items(results[0]), tree.leaves(want), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, msg=lambda m, p=path: f"{p}: {m}")
