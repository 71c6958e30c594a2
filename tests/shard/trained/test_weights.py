"""Training of packed weights on a mesh: bytes, gradients, steps and files are those of one process, bit for bit."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad, grad_and_value, jvp

import shard
from fquant import INT8_ROW, dequantize, jit, lazy, optim, quantize, random, tree
from fquant.format import INT4_ZERO, INT8_GROUP, NF4
from fquant.quantized_training import weights as of_one_process
from fquant.quantized_training.weights import is_packed
from models import decoder
from shard import Precision, Rules, weights
from tests.helpers import ranks
from tests.helpers.sharding import training
from tests.helpers.sharding.bundles import same_bits
from tests.helpers.sharding.meshes import config
from tests.helpers.sharding.training import PASSES

pytestmark = pytest.mark.xdist_group("ranks")
CFG = config(False)
PROJECTIONS = r"layers\.\d+\.(q|k|v|o|gate|up|down)"
F32, KEY, STEPS = Precision(torch.float32), random.key(3), 3
MESHES = [{"fsdp": 1}, {"fsdp": 2}, {"fsdp": 3}, {"dp": 2, "fsdp": 2}]
FORMATS = [INT8_ROW, INT8_GROUP, INT4_ZERO]


def params(format=INT8_ROW):
    """Return a decoder whose layers have packed projections beside norms and biases."""
    return tree.map_at(PROJECTIONS, lambda w: quantize(w, format), training.params(CFG, torch.float32))


def optimizer(moments=None, norm=None):
    adamw = optim.adamw(1e-3, eps=1e-6, weight_decay=0.1, moments=moments)
    return optim.chain(optim.clip_by_global_norm(0.5, norm), adamw)


def alone(moments=None, format=INT8_ROW, steps=STEPS):
    """Return weights, moments and losses after some steps in one process, by the verbs of one process."""
    rest, opt, losses = params(format), optimizer(moments), []
    packed = {path: w for path, w in tree.items(rest, is_leaf=is_packed) if is_packed(w)}
    floats = {path: w for path, w in tree.items(rest, is_leaf=is_packed) if not is_packed(w)}
    state = opt.init((floats, of_one_process.dense(packed)))

    def loss(trained, packed, *batch):
        whole = tree.map_with_path(lambda path, w: trained[0].get(path, w), rest, is_leaf=is_packed)
        return training.loss(of_one_process.attach(whole, packed, trained[1]), *batch, CFG)

    for i in range(steps):
        grads, value = grad_and_value(loss)((floats, of_one_process.carriers(packed)), packed, *training.rows(7, i))
        updates, state = opt.update(grads, state, (floats, of_one_process.dense(packed)))
        floats = optim.apply_updates(floats, updates[0])
        packed = of_one_process.apply_updates(packed, updates[1], random.fold(KEY, i))
        losses.append(value)
    merged = floats | packed
    return tree.map_with_path(lambda path, w: merged[path], rest, is_leaf=is_packed), torch.stack(losses)


def setting(axes, moments=None, format=INT8_ROW, recompute=True):
    mesh, rules = shard.mesh(**axes), Rules()
    placed = shard.place(params(format), decoder.dims(CFG), rules, mesh, CFG, F32)
    p, comm = shard.local(placed), shard.comm(mesh, rules, recompute=recompute)
    opt = optimizer(moments, partial(shard.global_norm, mesh=mesh, rules=rules))

    def step(p, state, key, *batch):
        of = lambda c, *batch: training.loss(weights.attach(p, c), *batch, CFG, comm)
        grads, value = shard.reduce(grad_and_value(of)(weights.carriers(p), *batch), mesh, rules)
        updates, state = opt.update(grads, state, weights.dense(p))
        return weights.apply_updates(p, updates, key, mesh, rules), state, value.clone()

    return mesh, rules, placed, p, opt.init(weights.dense(p)), step


def together(axes, moments=None, format=INT8_ROW, captured=False):
    mesh, rules, _, p, state, step = setting(axes, moments, format, not captured)
    if captured:
        step = jit(step, donate=("p", "state"), passes=PASSES, recompute=False)
    losses = []
    for i in range(STEPS):
        *mine, count = (*shard.share(training.rows(7, i)[:2], mesh, rules), training.rows(7, i)[2])
        with shard.traffic() as seen:
            p, state, value = step(p, state, random.fold(KEY, i), *mine, count)
        losses.append(value)
    calls = [(name, size) for name, size, n in seen.calls if n > 1]
    return shard.whole(p, mesh, rules), torch.stack(losses), calls


def placed_and_back(axes, format):
    """Place, and return whether the tree comes back, and how many bytes a rank holds beside the packed ones."""
    mesh, rules, placed, p, _, _ = setting(axes, None, format)
    like = shard.abstract_local(params(format), decoder.dims(CFG), rules, mesh, F32)
    assert tree.structure(p) == tree.structure(like)
    assert [t.shape for t in tree.leaves(p)] == [t.shape for t in tree.leaves(like)]
    assert same_bits(shard.local(shard.at_rest(p, mesh, rules)), p)
    assert same_bits(shard.collect(placed), params(format))
    whole = shard.whole(placed, mesh, rules)
    assert tree.structure(whole) == tree.structure(shard.whole_like(p)) == tree.structure(params(format))
    assert dist.get_rank() or same_bits(whole, params(format))
    back = shard.part(params(format), p, mesh, rules)
    return same_bits(back, p) and same_bits(shard.part(params(format), tree.map(torch.zeros_like, p), mesh, rules), p)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_rows_are_placed_and_come_back_to_the_bit(n, format):
    assert all(ranks.run(n, placed_and_back, {"fsdp": n}, format))


def near(got, want):
    """Compare weights after some steps: a packed one differs by a code here and there, where a sum was rounded."""
    for (path, a), b in zip(tree.items(got), tree.leaves(want), strict=True):
        if a.dtype == torch.uint8:
            apart = (a.int() - b.int()).abs()
            assert apart.max() <= 1 and (apart > 0).float().mean() < 2e-3, path
        else:
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6, msg=lambda text, path=path: f"{path}: {text}")


SLOW = [(axes, True) for axes in MESHES[1:]]
CASES = [
    *((axes, False) for axes in MESHES),
    (MESHES[0], True),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW),
]


@pytest.mark.parametrize(("axes", "captured"), CASES, ids=str)
def test_steps_are_those_of_one_process(axes, captured):
    want, losses = alone()
    found = ranks.run(math.prod(axes.values()), together, axes, None, INT8_ROW, captured)
    near(found[0][0], want)
    for _, values, calls in found:
        torch.testing.assert_close(values, losses, rtol=1e-5, atol=0)
        scattered = [size for name, size in calls if name.startswith("reduce_scatter")]
        assert len(scattered) == (4 if axes["fsdp"] > 1 else 0)  # one a block
    if axes["fsdp"] == 2:
        held = sum(t.nbytes for t in tree.leaves(params()))
        gathered = sum(size for name, size in found[0][2] if name.startswith("all_gather"))
        assert gathered < 2.2 * held  # forward and backward; the rows of a rank are a multiple of 256 elements


def updated(axes):
    """Return the whole tree after the same updates on any mesh."""
    mesh, rules, _, p, _, _ = setting(axes)
    drawn = tree.map_with_path(lambda path, t: 0.01 * random.normal(random.fold(KEY, path), tuple(t.shape)), decoded())
    updates = shard.part(drawn, weights.dense(p), mesh, rules)
    return shard.whole(weights.apply_updates(p, updates, KEY, mesh, rules), mesh, rules), drawn


def decoded():
    return tree.map(lambda w: dequantize(w) if is_packed(w) else w, params(), is_leaf=is_packed)


def test_the_same_key_gives_the_same_bits_on_any_mesh():
    found, drawn = ranks.run(1, updated, {"fsdp": 1})[0]
    others = [ranks.run(n, updated, axes)[0][0] for n, axes in [(2, {"fsdp": 2}), (3, {"fsdp": 3}), (2, {"dp": 2})]]
    assert all(same_bits(found, other) for other in others)
    start = dict(tree.items(params(), is_leaf=is_packed))
    packed = {path: w for path, w in start.items() if is_packed(w)}
    floats = dict(tree.items(drawn))
    want = of_one_process.apply_updates(packed, {path: floats[path] for path in packed}, KEY)
    for path, w in tree.items(found, is_leaf=is_packed):
        assert same_bits(w, want[path] if path in want else start[path] + floats[path]), path
        assert not same_bits(w, start[path]), path


def resumed(saved):
    """Take two steps, the second from the state that was saved whole after the first; return both states, whole."""
    mesh, rules, _, p, state, step = setting({"fsdp": dist.get_world_size()}, optim.DYNAMIC8)
    if saved is None:
        p, state = step(p, state, KEY, *shard.share(training.rows(6)[:2], mesh, rules), training.rows(6)[2])[:2]
    else:
        unread = tree.map(lambda t: lazy.Lazy(lambda: t, t.to("meta")), saved)
        read = shard.part(saved, (p, state), mesh, rules)
        assert same_bits(read, shard.part(unread, (p, state), mesh, rules))
        p, state = read
    found, like = shard.whole((p, state), mesh, rules), shard.whole_like((p, state))
    assert tree.structure(found) == tree.structure(like)
    shapes = lambda x: [t.shape for part in (x[0], x[1][1].mean.layers) for t in tree.leaves(part)]
    assert shapes(found) == shapes(like)
    return found


def test_weights_and_packed_moments_go_to_any_number_of_ranks():
    saved = ranks.run(2, resumed, None)[0]
    assert any(t.any() for t in tree.leaves(saved[1][1].square))
    for n in (1, 3, 2):  # the codes of a FloatBundle end in padding, which depends on the ranks
        found = ranks.run(n, resumed, saved)[0]
        for (path, a), b in zip(tree.items(found), tree.leaves(saved), strict=True):
            if a.ndim and "layers" not in path:
                a, b = a[: len(b)], b[: len(a)]  # noqa: PLW2901
            assert same_bits(a, b), path


def transforms():
    mesh, rules, _, p, _, _ = setting({"fsdp": dist.get_world_size()})
    comm, zeros = shard.comm(mesh, rules), weights.carriers(p)
    *mine, count = (*shard.share(training.rows(6)[:2], mesh, rules), training.rows(6)[2])
    of = lambda c: training.loss(weights.attach(p, c), *mine, count, CFG, comm)
    grads, tangent = grad(of)(zeros), tree.map(lambda t: torch.full_like(t, 1e-3), weights.dense(p))
    _, along, *_ = jvp(of, (tree.map(torch.clone, zeros),), (tangent,))
    dot = sum((g * t).sum() for g, t in zip(tree.leaves(grads), tree.leaves(tangent), strict=True))
    return torch.stack([along, dot]), zeros.layers[0].values.untyped_storage().nbytes()


@pytest.mark.parametrize("n", [1, 2])
def test_forward_and_reverse_mode_agree(n):
    found = ranks.run(n, transforms)
    along, dot = torch.stack([each[0] for each in found]).sum(0)  # of ranks, each of which has a loss of its own
    torch.testing.assert_close(along, dot, rtol=1e-4, atol=0)
    assert along.abs() > 1e-4 and found[0][1] == 4


def refused(name):
    mesh, rules, _, p, _, _ = setting({"fsdp": 1})
    place = lambda x, train=F32: shard.place(x, decoder.dims(CFG), rules, mesh, CFG, train)
    layer = lambda f: tree.map_at(r"layers\.1\.attn_norm", f, params())
    match name:
        case "format":
            place(params(NF4))
        case "float64":
            place(layer(lambda w: w.double()))
        case "structure":
            weights.attach(p, p)
        case "rank":
            opened = shard.comm(mesh, rules).open
            opened(replace(p.layers[0], bytes=p.layers[0].bytes[:-64]))


REFUSED = {
    "format": r"layers\.0\.\w+: nf4 cannot be trained: wanted integers in blocks along rows.* use INT8_ROW",
    "float64": r"layers\.1\.attn_norm: got torch.float64 beside packed weights",
    "structure": "carriers: got a tree of another structure",
    "rank": "the bundle holds .* bytes, and this comm gathers from 1 ranks",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pytest.raises(ranks.RankFailure, match=REFUSED[name]):
        ranks.run(1, refused, name)
