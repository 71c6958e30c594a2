"""The time of hand-made graphs equals what is counted by hand: a product, a chain, gathers exposed and overlapped."""

import dataclasses

import pytest
import torch

import shard
from fquant import INT8, linear, quantize, tree
from fquant.compile.roofline import DEVICES, Shares, limit, predict, seconds, walk
from fquant.compile.trace import trace
from fquant.device import HOST
from fquant.kernels.ops.attention import attention
from fquant.kernels.ops.norm import rms_norm
from shard.transport.host import arrived, fetch, stash
from tests.helpers.arrays import named

ONE = Shares(1.0, 1.0, 1.0, 1.0, 1.0)
TOY = dataclasses.replace(
    DEVICES["h100"], flops_f32=1e12, bandwidth=1e9, link=1e6, host=1e6, launch=0.25, latency=0.5, share=ONE
)
SIDE = 1000
PRODUCT, MOVED = 2 * SIDE**3 / 1e12, 3 * 4 * SIDE**2 / 1e9  # seconds
HELD = 4 * 500_000  # bytes of a rank's part; of two ranks, so many are sent
COMMUNICATED = HELD / 1e6 + 0.5
OPS = torch.ops._c10d_functional


def meta(*shape):
    return torch.empty(shape, device="meta")


def graph_of(f, *args):
    return trace(lambda args: f(*args), args).module.graph


def gather(x):
    return OPS.all_gather_into_tensor(x, 2, "0")


@pytest.fixture
def two():
    """An abstract mesh of two ranks."""
    shard.close()
    with shard.abstract_mesh(fsdp=2):
        yield


def test_a_product_takes_the_longer_of_its_two_sides():
    assert PRODUCT < MOVED
    for device, wanted in ((TOY, MOVED), (dataclasses.replace(TOY, flops_f32=1e11), 10 * PRODUCT)):
        found = predict(graph_of(torch.mm, meta(SIDE, SIDE), meta(SIDE, SIDE)), device)
        assert found.by_kind == {"product": pytest.approx(wanted), "launch": 0.25}
        assert found.seconds == found.serial == pytest.approx(wanted + 0.25)
        assert found.limit == pytest.approx(PRODUCT * 1e12 / device.flops_f32)
        assert found.share == found.limit / found.seconds


def test_a_chain_is_read_and_written_once():
    found = predict(graph_of(lambda x, y: (x * y + 1.0) * x, meta(SIDE, SIDE), meta(SIDE, SIDE)), TOY)
    assert found.by_kind == {"elementwise": pytest.approx(MOVED), "launch": 0.25}
    assert found.limit == found.share == 0.0


def test_shares_are_of_peaks():
    graph = graph_of(torch.mm, meta(SIDE, SIDE), meta(SIDE, SIDE))
    half = dataclasses.replace(TOY, share=Shares(0.5, 0.5, 0.5, 0.5, 0.5))
    assert predict(graph, half).by_kind["product"] == pytest.approx(2 * MOVED)
    assert limit(graph, half) == pytest.approx(2 * PRODUCT)


def exposed(x, y):
    """Wait at once, then multiply."""
    return OPS.wait_tensor(gather(x)), y @ y


def overlapped(x, y):
    """Multiply between issue and wait."""
    sent = gather(x)
    product = y @ y
    return OPS.wait_tensor(sent), product


def behind_each_other(x, y):
    """Send two at once: the link takes one after the other."""
    first, second = gather(x), gather(x + 1)
    return OPS.wait_tensor(first), OPS.wait_tensor(second), y @ y


def summed(x, y):
    """Sum over ranks, which sends twice as much."""
    return OPS.wait_tensor(OPS.all_reduce(x, "sum", "0")), y @ y


STEP = 2 * 4 * SIDE**2 / 1e9 + 0.25  # of a square, which is read once
PLUS = 2 * HELD / 1e9 + 0.25
SCHEDULES = {
    exposed: COMMUNICATED,
    overlapped: COMMUNICATED - STEP,
    behind_each_other: 2 * COMMUNICATED - PLUS,
    summed: COMMUNICATED,
}


@pytest.mark.parametrize("f", SCHEDULES, ids=lambda f: f.__name__)
def test_a_collective_takes_what_is_left_of_it_at_its_wait(f, two):
    found = predict(graph_of(f, meta(HELD // 4), meta(SIDE, SIDE)), TOY)
    assert found.by_kind["collective"] == pytest.approx(SCHEDULES[f])
    assert found.serial - found.seconds == pytest.approx(
        {overlapped: STEP, behind_each_other: PLUS}.get(f, 0.0), abs=1e-9
    )


def test_a_wait_that_comes_late_takes_nothing(two):
    quick = dataclasses.replace(TOY, link=1e12, latency=0.0)
    assert predict(graph_of(overlapped, meta(HELD // 4), meta(SIDE, SIDE)), quick).by_kind["collective"] == 0.0


def near(x, y):
    """Fetch beside a product, and leave a copy that nothing waits for to the end."""
    coming = fetch(x, HOST)
    product = y @ y
    return arrived(coming), product, arrived(stash(product))


def test_copies_have_a_stream_for_each_direction():
    found = predict(graph_of(near, meta(HELD // 4), meta(SIDE, SIDE)), TOY)
    there = HELD / 1e6 + 0.5
    exposed = there - STEP + 4 * SIDE**2 / 1e6 + 0.5
    assert found.by_kind["copy"] == pytest.approx(exposed)
    assert found.copying == pytest.approx(there + 4 * SIDE**2 / 1e6 + 0.5)
    assert found.overlapped == pytest.approx(1 - exposed / found.copying)


def test_without_copies_all_are_hidden():
    assert predict(graph_of(torch.mm, meta(SIDE, SIDE), meta(SIDE, SIDE)), TOY).overlapped == 1.0


def test_the_limit_is_that_of_products_and_attention_alone():
    """Thin products count, at the share that products reach; norms, casts and the decoding of a weight do not."""

    def step(x, a, w, g):
        y = rms_norm(x, g, 1e-5)[0] @ a  # thin
        z = linear(y @ a.mT, w).reshape(1, 4, 250, SIDE)
        return attention(z, z, z)[0].sin()

    w = tree.map(lambda t: t.to("meta"), quantize(torch.zeros(SIDE, SIDE), INT8))
    args = meta(SIDE, SIDE), meta(SIDE, 16), w, meta(SIDE)
    device = dataclasses.replace(TOY, share=Shares(0.5, 0.25, 1.0, 1.0, 1.0))
    products = 2 * 2 * SIDE * 16 * SIDE + 2 * SIDE**3
    attended = 2 * 2 * 4 * SIDE * (250 * 251 // 2)
    assert limit(graph_of(step, *args), device) == pytest.approx((products / 0.5 + attended / 0.25) / 1e12)


def test_kinds_may_be_renamed():
    graph = graph_of(lambda x: x.sin(), meta(10))
    assert set(predict(graph, TOY, lambda node, kind: "sine" if kind == "elementwise" else kind).by_kind) == {
        "sine",
        "launch",
    }
    assert sum(spent.seconds for spent in walk(graph, TOY)) == sum(seconds(node, TOY) for node in graph.nodes)


@named("name", DEVICES)
def test_every_device_has_a_share_below_one(name):
    found = predict(graph_of(torch.mm, meta(SIDE, SIDE), meta(SIDE, SIDE)), DEVICES[name])
    assert 0 < found.limit < found.seconds
