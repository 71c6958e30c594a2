"""Every quantiser has the same verbs, with the same first arguments of the same meaning."""

import inspect

import pytest
import torch

from fquant import random, tree, vq
from fquant.vq import random_projection, sharded  # fmt: skip
from fquant.vq.codebook import implicit, simvq
from fquant.vq.composite import grouped, hierarchical, residual
from fquant.vq.scalar import binary, fsp, fsq, latent, lfq
from tests.helpers.vq.peers import drawn

D = 6
CASES = {  # verbs, a function from a key to a state, and the number of codes
    "book": (vq, lambda key: vq.init(key, 9, D), 9),
    "heads": (vq, lambda key: vq.init(key, 9, D, heads=4), 9),
    "a part": (sharded, lambda key: sharded.init(key, 9, D), 9),
    "residual": (residual, lambda key: residual.init_books(key, 7, 4, 3, dim=D), 7),
    "shared": (residual, lambda key: residual.init_books(key, 7, 4, 3, dim=D, shared=True), 7),
    "implicit": (residual, lambda key: residual.init_implicit(key, 7, 4, 2, dim=D, depth=1), 7),
    "residual fsq": (residual, lambda key: residual.init_fsq(key, (5, 4), 2, dim=D), 20),
    "grouped": (grouped, lambda key: grouped.init(key, 2 * [lambda key: residual.init_books(key, 7, 3, 2)]), 7),
    "hierarchical": (hierarchical, lambda key: hierarchical.init(key, 7, D, (1, 2, 4)), 7),
    "simvq": (simvq, lambda key: simvq.init(key, 9, D), 9),
    "fsq": (fsq, lambda key: fsq.init(key, (5, 4, 3), D), 60),
    "fsp": (fsp, lambda key: fsp.init(key, (5, 4, 3), D), 60),
    "lfq": (lfq, lambda key: lfq.init(key, 4, D), 16),
    "latent": (latent, lambda key: latent.init(key, (5, 4, 3), D), 60),
    "binary": (binary, lambda key: binary.init(key, D), 64),
    "projection": (random_projection, lambda key: random_projection.init(key, D, 9, 4, num_codebooks=2), 9),
}
MODULES = {verbs for verbs, _, _ in CASES.values()} | {implicit}
LEARN = ("book", "heads", "a part", "residual", "shared", "implicit", "grouped", "hierarchical")  # from drawn rows too
SHAPE = {"encode": 2, "decode": 2, "apply": 4, "update": 2}  # verbs, and their number of positional arguments
every = pytest.mark.parametrize("name", CASES)


def test_whatever_begins_takes_a_key_first():
    for verbs in MODULES:
        begin = [name for name in dir(verbs) if name == "init" or name.startswith("init_")]
        assert "init" in begin, verbs
        for name in begin:
            assert next(iter(inspect.signature(getattr(verbs, name)).parameters)) == "key", (verbs, name)


@every
def test_a_state_is_a_function_of_its_key(name):
    make = CASES[name][1]
    state, same, other = make(3), make(random.key(3)), make(4)
    assert tree.structure(state) == tree.structure(same) == tree.structure(other)
    assert all(torch.equal(*both) for both in zip(tree.leaves(state), tree.leaves(same), strict=True))
    apart = [not torch.equal(*both) for both in zip(tree.leaves(state), tree.leaves(other), strict=True)]
    assert any(apart) or name == "binary"  # it draws nothing


def test_parts_of_one_key_are_parts_of_one_book():
    for options in ({}, {"heads": 3}, {"metric": "cosine"}, {"learnable": True}):
        book = vq.init(5, 9, D, **options)
        parts = [sharded.init(5, 9, D, *span, **options) for span in ((0, 4), (4, 5), (5, 9))]
        assert torch.equal(torch.cat([part.book.codes for part in parts], -2), book.codes)
        assert [(part.first, part.num_codes) for part in parts] == [(0, 9), (4, 9), (5, 9)]
        assert parts[0].book.metric == book.metric and parts[0].book.learnable == book.learnable


def test_groups_have_keys_of_their_own():
    state = CASES["grouped"][1](0)
    one, other = (group.layers[0].codes for group in state.groups)
    assert not torch.equal(one, other)


@every
def test_codes_that_there_are_not_are_refused(name):
    verbs, make, size = CASES[name]
    state = make(0)
    codes = verbs.encode(state, drawn(5, 4, D))
    for wrong in (size, size + 5, -2):
        beyond = tree.map(lambda c: torch.full_like(c, wrong), codes)  # noqa: B023
        with pytest.raises(IndexError, match=rf"(got|is) {wrong}( for a book of {size})?; wanted"):
            verbs.decode(state, beyond)


def test_codes_that_there_are_not_are_refused_by_what_learns_and_by_losses():
    book, x = vq.init(0, 9, D), drawn(5, D)
    for f in (vq.stats, vq.cross_entropy, lambda *args: vq.apply(*args[:2], codes=args[2])):
        for wrong in (9, -2):
            with pytest.raises(IndexError, match=f"codes: got {wrong} for a book of 9; wanted 0 to 8, or -1 for none"):
                f(book, x, torch.full((5,), wrong))
    with pytest.raises(IndexError, match=r"binary.log_prob: the code at \(0,\) is 64; wanted one in \[0, 64\)"):
        binary.log_prob(binary.init(0, D), x, torch.full((5,), 64))
    with pytest.raises(IndexError, match=r"fsq.decode_levels: the code at \(0,\) is 60; wanted one in \[0, 60\)"):
        fsq.decode_levels(fsq.init(0, (5, 4, 3)), torch.full((5,), 60))


@every
def test_verbs(name):
    verbs, make, _ = CASES[name]
    state, x, key = make(0), drawn(5, 4, D), random.key(1)
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
    verbs, make, _ = CASES[name]
    state = make(0)
    codes = verbs.encode(state, drawn(5, 4, D))
    got = verbs.decode(state, codes, dtype=dtype)
    assert got.dtype is dtype
    torch.testing.assert_close(got.float(), verbs.decode(state, codes), rtol=0.05, atol=0.05)


@every
def test_a_mask_of_the_first_dims_is_one_of_all(name):
    verbs, make, _ = CASES[name]
    x, mask = drawn(5, 4, D), torch.tensor([True, False, True, True, False])
    more = {"draw": True} if name in LEARN else {}
    whole = mask[:, None].expand(5, 4).contiguous()
    got, wanted = (verbs.apply(make(0), x, random.key(1), m, **more) for m in (mask, whole))
    assert got.x[1].eq(0).all() and got.x[0].ne(0).any()
    for a, b in zip(tree.leaves(tuple(got)), tree.leaves(tuple(wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)  # nan marks the masked rows of a shard
