"""The gather and the scattered sum over gloo, in shared memory and with parts that travel.

They equal torch's own for any dtype and shape, take one buffer, run together, and fail with an error. Shared memory has
more tests in test_shared_memory.py.
"""

import contextlib
import datetime
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.func import vmap

import shard
from fquant import cost, jit
from fquant.compile import graph
from fquant.compile.trace import trace
from shard import bundle
from shard.passes.prefetch import prefetch_gathers
from shard.transport import gloo, shared_memory
from tests.helpers import ranks
from tests.helpers.cases import slow_after
from tests.helpers.live_memory import Peak

pytestmark = pytest.mark.xdist_group("ranks")
FUNCTIONAL = torch.ops._c10d_functional

SHAPES = {"row": (5,), "table": (3, 4), "deep": (2, 1, 3), "one": (1,), "nothing": (0,), "thin": (3, 0), "none": (0, 4)}
DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.bfloat16, torch.float16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


def issued(x):
    """Return a gather over all ranks that was not waited for."""
    assert dist.group.WORLD is not None
    return gloo.all_gather(x, dist.get_world_size(), dist.group.WORLD.group_name)


def drawn(rank, shape, dtype):
    """Return random bits, including NaNs, whose payloads must arrive too."""
    draw = torch.Generator().manual_seed(rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=draw).bool()
    size = (math.prod(shape) * dtype.itemsize,)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=draw).view(dtype).reshape(shape)


def travelling():
    """Run as if ranks were on different machines."""
    return mock.patch.object(shared_memory, "of_group", lambda group: None)


def every_way(check):
    """Return ``check()``, which is the same with shared memory and without."""
    assert shared_memory.of_group(dist.group.WORLD) is not None or dist.get_world_size() == 1
    result = check()
    with travelling():
        assert check() == result
    return result


def every_kind():
    n, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    for dtype in DTYPES:
        for name, shape in SHAPES.items():
            got = shard.all_gather(drawn(rank, shape, dtype), group)
            want = torch.cat([drawn(r, shape, dtype) for r in range(n)])
            assert (got.shape, got.dtype) == (want.shape, want.dtype), (name, dtype)
            assert torch.equal(bundle.raw(got), bundle.raw(want)), (name, dtype)
    return len(DTYPES) * len(SHAPES)


def every_sum():
    """Sum numbers of every dtype and shape, exactly in any order; bools have no sum."""
    n, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    kinds = [d for d in DTYPES if d not in (torch.bool, torch.complex64, torch.int16, torch.float8_e4m3fn)]
    for dtype in kinds:
        for name, shape in SHAPES.items():
            every = torch.randint(0, 9, (n, n * shape[0], *shape[1:]), generator=torch.Generator().manual_seed(3))
            got = shard.reduce_scatter(every[rank].to(dtype), group)
            want = every.sum(0).to(dtype).unflatten(0, (n, shape[0]))[rank]
            assert got.dtype == dtype and got.is_contiguous() and torch.equal(got, want), (name, dtype)
    return len(kinds)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_every_sum(n):
    assert ranks.run(n, every_way, every_sum) == [8] * n


def rounded():
    """Add up numbers in the order of ranks, the same on every rank."""
    n, rank = dist.get_world_size(), dist.get_rank()
    every = torch.randn(n, n * 50, 7, generator=torch.Generator().manual_seed(4)).bfloat16()
    got = shard.reduce_scatter(every[rank], dist.group.WORLD)
    want = every[0]
    for x in every[1:]:
        want = want + x
    return torch.equal(got, want.unflatten(0, (n, 50))[rank])


def test_sums_are_in_the_order_of_ranks():
    assert ranks.run(3, rounded) == [True] * 3


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_dtype_and_shape(n):
    assert ranks.run(n, every_way, every_kind) == [len(DTYPES) * len(SHAPES)] * n


def strided():
    """Gather tensors that are strided, mapped, or parts of others."""
    n, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    every = torch.arange(n * 24.0).reshape(n, 4, 6)
    own = every[rank]
    gather = lambda x: shard.all_gather(x, group)
    views = {
        "transposed": lambda x: x.mT, "columns": lambda x: x[:, 1:5:2], "rows": lambda x: x[1:3],
        "expanded": lambda x: x[:, :1].expand(4, 3), "reversed": lambda x: x.flip(0),
    }  # fmt: skip
    for name, view in views.items():
        assert torch.equal(gather(view(own)), torch.cat([view(x) for x in every])), name
        assert gather(view(own)).is_contiguous(), name
    for dim in range(2):
        want = torch.stack([torch.cat([x.select(dim, i) for x in every]) for i in range(own.shape[dim])])
        assert torch.equal(vmap(gather, in_dims=dim)(own), want), dim
    before = own.clone()
    assert gather(own).untyped_storage().nbytes() == n * own.nbytes and torch.equal(own, before)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_strided_and_mapped(n):
    ranks.run(n, every_way, strided)


def together():
    """Issue many gathers of several sizes, write their arguments, and wait in reverse order."""
    n, rank = dist.get_world_size(), dist.get_rank()
    sizes = [1 << 20, 3, 70_000, 1 << 20, 1, 5_000]
    for turn in range(10):
        given = [torch.full((size,), 100 * turn + 10 * i + rank) for i, size in enumerate(sizes)]
        flying = []
        for x in given:
            flying.append(issued(x))
            x.fill_(-1)
        del given, x
        for i, out in reversed(list(enumerate(flying))):
            got = FUNCTIONAL.wait_tensor(out).reshape(n, sizes[i])
            assert torch.equal(got[:, 0], 100 * turn + 10 * i + torch.arange(n)), (turn, i)
            assert (got == got[:, :1]).all(), (turn, i)
    assert torch._C._distributed_c10d._get_work_registry_size() == 0


@pytest.mark.parametrize("n", slow_after(1, [2, 3]))
def test_many_at_once(n):
    ranks.run(n, every_way, together)


def among_others():
    """Gather while the program sends and receives messages over the same group."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    for turn in range(20):
        theirs = torch.empty(1000)
        works: list[Any] = [dist.irecv(theirs, other)]
        one = issued(torch.full((1000,), 1.0 + rank))
        works.append(dist.isend(torch.full((1000,), 10.0 + rank + turn), other))
        assert FUNCTIONAL.wait_tensor(one).tolist() == [1.0] * 1000 + [2.0] * 1000
        for work in works:
            work.wait()
        assert theirs.tolist() == [10.0 + other + turn] * 1000


def test_messages_of_others():
    ranks.run(2, every_way, among_others)


# --- in a graph


def in_a_step():
    """Capture a gather that is prefetched and donated: a node issues, a node waits, and the memory is as predicted."""
    n, mesh = dist.get_world_size(), shard.mesh(fsdp=dist.get_world_size())
    group = mesh.get_group("fsdp")

    def step(state, a, b):
        x = shard.all_gather(a, group).sum()
        y = (shard.all_gather(b, group) + x).exp().sum()
        return state * 2 + x + y, shard.all_gather(state, group)

    arguments = lambda: [torch.full((1 << 16,), (i + dist.get_rank()) / 100) for i in range(3)]
    passes = (prefetch_gathers(),)
    wanted, taken = step(*arguments()), jit(step, donate=("state",), passes=passes)
    taken(*arguments())
    state, *rest = arguments()
    memory = state.data_ptr()
    with shard.traffic() as traffic, Peak() as peak:
        got = taken(state, *rest)
    assert got[0].data_ptr() == memory and all(map(torch.equal, got, wanted))
    predicted = cost(step, *arguments(), donate=("state",), passes=passes)
    assert predicted.peak - predicted.arguments == peak.most
    assert [(c.name, c.count, c.payload, c.sent) for c in predicted.collectives] == [
        ("all_gather", 3, 3 * n * 4 << 16, 3 * (n - 1) * 4 << 16)
    ]
    assert traffic.calls == [("all_gather", n * 4 << 16, n)] * 3
    nodes = list(trace(lambda args: step(*args), arguments(), passes=passes).module.graph.nodes)
    kinds = ["issue" if graph.collective(n) else "wait" for n in nodes if graph.collective(n) or graph.is_wait(n)]
    assert kinds[:3] == ["issue", "issue", "wait"] and len(kinds) == 6


@pytest.mark.parametrize("n", [2, 3])
def test_in_a_step(n):
    ranks.run(n, every_way, in_a_step)


def compiled():
    group = shard.mesh(fsdp=dist.get_world_size()).get_group("fsdp")

    def f(a, b):
        return (shard.all_gather(a + 1, group) * 2 + shard.all_gather(b, group)).relu(), a * 3

    args = torch.randn(64), torch.randn(64)
    return [all(map(torch.equal, jit(f, compile=how)(*args), f(*args))) for how in ("aot_eager", True)]


@pytest.mark.slow
def test_compiled():
    assert ranks.run(2, compiled, timeout=240) == [[True, True]] * 2


def chosen():
    """Return the op of each kind of group."""
    (gloos,) = {t for t in ops_of(dist.group.WORLD) if "all_gather" in t}
    shard.close()
    with shard.abstract_mesh(fsdp=4) as mesh:
        (fakes,) = {t for t in ops_of(mesh.get_group("fsdp")) if "all_gather" in t}
    return gloos, fakes


def ops_of(group):
    captured = trace(lambda x: shard.all_gather(x, group), torch.ones(3))
    return {str(node.target) for node in captured.module.graph.nodes}


def test_other_backends_have_their_own():
    assert ranks.run(1, chosen) == [("fquant.all_gather.default", "_c10d_functional.all_gather_into_tensor.default")]


# --- failures


def alone(travels):
    """Gather on all ranks but rank 1, which leaves."""
    if dist.get_rank() == 1:
        raise KeyError("gone")
    with travelling() if travels else contextlib.nullcontext():
        FUNCTIONAL.wait_tensor(issued(torch.ones(1 << 18)))


@pytest.mark.parametrize("travels", [False, True])
@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_that_has_gone(n, travels):
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(n, alone, travels, timeout=30)
    kinds = {rank: failure.type for rank, failure in caught.value.failures.items()}
    assert kinds == {rank: "KeyError" if rank == 1 else "RuntimeError" for rank in range(n)}
    assert "onnection" in caught.value.failures[0].message


def late():
    """Gather on rank 0 alone, over a group with a time-out of a second; return the error of its wait."""
    group: Any = dist.new_group(timeout=datetime.timedelta(seconds=1))
    seen = None
    if dist.get_rank() == 0:
        with travelling():
            out = gloo.all_gather(torch.ones(8), 2, group.group_name)
        with pytest.raises(RuntimeError) as caught:
            FUNCTIONAL.wait_tensor(out)
        seen = str(caught.value)
    dist.barrier()  # of the group of all
    return seen


def test_a_rank_that_does_not_come_in_time():
    assert "Timed out waiting 1000ms" in ranks.run(2, late, timeout=30)[0]
