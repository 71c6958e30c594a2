"""Arrays: split from tests.fquant.compile.passes.test_fuse_pointwise.

Arrays: split from tests.fquant.test_packed.

Arrays: split from tests.models.test_blocks.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fquant import jit, tree
from tests.helpers.formats import alike


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=rng(seed)).to(dtype)


def equal(a, b):
    return tree.structure(a) == tree.structure(b) and all(map(alike, tree.leaves(a), tree.leaves(b)))


def same(f, *args):
    """Whether captured, fused or not, ``f`` gives the bits that it gives."""
    copies = lambda: tree.map(torch.clone, args)
    wanted = f(*copies())
    return all(equal(jit(f, fuse=fuse)(*copies()), wanted) for fuse in (False, True))


named = partial(pytest.mark.parametrize, ids=lambda x: str(getattr(x, "name", x)).removeprefix("torch."))
rng = torch.Generator().manual_seed


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
