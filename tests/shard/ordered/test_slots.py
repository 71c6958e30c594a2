"""Slots of adapters on a mesh: each rank trains a part of them, with the bits of one process; no sums travel."""

import pytest
import torch

import shard
from fquant import NF4_DQ, jit, lora, optim, quantize, random, tree
from fquant.lora import slots
from models import decoder
from models.config import Config
from tests.helpers import ranks

pytestmark = pytest.mark.xdist_group("ranks")

CFG = Config(vocab=96, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden=96)
TARGETS = r"layers\.\d+\.(q|v|down)"
ROOM = ((4, 3), (8, 1), (16, 2))  # ranks of adapters, and slots of each
STEPS = 3


def optimiser(own):
    return optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(optim.cosine(own["lr"], own["total"])))


def full_bank(base):
    bank = slots.init(
        [(lora.init(base, TARGETS, rank), n) for rank, n in ROOM], optimiser, {"lr": 0.0, "total": 0}, dropout=True
    )
    for number, rank in enumerate([rank for rank, n in ROOM for _ in range(n)]):
        made = lora.init(base, TARGETS, rank, alpha=5.0 + number, key=number, dropout=0.1 * (number % 2))
        own = {"lr": 0.02 / (number + 1), "total": STEPS + number}
        bank = slots.fill(bank, slots.free(bank, made), made, optimiser, own, key=number)
    return slots.stop(bank, slots.Slot(2, 1))


def trained(axes, captured):
    """Return this rank's part of the bank, and the losses of its slots, after some steps."""
    mesh, rules = shard.mesh(**axes), shard.Rules()
    dense = decoder.init(CFG, random.key(0))
    base = tree.map_at(r"layers\.\d+\.(q|k|v|o|gate|up|down)", lambda t: quantize(t, NF4_DQ), dense)
    bank = shard.share(full_bank(base), mesh, rules)
    base, comm = shard.place(base, decoder.dims(CFG), rules, mesh, CFG), shard.comm(mesh, rules)
    tokens = torch.randint(0, CFG.vocab, (sum(n for _, n in ROOM), 2, 17), generator=torch.Generator().manual_seed(1))
    mine = torch.cat([shard.share(rows, mesh, rules) for rows in tokens.split([n for _, n in ROOM])])

    def loss(adapters, key, base, tokens):
        params = lora.attach(base, adapters, key)
        return decoder.token_losses(params, tokens[..., :-1], tokens[..., 1:], CFG, comm).mean((1, 2))

    def step(bank, base, tokens):
        return slots.step(bank, loss, optimiser, base, tokens)

    step, losses = (jit(step) if captured else step), []
    for _ in range(STEPS):
        bank, value = step(bank, shard.local(base), mine)
        losses.append(value)
    return tree.leaves(bank), torch.stack(losses, 1).split([len(stack.key) for stack in bank])


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("axes", [{"dp": 2}, {"fsdp": 2}, {"dp": 2, "fsdp": 2}], ids=str)
def test_parts_have_the_bits_of_one_process(axes, captured):
    """With four ranks some have no slot of a stack."""
    (wanted,) = ranks.run(1, trained, {"fsdp": 1}, False)
    world = 2 if len(axes) == 1 else 4
    parts = ranks.run(world, trained, axes, captured)
    for leaf, *each in zip(wanted[0], *(leaves for leaves, _ in parts), strict=True):
        assert torch.equal(leaf, torch.cat(each))
    for losses, *each in zip(wanted[1], *(losses for _, losses in parts), strict=True):
        torch.testing.assert_close(losses, torch.cat(each), rtol=1e-6, atol=0)
