"""Gathers are issued as far ahead as asked for and no further, never past a write, and small programs stay right."""

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.fx import Graph, GraphModule

import shard
from fquant import graph, tree
from fquant.capture import trace
from fquant.cost import of
from shard.schedule import Row, keep, prefetch, show, text

from . import ranks
from .test_capture import equal

pytestmark = pytest.mark.xdist_group("ranks")

OPS = torch.ops._c10d_functional
WAIT, GATHER = OPS.wait_tensor.default, OPS.all_gather_into_tensor.default
GATHERS = GATHER, torch.ops.fquant.all_gather.default  # the second is that of shard.all_gather over gloo


# --- an oracle: what a graph says, read off the order of its nodes ----------------------------------------------------


def passed(captured, *passes):
    """``captured`` with passes over a copy of its graph."""
    g = Graph()
    g.output(g.graph_copy(captured.module.graph, {}))
    graph.run(g, passes)
    return replace(captured, module=GraphModule(captured.module, g))


def run(captured, args):
    """What it gives, of copies of the tensors of ``args``."""
    return captured(*[leaf.clone() for leaf in tree.leaves(args) if isinstance(leaf, torch.Tensor)])


def places(captured):
    return {node.name: i for i, node in enumerate(captured.module.graph.nodes)}


def gathers(captured):
    """(name of the gather, name of its wait, bytes of the result), in order of issue."""
    nodes = [node for node in captured.module.graph.nodes if node.target in GATHERS]
    return [(node.name, next(iter(node.users)).name, tree.nbytes(node.meta["val"])) for node in nodes]


def early(captured, plain):
    """The most bytes of gathers at once that are issued before where they were."""
    was, now = places(plain), places(captured)
    return max(
        sum(size for name, _, size in gathers(captured) if now[name] < now[node] and was[name] > was[node])
        for node in now
    )


def under_way(captured):
    """The most gathers between issue and wait while anything else runs."""
    place, found = places(captured), gathers(captured)
    busy = [node.name for node in captured.module.graph.nodes if node.target not in (*GATHERS, WAIT)]
    return max(sum(place[name] < place[node] < place[wait] for name, wait, _ in found) for node in busy)


def written_under_way(captured):
    """Whether a node writes what a gather reads, between its issue and its wait."""
    nodes, place = list(captured.module.graph.nodes), places(captured)
    for name, wait, _ in gathers(captured):
        (given,) = next(node for node in nodes if node.name == name).all_input_nodes
        if any(graph.written(node) & graph.storages(given) for node in nodes[place[name] : place[wait]]):
            return True
    return False


# --- small programs, over a group of one ------------------------------------------------------------------------------


def gather(x):
    return shard.all_gather(x, dist.group.WORLD)


def layers(x, **w):
    """Blocks as a model has them: gathered, viewed, multiplied."""
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
        scheduled = passed(plain, prefetch(depth))
        assert torch.equal(run(scheduled, four()), layers(**four()))
        place = places(scheduled)
        found.append([sum(place[w] < place[name] for _, w, _ in gathers(scheduled)) for name, *_ in gathers(scheduled)])
    twice = passed(plain, prefetch(2), prefetch(2))
    assert list(places(twice)) == list(places(passed(plain, prefetch(2))))
    return found


def test_gather_k_is_issued_before_wait_k_less_depth():
    """How many have been waited for when a gather is issued."""
    assert ranks.run(1, issued) == [[[0, 0, 1, 2], [0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]]


def strided():
    """Views and the copy that a gather needs go with it."""
    args = {f"w{i}": torch.sin(torch.arange(32.0) + i).reshape(4, 8) for i in range(3)}
    f = lambda args: sum(gather(w[:, ::2].mT[1:]).exp().sum() for w in args.values())
    plain = trace(f, args)
    scheduled = passed(plain, prefetch())
    assert equal(run(scheduled, args), f(args)) and under_way(scheduled) == 1
    size = 2 * 3 * 4 * 4  # of a copy and what is gathered of it
    return early(passed(plain, prefetch(2, size - 1)), plain), early(passed(plain, prefetch(2, size)), plain)


def test_what_leads_from_an_argument_to_a_gather_goes_with_it():
    assert ranks.run(1, strided) == [(0, 48)]


def hazards():
    """Which gathers are issued before the first is waited for: ``+``, of programs whose second must not be.

    A gather that could have moved, were it not for a write, holds back what comes after it; others do not count.
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
        scheduled = passed(plain, prefetch(5))
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
    """A random program of gathers of arguments, views, copies and results, and of writes to arguments and views."""
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
        for passes in ((prefetch(depth, budget),), (keep(budget),), (keep(budget), prefetch(depth))):
            scheduled = passed(plain, *passes)
            given = [t.clone() for t in args]
            assert equal((scheduled(*given), given), wanted) and not written_under_way(scheduled), seed
            joined += len(gathers(plain)) - len(gathers(scheduled))
        ahead = passed(plain, prefetch(depth, budget))
        assert under_way(ahead) <= depth and (budget is None or early(ahead, plain) <= budget), seed
        moved += early(ahead, plain) > 0
    return moved, joined


def test_any_program():
    ((moved, joined),) = ranks.run(1, random_programs, 80)
    assert moved > 20 and joined > 20


# --- gathered once ----------------------------------------------------------------------------------------------------


def there_and_back(x, **w):
    """Blocks gathered in order and again in reverse, as forward and backward do."""
    for shards in (*w.values(), *reversed(w.values())):
        x = torch.tanh(x @ gather(shards).view(4, 4))
    return x.sum()


def joined():
    plain = trace(lambda args: there_and_back(**args), four())
    sizes = []
    for budget in (0, 63, 64, 127, 128, 191, 192, None):
        scheduled = passed(plain, keep(budget))
        assert torch.equal(run(scheduled, four()), run(plain, four()))
        sizes.append((len(gathers(scheduled)), (of(scheduled).peak - of(plain).peak) // 64))
    crossed = trace(lambda args: sum(gather(args[f"w{i}"]).sum() for i in (0, 1, 2, 0, 2)), four())
    return sizes, [row.of for row in show(passed(crossed, keep(64)))]


def test_the_nearest_are_kept_first():
    """Four blocks of 64 bytes: the gathers that are left, and how many blocks more are held at the peak."""
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
    return [len(gathers(passed(trace(f, four()), keep()))) for f in (other, returned, written, result_written, same)]


def test_what_is_not_the_same_or_not_left_alone_is_gathered_again():
    assert ranks.run(1, not_joined) == [[3, 2, 2, 2, 1]]


# --- what it shows ----------------------------------------------------------------------------------------------------


def shown():
    mesh = shard.mesh(fsdp=2)
    f = lambda x, **w: shard.all_reduce(layers(x, **w), mesh.get_group("fsdp"))
    args = {"x": X, **{f"w{i}": X[:2] for i in range(3)}}
    plain = trace(lambda args: f(**args), args)
    ahead = passed(plain, prefetch())
    return show(plain, mesh), show(ahead, mesh), show(ahead.module.graph), text(show(ahead, mesh))


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


# --- what is refused --------------------------------------------------------------------------------------------------


def test_passes_are_values():
    assert prefetch() == prefetch(1, None) and hash(keep(3)) == hash(keep(3)) and prefetch(1) != prefetch(2)
    assert len({prefetch(), prefetch(1), keep(), keep(None)}) == 2


BAD = {
    "no depth": (lambda: prefetch(0), "prefetch: depth is 0; wanted an integer of at least 1"),
    "half a depth": (lambda: prefetch(1.5), "depth is 1.5"),
    "depth of bytes": (lambda: prefetch(True), "depth is True"),
    "negative budget": (lambda: prefetch(1, -1), "prefetch: budget is -1; wanted bytes, or None"),
    "budget in MiB": (lambda: keep(0.5), "keep: budget is 0.5; wanted bytes, or None"),
}


@pytest.mark.parametrize("make, message", BAD.values(), ids=BAD)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def unknown(op, wait=1):
    """A graph of one collective, waited for so many times."""
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
@pytest.mark.parametrize("use", [prefetch(), keep(), show], ids=["prefetch", "keep", "show"])
def test_unknown_collectives(use, g, message):
    with pytest.raises(ValueError, match=message):
        use(g)
