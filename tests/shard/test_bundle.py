"""Bundles: any buffers as bytes and back, and a gathered block under every transform against the block itself."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, hessian, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import shard
from fquant import LOCAL, NF4, NF4_DQ, linear, lora, quantize, tree
from fquant.device import HOST
from shard import bundle, collectives
from tests.helpers import ranks
from tests.helpers.devices.placing import on
from tests.helpers.sharding.bundles import bits, same_bits, zoo
from tests.helpers.sharding.meshes import mesh_of_one

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64])
def test_what_is_written_is_read_without_a_copy(n, device):
    block = zoo()
    layout = bundle.plan(block, n)
    whole = bundle.write(block, layout, device)
    back = bundle.read(whole, layout)
    assert whole.device == device and same_bits(tree.map(lambda t: t.cpu(), back), block)
    begin = whole.data_ptr()
    for t in tree.leaves(back):
        assert t.numel() == 0 or begin <= t.data_ptr() < begin + layout.size
        assert t.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_layout_is_aligned_padded_once_and_planned_from_outlines(n):
    block = zoo()
    layout = bundle.plan(block, n)
    assert layout == bundle.plan(tree.map(lambda t: t.to("meta"), block), n)
    sizes = [t.numel() * t.element_size() for t in tree.leaves(block)]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + math.ceil(size / 64) * 64)
    assert [buffer.offset for buffer in layout.buffers] == starts[:-1]
    assert [buffer.path for buffer in layout.buffers] == tree.paths(block)
    assert layout.size == math.ceil(starts[-1] / (64 * n)) * 64 * n
    assert layout.nbytes == sum(sizes)
    free = torch.ones(layout.size, dtype=torch.bool)
    for buffer in layout.buffers:
        free[buffer.offset : buffer.offset + buffer.nbytes] = False
    assert bundle.write(block, layout)[free].eq(0).all()


def test_a_stack_of_bundles_is_read_along_its_last_dim():
    block = {"a": bits((3, 4), torch.float32), "s": bits((), torch.int16)}
    layout = bundle.plan(block, 1)
    whole = bundle.write(block, layout)
    stacked = bundle.read(torch.stack([whole, whole.flip(0), whole]), layout)
    assert stacked["a"].shape == (3, 3, 4) and stacked["s"].shape == (3,)
    assert same_bits({"a": stacked["a"][2], "s": stacked["s"][2]}, block)


# --- gathered, under transforms


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 2


def like(seed, t):
    """Draw numbers of the shape of ``t``, where it is."""
    return draw(seed, *t.shape).to(t.device)


def block_and_adapters():
    block = {
        "norm": draw(1, 8).float(),
        "up": quantize(draw(2, 96, 8).float(), NF4_DQ),
        "down": quantize(draw(3, 5, 96).float(), NF4),
        "bias": draw(4, 5),
    }
    adapters = lora.init(block, "up|down", rank=2, key=0, dtype=torch.float64)
    return block, {path: tree.map(lambda t: t + 0.1 * draw(5, *t.shape), one) for path, one in adapters.items()}


def body(x, block, comm):
    block = comm.load(block)
    y = torch.tanh(linear(x * block["norm"], block["up"]))
    return linear(y, block["down"], block["bias"])


def loss(adapters, block, x, comm=LOCAL):
    return comm.wrap(body)(x, lora.attach(block, adapters), comm).square().sum()


def moved(adapters):
    return tree.map(lambda t: like(6, t), adapters)


def both_gradients(f, adapters, block, x):
    return grad(lambda pair: f(pair[0], block, pair[1]))((adapters, x))


def along(f, adapters, block, x):
    """Return the derivative of the gradients' inner product with a constant."""
    g = grad(lambda pair: f(pair[0], block, pair[1]))

    def product(pair):
        return sum((u * like(7, u)).sum() for u in tree.leaves(g(pair)))

    return grad(product)((adapters, x))


def traced(f, adapters, block, x):
    def step(adapters, block, x):
        return grad(f, (0, 2))(adapters, block, x)

    leaves, structure = tree.flatten((adapters, block, x))
    replay = make_fx(lambda *leaves: step(*tree.unflatten(structure, leaves)), tracing_mode="fake")(*leaves)
    again = tree.flatten((tree.map(lambda t: 2 * t, adapters), block, x + 1))[0]
    return replay(*leaves), replay(*again), step(tree.map(lambda t: 2 * t, adapters), block, x + 1)


# name -> f(loss, adapters, block, x [3 8])
FIRST = {
    "value": lambda f, a, b, x: f(a, b, x),
    "grad": both_gradients,
    "vmap": lambda f, a, b, x: vmap(f, (None, None, 0))(a, b, x),
    "vmap grad, an example each": lambda f, a, b, x: vmap(grad(f, (0, 2)), (None, None, 0))(a, b, x),
    "vmap grad, an adapter each": lambda f, a, b, x: vmap(grad(f), (0, None, None))(
        lora.stack([a, tree.map(lambda t: -t, a)]), b, x
    ),
    "vmap grad, both": lambda f, a, b, x: vmap(grad(f), (0, None, 0))(lora.stack([a, a, moved(a)]), b, x),
    "jvp": lambda f, a, b, x: jvp(lambda a, x: f(a, b, x), (a, x), (moved(a), like(8, x))),
    "make_fx grad": traced,
}
SECOND = {
    "grad of grad": along,
    "hessian": lambda f, a, b, x: hessian(lambda x: f(a, b, x))(x),
    "vmap hessian": lambda f, a, b, x: vmap(hessian(lambda x: f(a, b, x)))(x),
}
COMMS = {"plain": 0, "remat": 1, "remat order 2": 2}


DIMS = {"": {"norm": "embed", "up": "ffn embed", "down": "out ffn", "bias": "out"}}


def on_rank(order, names, mesh=None):
    block, adapters = block_and_adapters()
    mesh, rules = mesh or shard.mesh(fsdp=dist.get_world_size()), shard.Rules()
    placed = shard.local(shard.place(block, DIMS, rules, mesh))
    comm = shard.comm(mesh, rules, order or 1)
    if not order:
        comm = type(comm)(open=comm.open)
    f = functools.partial(loss, comm=comm)
    adapters, x = on(shard.device_of(mesh), [adapters, draw(10 + dist.get_rank(), 3, 8)])
    return {name: (FIRST | SECOND)[name](f, adapters, placed, x) for name in names}


def on_one_rank(order, names, device):
    with mesh_of_one(device) as mesh:
        return on(HOST, on_rank(order, names, mesh))


@functools.cache
def gathered(n, comm):
    names = (*FIRST, *SECOND) if comm != "remat" else tuple(FIRST)
    return ranks.run(n, on_rank, COMMS[comm], names)


@pytest.mark.parametrize("transform", [*FIRST, *SECOND])
@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("n", [2, 3])
def test_transforms_of_a_gathered_block_against_one_process(n, comm, transform):
    if comm == "remat" and transform in SECOND:
        with pytest.raises(ranks.RankFailure) as caught:
            ranks.run(n, on_rank, COMMS[comm], (transform,))
        assert {f.type for f in caught.value.failures.values()} == {"RuntimeError"}
        assert all("remat(body) gives first derivatives only" in f.message for f in caught.value.failures.values())
        return
    block, adapters = block_and_adapters()
    for rank, got in enumerate(gathered(n, comm)):
        want = (FIRST | SECOND)[transform](loss, adapters, block, draw(10 + rank, 3, 8))
        assert all(t.abs().max() > 0 for t in tree.leaves(want))
        torch.testing.assert_close(tree.leaves(got[transform]), tree.leaves(want), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("comm", ["plain", "remat order 2"])
def test_transforms_of_a_gathered_block_on_one_rank(comm, device):
    block, adapters = block_and_adapters()
    names = (*FIRST, *SECOND)
    (got,) = ranks.run(1, on_one_rank, COMMS[comm], names, device)
    for name in names:
        want = (FIRST | SECOND)[name](loss, adapters, block, draw(10, 3, 8))
        torch.testing.assert_close(tree.leaves(got[name]), tree.leaves(want), rtol=1e-6, atol=1e-6)


def shared_gather():
    """Map over examples with a bundle that is not mapped, which is gathered once, not once for each example."""
    block, adapters = block_and_adapters()
    mesh, rules = shard.mesh(fsdp=dist.get_world_size()), shard.Rules()
    placed = shard.local(shard.place(block, DIMS, rules, mesh))
    f = functools.partial(loss, comm=shard.comm(mesh, rules))
    with collectives.traffic() as t:
        vmap(grad(f), (0, None, 0))(lora.stack([adapters] * 3), placed, draw(9, 3, 8))
    return t.calls, placed.layout.size


@pytest.mark.parametrize("n", [2, 3])
def test_examples_and_adapters_share_one_gather(n):
    for calls, size in ranks.run(n, shared_gather):
        assert calls == [("all_gather", size, n)] * 2  # forward and recompute


def many_bundles():
    """Map over a stack of bundles, one for each model."""
    mesh = shard.mesh(fsdp=dist.get_world_size())
    n, rank, group = dist.get_world_size(), dist.get_rank(), mesh.get_group("fsdp")
    blocks = [{"w": bits((3, 5), torch.bfloat16, i), "b": bits((), torch.int64, i)} for i in range(4)]
    layout = bundle.plan(blocks[0], n)
    parts = torch.stack([bundle.write(block, layout).chunk(n)[rank] for block in blocks])
    found = vmap(lambda part: bundle.read(collectives.all_gather(part, group), layout))(parts)
    return all(same_bits(tree.map(lambda t, i=i: t[i], found), block) for i, block in enumerate(blocks))


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch before 2.13 cannot vmap view(dtype)")
@pytest.mark.parametrize("n", [2, 3])
def test_vmap_over_a_stack_of_bundles(n):
    assert all(ranks.run(n, many_bundles))


def wrong_weight():
    block, adapters = block_and_adapters()
    mesh, rules = shard.mesh(fsdp=dist.get_world_size()), shard.Rules()
    placed = shard.local(shard.place(block, DIMS, rules, mesh))
    grad(loss)({"up": adapters["up"], "gate": adapters["up"]}, placed, draw(9, 3, 8), shard.comm(mesh, rules))


def test_an_adapter_for_a_weight_that_the_bundle_lacks_is_named():
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, wrong_weight)
    for failure in caught.value.failures.values():
        assert failure.type == "ValueError"
        assert failure.message.startswith("adapter 'gate' has no weight to be attached to; there is ")
