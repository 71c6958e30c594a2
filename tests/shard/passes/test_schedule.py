"""Passes over small programs: gathers are issued as far ahead as asked, never past a write, with equal results."""

import random

import pytest
import torch
import torch.distributed as dist
from torch.fx import Graph

import shard
from fquant.compile.cost import of
from fquant.compile.trace import trace
from shard.passes.deduplicate import deduplicate_gathers
from shard.passes.prefetch import prefetch_gathers
from shard.passes.report import Row, schedule, schedule_text
from tests.helpers import ranks
from tests.helpers.qlora_step import equal
from tests.helpers.sharding.schedules import (
    GATHER,
    GATHERS,
    OPS,
    WAIT,
    early,
    gathers,
    passed,
    places,
    run,
    under_way,
    written_under_way,
)

pytestmark = pytest.mark.xdist_group("ranks")


# --- small programs, over a group of one ------------------------------------------------------------------------------


def gather(x):
    return shard.all_gather(x, dist.group.WORLD)


def layers(x, **w):
    """Gather, view and multiply blocks, as a model does."""
    for shards in w.values():
        x = torch.tanh(x @ gather(shards.contiguous()).view(4, 4))
    return x.sum()


X = torch.arange(16.0).reshape(4, 4) / 16


def four():
    return {"x": X} | {f"w{i}": torch.sin(X + i) for i in range(4)}


def issued():
    plain = trace(lambda args: layers(**args), four())
    found = []
    for depth in range(1, 6):
        scheduled = passed(plain, prefetch_gathers(depth))
        assert torch.equal(run(scheduled, four()), layers(**four()))
        place = places(scheduled)
        found.append([sum(place[w] < place[name] for _, w, _ in gathers(scheduled)) for name, *_ in gathers(scheduled)])
    twice = passed(plain, prefetch_gathers(2), prefetch_gathers(2))
    assert list(places(twice)) == list(places(passed(plain, prefetch_gathers(2))))
    return found


def test_gather_k_is_issued_before_wait_k_less_depth():
    """The table has the number of waits before the issue of each gather."""
    assert ranks.run(1, issued) == [[[0, 0, 1, 2], [0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]]


def strided():
    """Prefetch gathers of strided views; return the bytes issued early for two budgets."""
    args = {f"w{i}": torch.sin(torch.arange(32.0) + i).reshape(4, 8) for i in range(3)}
    f = lambda args: sum(gather(w[:, ::2].mT[1:]).exp().sum() for w in args.values())
    plain = trace(f, args)
    scheduled = passed(plain, prefetch_gathers())
    assert equal(run(scheduled, args), f(args)) and under_way(scheduled) == 1
    size = 2 * 3 * 4 * 4  # of a copy and what is gathered of it
    return early(passed(plain, prefetch_gathers(2, size - 1)), plain), early(
        passed(plain, prefetch_gathers(2, size)), plain
    )


def test_what_leads_from_an_argument_to_a_gather_goes_with_it():
    assert ranks.run(1, strided) == [(0, 48)]


def hazards():
    """Mark with ``+`` the gathers that are issued before the first wait, in programs whose second must not be.

    A gather that only a write keeps in place also holds back the gathers after it.
    """

    def computed(a, b, c):
        y = gather(a).sum()
        return gather(b * 2).sum() + gather(c).sum() + y

    def written(a, b, c):
        y = gather(a).sum()
        b.add_(y)
        return gather(b).sum() + gather(c).sum()

    def written_through_a_view(a, b, c):
        y = gather(a).sum()
        b[1:].mul_(y)
        return gather(b[0]).sum() + gather(c).sum()

    def of_what_was_gathered(a, b, c):
        y = gather(a)
        return gather(y).sum() + gather(c).sum()

    found = {}
    for f in (computed, written, written_through_a_view, of_what_was_gathered):
        args = {name: X + i for i, name in enumerate("abc")}
        plain = trace(lambda args, f=f: f(**args), args)
        scheduled = passed(plain, prefetch_gathers(5))
        wanted = f(**{name: t.clone() for name, t in args.items()})
        assert torch.equal(run(scheduled, args), wanted) and not written_under_way(scheduled)
        place = places(scheduled)
        first = place[gathers(plain)[0][1]]
        found[f.__name__] = "".join("+" if place[name] < first else "-" for name, *_ in gathers(plain)[1:])
    return found


def test_what_is_computed_or_written_is_not_gathered_ahead():
    assert ranks.run(1, hazards) == [
        {"computed": "-+", "written": "-+", "written_through_a_view": "--", "of_what_was_gathered": "-+"}
    ]


def program(draw):
    """Return a random program that gathers arguments, views, copies and results, and writes to arguments and views."""
    script = [(draw.choice("ggvvcmwwrs"), draw.random(), draw.random()) for _ in range(draw.randint(2, 14))]

    def f(args):
        args, total = list(args), torch.zeros(())
        for op, i, j in script:
            x, y = args[int(i * len(args))], args[int(j * len(args))]
            if op in "gr":
                total = total + gather(x).mul(1 + i).sum()
            elif op == "w":
                x.add_(y.mean() + total / 100)
            else:
                args.append(
                    {
                        "v": lambda x: x[:1],
                        "c": lambda x: x.mT.contiguous(),
                        "m": lambda x: x * 2,
                        "s": lambda x: x.view(-1)[:2, None],
                    }[op](x)
                )
        return total

    return f


def random_programs(count):
    moved = joined = 0
    for seed in range(count):
        draw = random.Random(seed)
        f, args = program(draw), [torch.sin(X[:2, :2] * (i + 1)) for i in range(3)]
        plain = trace(f, args)
        given = [t.clone() for t in args]
        wanted = (f(given), given)
        depth, budget = draw.randint(1, 4), draw.choice([None, 0, 16, 40, 100])
        for passes in (
            (prefetch_gathers(depth, budget),),
            (deduplicate_gathers(budget),),
            (deduplicate_gathers(budget), prefetch_gathers(depth)),
        ):
            scheduled = passed(plain, *passes)
            given = [t.clone() for t in args]
            assert equal((scheduled(*given), given), wanted) and not written_under_way(scheduled), seed
            joined += len(gathers(plain)) - len(gathers(scheduled))
        ahead = passed(plain, prefetch_gathers(depth, budget))
        assert under_way(ahead) <= depth and (budget is None or early(ahead, plain) <= budget), seed
        moved += early(ahead, plain) > 0
    return moved, joined


def test_any_program():
    ((moved, joined),) = ranks.run(1, random_programs, 80)
    assert moved > 20 and joined > 20


# --- gathered once ----------------------------------------------------------------------------------------------------


def there_and_back(x, **w):
    """Gather blocks in order and again in reverse, as forward and backward do."""
    for shards in (*w.values(), *reversed(w.values())):
        x = torch.tanh(x @ gather(shards).view(4, 4))
    return x.sum()


def joined():
    plain = trace(lambda args: there_and_back(**args), four())
    sizes = []
    for budget in (0, 63, 64, 127, 128, 191, 192, None):
        scheduled = passed(plain, deduplicate_gathers(budget))
        assert torch.equal(run(scheduled, four()), run(plain, four()))
        sizes.append((len(gathers(scheduled)), (of(scheduled).peak - of(plain).peak) // 64))
    crossed = trace(lambda args: sum(gather(args[f"w{i}"]).sum() for i in (0, 1, 2, 0, 2)), four())
    return sizes, [row.of for row in schedule(passed(crossed, deduplicate_gathers(64)))]


def test_the_nearest_are_kept_first():
    """Of four blocks of 64 bytes, a budget decides which gathers remain, and the blocks held at the peak."""
    ((found, crossed),) = ranks.run(1, joined)
    assert crossed == ["w0", "w1", "w2", "w0"]
    assert [count for count, _ in found] == [8, 8, 7, 7, 6, 6, 5, 4]
    assert all(more <= max(0, 8 - count) for count, more in found)


def not_joined():
    other = lambda args: gather(args["w0"]).sum() + gather(args["w0"].view(-1)).sum() + gather(args["w1"]).sum()
    returned = lambda args: (gather(args["w0"]), gather(args["w0"]).sum())

    def written(args):
        y = gather(args["w0"][0]).sum()
        args["w0"][1:].mul_(y)
        return gather(args["w0"][0]).sum() + y

    def result_written(args):
        return gather(args["w0"]).add_(1).sum() + gather(args["w0"]).sum()

    same = lambda args: gather(args["w0"]).sum() + gather(args["w0"]).sum()
    return [
        len(gathers(passed(trace(f, four()), deduplicate_gathers())))
        for f in (other, returned, written, result_written, same)
    ]


def test_what_is_not_the_same_or_not_left_alone_is_gathered_again():
    assert ranks.run(1, not_joined) == [[3, 2, 2, 2, 1]]


# --- the table --------------------------------------------------------------------------------------------------------


def shown():
    mesh = shard.mesh(fsdp=2)
    f = lambda x, **w: shard.all_reduce(layers(x, **w), mesh.get_group("fsdp"))
    args = {"x": X, **{f"w{i}": X[:2] for i in range(3)}}
    plain = trace(lambda args: f(**args), args)
    ahead = passed(plain, prefetch_gathers())
    return (
        schedule(plain, mesh),
        schedule(ahead, mesh),
        schedule(ahead.module.graph),
        schedule_text(schedule(ahead, mesh)),
    )


def test_show():
    (plain, ahead, bare, printed), other = ranks.run(2, shown)
    assert [plain, ahead, bare, printed] == list(other)
    product = 2 * 4 * 4 * 4
    assert plain == [Row("all_gather", "fsdp", f"w{i}", 64, 4 * i, 4 * i + 1, 0, 0) for i in range(3)] + [
        Row("all_reduce", "fsdp", "", 4, 13, 14, 0, 0)
    ]
    assert ahead == [
        Row("all_gather", "fsdp", "w0", 64, 0, 2, 0, 0),
        Row("all_gather", "fsdp", "w1", 64, 1, 6, 2, product),
        Row("all_gather", "fsdp", "w2", 64, 5, 9, 2, product),
        Row("all_reduce", "fsdp", "", 4, 13, 14, 0, 0),
    ]
    assert [row.of for row in bare] == ["arg1_1", "arg2_1", "arg3_1", ""] and bare[0].axis == "0"
    assert printed.splitlines() == [
        "collective  axis  of          KiB  issued  waited  ops between  MFLOP between",
        "all_gather  fsdp  w0          0.1       0       2            0           0.00",
        "all_gather  fsdp  w1          0.1       1       6            2           0.00",
        "all_gather  fsdp  w2          0.1       5       9            2           0.00",
        "all_reduce  fsdp  (computed)  0.0      13      14            0           0.00",
    ]


# --- errors ----------------------------------------------------------------------------------------------------------


def test_passes_are_values():
    assert (
        prefetch_gathers() == prefetch_gathers(1, None)
        and hash(deduplicate_gathers(3)) == hash(deduplicate_gathers(3))
        and prefetch_gathers(1) != prefetch_gathers(2)
    )
    assert len({prefetch_gathers(), prefetch_gathers(1), deduplicate_gathers(), deduplicate_gathers(None)}) == 2


BAD = {
    "no depth": (lambda: prefetch_gathers(0), "prefetch_gathers: depth is 0; wanted an integer of at least 1"),
    "half a depth": (lambda: prefetch_gathers(1.5), "depth is 1.5"),
    "depth of bytes": (lambda: prefetch_gathers(True), "depth is True"),
    "negative budget": (lambda: prefetch_gathers(1, -1), "prefetch_gathers: budget is -1; wanted bytes, or None"),
    "budget in MiB": (lambda: deduplicate_gathers(0.5), "deduplicate_gathers: budget is 0.5; wanted"),
}


@pytest.mark.parametrize("make, message", BAD.values(), ids=BAD)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def unknown(op, wait=1):
    """Return a graph of one collective with ``wait`` waits."""
    g = Graph()
    x = g.placeholder("x")
    x.meta["val"] = torch.empty(2, device="meta")
    y = g.call_function(op, (x, 1, "0"))
    y.meta["val"] = torch.empty(2, device="meta")
    waits = [g.call_function(WAIT, (y,)) for _ in range(wait)]
    for node in waits:
        node.meta["val"] = y.meta["val"]
    g.output(waits)
    return g


STRANGE = {
    "in place": (
        unknown(OPS.all_reduce_.default),
        "all_reduce_.default cannot be scheduled; use the collectives of shard",
    ),
    "coalesced": (unknown(OPS.all_gather_into_tensor_coalesced.default), "cannot be scheduled"),
    "of autograd": (unknown(torch.ops._c10d_functional_autograd.all_gather_into_tensor.default), "cannot be scheduled"),
    "of c10d": (unknown(torch.ops.c10d.allreduce_.default), "allreduce_.default cannot be scheduled"),
    "no wait": (unknown(GATHER, 0), "all_gather_into_tensor.*: is used by nothing; wanted a wait_tensor of its own"),
    "over gloo": (unknown(GATHERS[1], 0), "all_gather_default: is used by nothing; wanted a wait_tensor of its own"),
    "two waits": (unknown(GATHER, 2), "is used by .*wait_tensor.default, .*wait_tensor.default; wanted a wait"),
}


@pytest.mark.parametrize("g, message", STRANGE.values(), ids=STRANGE)
@pytest.mark.parametrize("use", [prefetch_gathers(), deduplicate_gathers(), schedule], ids=["prefetch", "keep", "show"])
def test_unknown_collectives(use, g, message):
    with pytest.raises(ValueError, match=message):
        use(g)
