"""Optimisers that need whole tensors, on bundles: steps on any mesh are those of one process."""

import math

import pytest
import torch
from torch.func import grad_and_value

import shard
from fquant import jit, optim, tree
from models import decoder
from shard import Rules
from tests.helpers import ranks
from tests.helpers.sharding import training
from tests.helpers.sharding.meshes import config
from tests.helpers.sharding.training import EXACT

pytestmark = pytest.mark.xdist_group("ranks")
CFG, STEPS = config(False), 3


def optimizer(name, moments=None):
    clip = optim.clip_by_global_norm(0.5)
    if name == "adafactor":
        return optim.chain(clip, optim.adafactor(1e-2, weight_decay=0.1))
    muon = optim.muon(0.02, moments=moments)
    rest = optim.adamw(3e-3, eps=1e-6, moments=moments)
    matrices = r"layers\.\d+\.(q|k|v|o|gate|up|down)"
    return optim.chain(clip, optim.partition({matrices: muon, rf"(?!{matrices}$).*": rest}))


def steps(opt, p, batches, loss, reduce=lambda x: x, captured=False):
    def step(p, state, *batch):
        grads, value = reduce(grad_and_value(loss)(p, *batch))
        updates, state = opt.update(grads, state, p)
        return optim.apply_updates(p, updates), state, value.clone()

    step, state, losses = jit(step) if captured else step, opt.init(p), []
    for batch in batches:
        p, state, value = step(p, state, *batch)
        losses.append(value)
    return p, state, torch.stack(losses)


def alone(name, moments=None):
    batches = [training.rows(7, i) for i in range(STEPS)]
    loss = lambda p, *batch: training.loss(p, *batch, CFG)
    return steps(optimizer(name, moments), training.params(CFG), batches, loss)


def together(axes, name, captured, moments=None):
    mesh, rules = shard.mesh(**axes), Rules()
    p = shard.local(shard.place(training.params(CFG), decoder.dims(CFG), rules, mesh, CFG, EXACT))
    comm = shard.comm(mesh, rules)
    share = lambda x, y, count: (*shard.share((x, y), mesh, rules), count)
    batches = [share(*training.rows(7, i)) for i in range(STEPS)]
    loss = lambda p, *batch: training.loss(p, *batch, CFG, comm)
    opt = shard.on_whole(optimizer(name, moments), mesh, rules)
    reduce = lambda x: shard.reduce(x, mesh, rules)
    p, state, losses = steps(opt, p, batches, loss, reduce, captured)
    return shard.whole(p, mesh, rules), state, losses


@pytest.mark.parametrize("name", ["muon", "adafactor"])
@pytest.mark.parametrize(
    ("axes", "captured"), [({"fsdp": 1}, True), ({"fsdp": 2}, False), ({"dp": 1, "fsdp": 3}, False)]
)
def test_steps_are_those_of_one_process(name, axes, captured):
    """Muon computes in bfloat16, where a gradient whose sum was taken in another order may round the other way."""
    want, state, losses = alone(name)
    found = ranks.run(math.prod(axes.values()), together, axes, name, captured)
    start = training.params(CFG)
    for (path, a), b, before in zip(tree.items(found[0][0]), tree.leaves(want), tree.leaves(start), strict=True):
        moved = (b - before).norm()
        assert moved > 0 and (a - b).norm() <= (5e-3 if name == "muon" else 1e-6) * moved, path
    for _, own, values in found:
        torch.testing.assert_close(values, losses, rtol=1e-4, atol=0)
        assert tree.structure(own) == tree.structure(state)
        assert [t.shape for t in tree.leaves(own)] == [t.shape for t in tree.leaves(state)]


def test_moments_of_8_bits():
    _, state, losses = alone("muon", optim.DYNAMIC8)
    _, own, values = ranks.run(2, together, {"fsdp": 2}, "muon", False, optim.DYNAMIC8)[0]
    torch.testing.assert_close(values, losses, rtol=1e-3, atol=0)
    assert tree.structure(own) == tree.structure(state)


def refused(name):
    mesh, rules = shard.mesh(fsdp=1), Rules()
    p = shard.local(shard.place(training.params(CFG), decoder.dims(CFG), rules, mesh, CFG, EXACT))
    {"muon": optim.muon(0.02), "adafactor": optim.adafactor()}[name].init(p)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_a_part_of_a_tensor_is_refused(name):
    with pytest.raises(
        ranks.RankFailure, match=r"embed: got a FloatBundle, of which a rank has a part.*shard.on_whole"
    ):
        ranks.run(1, refused, name)
