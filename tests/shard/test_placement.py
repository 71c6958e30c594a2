"""Placement: every byte arrives at its place, from tensors or from Lazy leaves, and collect returns it."""

import dataclasses
import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.func import grad, jvp, vmap

import shard
from fquant import AQ_2X8, LOCAL, NF4, NF4_DQ, lora, quantize, tree
from fquant.device import HOST
from fquant.lazy import Lazy
from fquant.packed import Packed
from shard import bundle
from tests.helpers import ranks
from tests.helpers.devices.placing import elsewhere, on
from tests.helpers.sharding.bundles import same_bits, zoo
from tests.helpers.sharding.meshes import mesh_of_one

pytestmark = pytest.mark.xdist_group("ranks")

MESHES = [{"fsdp": 1}, {"fsdp": 2}, {"dp": 2}, {"fsdp": 3}, {"dp": 2, "fsdp": 2}, {"fsdp": 5}]


def params():
    """Return blocks that are a dict, a tensor, a Packed, and one without bytes."""
    w = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    return {
        "zoo": zoo(),
        "layers": [{"w": quantize(w + i, NF4_DQ)} for i in range(2)],
        "bare": w.bfloat16(),
        "packed": quantize(w, NF4),
        "vectors": quantize(w, AQ_2X8),
        "nothing": {"empty": torch.empty(0, 2)},
    }


def is_weight(x):
    return isinstance(x, Packed | Lazy)


def dims_of(tree_):
    def names(weight):
        shape = (weight.like if isinstance(weight, Lazy) else weight).shape
        return " ".join(f"dim{i}" for i in range(len(shape)))

    paths = ("zoo", "layers.0", "layers.1", "bare", "packed", "vectors", "nothing")
    return {
        path: {inner: names(w) for inner, w in tree.items(tree.get(tree_, path), is_leaf=is_weight)} for path in paths
    }


def as_lazy(x):
    """Return every weight as Lazy, and a list of the paths that were read."""
    asked = []

    def one(path, weight):
        def read():
            asked.append(path)
            return weight

        return Lazy(read, tree.map(lambda t: t.to("meta"), weight), lambda: f"stamp of {path}")

    return tree.map_with_path(one, x, is_leaf=is_weight), asked


def outline(x):
    return tree.map(lambda t: t.to("meta"), x)


def there_and_back(axes, source, rules, mesh=None):
    """Place a tree on ``mesh``, or on one of ``axes``, and check each block; return what came back right."""
    mesh = mesh or shard.mesh(**axes)
    whole, rank, device = params(), dist.get_rank(), shard.device_of(mesh)
    given, asked = (on(device, whole) if source == "the mesh's device" else whole), []
    if source == "rank 0" and rank:
        given = outline(whole)
    if source == "lazy":
        given, asked = as_lazy(whole)
    placed = shard.place(given, dims_of(given), rules, mesh)
    back = shard.collect(placed)
    local, announced = shard.local(placed), shard.abstract_local(given, dims_of(given), rules, mesh)
    assert tree.structure(announced) == tree.structure(local) and all(t.is_meta for t in tree.leaves(announced))
    assert [t.shape for t in tree.leaves(announced)] == [t.shape for t in tree.leaves(local)]
    ranks_ = mesh["fsdp"].size() if rules.block else 1
    part = mesh["fsdp"].get_local_rank() if rules.block else 0
    for path in dims_of(given):
        at_rest = tree.get(placed, path)
        wanted = bundle.write(tree.get(whole, path), bundle.plan(tree.get(whole, path), ranks_))
        assert isinstance(at_rest.bytes, DTensor) and at_rest.bytes.dtype == torch.uint8
        assert at_rest.bytes.placements == (Replicate(), Shard(0) if rules.block else Replicate())
        assert at_rest.bytes.shape == wanted.shape
        assert torch.equal(at_rest.bytes.to_local().cpu(), wanted.chunk(ranks_)[part] if len(wanted) else wanted)
        assert torch.equal(at_rest.bytes.full_tensor().cpu(), wanted)
    assert elsewhere((local, back), device) == []
    return same_bits(on(HOST, back), whole), same_bits(shard.collect(placed), back), asked


@pytest.mark.each_value
@pytest.mark.parametrize("source", ["rank 0", "everywhere", "lazy"])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_bytes_arrive_and_come_back_bit_for_bit(axes, source):
    got = ranks.run(math.prod(axes.values()), there_and_back, axes, source, shard.Rules())
    assert all(one[:2] == (True, True) for one in got)
    if source == "lazy":  # each is read once, by one rank
        assert sorted(path for _, _, asked in got for path in asked) == sorted(tree.paths(params(), is_leaf=is_weight))


def there_and_back_on_one_rank(source, device):
    with mesh_of_one(device) as mesh:
        return there_and_back({}, source, shard.Rules(), mesh)


@pytest.mark.parametrize("source", ["rank 0", "the mesh's device", "lazy"])
def test_bytes_arrive_on_one_rank(source, device):
    ((arrived, again, asked),) = ranks.run(1, there_and_back_on_one_rank, source, device)
    assert (
        arrived
        and again
        and sorted(asked) == (sorted(tree.paths(params(), is_leaf=is_weight)) if source == "lazy" else [])
    )


@pytest.mark.parametrize("source", ["rank 0", "lazy"])
def test_blocks_that_are_not_split(source):
    got = ranks.run(2, there_and_back, {"fsdp": 2}, source, shard.Rules(block=None))
    assert all(one[:2] == (True, True) for one in got)


def opened(axes, mesh=None):
    whole, mesh, rules = params(), mesh or shard.mesh(**axes), shard.Rules()
    placed = shard.place(whole, dims_of(whole), rules, mesh)
    comm, local = shard.comm(mesh, rules), shard.local(placed)
    found = []
    for path in ("zoo", "bare", "packed", "vectors"):
        with shard.traffic() as t:
            block = comm.load(tree.map(lambda x: x, local[path]))
        storages = {leaf.untyped_storage().data_ptr() for leaf in tree.leaves(block)}
        sizes = {leaf.untyped_storage().nbytes() for leaf in tree.leaves(block)}
        inside = all(
            min(storages) <= leaf.data_ptr() and leaf.data_ptr() + leaf.nbytes <= min(storages) + min(sizes)
            for leaf in tree.leaves(block)
            if leaf.numel()
        )
        layout, right = placed[path].layout, same_bits(on(HOST, block), whole[path])
        found.append((right, len(storages), sizes == {layout.size}, inside, t.count("all_gather")))
    return found


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_a_block_is_viewed_out_of_one_gathered_buffer(axes):
    n = math.prod(axes.values())
    for found in ranks.run(n, opened, axes):
        assert found == [(True, 1, True, True, int(axes.get("fsdp", 1) > 1))] * 4


def opened_on_one_rank(device):
    with mesh_of_one(device) as mesh:
        return opened({}, mesh)


def test_a_block_is_viewed_out_of_one_buffer_on_one_rank(device):
    assert ranks.run(1, opened_on_one_rank, device) == [[(True, 1, True, True, 0)] * 4]


def on_devices(per_rank):
    """Place a tree whose tensors are on the devices that rank has for "a", "b" and the adapters; the first are fake."""
    mesh = shard.mesh(fsdp=dist.get_world_size())
    with torch.no_grad(), FakeTensorMode() if dist.get_rank() == 0 else nullcontext():
        a, b, c = (torch.empty(2, 2, device=device) for device in per_rank[dist.get_rank()])
    shard.place(({"a": a, "b": b}, {"c": c}), {"": {"a": "x y", "b": "x y"}}, shard.Rules(), mesh)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (("cpu", "cuda:0", "cpu"), "b: got a tensor on cuda:0 beside a on cpu; wanted one device in a tree"),
        (("cuda:0", "cuda:1", "cpu"), "b: got a tensor on cuda:1 beside a on cuda:0; wanted one device in a tree"),
        (("cuda:0", "cuda:0", "cpu"), "a: got a tensor on cuda:0; wanted cpu"),
        (("cpu", "cpu", "cuda:0"), "c: got a tensor on cuda:0; wanted cpu"),
    ],
    ids=str,
)
def test_mixed_devices_are_refused_on_every_rank(devices, message):
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, on_devices, [devices, ("meta", "meta", "meta")], timeout=10)
    first, second = (caught.value.failures[rank].message for rank in range(2))
    assert first == f"{message}; move the tree by tree.map(lambda t: t.to('cpu'), x)"
    assert second == f"place failed on rank 0: ValueError: {first}"


def beside(meta, mesh=None):
    base, mesh = {"w": torch.ones(4, 6)}, mesh or shard.mesh(fsdp=dist.get_world_size())
    adapters = lora.init(base, "w", rank=2, key=0, dora=True, dtype=torch.bfloat16)
    wanted = tree.map(torch.clone, adapters)
    if meta and dist.get_rank():
        base, adapters = outline((base, adapters))
    placed, got = shard.place((base, adapters), {"": {"w": "out in"}}, shard.Rules(), mesh)
    empty = shard.place((base, {}), {"": {"w": "out in"}}, shard.Rules(), mesh)[1]
    again = shard.replicate({"seed": torch.tensor(dist.get_rank() + 5)}, mesh)
    back = shard.collect(placed)
    assert elsewhere((got, again, back), shard.device_of(mesh)) == []
    return (
        same_bits(on(HOST, got), wanted),
        same_bits(on(HOST, back), {"w": torch.ones(4, 6)}),
        empty,
        again["seed"].item(),
    )


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_what_is_trained_is_replicated_from_rank_0(n, meta):
    assert ranks.run(n, beside, meta) == [(True, True, {}, 5)] * n


def beside_on_one_rank(device):
    with mesh_of_one(device) as mesh:
        return beside(False, mesh)


def test_what_is_trained_is_on_the_device_of_one_rank(device):
    assert ranks.run(1, beside_on_one_rank, device) == [(True, True, {}, 5)]


def misused(what):
    mesh, rules = shard.mesh(fsdp=dist.get_world_size()), shard.Rules()
    base, dims = {"w": torch.ones(4, 6)}, {"": {"w": "out in"}}
    placed = shard.place(base, dims, rules, mesh)
    local = shard.local(placed)
    match what:
        case "collect local":
            shard.collect(local)
        case "load placed":
            shard.comm(mesh, rules).load(placed)
        case "load without a comm":
            return type(LOCAL.load(local)).__name__
        case "load something closed":
            shard.comm(mesh, rules).load(Sealed())
        case "other rules":
            shard.comm(mesh, shard.Rules(block=None)).load(local)
        case "place with other rules":
            placed = shard.place(base, dims, shard.Rules(block=None), mesh)
            shard.comm(mesh, rules).load(shard.local(placed))
        case "place twice":
            shard.place(placed, dims, rules, mesh)
        case "meta on rank 0":
            shard.place(outline(base), dims, rules, mesh)
        case "meta beside":
            shard.place((base, outline(base)), dims, rules, mesh)
        case "some lazy":
            shard.place(as_lazy(base)[0] | {"v": torch.ones(2)}, {"": {"w": "out in", "v": "d"}}, rules, mesh)
        case "number":
            shard.place({"w": torch.ones(4, 6), "n": 3}, dims, rules, mesh)
        case "unnamed":
            shard.place(base | {"v": torch.ones(2)}, dims, rules, mesh)
        case "axis":
            shard.place(base, dims, shard.Rules(block="tp"), mesh)
        case "other than announced":
            w = Lazy(lambda: torch.ones(4, 6).half(), torch.ones(4, 6, device="meta"))
            shard.place({"w": w}, dims, rules, mesh)


class Sealed(bundle.Loadable):
    pass


@pytest.mark.parametrize(
    ("what", "type_", "message"),
    [
        ("collect local", "ValueError", "collect got a local bundle; wanted the placed tree, before shard.local"),
        (
            "load placed",
            "TypeError",
            "the bundle holds a DTensor, which torch.func cannot trace; pass shard.local(base)",
        ),
        ("load something closed", "TypeError", "a Sealed is closed, and this comm opens bundles made by shard.place"),
        ("other rules", "ValueError", "the bundle holds 64 of 128 bytes, and this comm gathers from 1 ranks; make the"),
        (
            "place with other rules",
            "ValueError",
            "the bundle holds 128 of 128 bytes, and this comm gathers from 2 ranks",
        ),
        ("place twice", "TypeError", "bytes is a DTensor; wanted a plain tensor or a Lazy"),
        ("meta on rank 0", "ValueError", "w is a meta tensor on rank 0, whose values are the ones that count"),
        ("meta beside", "ValueError", "w is a meta tensor on rank 0, whose values are the ones that count"),
        ("some lazy", "ValueError", "v: a tensor among Lazy leaves; make it Lazy, or read all (fquant.lazy.read)"),
        ("number", "TypeError", "n is a int; wanted a plain tensor or a Lazy"),
        ("unnamed", "ValueError", "v: dims[''] does not name its dims; it names w; add it"),
        ("axis", "ValueError", "rule block: the mesh has no axis 'tp'; wanted some of dp, fsdp"),
        ("other than announced", "ValueError", "w: read [(torch.float16, (4, 6))]; wanted [(torch.float32, (4, 6))]"),
    ],
)
def test_misuse_is_refused_on_every_rank(what, type_, message):
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, misused, what, timeout=10)
    failures = caught.value.failures
    assert sorted(failures) == [0, 1]
    own = [f for f in failures.values() if " failed on " not in f.message]
    assert own and all(f.type == type_ and f.message.startswith(message) for f in own), failures
    for other in failures.values():  # a rank that did not fail itself tells of the ones that did
        assert message in other.message


def test_local_leaves_everything_but_bundles_alone():
    x = {"a": torch.ones(2), "b": [torch.zeros(1)]}
    assert tree.leaves(shard.local(x))[0] is x["a"]
    assert shard.collect(x)["a"] is x["a"]


def twice_local():
    mesh = shard.mesh(fsdp=2)
    placed = shard.place({"w": torch.ones(4, 6)}, {"": {"w": "out in"}}, shard.Rules(), mesh)
    local = shard.local(placed)
    again = shard.local(local)
    return type(local.bytes) is torch.Tensor, again.bytes is local.bytes, dataclasses.is_dataclass(local)


def test_local_of_local_is_itself():
    assert ranks.run(2, twice_local) == [(True, True, True)] * 2


def local_inside(transform):
    mesh = shard.mesh(fsdp=2)
    placed = shard.place({"w": torch.ones(4, 6)}, {"": {"w": "out in"}}, shard.Rules(), mesh)
    f, x = lambda x: shard.local(placed).bytes.sum() * x, torch.ones(())
    run = {
        "grad": lambda: grad(f)(x),
        "vmap": lambda: vmap(f)(torch.ones(3)),
        "jvp": lambda: jvp(f, (x,), (x,)),
        "grad of vmap": lambda: grad(lambda x: vmap(f)(x).sum())(torch.ones(3)),
    }
    with pytest.raises(RuntimeError) as caught:
        run[transform]()
    local = shard.local(placed)
    assert grad(lambda x: shard.local(local).bytes.sum() * x)(x) > 0  # nothing is left to do, so it may be called
    return str(caught.value)


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "grad of vmap"])
def test_local_inside_a_transform_is_refused(transform):
    name = transform.split()[-1]
    message = f"shard.local(base) was called inside torch.func.{name}; call it once outside and pass its result as an "
    assert ranks.run(2, local_inside, transform) == [message + "argument"] * 2


def shared_tensor():
    """Place one tensor that is in several blocks."""
    mesh, w = shard.mesh(fsdp=2), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    layer = {"w": w}
    base = {"embed": w, "layers": [layer, layer], "head": {"w": w}}
    dims = {"embed": {"": "a b"}} | {path: {"w": "a b"} for path in ("layers.0", "layers.1", "head")}
    return same_bits(shard.collect(shard.place(base, dims, shard.Rules(), mesh)), base)


def test_a_tensor_may_be_in_several_blocks():
    assert ranks.run(2, shared_tensor) == [True, True]
