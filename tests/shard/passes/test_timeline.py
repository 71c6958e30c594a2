"""The time of copies: a stream of them for each direction, as the prediction has it."""

import random

import torch

from fquant.compile.trace import trace
from fquant.device import HOST
from shard.passes.timeline import RoundTrip, Timeline
from shard.transport.host import arrived, fetch
from tests.helpers.sharding.schedules import slow_device

DEVICE = slow_device(1e9)
X = torch.ones(16, 16)


def chain(args):
    """Multiply by blocks, some of which are fetched."""
    x, near, far = args
    for i, w in enumerate(near):
        x = x @ w
        if i % 3 == 1:
            x = x @ arrived(fetch(far[i // 3], HOST))
    return x


def timeline():
    captured = trace(chain, (X, [X] * 12, [X.clone() for _ in range(4)]), fuse=False, recompute=False)
    return Timeline(captured.module.graph, DEVICE)


def late(line, trips):
    """Return the seconds by which copies are late, were each direction a queue in the order of issues."""
    total, free = 0.0, 0.0
    for x in sorted(trips, key=lambda x: x.last):
        free = max(free, line.begins[x.last + 1]) + line.copying(x.nbytes)
        total += max(0.0, free - line.begins[x.stashed])
    ours = [(x.fetched, x.first, x.nbytes, line.begins[x.first]) for x in trips]  # before the graph's at one node
    theirs = [(at, len(line.nodes), (end - begin) * 1e9, end) for begin, end, at in line.fetches]
    free = 0.0
    for at, _, nbytes, end in sorted(ours + theirs):
        free = max(free, line.begins[at]) + line.copying(nbytes)
        total += max(0.0, free - end)
    return total


def test_copies_are_in_time_or_refused():
    line, draw, placed = timeline(), random.Random(0), 0
    assert len(line.fetches) == 4
    for _ in range(300):
        trips = []
        for storage in range(draw.randint(1, 6)):
            peak = draw.randint(2, len(line.nodes) - 3)
            last, first = draw.randint(1, peak - 1), draw.randint(peak + 1, len(line.nodes) - 1)
            trips.append(RoundTrip(storage, draw.choice([100, 1000, 5000]), last, first, peak, peak))
        found = line.place(trips)
        if found is not None:
            placed += 1
            assert late(line, found) < 1e-9, found
            assert all(x.last < x.stashed < x.fetched <= x.first for x in found)
        waits = line.place(trips, waits=True)
        assert waits and all(x.last < x.stashed <= x.low <= x.high < x.fetched <= x.first for x in waits)
    assert 50 < placed < 250
