"""Trained blocks on a mesh: gradients and training are those of one process, under every transform and captured."""

import dataclasses
import math
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, grad_and_value, jacrev, jvp, vmap

import shard
from fquant import NF4, lazy, quantize, tree
from fquant.compile.cost import cost
from models import decoder
from models.config import Config
from shard import Precision, Rules
from shard.bundle import Buffer
from tests.helpers import ranks
from tests.helpers.sharding import training
from tests.helpers.sharding.bundles import same_bits
from tests.helpers.sharding.meshes import config, dims_of, drawn
from tests.helpers.sharding.training import EXACT, PASSES

pytestmark = pytest.mark.xdist_group("ranks")
BF16 = Precision(torch.bfloat16, torch.float32)
MESHES = [{"fsdp": 1}, {"fsdp": 2}, {"fsdp": 3}, {"dp": 2, "fsdp": 2}, {"dp": 2}]


# --- placing ----------------------------------------------------------------------------------------------------------


def block():
    """Return a block with matrices between vectors, a scalar, and an empty tensor."""
    shapes = {"norm": (70,), "w": (9, 70), "bias": (), "none": (0, 3), "stack": (2, 3, 50), "last": (257,)}
    return {name: drawn(*shape).to(torch.bfloat16) for name, shape in shapes.items()}


def placed(is_lazy):
    params, n = {"block": block(), "other": {"w": drawn(300)}}, dist.get_world_size()
    dims = {path: dims_of(inner)[""] for path, inner in params.items()}
    given = params
    if is_lazy:
        given = tree.map(lambda t: lazy.Lazy(lambda: t, t.to("meta"), lambda: "same"), params)
    elif dist.get_rank():
        given = tree.map(lambda t: t.to("meta"), params)
    mesh, rules = shard.mesh(fsdp=n), Rules()
    found = shard.place(given, dims, rules, mesh, train=BF16)
    local, like = shard.local(found), shard.abstract_local(given, dims, rules, mesh, train=BF16)
    assert tree.structure(local) == tree.structure(like)
    assert [t.shape for t in tree.leaves(local)] == [t.shape for t in tree.leaves(like)]
    assert same_bits(shard.collect(found), tree.map(lambda t: t.float(), params))
    mine = local["block"]
    return mine.values, mine.layout.buffers, mine.layout.size  # the structure in a layout does not pickle in silence


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_masters_are_float32_and_each_tensor_begins_a_block_of_256(n, is_lazy):
    found = ranks.run(n, placed, is_lazy)
    _, buffers, size = found[0]
    place = list(block()).index("norm")
    assert buffers[place] == Buffer("norm", torch.float32, (70,), 4 * 256 * 5)  # after w and stack
    assert all(buffer.offset % 1024 == 0 for buffer in buffers) and size % (1024 * n) == 0
    assert {part[0].shape for part in found} == {(size // 4 // n,)}
    whole = torch.cat([part[0] for part in found])
    for buffer, t in zip(buffers, block().values(), strict=True):
        assert torch.equal(whole[buffer.offset // 4 :][: t.numel()].view(t.shape), t.float()), buffer.path


# --- gradients --------------------------------------------------------------------------------------------------------


def on_mesh(axes, tied, rules=None, tokens=None, order=1):
    cfg, (x, y, count) = config(tied), training.rows(7)
    mesh, rules = shard.mesh(**axes), rules or Rules()
    params = shard.place(training.params(cfg), decoder.dims(cfg), rules, mesh, cfg, train=EXACT)
    comm, mine = shard.comm(mesh, rules, order, tokens=tokens), shard.share((x, y), mesh, rules)
    with shard.traffic() as t:
        grads, value = grad_and_value(training.loss)(shard.local(params), *mine, count, cfg, comm)
        calls = [(name, n) for name, _, n in t.calls]
        grads, value = shard.reduce((grads, value), mesh, rules)
    norm = shard.global_norm((grads, value), mesh, rules)
    return shard.whole(grads, mesh, rules), value, norm, calls


@cache
def in_one_process(tied):
    x, y, count = training.rows(7)
    return grad_and_value(training.loss)(training.params(config(tied)), x, y, count, config(tied))


def close(got, want, rtol=1e-9, atol=1e-12):
    assert tree.structure(got) == tree.structure(want)
    for (path, a), b in zip(tree.items(got), tree.leaves(want), strict=True):
        assert b.abs().max() > 0, path
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text, path=path: f"{path}: {text}")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_gradients_are_those_of_one_process(axes, tied):
    """With tables whose rows could travel alone, which trained ones do not."""
    want, value = in_one_process(tied)
    n = math.prod(axes.values())
    (grads, got, norm, calls), *rest = ranks.run(n, on_mesh, axes, tied, None, 16)
    close(grads, want)
    leaves = [t.float() for t in (*tree.leaves(want), value)]
    expected = torch.stack([t.square().sum() for t in leaves]).sum().sqrt()
    for value_of_rank, norm_of_rank in [(got, norm), *(each[1:3] for each in rest)]:
        torch.testing.assert_close(value_of_rank, value, rtol=1e-10, atol=0)
        torch.testing.assert_close(norm_of_rank.to(expected), expected, rtol=1e-6, atol=0)
    split = axes.get("fsdp", 1)
    assert calls.count(("reduce_scatter", split)) == (
        0 if split == 1 else 4 + tied
    )  # of a tied table two, of others one
    assert {each[3] == calls for each in rest} <= {True}


@pytest.mark.parametrize("rules", [Rules(block=None), Rules(block="dp")], ids=["whole", "over dp"])
def test_other_rules(rules):
    want, value = in_one_process(True)
    grads, got, _, calls = ranks.run(2, on_mesh, {"dp": 2}, True, rules)[0]
    close(grads, want)
    assert bool(calls) == (rules.block == "dp")


def of_shares(n):
    """Return gradients in bfloat16 of each rank's share, summed in float32 in the order of ranks, in one process."""
    cfg, (x, y, count) = config(True), training.rows(7)
    params = tree.map(lambda t: t.bfloat16(), training.params(cfg, torch.float32))
    f = partial(training.loss, cfg=cfg, dtype=torch.bfloat16)
    each = [grad(f)(params, *mine, count) for mine in zip(x.tensor_split(n), y.tensor_split(n), strict=True)]
    return tree.map(lambda *ts: sum(t.float() for t in ts), *each)


def in_bfloat16(precision):
    cfg, (x, y, count) = config(True), training.rows(7)
    mesh, rules = shard.mesh(fsdp=dist.get_world_size()), Rules()
    params = shard.place(training.params(cfg, torch.float32), decoder.dims(cfg), rules, mesh, train=precision)
    f = partial(training.loss, cfg=cfg, comm=shard.comm(mesh, rules), dtype=torch.bfloat16)
    with shard.traffic() as t:
        grads = grad(f)(shard.local(params), *shard.share((x, y), mesh, rules), count)
    return shard.whole(grads, mesh, rules), t.payload("reduce_scatter")


@pytest.mark.parametrize("n", [1, 2, 3])
def test_products_in_bfloat16_and_sums_in_float32(n):
    """Bit for bit, except that the two uses of a tied table are summed in float32 here, and in bfloat16 there."""
    grads, sent = ranks.run(n, in_bfloat16, BF16)[0]
    want = of_shares(n)
    assert same_bits(grads.layers, want.layers) and same_bits(grads.final, want.final)
    torch.testing.assert_close(grads.embed, want.embed, rtol=0.02, atol=2e-3)
    narrow, half = ranks.run(n, in_bfloat16, Precision(torch.bfloat16, torch.bfloat16))[0]
    assert sent == 2 * half and (n == 1 or not same_bits(narrow.layers, want.layers) or n == 1)
    torch.testing.assert_close(tree.leaves(narrow), tree.leaves(grads), rtol=0.02, atol=2e-3)


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "captured"),
    [
        ({"fsdp": 2}, True),
        ({"fsdp": 3}, False),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (({"dp": 2, "fsdp": 2}, True), ({"fsdp": 2}, False), ({"fsdp": 1}, True))
        ),
    ],
    ids=str,
)
def test_ten_clipped_steps_are_those_of_one_process(axes, captured):
    cfg = config(True)
    want, state, losses = training.alone(cfg, 10)
    options = {"captured": captured, "recompute": not captured}
    found = ranks.run(math.prod(axes.values()), partial(training.together, **options), cfg, axes, EXACT, 10)
    for _, _, values, _ in found:
        torch.testing.assert_close(values, losses, rtol=1e-7, atol=0)
    close(found[0][0], want, 1e-5, 1e-4 * training.RATE)  # moments are float32
    close(found[0][1][1].mean, state[1].mean, 1e-5, 1e-7)
    assert losses[-1] < losses[0] - 0.1


def captured_like_uncaptured(precision, recompute):
    cfg, axes = config(True), {"fsdp": dist.get_world_size()}
    found = [
        training.together(cfg, axes, precision, 3, captured=is_captured, recompute=recompute, dtype=torch.bfloat16,
                          start=training.params(cfg, torch.float32))
        for is_captured in (False, True)
    ]  # fmt: skip
    return same_bits(found[0][2:], found[1][2:]), found[0][2]


@pytest.mark.parametrize(
    ("precision", "recompute"),
    [
        (BF16, False),
        (dataclasses.replace(BF16, wire=shard.wire.FP8, dense="embed"), False),
        *(
            pytest.param(dataclasses.replace(BF16, wire=wire), recompute, marks=pytest.mark.slow)
            for wire in (None, shard.wire.INT8, shard.wire.TERNARY)
            for recompute in (True, False)
        ),
    ],
    ids=str,
)
def test_a_captured_step_has_the_bits_of_the_step(precision, recompute):
    """With every pass that places collectives, and parameters and moments written over."""
    for same, losses in ranks.run(2, captured_like_uncaptured, precision, recompute, timeout=120):
        assert same and losses.isfinite().all()


def test_a_rank_needs_its_part_of_the_state_and_two_blocks():
    """Master, gradient and two moments are 16 bytes a parameter over all ranks; the rest is of one block at a time."""
    cfg = Config(512, 256, 6, 4, 4, 64, 768, norm_eps=1e-5, rope_theta=1e4, max_positions=64, tied=True)
    peaks = dict[int, int]()
    with torch.device("meta"):
        x, count = torch.empty(1, 32, dtype=torch.int64), torch.empty((), dtype=torch.int64)
    for n in (2, 8):
        with shard.abstract_mesh(fsdp=n) as mesh, pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard, "mesh", lambda mesh=mesh, **_: mesh)
            patch.setattr(shard, "place", lambda p, dims, rules, mesh, _, train: shard.abstract_local(p, dims, rules, mesh, train))  # fmt: skip # noqa: E501
            *_, p, state, step = training.setting(cfg, {}, BF16, False, torch.bfloat16, None, decoder.shapes(cfg))
            found = cost(step, p, state, [], x, x, count, donate=("params", "state"), passes=PASSES, recompute=False)
        own, layer = tree.nbytes(p), max(b.layout.size for b in p.layers)  # bytes of float32
        peaks[n] = found.peak - 4 * own
        # The layer's gradients in float32 beside those in bfloat16, the layer, and the next one under way.
        assert peaks[n] < 2.75 * layer, (n, peaks[n] / layer)
        (scattered,) = (c for c in found.collectives if c.name == "reduce_scatter")
        assert scattered.payload == n * (own + p.embed.values.nbytes)  # the tied table's is scattered twice


# --- transforms -------------------------------------------------------------------------------------------------------


def small():
    return {"w": drawn(3, 5).double(), "b": drawn(3).double()}


def objective(p, x, comm=None):
    p = p if comm is None else comm.load(p)
    return torch.tanh(x @ p["w"].T + p["b"]).square().sum()


def directional(f):
    """Return the second derivative along the parameters themselves, forward over forward."""
    first = lambda p, x: jvp(lambda p: f(p, x), (p,), (p,))[1]
    return lambda p, x: jvp(lambda p: first(p, x), (p,), (p,))[1]


TRANSFORMS = {
    "grad": grad,
    "vmap of models": lambda f: vmap(grad(f), (0, None)),
    "jvp": lambda f: lambda p, x: jvp(lambda p: f(p, x), (p,), (p,))[1],
    "jvp of jvp": directional,
    "jvp of grad": lambda f: lambda p, x: jvp(lambda p: grad(f)(p, x), (p,), (p,))[1],
    "grad of grad": lambda f: grad(lambda p, x: sum(t.square().sum() for t in tree.leaves(grad(f)(p, x)))),
    "make_fx": lambda f: lambda p, x: torch.fx.experimental.proxy_tensor.make_fx(grad(f))(p, x)(p, x),
}


def stacked(x, times):
    return tree.map(lambda t: torch.stack([t * (i + 1) for i in range(times)]), x)


def transformed(name):
    n, rank = dist.get_world_size(), dist.get_rank()
    mesh, rules = shard.mesh(fsdp=n), Rules()
    p, dims = small(), dims_of(small())
    local = shard.local(shard.place(p, dims, rules, mesh, train=EXACT))
    local = stacked(local, 2) if name.startswith("vmap") else local
    found = TRANSFORMS[name](partial(objective, comm=shard.comm(mesh, rules)))(local, drawn(n, 4, 5).double()[rank])
    if name.startswith("vmap"):
        found = [tree.map(lambda t, i=i: t[i], found) for i in range(2)]
    return shard.whole(found, mesh, rules) if name not in ("jvp", "jvp of jvp") else shard.psum(found, mesh, "fsdp")


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_transforms(n, name):
    p, x = small(), drawn(n, 4, 5).double()
    f = lambda p, x: sum(objective(p, row) for row in x)
    if name == "grad of grad":  # of the square of the whole gradient, of which each rank has a part
        want = TRANSFORMS[name](f)(p, x)
    elif name.startswith("vmap"):
        want = [grad(f)(tree.map(lambda t, i=i: t * (i + 1), p), x) for i in range(2)]
    else:
        want = TRANSFORMS[name](f)(p, x)
    close(ranks.run(n, transformed, name)[0], want, 1e-10, 1e-12)


def refused(name):
    n = dist.get_world_size()
    mesh, rules = shard.mesh(fsdp=n), Rules()
    precision = Precision(torch.float32, wire=shard.wire.INT8) if name == "wire" else EXACT
    p = tree.map(lambda t: t.float(), small()) if name == "wire" else small()
    local = shard.local(shard.place(p, dims_of(p), rules, mesh, train=precision))
    f, x = partial(objective, comm=shard.comm(mesh, rules)), drawn(4, 5).to(local.values.dtype)
    if name == "wire":
        vmap(f, (0, None))(stacked(local, 2), x)
    elif name == "examples":
        vmap(grad(f), (None, 0))(local, x[:, None])
    else:
        jacrev(lambda p: f(p, x)[None].expand(2))(local)


OF_EXAMPLES = "a gradient for each example, of weights that ranks share, would be summed with that of other ranks"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("examples", OF_EXAMPLES),
        ("rows of a Jacobian", OF_EXAMPLES),
        ("wire", "a bundle that travels as int8 was mapped over; use Precision"),
    ],
)
def test_what_a_transform_cannot_do_is_named(name, error):
    with pytest.raises(ranks.RankFailure, match=error):
        ranks.run(2, refused, name)


# --- faults -----------------------------------------------------------------------------------------------------------


def faulty(name):
    mesh = shard.mesh(fsdp=dist.get_world_size())
    p, rules, train = small(), Rules(), EXACT
    if name == "packed":
        p = {"w": quantize(drawn(4, 64), NF4), "b": drawn(3)}
    elif name == "integers":
        p["b"] = torch.arange(3)
    elif name == "batch":
        rules = Rules("dp")
    elif name == "offload":
        rules = Rules(offload="block")
    elif name == "wire":
        train = dataclasses.replace(EXACT, wire=shard.wire.INT8)
    elif name == "dense":
        train, p = Precision(wire=shard.wire.INT8, dense="head"), tree.map(lambda t: t.float(), p)
    elif name == "narrow":
        train, p = Precision(wire=shard.wire.INT8), tree.map(lambda t: t.float(), p)
    elif name == "scales":
        train, p = Precision(wire=shard.wire.TERNARY), tree.map(lambda t: t.float(), p)
    placed = shard.place(p, dims_of(p), rules, mesh, train=train)
    local = placed if name == "placed" else shard.local(placed)
    whole = Rules(block=None)
    local = tree.map(lambda t: t.bfloat16(), local) if name == "narrow" else local
    if name == "reduce":
        shard.reduce(local, mesh, whole)
    shard.comm(mesh, whole if name == "comm" else rules).load(local)


FAULTS = {
    "packed": "w: nf4 cannot be trained: wanted integers in blocks along rows with float32 scales; use INT8_ROW",
    "integers": "b: got int64, wanted floats to train",
    "batch": "rule block: 'fsdp' does not split the batch, so every rank would add the same gradient; add it to batch",
    "offload": "rule offload: got 'block', and trained blocks stay on the device; use None",
    "wire": "got torch.float64 to be sent as int8, wanted at most 32 bits; use wire=None, or cast it to float32",
    "dense": "precision dense: no block matches 'head'; the blocks are",
    "scales": "a bundle that travels as ternary has no scales; open shard.scaled",
    "narrow": "a bundle of torch.bfloat16 was to travel as int8; wanted float32, or wire=None",
    "placed": "the bundle holds a DTensor, which torch.func cannot trace; pass shard.local",
    "comm": "the bundle holds 256 of 512 elements, and this comm gathers from 1 ranks; make the comm with the mesh",
    "reduce": "a bundle holds 256 of 512 elements, and these rules split blocks over 1 ranks; pass the mesh",
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named_on_every_rank(name):
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, faulty, name)
    assert [FAULTS[name] in failure.message for failure in caught.value.failures.values()] == [True, True]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"compute": torch.int8}, "precision compute: got torch.int8; wanted a float of 16 bits or more"),
        ({"reduce": torch.float8_e4m3fn}, "precision reduce: got torch.float8_e4m3fn; wanted a float of 16 bits"),
        ({"dense": "embed"}, "precision dense: got 'embed', and wire is None; leave it out"),
        ({"wire": "int8"}, "precision wire: got 'int8'; wanted a Wire, such as shard.wire.INT8, or None"),
    ],
)
def test_precisions_that_make_no_sense_are_named(options, error):
    with pytest.raises((ValueError, TypeError), match=error):
        Precision(**options)
