"""Trained trees made whole and cut again: on any mesh, in any form of a moment."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import shard
from fquant import INT8, lazy, quantize, tree
from models import decoder
from shard import Precision
from tests.helpers import ranks
from tests.helpers.sharding import training
from tests.helpers.sharding.bundles import same_bits
from tests.helpers.sharding.meshes import config

pytestmark = pytest.mark.xdist_group("ranks")
CFG = config(False)


def moments(p):
    """Return moments of some kinds: floats of two dtypes, codes beside scales in blocks of 256, and a step."""
    packed = lambda t: quantize((t * t).view(-1, 256), INT8)  # the blocks of a flat parameter
    square = tree.map(lambda b: replace(b, values=packed(b.values)), p, is_leaf=shard.trained.float_bundle.is_bundle)
    return {"mean": tree.map(lambda t: (3 * t).bfloat16(), p), "square": square, "step": torch.tensor(7)}


def local():
    mesh, rules = shard.mesh(fsdp=dist.get_world_size()), shard.Rules()
    placed = shard.place(training.params(CFG, torch.float32), decoder.dims(CFG), rules, mesh, CFG, Precision())
    p = shard.local(placed)
    return mesh, rules, (p, moments(p)), placed


def whole():
    mesh, rules, x, placed = local()
    found = shard.whole(x, mesh, rules)
    assert tree.structure(found) == tree.structure(shard.whole_like(x))
    others = shard.collect(placed), shard.whole(placed, mesh, rules)
    if dist.get_rank() == 0:
        assert same_bits(found[0], training.params(CFG, torch.float32))
        assert all(same_bits(found[0], other) for other in others)
        assert same_bits(found[1]["mean"], tree.map(lambda t: (3 * t).bfloat16(), training.params(CFG, torch.float32)))
    else:
        assert all(t.is_meta for t in tree.leaves(found) if t.ndim)
    return found


def cut(found):
    mesh, rules, x, _ = local()
    unread = tree.map(lambda t: lazy.Lazy(lambda: t, t.to("meta")), found)
    return same_bits(shard.part(found, x, mesh, rules), x) and same_bits(shard.part(unread, x, mesh, rules), x)


@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 3), (3, 1), (2, 2)])
def test_from_any_number_of_ranks_to_any_other(n, m):
    found = ranks.run(n, whole)[0]
    assert all(ranks.run(m, cut, found))


def through_dcp(folder):
    """Save what is trained at rest, and load it into other memory."""
    mesh, rules, x, placed = local()
    rest = shard.at_rest(x, mesh, rules)
    assert tree.structure(rest[0]) == tree.structure(placed)
    assert same_bits(shard.collect(rest[0]), shard.collect(placed)) and same_bits(shard.local(rest), x)
    dcp.save(dict(tree.items(rest)), checkpoint_id=folder)
    empty = shard.at_rest(tree.map(torch.zeros_like, x), mesh, rules)
    dcp.load(dict(tree.items(empty)), checkpoint_id=folder)
    return same_bits(shard.local(empty), x)


@pytest.mark.parametrize("n", [1, 2])
def test_torch_saves_what_is_at_rest(n, tmp_path):
    assert all(ranks.run(n, through_dcp, str(tmp_path / "checkpoint")))


def wrong(name):
    mesh, rules, x, _ = local()
    found = shard.whole(x, mesh, rules)
    if name == "shape":
        found[0].layers[0] = replace(found[0].layers[0], q=torch.zeros(4, 64))
    else:
        found = (found[0], {"mean": found[1]["mean"]})
    shard.part(found, x, mesh, rules)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("shape", r"q: got shape \(4, 64\), wanted \(64, 64\)"),
        ("structure", r"part: got a tree of another structure \(1.square.embed.0 is in one only\); wanted one from"),
    ],
)
def test_another_tree_is_named(name, error):
    with pytest.raises(ranks.RankFailure, match=error):
        ranks.run(1, wrong, name)
