"""Shares of a batch and sums over ranks: all shares are the batch, and their sums equal those of one process."""

import math

import pytest
import torch
import torch.distributed as dist

import shard
from fquant import jit, tree
from fquant.device import HOST
from shard import Rules
from tests.helpers import ranks
from tests.helpers.arrays import named
from tests.helpers.devices.placing import elsewhere, on
from tests.helpers.sharding.bundles import same_bits
from tests.helpers.sharding.meshes import mesh_of_one

pytestmark = pytest.mark.xdist_group("ranks")

MESHES = [{"fsdp": 1}, {"fsdp": 3}, {"dp": 2}, {"dp": 2, "fsdp": 2}, {"fsdp": 5}]


def shares(axes, rows, batch):
    mesh = shard.mesh(**axes)
    x = {"tokens": torch.arange(rows * 2).reshape(rows, 2), "mask": [torch.arange(rows) % 2 == 0]}
    return shard.share(x, mesh, Rules(batch=batch)) | {"most": shard.max_local_rows(rows, mesh, Rules(batch=batch))}


@pytest.mark.parametrize("rows", [7, 8, 3, 1, 0])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_shares_are_the_batch_cut_evenly(axes, rows):
    n = math.prod(axes.values())
    got = ranks.run(n, shares, axes, rows, ("dp", "fsdp"))
    sizes = [len(one["tokens"]) for one in got]
    assert max(sizes) - min(sizes) <= 1 and [one["most"] for one in got] == [max(sizes)] * n
    assert torch.cat([one["tokens"] for one in got]).tolist() == torch.arange(rows * 2).reshape(rows, 2).tolist()
    assert torch.cat([one["mask"][0] for one in got]).tolist() == [i % 2 == 0 for i in range(rows)]


@pytest.mark.parametrize(("batch", "same"), [(("dp",), (0, 1)), (("fsdp",), (0, 2)), ((), (0, 1, 2, 3))])
def test_ranks_along_an_axis_that_does_not_split_the_batch_share_rows(batch, same):
    got = [one["tokens"].tolist() for one in ranks.run(4, shares, {"dp": 2, "fsdp": 2}, 6, batch)]
    assert all(got[rank] == got[same[0]] for rank in same)
    assert len(got[0]) == 6 // 2 ** len(batch)


def mixed(rank):
    draw = torch.Generator().manual_seed(rank)
    return {
        "a": torch.randn(3, 2, generator=draw, dtype=torch.float64),
        "count": torch.tensor(rank + 1),
        "b": [torch.randn((), generator=draw), torch.empty(0), torch.randn(4, 1, generator=draw).T],
        "half": torch.full((5,), 0.5 + rank, dtype=torch.bfloat16),
        "ints": torch.arange(3) * rank,
    }


def summed(axes, over):
    with shard.traffic() as t:
        got = shard.psum(mixed(dist.get_rank()), shard.mesh(**axes), over)
    return got, t.count("all_reduce")


@pytest.mark.parametrize(
    ("axes", "over", "members", "sums"),
    [
        ({"fsdp": 1}, ("dp", "fsdp"), lambda r: [r], 0),
        ({"fsdp": 3}, ("dp", "fsdp"), lambda r: [0, 1, 2], 1),
        ({"fsdp": 3}, ("dp",), lambda r: [r], 0),
        ({"dp": 2, "fsdp": 2}, ("dp", "fsdp"), lambda r: [0, 1, 2, 3], 1),
        ({"dp": 2, "fsdp": 2}, ("dp",), lambda r: [r % 2, r % 2 + 2], 1),
        ({"dp": 2, "fsdp": 2}, ("fsdp",), lambda r: [r - r % 2, r - r % 2 + 1], 1),
        ({"dp": 2, "fsdp": 2}, (), lambda r: [r], 0),
        ({"dp": 2, "fsdp": 2}, "dp", lambda r: [r % 2, r % 2 + 2], 1),
        ({"dp": 2, "fsdp": 2}, "fsdp", lambda r: [r - r % 2, r - r % 2 + 1], 1),
    ],
)
def test_psum_is_one_sum_a_dtype(axes, over, members, sums):
    for rank, (got, count) in enumerate(ranks.run(math.prod(axes.values()), summed, axes, over)):
        want = tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *[mixed(i) for i in members(rank)])
        assert tree.structure(got) == tree.structure(want)
        assert count == 4 * sums
        for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            torch.testing.assert_close(a, b)


def on_one_rank(device):
    """Return what functions of axes give on a mesh of one rank on ``device``, and what they should give."""
    with mesh_of_one(device) as mesh:
        rules, numbers, rows = Rules(), on(device, mixed(3)), torch.arange(6.0, device=device).reshape(3, 2)
        batch = {"tokens": rows.long(), "mask": [rows[:, 0] > 1]}
        over = shard.exchange_rows(mesh, "fsdp", max_rows=3)
        got = [
            shard.share(batch, mesh, rules), shard.psum(numbers, mesh, ("dp", "fsdp")),
            shard.reduce({"q": rows}, mesh, rules), over.gather(rows), over.mine(rows, 3), over.scatter(rows),
            over.largest(rows.long()),
        ]  # fmt: skip
        assert elsewhere(got, shard.device_of(mesh)) == []
        return on(HOST, got), on(HOST, [batch, numbers, {"q": rows}, rows, rows, rows, rows.long()])


def test_one_rank_has_the_whole_batch_and_the_sum(device):
    ((got, wanted),) = ranks.run(1, on_one_rank, device)
    assert same_bits(got, wanted)


def reduced(x):
    return shard.reduce(x, shard.mesh(fsdp=2), Rules())


def test_reduce_is_the_sum_over_the_axes_of_the_batch():
    got = ranks.run(2, reduced, {"q": torch.ones(3)})
    assert all(one["q"].tolist() == [2.0] * 3 for one in got)


def test_reduce_refuses_what_is_no_gradient():
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, reduced, {"q": torch.ones(3), "codes": torch.ones(3, dtype=torch.uint8)}, timeout=10)
    messages = {failure.message for failure in caught.value.failures.values()}
    assert messages == {"codes: a gradient of torch.uint8; wanted floats"}


def reduced_over_dp():
    mesh, rules = shard.mesh(dp=2, fsdp=2), Rules(batch=("dp",))
    return shard.reduce(torch.tensor(2.0 ** dist.get_rank()), mesh, rules).item()


def test_reduce_leaves_out_axes_that_do_not_split_the_batch():
    assert ranks.run(4, reduced_over_dp) == [5.0, 10.0, 5.0, 10.0]


def of_one_axis(axis):
    """Compare every function of axes, given a name and a tuple of it."""
    mesh, rank = shard.mesh(dp=2, fsdp=2), dist.get_rank()
    x = torch.arange(4.0 + rank).reshape(-1, 1)
    mine = torch.full((3,), rank)

    def results(axes):
        rules, over = Rules(batch=axes), shard.exchange_rows(mesh, axes, max_rows=8)
        return (
            shard.psum(mine, mesh, axes), shard.reduce(x[:2], mesh, rules), shard.share(torch.arange(7), mesh, rules),
            shard.max_local_rows(7, mesh, rules), shard.rows(len(x), mesh, axes), shard.local_range(9, mesh, axes),
            over.gather(x).nan_to_num(), over.mine(over.gather(x), len(x)), over.largest(mine), over.rank,
            over.num_ranks,
        )  # fmt: skip

    for got, wanted in zip(map(tree.leaves, results(axis)), map(tree.leaves, results((axis,))), strict=True):
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("axis", ["dp", "fsdp"])
def test_one_axis_may_be_a_name(axis):
    ranks.run(4, of_one_axis, axis)


def of_unknown_axis():
    mesh, x, seen = shard.mesh(fsdp=2), torch.ones(2), []
    for f in (
        lambda: shard.psum(x, mesh, "tp"),
        lambda: shard.reduce(x, mesh, Rules("tp")),
        lambda: shard.share(x, mesh, Rules(("dp", "tp"))),
        lambda: shard.max_local_rows(3, mesh, Rules("tp")),
        lambda: shard.rows(3, mesh, ("tp", "fsdp")),
        lambda: shard.exchange_rows(mesh, "tp", max_rows=3),
        lambda: shard.local_range(3, mesh, "tp"),
    ):
        with pytest.raises(ValueError) as caught:
            f()
        seen.append(str(caught.value))
    return seen


def test_an_unknown_axis_is_refused_by_name():
    wanted = "the mesh has no axis 'tp'; wanted some of dp, fsdp"
    assert ranks.run(2, of_unknown_axis) == [[wanted] * 7] * 2


def rows_over(axes):
    """Exchange rows over several axes; return the gathered rows, and the sum that each rank keeps of them."""
    mesh, rank = shard.mesh(dp=2, fsdp=2), dist.get_rank()
    over = shard.exchange_rows(mesh, axes, max_rows=2)
    x = torch.tensor([10.0 + rank, 20.0 + rank])[: 1 + rank % 2]
    every = over.gather(x)
    assert torch.equal(over.mine(every, len(x)), x) and over.largest(torch.tensor([rank])).item() == 3
    return every.nan_to_num().tolist(), over.scatter(every.nan_to_num())[0].item(), shard.local_range(9, mesh, axes)


@pytest.mark.parametrize(("axes", "order"), [(("dp", "fsdp"), (0, 1, 2, 3)), (("fsdp", "dp"), (0, 2, 1, 3))])
def test_rows_are_exchanged_over_several_axes(axes, order):
    every = [y for rank in order for y in ((10.0 + rank, 20.0 + rank if rank % 2 else 0.0))]
    for rank, (got, kept, (first, stop)) in enumerate(ranks.run(4, rows_over, axes)):
        assert got == every and kept == 4 * (10.0 + rank)
        place = order.index(rank)
        assert (first, stop) == (2 * place + (place > 0), 2 * place + 3)


# --- ranks with trees that differ


def one_and_ten(*shape):
    return torch.full(shape, 1.0), torch.full(shape, 10.0)


def turned(x):
    """Return the tree ``x`` with the keys of every dict in the opposite order."""
    if isinstance(x, dict):
        return {key: turned(x[key]) for key in reversed(x)}
    return [turned(y) for y in x] if isinstance(x, list) else x


SUMS = {
    "psum": lambda x, mesh: shard.psum(x, mesh, "fsdp"),
    "reduce": lambda x, mesh: shard.reduce(x, mesh),
    "captured": lambda x, mesh: jit(lambda x: shard.reduce(x, mesh))(x),
    "vmap": lambda x, mesh: torch.func.vmap(lambda x: shard.psum(x, mesh, "fsdp"))(x),
    "gradient": lambda x, mesh: torch.func.grad(lambda x: tree.leaves(tree.map(torch.sum, weighed(x, mesh)))[0])(x),
    "ordered": lambda x, mesh: shard.ordered.grad_and_value(
        lambda x, row: sum(row * t.sum() for t in tree.leaves(x)), mesh, Rules(), rows=dist.get_world_size()
    )(x, [torch.full((1,), 1.0 + dist.get_rank())]),
}


def weighed(x, mesh):
    """Return sums over ranks, of which the first leaf is the sum of all, by their names."""
    found = shard.psum(x, mesh, "fsdp")
    return {"of all": sum(t.sum() * (i + 1) for i, (_, t) in enumerate(sorted(tree.items(found))))}


def of_turned(name):
    """Sum on this rank a tree whose dicts have their keys in an order of its own; compare with all trees by paths."""
    mesh, rank = shard.mesh(fsdp=dist.get_world_size()), dist.get_rank()
    trees = [{"a": a + i, "b": [b, {"d": 3 * a, "c": 2 * b + i}]} for i in range(3) for a, b in [one_and_ten(2)]]
    mine = turned(trees[rank]) if rank == 1 else trees[rank]
    got = dict(tree.items(SUMS[name](mine, mesh)))
    if name in ("gradient", "ordered"):
        mean = {path[2:] if name == "ordered" else path: t.mean().item() for path, t in got.items() if t.ndim}
        n = dist.get_world_size()
        places = sorted(tree.paths(trees[0]))
        return mean == {p: n * (i + 1.0) if name == "gradient" else n * (n + 1) / 2 for i, p in enumerate(places)}
    wanted = {path: sum(dict(tree.items(t))[path] for t in trees[: dist.get_world_size()]) for path in got}
    return all(torch.equal(got[path], wanted[path]) for path in wanted)


@pytest.mark.parametrize("n", [1, 2, 3])
@named("name", SUMS)
def test_leaves_are_paired_by_path_and_not_by_position(name, n):
    assert ranks.run(n, of_turned, name) == [True] * n


OTHERS = {  # what rank 1 has, where the others have {"a": f32[2], "b": f32[2, 3]}; the leaves in the error
    "another name": ({"a": torch.ones(2), "c": torch.ones(2, 3)}, "b float32[2, 3]", "c float32[2, 3]"),
    "another shape": ({"a": torch.ones(2), "b": torch.ones(3, 2)}, "b float32[2, 3]", "b float32[3, 2]"),
    "shapes of one sum": ({"a": torch.ones(6), "b": torch.ones(2)}, "a float32[2]", "a float32[6]"),
    "another depth": ({"a": torch.ones(2), "b": [torch.ones(2, 3)]}, "b float32[2, 3]", "b.0 float32[2, 3]"),
    "one leaf more": (
        {"a": torch.ones(2), "b": torch.ones(2, 3), "n": torch.ones((), dtype=torch.float64)}, "nothing", "n float64[]"
    ),
    "two in one": ({"a": torch.ones(8)}, "a float32[2]", "a float32[8]"),
}  # fmt: skip


def of_others(case, name):
    mesh = shard.mesh(fsdp=dist.get_world_size())
    x = OTHERS[case][0] if dist.get_rank() == 1 else {"a": torch.ones(2), "b": torch.ones(2, 3)}
    SUMS[name](x, mesh)


@pytest.mark.parametrize(("name", "n"), [("psum", 2), ("reduce", 3), ("captured", 2), ("ordered", 2)])
@named("case", OTHERS)
def test_trees_that_differ_raise_on_every_rank(case, name, n):
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(n, of_others, case, name, timeout=20)
    failures = caught.value.failures
    assert {rank: f.type for rank, f in failures.items()} == dict.fromkeys(range(n), "RuntimeError")
    _, *leaves = OTHERS[case]
    named = leaves if name != "ordered" and "nothing" not in leaves else leaves[1:] * (name != "ordered")
    for f in failures.values():
        assert "ranks are about to " in f.message and all(f"leaf {leaf}" in f.message for leaf in named), f.message


TWO = torch.ones(2)
FAULTS = {  # the trees of two ranks, and the error of both
    "no leaves": ([{"a": TWO}, {}], "RuntimeError", "a sum of no tensors over all ranks"),
    "a number and a vector": ([torch.ones(()), torch.ones(1)], "RuntimeError", "leaf (root) float32[]"),
    "a path of two leaves": ([{"a.b": TWO, "a": {"b": TWO}}] * 2, "ValueError", "a.b: two leaves have this path"),
    "keys of one text": ([{0: TWO, "0": 2 * TWO}] * 2, "ValueError", "0: two leaves have this path"),
    "a float": ([{"a": TWO, "n": 3.0}] * 2, "TypeError", "n: a sum over ranks of a float; wanted a tensor"),
    "None": ([[TWO, None]] * 2, "TypeError", "1: a sum over ranks of a NoneType; wanted a tensor"),
}


def of_faults(case, name):
    SUMS[name](FAULTS[case][0][dist.get_rank()], shard.mesh(fsdp=2))


@pytest.mark.parametrize("name", ["psum", "reduce"])
@named("case", FAULTS)
def test_trees_that_cannot_be_added_up_raise_on_every_rank(case, name):
    _, kind, message = FAULTS[case]
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, of_faults, case, name, timeout=20)
    assert [(f.type, message in f.message) for f in caught.value.failures.values()] == [(kind, True)] * 2


def replicated():
    mesh, x = shard.mesh(fsdp=2), dict(zip("ab", one_and_ten(3), strict=True))
    shard.replicate(turned(x) if dist.get_rank() else x, mesh)


def test_replicate_refuses_another_order():
    """Its layout is that of each rank."""
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, replicated, timeout=20)
    for f in caught.value.failures.values():
        assert "replicate: ranks disagree on the order: rank 0 has a first; rank 1 has b first" in f.message
    assert len(caught.value.failures) == 2


def collected():
    mesh, w = shard.mesh(fsdp=2), torch.arange(64.0)
    placed = shard.place({"a": {"w": w}, "b": {"w": -w}}, {"a": {"w": "d"}, "b": {"w": "d"}}, Rules(), mesh)
    shard.collect(turned(placed) if dist.get_rank() else placed)


def test_collect_refuses_another_order():
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, collected, timeout=20)
    assert all("leaf a; rank 1 all_gather" in f.message for f in caught.value.failures.values())
    assert len(caught.value.failures) == 2
