"""The recorder of CUDA: the memory that its pool takes by a model, and on a device what a replay does."""

import contextlib
import gc
import warnings

import pytest
import torch

from fquant import cost, jit, tree
from fquant.compile import graph as graphs
from fquant.compile import liveness
from fquant.compile.cuda_graph import recorder_of
from fquant.compile.memory.offsets import assign_offsets
from fquant.compile.roofline import DEVICES, scratch
from fquant.compile.tracing.collector import uncollected
from fquant.kernels.dispatch import runs_programs
from tests.helpers.arrays import equal
from tests.helpers.cases import slow_after
from tests.helpers.graphs import llama_step
from tests.helpers.graphs.bf16_step import start, step
from tests.helpers.graphs.caching_allocator import MIB, Allocator, recorded
from tests.helpers.qlora_step import copied


def test_the_model_of_the_allocator():
    pool = Allocator()
    a, b, c = (pool.allocate(n) for n in (3 * MIB, 4 * MIB, 5 * MIB))
    assert (pool.reserved, pool.allocated, b - a, c - b) == (20 * MIB, 12 * MIB, 3 * MIB, 4 * MIB)
    pool.release(b)
    assert pool.allocate(2 * MIB) == b and pool.allocate(2 * MIB) == b + 2 * MIB  # the best fit, and its rest
    pool.release(a)
    pool.release(b)
    assert pool.allocate(5 * MIB) == a and pool.reserved == 20 * MIB  # merged
    small = [pool.allocate(1) for _ in range(4096)]
    assert small[1] - small[0] == 512 and pool.reserved == 22 * MIB
    pool.allocate(11 * MIB)
    assert pool.reserved == 34 * MIB
    pool = Allocator()
    last = pool.allocate(19 * MIB + 1)
    assert pool.allocate(MIB + 1) != last + 19 * MIB + 512 and pool.reserved == 40 * MIB  # a rest that is too small


needs_programs = pytest.mark.skipif(not runs_programs("cuda"), reason="Triton is not installed: nothing is fused")
STEPS = (2, "selective", 4, 0.055), pytest.param(6, "full", 1, 0.015, marks=needs_programs)


@pytest.mark.parametrize(("layers", "checkpoint", "batch", "share"), slow_after(1, STEPS))
def test_a_pool_that_begins_with_the_peak_is_hardly_larger(layers, checkpoint, batch, share):
    """Fragments are fewer than without the first segment, and at most a ``share`` of what the step needs."""
    with llama_step.captured(layers, checkpoint, batch) as captured:
        graph = captured.module.graph
    inside = graphs.storages_on_device(graph) - graphs.all_storages(graph.find_nodes(op="placeholder"))
    live, whole = liveness.peak(graph, inside).nbytes, liveness.peak(graph).nbytes
    slab = lambda node: scratch(node, DEVICES["h100"])
    most = liveness.peak(graph, inside, slab).nbytes
    peak, alone = recorded(graph, 0, slab)
    _, begun = recorded(graph, most, slab)
    assert most <= peak < most + 512 * len(graph.nodes)  # rounded
    assert live <= most <= live + 8 * MIB  # slabs are decoded where less is live
    assert begun < alone and begun - live < share * whole
    assert live < planned(graph) < live * 1.01  # if every op could compute into given memory


def planned(graph):
    """Return the bytes of a memory plan of all tensors of ``graph`` that are no arguments."""
    last, spans, seen = liveness.last_uses(graph), [], graphs.all_storages(graph.find_nodes(op="placeholder"))
    for place, node in enumerate(graph.nodes):
        for storage, nbytes in graphs.sizes(node).items():
            if nbytes and storage not in seen:
                seen.add(storage)
                spans.append((place, last[storage], nbytes))
    return assign_offsets(spans)[1]


def test_a_recorder_is_of_a_device():
    assert recorder_of(torch.device("cpu")) is None is recorder_of(torch.device("meta"))


def test_nothing_is_collected_while_a_step_is_recorded():
    for was in (True, False):
        with contextlib.suppress(ValueError), uncollected():
            assert not gc.isenabled()
            with uncollected():
                pass
            assert not gc.isenabled()
            if not was:
                raise ValueError("a step fails")
        assert gc.isenabled()


# --- on a device ------------------------------------------------------------------------------------------------------


def taken(f, adapters, state, base, tokens, steps=5):
    """Return the state and the losses of some steps."""
    losses = []
    for _ in range(steps):
        adapters, state, loss = f(adapters, state, base, tokens)
        losses.append(loss)
    return adapters, state, losses


@pytest.mark.cuda
def test_a_replay_equals_the_step_node_by_node(device):
    adapters, state, base, tokens = tree.map(lambda t: t.to(device), start())
    donate = ("adapters", "state")
    got = taken(jit(step, donate=donate, cuda_graph=True), *copied((adapters, state)), base, tokens)
    assert equal(got, taken(jit(step, donate=donate, cuda_graph=False), *copied((adapters, state)), base, tokens))
    assert len({float(loss) for loss in got[2]}) == 5


@pytest.mark.cuda
def test_a_replay_waits_for_nothing_and_keeps_its_memory(device):
    adapters, state, base, tokens = tree.map(lambda t: t.to(device), start())
    f = jit(step, donate=("adapters", "state"), cuda_graph=True)
    adapters, state, _ = taken(f, adapters, state, base, tokens, 3)
    memory = [t.data_ptr() for t in tree.leaves((adapters, state))]
    with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        adapters, state, _ = taken(f, adapters, state, base, tokens.clone(), 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [t.data_ptr() for t in tree.leaves((adapters, state))] == memory


@pytest.mark.cuda
def test_the_peak_is_that_of_the_cost(device):
    """Recorded and replayed, a function takes what is read off its graph, and its pool hardly more."""
    f = lambda w, x: ((x @ w).relu() @ w.mT).square().sum()
    w, x = torch.randn(1024, 4096, device=device), torch.randn(8192, 1024, device=device)
    predicted, g = cost(f, w, x, device=device), jit(f, cuda_graph=True)
    g(w, x)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    others = torch.cuda.memory_allocated(device) - w.nbytes - x.nbytes
    for _ in range(3):
        g(w, x)
    assert abs((torch.cuda.max_memory_allocated(device) - others) / predicted.peak - 1) < 0.05
    assert torch.cuda.max_memory_reserved(device) - others < 1.1 * predicted.peak


def test_an_old_recording_may_be_collectable_while_another_is_made(device):
    """A graph in a cycle of references is freed by the collector, which its threshold lets run at every object."""
    x = torch.ones(3, device=device)
    if recorder_of(device) is None:
        pytest.skip("records on a CUDA device")
    old = jit(lambda t: t + 1)
    for _ in range(3):
        old(x)
    cycle = [old]
    cycle.append(cycle)
    threshold = gc.get_threshold()
    gc.collect()
    del old, cycle
    new = jit(lambda t: t * 2 + 1, cuda_graph=True)
    try:
        gc.set_threshold(1, 1, 1)
        for _ in range(4):
            assert torch.equal(new(x), x * 2 + 1)
    finally:
        gc.set_threshold(*threshold)
