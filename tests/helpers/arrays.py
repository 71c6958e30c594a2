"""Random tensors, bit-exact comparison of trees, and named parameters for tests."""

import re
import struct
from functools import partial
from pathlib import Path

import pytest
import torch

from fquant import jit, tree
from fquant.io.files.digests import KEY
from tests.helpers.formats import alike

named = partial(pytest.mark.parametrize, ids=lambda x: str(getattr(x, "name", x)).removeprefix("torch."))
rng = torch.Generator().manual_seed


def randn(*shape, seed=0, dtype=torch.float32):
    """Draw float32 normals and cast them to ``dtype``."""
    return torch.randn(shape, generator=rng(seed)).to(dtype)


def normal(*shape, seed=0, dtype=torch.float64):
    """Draw normals in ``dtype``."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def equal(a, b):
    """Return True if two trees have one structure and equal bits."""
    return tree.structure(a) == tree.structure(b) and all(map(alike, tree.leaves(a), tree.leaves(b)))


def assert_equal(got, want):
    """Check that two trees have one structure and equal bits, naming the path of a leaf that differs."""
    assert tree.structure(got) == tree.structure(want)
    for (path, a), b in zip(tree.items(got), tree.leaves(want), strict=True):
        assert alike(a, b), path


def same_bits(a, b):
    """Return True if two tensors have one dtype and shape and equal bytes, payloads of NaN included."""
    raw = lambda t: t.contiguous().reshape(-1).view(torch.uint8)
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def same(f, *args):
    """Return True if the captured ``f``, fused and not fused, gives its eager bits."""
    copies = lambda: tree.map(torch.clone, args)
    wanted = f(*copies())
    return all(equal(jit(f, fuse=fuse)(*copies()), wanted) for fuse in (False, True))


def without_digests(path: Path) -> bytes:
    """Return the bytes of a file as they would be without its digests."""
    content = path.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    text = re.sub(f',"{KEY}":"[^"]*"', "", content[8:size].decode()).rstrip()
    text += " " * (-len(text.encode()) % 8)
    return struct.pack("<Q", len(text.encode())) + text.encode() + content[size:]
