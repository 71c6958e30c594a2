"""Waits for scattered sums: later, never in another order, with the same bits and one buffer of gradients at a time."""

import pytest
import torch
import torch.distributed as dist

import shard
from fquant import jit, tree
from fquant.compile.cost import of
from shard import Precision
from shard.passes import overlap_reductions, schedule
from tests.helpers import ranks
from tests.helpers.sharding import training
from tests.helpers.sharding.bundles import same_bits
from tests.helpers.sharding.meshes import config

pytestmark = pytest.mark.xdist_group("ranks")
PRECISIONS = {"f32": Precision(torch.float32), "bf16": Precision(torch.bfloat16, torch.bfloat16)}


def with_and_without(name):
    precision, found = PRECISIONS[name], []
    cfg, axes = config(False), {"fsdp": dist.get_world_size()}
    for passes in ((), (overlap_reductions(),), (overlap_reductions(2),)):
        options = {"dtype": precision.compute, "start": training.params(cfg, torch.float32)}
        mesh, rules, p, state, step = training.setting(cfg, axes, precision, **options)
        x, y, count = training.rows(4)
        captured = jit(step, passes=passes)
        result = captured(p, state, [], *shard.share((x, y), mesh, rules), count)
        (traced,) = captured.traced.values()
        rows = [row for row in schedule(traced, mesh) if row.name == "reduce_scatter"]
        found.append((tree.leaves(result), rows, of(traced).peak))
    return found


@pytest.mark.parametrize("name", ["bf16", pytest.param("f32", marks=pytest.mark.slow)])
def test_the_next_block_computes_meanwhile(name):
    for (plain, before, peak), (once, one, peak_of_one), (twice, two, peak_of_two) in ranks.run(
        2, with_and_without, name
    ):
        assert same_bits(plain, once) and same_bits(plain, twice)
        assert [row.nbytes for row in before] == [row.nbytes for row in one] == [row.nbytes for row in two]
        assert max(row.ops for row in before) == 0
        layers = sorted(row.ops for row in one)[-2:]  # of the layers, while the one before computes
        assert min(layers) > 20 and max(row.ops for row in two) > max(layers)
        for row, after in zip(one, one[1:], strict=False):
            assert row.waited < after.issued
        largest = max(row.nbytes for row in one)
        assert peak <= peak_of_one <= peak + largest and peak_of_two <= peak + 2 * largest


def test_a_bad_depth_is_named():
    with pytest.raises(ValueError, match="overlap_reductions: depth is 0; wanted an integer of at least 1"):
        overlap_reductions(0)
