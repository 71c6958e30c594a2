"""Passes over programs that fetch arguments and gather them: two stages, each ahead of the next, with equal results."""

import random

import pytest
import torch
import torch.distributed as dist

import shard
from fquant.compile import liveness
from fquant.compile.trace import trace
from fquant.device import HOST
from shard.passes.deduplicate import deduplicate_gathers
from shard.passes.gathers import gathers
from shard.passes.prefetch import prefetch_gathers
from shard.passes.regather import regather_blocks
from shard.passes.report import schedule, schedule_text
from shard.transport.host import arrived, fetch
from tests.helpers import ranks
from tests.helpers.live_memory import Peak
from tests.helpers.qlora_step import equal
from tests.helpers.sharding.schedules import check_order, flights, passed, places, run

pytestmark = pytest.mark.xdist_group("ranks")
X = torch.arange(16.0).reshape(4, 4) / 16


def gather(x):
    return shard.all_gather(x, dist.group.WORLD)


def near(x):
    return arrived(fetch(x, HOST))


def layers(x, **w):
    """Fetch and gather blocks and multiply by them, there and back."""
    for block in (*w.values(), *reversed(w.values())):
        x = torch.tanh(x @ gather(near(block)).view(4, 4))
    return x.sum()


def four():
    return {"x": X} | {f"w{i}": torch.sin(X + i) for i in range(4)}


def ordered():
    """Return for each depth: the number of waits for a block before the issue of each fetch, and of each gather."""
    plain = trace(lambda args: layers(**args), four())
    found = []
    for depth in (1, 2):
        scheduled = passed(plain, prefetch_gathers(depth))
        assert torch.equal(run(scheduled, four()), layers(**four()))
        place = {node: i for i, node in enumerate(scheduled.module.graph.nodes)}
        assert list(places(scheduled)) == list(places(passed(scheduled, prefetch_gathers(depth))))
        done = [place[x.wait] for x in gathers(scheduled.module.graph)]
        before = lambda node, place=place, done=done: sum(wait < place[node] for wait in done)
        stages = zip(*(x.stages for x in gathers(scheduled.module.graph)), strict=True)
        found.append([[before(stage.issue) for stage in each] for each in stages])
    return found


def test_a_block_is_fetched_while_the_one_before_it_is_gathered():
    ((one, two),) = ranks.run(1, ordered)
    assert one == [[0, 0, 0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 3, 4, 5, 6]]
    assert two == [[0, 0, 0, 0, 0, 1, 2, 3], [0, 0, 0, 1, 2, 3, 4, 5]]


def again():
    plain = trace(lambda args: layers(**args), four())
    kept = passed(plain, deduplicate_gathers())
    once = passed(kept, regather_blocks(), prefetch_gathers())
    assert torch.equal(run(kept, four()), layers(**four())) and torch.equal(run(once, four()), layers(**four()))
    rows = schedule(once)
    return [len(flights(x)) for x in (plain, kept, once)], [(r.name, r.of, r.nbytes) for r in rows], schedule_text(rows)


def test_regather_and_deduplicate_take_a_fetch_along():
    ((counts, rows, printed),) = ranks.run(1, again)
    assert counts == [16, 8, 14]  # w3 is used twice in a row
    order = [f"w{i}" for i in (0, 1, 2, 3, 2, 1, 0)]
    assert [of for name, of, _ in rows if name == "fetch"] == order
    assert [of for name, of, _ in rows if name == "all_gather"] == order and {size for *_, size in rows} == {64}
    assert printed.splitlines()[1].split()[:3] == ["fetch", "host", "w0"]


def program(draw):
    """Return a random program that fetches and gathers arguments and results, and writes to arguments and views."""
    script = [(draw.choice("ffgbbbvcmw"), draw.random(), draw.random()) for _ in range(draw.randint(3, 14))]

    def f(args):
        args, total = list(args), torch.zeros(())
        for op, i, j in script:
            x, y = args[int(i * len(args))], args[int(j * len(args))]
            if op in "fgb":
                brought = {"f": near, "g": gather, "b": lambda x: gather(near(x))}[op](x)
                total = total + brought.mul(1 + i).sum()
            elif op == "w":
                x.add_(y.mean() + total / 100)
            else:
                args.append({"v": lambda x: x[:1], "c": lambda x: x.mT.contiguous(), "m": lambda x: x * 2}[op](x))
        return total

    return f


def early(captured, plain):
    """Return the maximum bytes of fetches and gathers that are issued earlier than in ``plain``."""
    was, now = places(plain), places(captured)
    ahead = lambda n, node: now[n.name] < now[node] and was[n.name] > was[node]
    return max(sum(size for n, _, size in flights(captured) if ahead(n, node)) for node in now)


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
            (regather_blocks(), deduplicate_gathers(budget), prefetch_gathers(depth)),
        ):
            scheduled = passed(plain, *passes)
            given = [t.clone() for t in args]
            assert equal((scheduled(*given), given), wanted), seed
            check_order(scheduled)
            joined += len(flights(plain)) > len(flights(scheduled))
        ahead = passed(plain, prefetch_gathers(depth, budget))
        assert budget is None or early(ahead, plain) <= budget, seed
        moved += early(ahead, plain) > 0
        with Peak() as peak, torch.no_grad():
            ahead(*[t.clone() for t in args])
        assert peak.most <= liveness.peak(ahead.module.graph).nbytes, seed
    return moved, joined


def test_any_program():
    ((moved, joined),) = ranks.run(1, random_programs, 60)
    assert moved > 15 and joined > 15
