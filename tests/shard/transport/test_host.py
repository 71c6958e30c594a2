"""Transfers between a device and the host: copies with the bits, layouts and errors of a copy, in order of streams."""

import contextlib
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp, vmap

from fquant import jit
from fquant.compile import graph, liveness
from fquant.compile.cost import of
from fquant.compile.trace import trace
from fquant.device import HOST
from shard.transport import host
from shard.transport.host import arrived, fetch, stash
from tests.helpers.arrays import same_bits

CUDA = torch.device("cuda", 0)
X = torch.arange(24.0).reshape(2, 3, 4)
LAYOUTS = {
    "contiguous": X,
    "transposed": X.mT,
    "a slice": X[:, 1:],
    "expanded": X[:1].expand(5, 3, 4),
    "scalar": X[0, 0, 0],
    "empty": X[:0],
    "bytes": X.view(torch.uint8),
    "bfloat16": X.bfloat16(),
}


def there_and_back(x):
    return arrived(fetch(arrived(stash(x)), HOST))


@pytest.mark.parametrize("x", LAYOUTS.values(), ids=LAYOUTS)
def test_a_copy(x):
    y = there_and_back(x)
    assert same_bits(y, x) and y.stride() == torch.empty_like(x).stride()
    assert not y.numel() or y.data_ptr() != x.data_ptr()
    assert not host._UNDER_WAY


def test_transforms():
    f = lambda x, w: (there_and_back(w) * x.sin()).sum()
    plain = lambda x, w: (w * x.sin()).sum()
    assert same_bits(grad(f)(X, X), grad(plain)(X, X))
    assert same_bits(vmap(grad(f), (0, 1))(X, X.movedim(0, 1)), vmap(grad(plain), (0, 0))(X, X))
    assert all(map(same_bits, jvp(lambda x: f(x, X), (X,), (X,)), jvp(lambda x: plain(x, X), (X,), (X,))))
    assert same_bits(jit(f)(X, X), f(X, X))


def test_the_result_is_waited_for_once():
    y = fetch(X, HOST)
    assert arrived(y) is not None
    with pytest.raises(RuntimeError, match=r"arrived: no copy to \(2, 3, 4\) of torch.float32 is under way; wait for"):
        arrived(y)


def test_a_copy_that_is_not_waited_for_is_forgotten():
    """An error between issue and wait drops the result; what is under way otherwise stays."""
    fetch(X, HOST)
    held = fetch(X, HOST)
    assert len(host._UNDER_WAY) == 1
    arrived(held)
    assert not host._UNDER_WAY


def test_on_fake_tensors():
    with FakeTensorMode():
        near, far = torch.empty(4, 3, device=CUDA).t(), torch.empty(4, 3).t()
        fetched, stashed = fetch(far, CUDA), stash(near)
        assert (fetched.device, stashed.device) == (CUDA, HOST) and fetched.stride() == stashed.stride() == (1, 3)
        assert arrived(fetched) is fetched and arrived(stashed) is stashed
        assert {t.device.type for t in (fetch(far.to("meta"), CUDA), stash(near.to("meta")))} == {"meta"}


def test_pageable_memory_is_refused():
    with pytest.raises(ValueError, match=r"fetch: \(2, 3, 4\) of torch.float32 is in pageable memory; wanted pinned"):
        fetch(X, CUDA)


# --- streams, of which a log has the order ----------------------------------------------------------------------------


class Streams:
    """CUDA's streams and events as far as transfers use them; ``log`` has the calls in order."""

    def __init__(self):
        self.log, self.current, self.recording, self.done = [], "main", False, True

    def patched(self):
        stack = contextlib.ExitStack()
        for name, value in {
            "Stream": lambda device: mock.Mock(**{"wait_stream.side_effect": self.waits(f"side {self.count()}")}),
            "Event": self.event,
            "current_stream": lambda device=None: mock.Mock(
                **{"wait_event.side_effect": lambda event: self.log.append(f"main waits for {event.name_}")}
            ),
            "stream": lambda stream: contextlib.nullcontext(self.log.append("copy")),
            "is_available": lambda: True,
            "is_current_stream_capturing": lambda: self.recording,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(host, "pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)))
        stack.callback(host._stream.cache_clear)
        stack.callback(host._BUFFERS.clear)
        host._stream.cache_clear()
        return stack

    def count(self):
        return sum(line.startswith("side") and "waits" not in line for line in self.log)

    def waits(self, name):
        self.log.append(name)
        return lambda other: self.log.append(f"{name} waits for main")

    def event(self):
        number = sum(line.startswith("record") for line in self.log)
        event = mock.Mock(**{"query.side_effect": lambda: self.done})
        event.name_ = f"event {number}"
        event.record.side_effect = lambda stream: self.log.append(f"record {event.name_}")
        return event


def test_the_order_of_streams():
    streams, y = Streams(), torch.empty_like(X)
    with streams.patched():
        host._issue(X, y, CUDA)
        host._issue(y, z := torch.empty_like(y), CUDA)
        arrived(z)
        arrived(y)
    assert streams.log == [
        "side 0", "side 0 waits for main", "copy", "record event 0",
        "side 0 waits for main", "copy", "record event 1",
        "main waits for event 1", "main waits for event 0",
    ]  # fmt: skip
    assert same_bits(z, X)


def test_both_ends_stay_alive_until_the_wait():
    streams = Streams()
    with streams.patched():
        source = X.clone()
        y = host._issue(source, torch.empty_like(X), CUDA)
        storage = host._storage(source)
        del source
        (copy,) = host._UNDER_WAY.values()
        assert host._storage(copy.source) == storage
        del copy
        streams.done = False
        z = host._issue(X, torch.empty_like(X), CUDA)
        del z  # its copy may still run
        arrived(y)
        arrived(host._issue(X, y, CUDA))
        assert len(host._UNDER_WAY) == 1
        streams.done = True
        arrived(host._issue(X, y, CUDA))
        assert not host._UNDER_WAY


def test_buffers_are_used_again_and_a_graph_keeps_its_own():
    streams = Streams()
    with streams.patched():
        first = host._buffer(64).view(torch.float32).as_strided((4, 4), (4, 1))
        second = host._buffer(64).as_strided((64,), (1,))
        pointers = first.data_ptr(), second.data_ptr()
        assert len(set(pointers)) == 2
        del first
        assert host._buffer(64).data_ptr() == pointers[0]
        view = host._buffer(64).as_strided((4,), (1,))
        streams.recording = True
        graphs = host._buffer(64)
        assert graphs.data_ptr() not in pointers  # both are in use
        del graphs, view
        assert host._buffer(64).data_ptr() not in pointers  # its own is free again
        held = host._buffer(64).as_strided((4,), (1,))
        assert host._buffer(64).data_ptr() == pointers[0]  # taken from the others, because it was free
        del held
        streams.recording = False
        assert host._buffer(64).data_ptr() not in pointers[:1]
        del second


def test_a_graph_records_forks_copies_and_joins():
    """The host does not wait for a copy, each stream that forks is joined, and no memory is pinned meanwhile."""
    streams, pinned = Streams(), torch.empty

    def round_trips():
        far = [host._stash(torch.empty(4, 3, device=CUDA).t()) for _ in range(2)]
        near = [host._fetch(host._arrived(x), CUDA) for x in far]
        return [host._arrived(x) for x in near]

    def taken(nbytes):
        assert not streams.recording, "memory is pinned while a graph is recorded"
        return pinned(nbytes, dtype=torch.uint8)

    copies, log = [], streams.log  # a build without CUDA has no copies to fake tensors of it

    def copy(to, x, non_blocking=False):
        copies.append((to.device.type, x.device.type, non_blocking))

    with streams.patched(), FakeTensorMode(), mock.patch.object(host, "pinned", taken):
        with mock.patch.multiple(torch.Tensor, is_pinned=lambda x: True, copy_=copy):
            round_trips()
            streams.recording = True
            log.clear()
            copies.clear()
            assert [x.stride() for x in round_trips()] == [(1, 3)] * 2
        assert len(host._BUFFERS[True, 48]) == 2 and not host._UNDER_WAY
    assert copies == [("cpu", "cuda", True)] * 2 + [("cuda", "cpu", True)] * 2
    records = [line.removeprefix("record ") for line in log if line.startswith("record")]
    joined = [line.removeprefix("main waits for ") for line in log if line.startswith("main waits for")]
    assert len(records) == 4 and sorted(records) == sorted(joined)
    copied = [i for i, line in enumerate(log) if line == "copy"]
    assert all(log[i - 1].endswith("waits for main") for i in copied) and len(copied) == 4


def test_an_event_of_a_graph_is_never_asked():
    """A recording that fails between issue and wait leaves a copy whose event no graph will ever reach."""
    streams = Streams()
    with streams.patched():
        streams.recording = True
        y = host._issue(X, torch.empty_like(X), CUDA)
        (copy,) = host._UNDER_WAY.values()
        copy.event.query.side_effect = RuntimeError("operation not permitted on an event last recorded in a capture")
        del y, copy
        streams.recording = False
        arrived(host._issue(X, torch.empty_like(X), CUDA))
        assert not host._UNDER_WAY


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_a_copy_under_way_holds_both_ends():
    """The result counts from the issue, and the source to the wait; the host's memory is counted apart."""

    def f(x):
        y = x * 2
        far = stash(y)
        z = x.sin().sum()
        back = fetch(arrived(far), HOST)
        return z + x.cos().sum() + arrived(back).sum()

    captured = trace(lambda args: f(*args), (X,), fuse=False, recompute=False)
    g = captured.module.graph
    (issued,) = (node for node in g.nodes if graph.transfer(node) == "stash")
    source = graph.storages(issued.all_input_nodes[0])
    alive = [source <= set(live) for _, _, live in liveness.walk_memory(g)]
    between = [node for node, held in zip(g.nodes, alive, strict=True) if held]
    assert graph.is_wait(between[-1]) and graph.read_nodes(between[-1])[1] is issued.all_input_nodes[0]
    c = of(captured)
    assert c.fetched == c.stashed == c.host == X.nbytes and not c.collectives
    assert same_bits(captured(X), f(X))
