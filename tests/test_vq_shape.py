"""Every quantiser has the same verbs, which take the same first arguments and mean the same by them."""

import inspect

import pytest
import torch

from fquant import random, tree, vq
from fquant.vq import binary, fsp, fsq, grouped, hierarchical, latent, lfq, projection, residual, simvq

from .peers import drawn

D = 6
CASES = {
    "book": (vq, lambda: vq.init(0, 9, D)),
    "heads": (vq, lambda: vq.init(0, 9, D, heads=4)),
    "residual": (residual, lambda: residual.init_books(0, 7, 4, 3, dim=D)),
    "shared": (residual, lambda: residual.init_books(0, 7, 4, 3, dim=D, shared=True)),
    "implicit": (residual, lambda: residual.init_implicit(0, 7, 4, 2, dim=D, depth=1)),
    "residual fsq": (residual, lambda: residual.init_fsq(0, (5, 4), 2, dim=D)),
    "grouped": (grouped, lambda: grouped.init([residual.init_books(i, 7, 3, 2) for i in (0, 1)])),
    "hierarchical": (hierarchical, lambda: hierarchical.init(0, 7, D, (1, 2, 4))),
    "simvq": (simvq, lambda: simvq.init(0, 9, D)),
    "fsq": (fsq, lambda: fsq.init(0, (5, 4, 3), D)),
    "fsp": (fsp, lambda: fsp.init(0, (5, 4, 3), D)),
    "lfq": (lfq, lambda: lfq.init(0, 4, D)),
    "latent": (latent, lambda: latent.init(0, (5, 4, 3), D)),
    "binary": (binary, lambda: binary.init(0, D)),
    "projection": (projection, lambda: projection.init(0, D, 9, 4, num_codebooks=2)),
}
LEARN = ("book", "heads", "residual", "shared", "implicit", "grouped", "hierarchical")  # from rows, some of them drawn
SHAPE = {"encode": 2, "decode": 2, "apply": 4, "update": 2}  # verbs, and how many arguments can be given by place
every = pytest.mark.parametrize("name", CASES)


@every
def test_verbs(name):
    verbs, make = CASES[name]
    state, x, key = make(), drawn(5, 4, D), random.key(1)
    assert callable(verbs.init)
    for verb, number in SHAPE.items():
        inspect.signature(getattr(verbs, verb)).bind(*range(number))
    x_q, codes, losses, stats = verbs.apply(state, x, key, torch.ones(5, 4, dtype=torch.bool))
    assert x_q.shape[:-1] == x.shape[:-1] and all(isinstance(loss, vq.Mean) for loss in losses.values())
    assert all(t.dtype is torch.int64 for t in tree.leaves(codes))
    assert tree.structure(verbs.encode(state, x)) == tree.structure(codes)
    assert verbs.decode(state, codes).shape == x_q.shape
    assert type(verbs.update(state, stats)) is type(state)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_takes_a_dtype(name, dtype):
    verbs, make = CASES[name]
    state = make()
    codes = verbs.encode(state, drawn(5, 4, D))
    got = verbs.decode(state, codes, dtype=dtype)
    assert got.dtype is dtype
    torch.testing.assert_close(got.float(), verbs.decode(state, codes), rtol=0.05, atol=0.05)


@every
def test_a_mask_of_the_first_dims_is_one_of_all(name):
    verbs, make = CASES[name]
    x, mask = drawn(5, 4, D), torch.tensor([True, False, True, True, False])
    more = {"draw": True} if name in LEARN else {}
    whole = mask[:, None].expand(5, 4).contiguous()
    got, wanted = (verbs.apply(make(), x, random.key(1), m, **more) for m in (mask, whole))
    assert got.x[1].eq(0).all() and got.x[0].ne(0).any()
    for a, b in zip(tree.leaves(tuple(got)), tree.leaves(tuple(wanted)), strict=True):
        assert torch.equal(a, b)
