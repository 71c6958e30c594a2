"""Tests of fquant.lora.slots: each slot has the bits of its adapter trained alone, by plain functions, throughout."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.func import grad, grad_and_value, jvp, vjp, vmap

from fquant import NF4_DQ, jit, linear, lora, optim, quantize, random, tree
from fquant.lora import slots
from fquant.packed import dequantize
from fquant.packed_linear import embedding
from models import decoder
from models.config import Config

CFG = Config(vocab=96, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden=96)
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
    """Three steps, then one stops, then another takes its slot; one slot is free throughout."""
    base, optimiser = make_base(), OPTIMISERS[name]
    bank, running, ended = make_bank(base, optimiser), {}, {}

    def step(bank, base, tokens):
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
