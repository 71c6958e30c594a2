"""Tests of fquant.lora.slots: each slot has the bits of its adapter trained alone, by plain functions, throughout."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.func import grad_and_value

import fquant
from fquant import NF4_DQ, jit, linear, lora, optim, quantize, random, tree
from fquant.lora import slots
from models import decoder
from models.config import Config

CFG = Config(vocab=96, dim=64, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16, hidden=96)
TARGETS = r"layers\.\d+\.(q|k|v|o|gate|up|down)"
ROOM = ((4, 2), (16, 3), (8, 1))  # ranks, and slots of each
SLOTS = sum(n for _, n in ROOM)
OPTIMISERS = {
    "adamw": lambda own: optim.adamw(optim.cosine(own["lr"], own["total"], own["warmup"])),
    "clipped": lambda own: optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(own["lr"])),
    "lion8": lambda own: optim.lion(optim.linear(own["lr"], own["total"]), moments=optim.DYNAMIC8),
    "sgd": lambda own: optim.sgd(optim.constant(own["lr"], own["warmup"]), momentum=0.9),
}


def make_base():
    dense = decoder.init(CFG, random.key(0))
    return tree.map_at(TARGETS, lambda w: quantize(w, NF4_DQ), dense)


def tokens_of(step, n=SLOTS, rows=2):
    return torch.randint(0, CFG.vocab, (n, rows, 17), generator=torch.Generator().manual_seed(step))


def loss(adapters, key, base, tokens, dtype):
    params = lora.attach(base, adapters, key)
    return decoder.token_losses(params, tokens[..., :-1], tokens[..., 1:], CFG, dtype=dtype).mean((1, 2))


@dataclass
class Alone:
    """An adapter that plain functions train with numbers in place of tensors."""

    adapters: Any
    own: dict[str, float]
    key: int
    optimiser: Any
    steps: int = 0
    losses: list = field(default_factory=list)

    def __post_init__(self):
        self.state = self.optimiser(self.own).init(self.adapters)

    def step(self, base, tokens, dtype):
        def of(adapters):
            params = lora.attach(base, adapters, random.fold(random.key(self.key), self.steps))
            return decoder.token_losses(params, tokens[..., :-1], tokens[..., 1:], CFG, dtype=dtype).mean()

        grads, value = grad_and_value(of)(self.adapters)
        self.adapters, self.state = optim.step(self.optimiser(self.own), grads, self.state, self.adapters)
        self.steps += 1
        self.losses.append(value)


def make_alone(base, number, rank, optimiser, dropout=True):
    made = lora.init(
        base, TARGETS, rank, alpha=3.0 + number, key=number, dropout=0.1 * (number % 3) if dropout else 0.0
    )
    own = {"lr": 1e-2 / (number + 1), "total": 5 + number, "warmup": number % 3}
    return Alone(made, own, 100 + number, optimiser)


def make_bank(base, optimiser, dropout=True):
    like = [(lora.init(base, TARGETS, rank), n) for rank, n in ROOM]
    return slots.init(like, optimiser, {"lr": 0.0, "total": 0, "warmup": 0}, dropout)


def put(bank, alone, optimiser):
    slot = slots.free(bank, alone.adapters)
    return slots.fill(bank, slot, alone.adapters, optimiser, alone.own, alone.key), slot


def numbers_of(slot):
    """Return the place of a slot among all."""
    return sum(n for _, n in ROOM[: slot.stack]) + slot.index


def of_slot(bank, slot):
    """Return adapters and optimiser state of a slot."""
    return slots.take(bank, slot), tree.map(lambda t: t[slot.index], bank[slot.stack].state)


def same_bits(x, y):
    pairs = list(zip(tree.leaves(x), tree.leaves(y), strict=True))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_each_slot_has_the_bits_of_its_adapter_alone(name, dtype, captured):
    """Three steps, then one stops, then another takes its slot; one slot is free throughout.

    Products are ours, because on some machines the bits of torch's depend on the rows beside them.
    """
    base, optimiser = make_base(), OPTIMISERS[name]
    bank, running, ended = make_bank(base, optimiser), {}, {}

    def step(bank, base, tokens):
        with fquant.batch_invariant():
            return slots.step(bank, loss, optimiser, base, tokens, dtype)

    step = jit(step) if captured else step
    for number, (rank, _) in enumerate([ROOM[0], ROOM[1], ROOM[0], ROOM[1], ROOM[2]]):
        alone = make_alone(base, number, rank, optimiser)
        bank, slot = put(bank, alone, optimiser)
        running[slot] = alone
    first = slots.Slot(0, 1)
    assert set(running) == {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)}
    for i in range(6):
        if i == 2:
            bank, ended[first] = slots.stop(bank, first), running.pop(first)
        if i == 4:
            alone = make_alone(base, 7, ROOM[0][0], optimiser)
            bank, slot = put(bank, alone, optimiser)
            assert slot == first
            del ended[first]
            running[first] = alone
        tokens = tokens_of(i)
        bank, losses = step(bank, base, tokens)
        for slot, alone in running.items():
            with fquant.batch_invariant():
                alone.step(base, tokens[numbers_of(slot)], dtype)
            assert torch.allclose(losses[numbers_of(slot)], alone.losses[-1], rtol=1e-6)
        for slot, alone in (running | ended).items():
            adapters, state = of_slot(bank, slot)
            assert tree.structure(adapters) == tree.structure(alone.adapters)  # with alpha and dropout
            same = same_bits(adapters, alone.adapters), same_bits(state, alone.state)
            assert same == (True, True), (i, slot)
            assert bank[slot.stack].count[slot.index] == alone.steps
    assert not any(t.any() for t in tree.leaves(tree.map(lambda t: t[2], bank[1].adapters)))  # the free one
    if captured:
        assert len(step.traced) == 1


def test_a_slot_does_not_see_the_others():
    """Adapters, moments and losses of a slot keep their bits if all others hold infinities."""
    base, optimiser = make_base(), OPTIMISERS["adamw"]
    bank = make_bank(base, optimiser, dropout=False)
    alone = make_alone(base, 1, 16, optimiser, dropout=False)
    bank, slot = put(bank, alone, optimiser)
    spoilt = make_alone(base, 2, 16, optimiser, dropout=False)
    spoilt.adapters = tree.map(lambda t: t + torch.inf, spoilt.adapters)
    mixed, other = put(bank, spoilt, optimiser)
    found = [slots.step(each, loss, optimiser, base, tokens_of(0), torch.float32) for each in (bank, mixed)]
    assert same_bits(*(of_slot(bank, slot) for bank, _ in found))
    assert found[0][1][numbers_of(slot)] == found[1][1][numbers_of(slot)]
    assert not found[1][1][numbers_of(other)].isfinite()


def test_fill_and_take():
    """An adapter is taken as it was filled in, in a slot of its rank; arguments are not changed."""
    base, optimiser = make_base(), OPTIMISERS["adamw"]
    bank = make_bank(base, optimiser)
    made = lora.init(base, TARGETS, 16, alpha=7.3, dropout=0.2)
    before = tree.map(torch.clone, bank)
    filled = slots.fill(bank, slots.Slot(1, 1), made, optimiser, {"lr": 0.1, "total": 3, "warmup": 1}, key=5)
    assert same_bits(bank, before)
    taken = slots.take(filled, slots.Slot(1, 1))
    assert same_bits(taken, made) and tree.structure(taken) == tree.structure(made)
    assert slots.free(filled, made) == (1, 0)
    assert filled[1].active.tolist() == [False, True, False] and filled[1].key.tolist() == [0, 5, 0]
    assert torch.equal(filled[1].own["lr"], torch.tensor([0, 0.1, 0])) and filled[1].own["total"].tolist() == [0, 3, 0]
    assert slots.stop(filled, slots.Slot(1, 1))[1].active.tolist() == [False] * 3


def test_ranks_may_differ_between_paths():
    """Slots of one structure are a stack; its paths may have ranks of their own, stabilised."""
    base, optimiser = {"q": torch.eye(8), "k": torch.eye(8)}, lambda own: optim.sgd(own["lr"])
    make = lambda key: lora.init(base, "q", 2, 4.0, key) | lora.init(base, "k", 3, 4.0, key, rank_stabilised=True)
    bank = slots.init([(make(0), 2)], optimiser, {"lr": 0.1})
    many = [tree.map(lambda t: t + 0.1, make(key)) for key in (1, 2)]
    for adapters in many:
        bank = slots.fill(bank, slots.free(bank, adapters), adapters, optimiser, {"lr": 0.1})
    x = torch.arange(48.0).reshape(2, 3, 8)
    found = lora.attach(base, slots.joined(bank))
    for path in base:
        each = [linear(row, lora.attach(base, adapters)[path]) for row, adapters in zip(x, many, strict=True)]
        torch.testing.assert_close(linear(x, found[path]), torch.stack(each))


def test_a_captured_update_is_one_op_for_each_leaf():
    """It reads the gradient transposed, and writes what is active over the old adapters and moments."""
    base, optimiser = {"q": torch.eye(64), "k": torch.eye(64)}, lambda own: optim.adamw(own["lr"])
    bank = slots.init([(lora.init(base, "q|k", rank), n) for rank, n in ROOM], optimiser, {"lr": 0.1})

    def step(bank, base, x):
        f = lambda adapters, *_: (linear(x, lora.attach(base, adapters)["q"]) * x).sum((1, 2))
        return slots.step(bank, f, optimiser)

    step = jit(step, donate=("bank",))
    step(bank, base, torch.ones(SLOTS, 12, 64))
    (captured,) = step.traced.values()
    calls = [node for node in captured.module.graph.nodes if node.op == "call_function"]
    assert sum("adam_update" in str(node.target) and node.args[-1] is not None for node in calls) == 4 * len(ROOM)
    of_leaves = [node for node in calls if isinstance(t := node.meta["val"], torch.Tensor) and t.ndim == 3]
    assert not [node for node in of_leaves if node.target in (torch.ops.aten.where.self, torch.ops.aten.clone.default)]


ADAPTERS = lora.init({"w": torch.eye(8)}, "w", 2)
OTHER = lora.init({"w": torch.eye(8)}, "w", 3)
SGD = lambda own: optim.sgd(own["lr"])
OWN = {"lr": 0.1}
BANK = slots.init([(ADAPTERS, 1)], SGD, OWN)
FULL = slots.fill(BANK, slots.Slot(0, 0), ADAPTERS, SGD, OWN)
DORA = lora.init({"w": torch.eye(8)}, "w", 2, dora=True)
TWO = lora.init({"w": torch.eye(8), "v": torch.eye(8)}, "w|v", 2)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: slots.init([], SGD, OWN), "like: got no adapters"),
        (lambda: slots.init([(ADAPTERS, 0)], SGD, OWN), r"like\.0: got 0 slots, wanted at least 1"),
        (lambda: slots.init([(ADAPTERS, 1), (TWO, 1)], SGD, OWN), r"like\.1: adapters of other paths"),
        (lambda: slots.init([(DORA, 1)], SGD, OWN), "w: got DoRA in a slot"),
        (lambda: slots.free(FULL, ADAPTERS), "no slot is free for adapters of rank 2 among 1 stacks like them"),
        (lambda: slots.free(FULL, OTHER), "no slot is free for adapters of rank 3 among 0 stacks"),
        (lambda: slots.fill(BANK, slots.Slot(0, 0), OTHER, SGD, OWN), r"slot \(0, 0\) is for adapters of other paths"),
        (lambda: slots.fill(BANK, slots.Slot(0, 0), ADAPTERS, SGD, {}), r"own: got \[\], wanted \['lr'\], as in init"),
        (
            lambda: slots.fill(BANK, slots.Slot(0, 0), lora.init({"w": torch.eye(8)}, "w", 2, dropout=0.5), SGD, OWN),
            r"dropout: got 0\.5 in a bank without; use slots\.init\(\.\.\., dropout=True\)",
        ),
        (
            lambda: slots.fill(
                slots.init([(TWO, 1)], SGD, OWN), slots.Slot(0, 0), TWO | lora.init({"v": torch.eye(8)}, "v", 2, 5.0),
                SGD, OWN,
            ),
            r"alpha: got \[5\.0, 16\.0\] in one slot, wanted one",
        ),
        (lambda: slots.step(FULL, lambda *_: torch.ones(2), SGD), r"loss: got shape \(2,\), wanted \(1,\)"),
    ],
)  # fmt: skip
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
