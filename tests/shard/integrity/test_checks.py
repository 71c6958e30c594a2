"""One rank with other bits: every fault of one rank among 2, 3 and 4 is named on every rank, and no other."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import shard
from fquant import NF4_DQ, lora, optim, quantize, tree
from models import decoder
from shard import Precision, bundle, integrity
from tests.helpers import ranks
from tests.helpers.sharding import training
from tests.helpers.sharding.meshes import config

pytestmark = pytest.mark.xdist_group("ranks")
CFG = config(False)
PROJECTIONS = r"layers\.\d+\.(q|k|v|o|gate|up|down)"


def made(trained, moments, done=7):
    """Return a state: what is trained, its moments, and the steps done."""
    return {"trained": trained, "moments": moments, "done": torch.tensor(done, device="cpu")}


def flip(x, path, byte=-1, bit=3):
    """Return the tree ``x`` with another bit in the leaf at ``path``."""

    def other(at, t):
        if at != path:
            return t
        raw = bundle.raw(t).clone()
        raw[byte] ^= 1 << bit
        return raw.view(t.dtype).reshape(t.shape)

    return tree.map_with_path(other, x)


def stepped(state, rate=1e-3):
    """Return the state after a step of AdamW, with what is trained as the gradient."""
    updates, moments = optim.adamw(rate).update(state["trained"], state["moments"], state["trained"])
    return made(optim.apply_updates(state["trained"], updates), moments, int(state["done"]) + 1)


FAULTS = {
    "none": stepped,
    "adapter": lambda s: flip(stepped(s), "trained.layers.1.v.b", 0),
    "moment": lambda s: flip(stepped(s), "moments.square.layers.0.q.a"),
    "step": lambda s: stepped(s) | {"done": s["done"] + 2},
    "rate": lambda s: stepped(s, 1.001e-3),
    "skipped": lambda s: s,
}
FIRST = {
    "adapter": "trained.layers.1.v.b, the first of 1 tensors",
    "moment": "moments.square.layers.0.q.a, the first of 1 tensors",
    "step": "done, the first of 1 tensors",
    "rate": "trained.layers.0.q.a, the first of 8 tensors",
    "skipped": "trained.layers.0.q.a, the first of 26 tensors",
}


def message(check, *args):
    try:
        check(*args)
    except integrity.Diverged as error:
        return str(error)


def faulty(axes, bad):
    """Return the error of each fault of the ranks ``bad`` in the state, and in each block of a base."""
    mesh, rules, mine = shard.mesh(**axes), shard.Rules(), dist.get_rank() in bad
    params = training.params(CFG, torch.float32)
    adapters = tree.map(lambda t: t + 0.5, lora.init(params, r"layers\.\d+\.(q|v)", rank=4, key=1))
    start = made(adapters, optim.adamw(1e-3).init(adapters))
    check = partial(integrity.check_copies, "state", mesh=mesh, rules=rules)
    found = {name: message(check, (fault if mine else stepped)(start)) for name, fault in FAULTS.items()}
    base = tree.map_at(PROJECTIONS, lambda w: quantize(w, NF4_DQ), params)
    base = shard.local(shard.place(base, decoder.dims(CFG), rules, mesh, CFG))
    known = integrity.record(base)
    in_turn = lambda x: [message(integrity.check_record, "base", x, known, i) for i in range(integrity.checks.TURNS)]
    flipped = {path: in_turn(flip(base, f"{path}.bytes") if mine else base) for path in known}
    return found, list(known), in_turn(base), flipped


@pytest.mark.parametrize(
    ("axes", "bad", "named"),
    [
        ({"fsdp": 2}, [1], "ranks 0, 1 have different bits, and none is in the minority, at"),
        ({"dp": 3}, [2], "rank 2 has other bits than ranks 0, 1 at"),
        ({"fsdp": 3}, [0, 1], "rank 2 has other bits than ranks 0, 1 at"),
        pytest.param({"dp": 2, "fsdp": 2}, [0], "rank 0 has other bits than ranks 1, 2, 3 at", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_fault_is_named_on_every_rank(axes, bad, named):
    n = torch.Size(axes.values()).numel()
    everywhere = ranks.run(n, faulty, axes, bad, timeout=60)
    assert all(each == everywhere[0] for each in everywhere)
    found, blocks, right, flipped = everywhere[0]
    assert found.pop("none") is None
    for name, text in found.items():
        assert text.startswith(f"state: {named} {FIRST[name]} that differ; continue from"), (name, text)
    assert right == [None] * 8 and {"layers.0", "layers.1", "embed"} < set(blocks)
    for path, texts in flipped.items():  # each block in one of eight turns
        (text,) = [text for text in texts if text]
        each = "; ".join(f"rank {rank} has other bits than were placed in {path}" for rank in bad)
        assert text.startswith(f"base: {each}; continue from"), text


def faulty_parts(axes, bad, at):
    """Return the error of a flipped bit in this rank's part of trained blocks and moments."""
    mesh, rules = shard.mesh(**axes), shard.Rules()
    params = training.params(CFG, torch.float32)
    mine = shard.local(shard.place(params, decoder.dims(CFG), rules, mesh, CFG, Precision()))
    state = made(mine, optim.adamw(1e-3, moments=optim.DYNAMIC8).init(mine))
    check = partial(integrity.check_copies, "state", mesh=mesh, rules=rules)
    right = message(check, state)
    return right, message(check, flip(state, at, 0) if dist.get_rank() == bad else state)


@pytest.mark.parametrize(
    ("axes", "at", "named"),
    [
        ({"dp": 3}, "trained.layers.1.values", "rank 1 has other bits than ranks 0, 2 at trained.layers.1."),
        ({"fsdp": 2}, "trained.layers.1.values", None),  # a part that no other rank has
        ({"fsdp": 2}, "done", "ranks 0, 1 have different bits, and none is in the minority, at done,"),
        pytest.param(
            {"dp": 2, "fsdp": 2}, "moments.mean.layers.0.values.codes",
            "ranks 1, 3 have different bits, and none is in the minority, at moments.mean.layers.0.",
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_parts_are_compared_between_the_ranks_that_have_them(axes, at, named):
    n = torch.Size(axes.values()).numel()
    for right, text in ranks.run(n, faulty_parts, axes, 1, at, timeout=60):
        assert right is None and (text is None if named is None else text.startswith(f"state: {named}")), text


@pytest.fixture
def alone():
    """A mesh of this process, which has no group afterwards."""
    yield shard.mesh(fsdp=1)
    shard.close()


def test_one_rank_compares_with_its_record_alone(alone):
    base = {"a": torch.ones(3, device="cpu"), "b": torch.ones(3, device="cpu")}
    known = integrity.record(base)
    integrity.check_copies("state", base, alone, shard.Rules())
    integrity.check_record("base", base, known, 1)
    with pytest.raises(integrity.Diverged, match=r"^base: rank 0 has other bits than were placed in b; continue"):
        integrity.check_record("base", flip(base, "b"), known, 1)
    integrity.check_record("base", {}, {}, 0)
