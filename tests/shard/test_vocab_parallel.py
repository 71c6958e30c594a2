"""Vocabulary-parallel loss: a rank's rows equal those of the table in every bit, and all ranks decide alike."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import shard
from fquant import FP4, INT4_ZERO, INT8, NF4, NF4_DQ, lora, quantize, tree
from fquant.communication import LOCAL, VocabShard
from shard import Rules, bundle, vocab_parallel
from tests.helpers import ranks
from tests.helpers.arrays import named
from tests.helpers.sharding.meshes import any_bits, dims_of, drawn

pytestmark = pytest.mark.xdist_group("ranks")


BLOCKS = {  # the path of the table, and the block
    "alone": ("", drawn(320, 16)),
    "alone, odd rows": ("", any_bits(301, 5)),
    "behind a norm": ("head", {"norm": drawn(24), "head": drawn(300, 24)}),
    "before a norm": ("head", {"head": drawn(300, 24), "norm": drawn(24), "bias": torch.tensor(3.0)}),
    "few rows behind much": ("b.head", {"a": drawn(999), "b": {"head": drawn(5, 3), "headless": drawn(7, 2)}}),
    "few rows before much": ("b", {"b": drawn(5, 3), "c": drawn(999)}),
    "long rows": ("head", {"norm": drawn(9), "head": drawn(5, 999).double()}),
    "nf4": ("", quantize(drawn(257, 128).bfloat16(), NF4)),
    "nf4, short blocks": ("head", {"norm": drawn(100), "head": quantize(drawn(257, 100), NF4)}),
    "fp4": ("", quantize(drawn(200, 64), FP4)),
    "int8": ("head", {"norm": drawn(64), "head": quantize(drawn(200, 64), INT8)}),
    "int4_zero": ("head", {"norm": drawn(64), "head": quantize(drawn(200, 64), replace(INT4_ZERO, block=32))}),
}


def own_part(name):
    path, block = BLOCKS[name]
    n, rank = dist.get_world_size(), dist.get_rank()
    mesh, rules = shard.mesh(fsdp=n), Rules()
    placed = shard.local(shard.place(block, dims_of(block), rules, mesh))
    group = mesh.get_group("fsdp")
    missing = vocab_parallel._missing(placed.layout, path, n)
    with shard.traffic() as traffic:
        got = vocab_parallel.cut(placed, torch.zeros(2, 3), path, group, 2, shard.comm(mesh, rules).open)
    room = max(sum(high - low for low, high in spans) for spans in missing)
    assert traffic.calls == ([("reduce_scatter", n * room, n)] if room else [])
    cut, table = tree.get(got, path), tree.get(block, path)
    total = tree.leaves(table)[0].shape[0]
    rows = [total * r // n for r in range(n + 1)]
    assert (cut.first, cut.size, cut.max_tokens) == (rows[rank], total, 2)
    for a, b in zip(tree.leaves(cut.table), tree.leaves(table), strict=True):
        assert torch.equal(bundle.raw(a), bundle.raw(b[rows[rank] : rows[rank + 1]])), name
    for at, t in tree.items(got, lambda x: isinstance(x, VocabShard)):
        if t is not cut:
            assert torch.equal(bundle.raw(t), bundle.raw(tree.get(block, at))), (name, at)
    for a, b in zip(tree.leaves(cut.whole(cut.closed)), tree.leaves(table), strict=True):
        assert torch.equal(bundle.raw(a), bundle.raw(b))
    return room


@pytest.mark.parametrize("n", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5))])
@named("name", BLOCKS)
def test_every_rank_has_its_rows(name, n):
    (room,) = set(ranks.run(n, own_part, name))
    assert (room == 0) == (n == 1 or (name == "alone" and n != 3))  # then its bytes are its rows


def test_what_is_less():
    """True exactly if the bytes are fewer; False for tables without separate rows and for ranks without rows."""
    layout = bundle.plan(torch.empty(6400, 16, device="meta"), 2)
    f32, bf16 = torch.empty(3, 16), torch.empty(3, 16, dtype=torch.bfloat16)
    less = lambda x, most, layout=layout, path="", n=2: vocab_parallel.is_less(layout, path, n, most, x)
    assert layout.size == 409600
    assert less(f32, 1383) and not less(f32, 1384)  # 148 bytes a token: x, dx, target, a sum of each rank, a loss
    assert less(bf16, 1765) and not less(bf16, 1766)  # 116
    assert less(f32.double(), 711) and not less(f32.double(), 712)  # 288
    wide = bundle.plan({"norm": torch.empty(1600), "head": torch.empty(6400, 16)}, 2)  # one misses the norm's 6400
    assert wide.size == 416000 and less(f32, 1362, wide, "head") and not less(f32, 1363, wide, "head")
    assert not less(f32, 1, wide) and not less(f32, 1, wide, "norm") and not less(f32, 1, wide, "other")
    for packed in (NF4_DQ, replace(NF4, flat=True)):
        assert not less(f32, 1, bundle.plan(quantize(drawn(6400, 16), packed), 2))
    few = bundle.plan(torch.empty(2, 10**6, device="meta"), 3)
    assert less(f32, 1, bundle.plan(torch.empty(2, 10**6, device="meta"), 2)) and not less(f32, 1, few, n=3)


def decided():
    n, block = dist.get_world_size(), {"norm": drawn(24), "head": drawn(300, 24)}
    mesh, rules = shard.mesh(fsdp=n), Rules()
    placed = shard.local(shard.place(block, dims_of(block), rules, mesh))
    comm = shard.comm(mesh, rules, tokens=4)
    x = torch.zeros(2, 2, 24)
    assert isinstance(comm.part(placed, x, "head")["head"], VocabShard)
    assert not isinstance(comm.part(placed, x.new_zeros(4, 999), "head")["head"], VocabShard)
    for whole in (shard.comm(mesh, rules), shard.comm(mesh, rules, tokens=400), replace(comm, cut=None)):
        assert torch.equal(whole.part(placed, x, "head")["head"], block["head"])
    waiting = lora.attach(placed, lora.init(block, "head", rank=2))
    assert torch.equal(comm.part(waiting, x, "head")["head"].base, block["head"])  # work that waits is the whole's
    assert comm.part(block, x, "head") is block and LOCAL.part(block, x, "head") is block
    with pytest.raises(ValueError) as caught:
        comm.part(placed, torch.zeros(5, 24), "head")
    return str(caught.value)


def test_what_is_cut():
    for message in ranks.run(2, decided):
        wanted = "5 tokens have a loss, and this comm is for at most 4 a rank; make it with tokens=5 or more"
        assert message.startswith(wanted)
