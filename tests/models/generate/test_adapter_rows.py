"""Adapters of one structure against the updates that they had."""

import pytest
import torch

from fquant import lora, random, tree
from fquant.packed_linear import scaling
from models.generate.adapter_rows import aligned, rows


def adapter(rank, seed=0, paths="ab", **options):
    key = random.key(seed)
    base = {name: torch.zeros(6, 8) for name in paths}
    made = lora.init(base, "|".join(paths), rank=rank, key=0, **options)
    return tree.map_with_path(lambda path, t: random.normal(random.fold(key, path), tuple(t.shape)), made)


def update(w):
    return scaling(w) * w.b @ w.a


def test_updates_stay():
    many = [adapter(2, 1), adapter(4, 2, alpha=3.0), adapter(3, 3, "b", rank_stabilised=True), {}]
    out = aligned(many)
    assert len({tree.structure(each) for each in out}) == 1
    for before, after in zip(many, out, strict=True):
        for path in "ab":
            wanted = update(before[path]) if path in before else torch.zeros(6, 8)
            torch.testing.assert_close(update(after[path]), wanted, rtol=1e-6, atol=1e-6)
    own = rows(lora.stack(out), torch.tensor([2, 0, 0]))
    assert torch.equal(own["a"].a[1], out[0]["a"].a) and not own["a"].b[0].any()


def test_one_structure_is_kept():
    many = [adapter(2, 1), adapter(2, 2)]
    assert all(a is b for a, b in zip(aligned(many), many, strict=True))
    doras = [adapter(2, seed, dora=True) for seed in (1, 2)]
    assert all(a is b for a, b in zip(aligned(doras), doras, strict=True))


def test_faults():
    with pytest.raises(ValueError, match="a: got DoRA beside adapters of another structure; wanted all of one rank"):
        aligned([adapter(2), adapter(2, dora=True)])
    other = {"a": lora.init({"a": torch.zeros(6, 9)}, "a", rank=2)["a"]}
    with pytest.raises(ValueError, match="a: got adapters of weights of 2 shapes"):
        aligned([adapter(2), other])
