"""Captured functions run in one order on all ranks, or every rank raises at once and names what each ran."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import shard
from fquant import cost, jit
from fquant.compile import collective_check
from tests.helpers import ranks
from tests.helpers.arrays import named

pytestmark = pytest.mark.xdist_group("ranks")


def functions(mesh):
    """Return captured functions of x f32[n 3] by name; the shapes that they send do not depend on n."""
    total = partial(shard.psum, mesh=mesh)
    both, fsdp = ("dp", "fsdp"), mesh.get_group("fsdp")

    def step(x):
        return total(x.sum(0), axes=both) * 2

    def evaluate(x):
        return total(x.sum(0), axes=both) + 1

    def inner(x):
        return total(x.sum(0), axes=("fsdp",))

    def gathered(x):
        return shard.all_gather(x.sum(0), fsdp)

    def local(x):
        return x.sum(0)

    def longer(x):
        return total(total(x.sum(0), axes=both).sum(), axes=both)

    longer.__name__ = "step"
    return {f.__name__: jit(f) for f in (step, evaluate, inner, gathered, local)} | {"longer": jit(longer)}


def rows(n, rank):
    return 1.0 + torch.arange(3.0 * n).reshape(n, 3) + 100 * rank


def run(axes, programs, n=2):
    """Run this rank's program, names of functions in order, and return the results."""
    mesh = shard.mesh(**axes)
    captured, rank = functions(mesh), dist.get_rank()
    sizes = n if isinstance(n, list) else [n] * dist.get_world_size()
    return [captured[name](rows(sizes[rank], rank)).tolist() for name in programs[rank].split()]


def wanted(name, axes, sizes, rank):
    """Compute the result of ``name`` without torch.distributed."""
    whole = torch.stack([rows(n, i).sum(0) for i, n in enumerate(sizes)])
    row = whole.reshape(axes.get("dp", 1), -1, 3)[rank // axes["fsdp"]]
    return {
        "step": whole.sum(0) * 2,
        "evaluate": whole.sum(0) + 1,
        "inner": row.sum(0),
        "gathered": row.reshape(-1),
        "local": whole[rank],
        "longer": whole.sum() * len(sizes),
    }[name].tolist()


MIXED = "step evaluate step inner local gathered evaluate longer inner step"


@pytest.mark.parametrize("sizes", [2, [2, 1], [1, 0]], ids=str)
def test_functions_interleaved_in_one_order(sizes):
    """Ranks may have different numbers of rows, and so different graphs."""
    each = sizes if isinstance(sizes, list) else [sizes] * 2
    for rank, got in enumerate(ranks.run(2, run, {"fsdp": 2}, [MIXED] * 2, sizes, timeout=30)):
        assert got == [wanted(name, {"fsdp": 2}, each, rank) for name in MIXED.split()]


def test_groups_that_are_not_the_world():
    axes, sizes = {"dp": 2, "fsdp": 2}, [3, 2, 1, 4]
    for rank, got in enumerate(ranks.run(4, run, axes, [MIXED] * 4, sizes, timeout=30)):
        assert got == [wanted(name, axes, sizes, rank) for name in MIXED.split()]


def test_what_only_some_ranks_run_does_not_count_where_it_does_not_communicate():
    got = ranks.run(2, run, {"fsdp": 2}, ["local step local", "step"], timeout=10)
    assert got[0][1] == got[1][0]


# --- orders that differ

FIX = "call captured functions that communicate on every rank, in the same order"
SUM = "all_reduce sum float32[3] over 2"
DIFFERENT = {  # axes, a program a rank, and what is expected
    "order": ({"fsdp": 2}, ["step evaluate", "evaluate step"], "rank 0 step; rank 1 evaluate"),
    "later": ({"fsdp": 2}, ["step evaluate step", "step evaluate evaluate"], "rank 0 step; rank 1 evaluate"),
    "once more": ({"fsdp": 2}, ["step step evaluate", "step evaluate"], "rank 0 step; rank 1 evaluate"),
    "a local one between": ({"fsdp": 2}, ["local step", "evaluate local"], "rank 0 step; rank 1 evaluate"),
    "one of three": ({"fsdp": 3}, ["step", "inner", "step"], "ranks 0, 2 step; rank 1 inner"),
    "three": ({"fsdp": 3}, ["step", "inner", "evaluate"], "rank 0 step; rank 1 inner; rank 2 evaluate"),
    # Nobody would wait here: ranks 0, 1 and ranks 2, 3 communicate among themselves.
    "along one axis": ({"dp": 2, "fsdp": 2}, ["inner"] * 2 + ["gathered"] * 2, "ranks 0, 1 inner; ranks 2, 3 gathered"),
    "another of the same name": (
        {"fsdp": 2},
        ["step", "longer"],
        f"rank 0 step (collective 1: {SUM}); rank 1 step (leaf (root) float32[])",
    ),
}


def all_raise(n, fn, *args):
    """Return the messages of the RuntimeErrors that every rank raises within 10 seconds."""
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(n, fn, *args, timeout=10)
    failures = caught.value.failures
    assert {rank: f.type for rank, f in failures.items()} == dict.fromkeys(range(n), "RuntimeError")
    return [f.message for f in failures.values()]


@named("case", DIFFERENT)
def test_different_orders_raise_on_every_rank(case):
    axes, programs, expected = DIFFERENT[case]
    message = f"jit: ranks are about to run different things: {expected}; {FIX}"
    assert all_raise(len(programs), run, axes, programs) == [message] * len(programs)


def a_rank_fails():
    mesh = shard.mesh(fsdp=dist.get_world_size())

    def step(x):
        if dist.get_rank() == 1:
            raise RuntimeError("out of order")
        return shard.psum(x, mesh, ("fsdp",))

    return jit(step)(torch.ones(3))


def test_ranks_that_wait_for_one_that_failed_say_with_what():
    expected = all_raise(3, a_rank_fails)
    assert expected[1] == "out of order"
    assert all(expected[rank].startswith("jit(step): not every rank came to run it: ") for rank in (0, 2))


# --- what is compared


def psum_of(dtype=torch.float32, size=3, axes=("dp", "fsdp")):
    def f(x, mesh):
        return shard.psum(torch.zeros(size, dtype=dtype) + x.sum().to(dtype), mesh, axes)

    return f


def over_fsdp(op):
    return lambda x, mesh: op(x, mesh.get_group("fsdp"))


GRAPHS = {  # of x f32[4], on a mesh of dp=2 and fsdp=2
    "nothing": (lambda x, mesh: x, []),
    "psum": (psum_of(), ["all_reduce sum float32[3] over 4"]),
    "dtype": (psum_of(torch.int64), ["all_reduce sum int64[3] over 4"]),
    "shape": (psum_of(size=5), ["all_reduce sum float32[5] over 4"]),
    "group": (psum_of(axes=("dp",)), ["all_reduce sum float32[3] over 2"]),
    "gather": (over_fsdp(shard.all_gather), ["all_gather 2 float32[8] over 2"]),
    "scatter": (over_fsdp(shard.reduce_scatter), ["reduce_scatter 2 float32[4] over 2"]),
    "backward": (
        grad(lambda x, mesh: shard.all_gather(x, mesh.get_group("fsdp")).sin().sum()),
        ["all_gather 2 float32[8] over 2", "reduce_scatter 2 float32[8] over 2"],
    ),
    "largest": (
        lambda x, mesh: torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(x, "max", mesh.get_group("dp").group_name)
        ),
        ["all_reduce max float32[4] over 2"],
    ),
    "uneven": (lambda x, mesh: uneven(x, mesh.get_group("fsdp")), ["all_to_all_single over 2"]),
}  # fmt: skip


def uneven(x, group):
    """Send one element to each from rank 0, three and one from rank 1: rank 0 gets four and rank 1 two."""
    send, receive = ([1, 1], [1, 3]) if group.rank() == 0 else ([3, 1], [1, 1])
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_to_all_single(x[: sum(send)], receive, send, group.group_name))


def graphs():
    mesh = shard.mesh(dp=2, fsdp=2)
    found = {}
    for name, (f, _) in GRAPHS.items():
        captured = jit(partial(f, mesh=mesh))
        captured(torch.ones(4))
        (one,) = captured.traced.values()
        found[name] = list(one.collectives)
    return found


def test_what_ranks_have_in_common():
    expected = {name: lines for name, (_, lines) in GRAPHS.items()}
    assert ranks.run(4, graphs) == [expected] * 4


# --- what exchanges nothing


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def exchanges(monkeypatched):
    """Count the exchanges of each call; rank 0 alone makes the calls that take none."""
    mesh, x = shard.mesh(fsdp=dist.get_world_size()), torch.ones(2, 3)
    seen = []
    for name in ("_exchange", "_gather"):  # by the roll call of a mesh of several ranks, and otherwise over gloo
        real = getattr(collective_check, name)
        monkeypatched.setattr(collective_check, name, lambda *args, real=real: seen.append(1) or real(*args))

    def count(f, *args):
        before = len(seen)
        f(*args)
        return len(seen) - before

    captured = functions(mesh)
    step = captured["step"]
    expected = {"first": count(step, x), "replay": count(step, x), "inside": count(jit(lambda x: step(x) + 1), x)}
    expected["grad"] = count(grad(lambda x: step(x).sum()), x)
    expected["local"] = count(captured["local"], x)
    expected["gathered"] = count(captured["gathered"], x)
    if dist.get_rank() == 0:
        expected["cost"] = count(cost, step, x)
        expected["traced"] = count(make_fx(step, tracing_mode="fake"), x)
    with Ops() as ops:
        step(x)
    return expected, ops.seen


def counted():
    with pytest.MonkeyPatch.context() as patch:
        return exchanges(patch)


@pytest.mark.parametrize("world", [1, 2])
def test_what_exchanges_nothing(world):
    n = world - 1  # a rank alone has nobody to compare with
    got = ranks.run(world, counted, timeout=20)
    none = {"grad": 0, "local": 0, "cost": 0, "traced": 0}
    assert got[0][0] == {"first": n, "replay": n, "inside": n, "gathered": n} | none
    for _, ops in got:
        assert not [name for name in ops if name.startswith("c10d::")]


def without_a_group():
    dist.destroy_process_group()
    assert jit(lambda x: x + 1)(torch.ones(())).item() == 2
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_check, "_gather", None)
        return jit(lambda x: shard.all_gather(x, dist.group.WORLD))(torch.ones(3)).shape


def test_a_group_that_is_not_there():
    assert ranks.run(1, without_a_group) == [(192,)]


# --- collectives that a replay would not wait for


IN_PLACE = {  # collectives that write into what they are given
    "allreduce_": lambda x: dist.all_reduce(x),
    "broadcast_": lambda x: dist.broadcast(x, 0),
    "allgather_": lambda x: dist.all_gather([torch.empty_like(x) for _ in range(2)], x),
    "reduce_scatter_": lambda x: dist.reduce_scatter(x, [x, x]),
    "barrier": lambda x: dist.barrier(),
}


def in_place():
    for name, op in IN_PLACE.items():

        def step(x, op=op):
            op(x)
            return x + 1

        for f in (jit(step), partial(cost, step)):
            with pytest.raises(TypeError, match=rf"the function uses c10d\.{name}, .* such as shard\.all_reduce"):
                f(torch.ones(3))


def test_collectives_in_place_are_refused():
    ranks.run(2, in_place, timeout=20)
