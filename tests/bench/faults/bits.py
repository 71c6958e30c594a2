"""The same bits on any number of ranks: losses and adapters of each step of the training step of examples.qlora.

A tiny decoder is trained with ordered sums, AdamW and clipping, on batches that are a function of the step's number.
Each rank makes a digest of the loss and of the adapters after each step. The oracle are those of one process that has
not captured the step.
"""

import hashlib
import math
from functools import partial

import torch
import torch.distributed as dist

import shard
from examples.common import training_step
from examples.common.training_step import Setup
from examples.data import dataset as data
from fquant import NF4_DQ, jit, lora, optim, quantize, random, tree
from fquant.device import HOST
from models import decoder
from models.config import Config
from shard.bundle import raw
from tests.helpers import ranks

CFG = Config(vocab=96, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden=96)
ROWS, LENGTH = 11, 16  # rows that no number of ranks above 1 divides
MESHES = (
    {"fsdp": 2}, {"dp": 2}, {"fsdp": 3}, {"dp": 3}, {"fsdp": 5}, {"dp": 5}, {"fsdp": 8}, {"dp": 8},
    {"dp": 2, "fsdp": 2}, {"dp": 2, "fsdp": 4},
)  # fmt: skip
PATIENCE = 60.0  # seconds, and so many more for each step


def digests(axes: dict[str, int], captured: bool, steps: int) -> list[str]:
    """Return a digest of the loss and the adapters after each step, on a rank."""
    mesh, rules = shard.mesh(**axes), shard.Rules()
    dense = decoder.init(CFG, random.key(0))
    packed = tree.map_at(r"layers\.\d+\.(q|k|v|o|gate|up|down)", lambda t: quantize(t, NF4_DQ), dense)
    begun = lora.init(packed, r"layers\.\d+\.(q|v|down)", 4, key=1)
    base, adapters = shard.place((packed, begun), decoder.dims(CFG), rules, mesh, CFG)
    norm = partial(shard.global_norm, mesh=mesh, rules=rules)
    opt = optim.chain(optim.clip_by_global_norm(1.0, norm), optim.adamw(1e-2))
    most = shard.max_local_rows(ROWS, mesh, rules)
    setup = Setup(CFG, mesh, opt, optim.constant(1e-2), most, LENGTH, "none", rules=rules, ordered=ROWS)
    step = jit(training_step.train_step, **setup.capture()) if captured else training_step.train_step
    state, base, out = training_step.initial(adapters, opt), shard.local(base), list[str]()
    for i in range(steps):
        draw = torch.Generator(device=HOST).manual_seed(i)
        tokens = torch.randint(CFG.vocab, (ROWS, LENGTH + 1), generator=draw, dtype=torch.int64, device=HOST)
        mine = shard.share(tokens, mesh, rules)
        rows = data.Rows(mine[:, :-1].contiguous(), mine[:, 1:].contiguous())
        count = torch.tensor(ROWS * LENGTH, dtype=torch.int64, device=HOST)
        state, measured = step(state, base, ((rows, None),), count, setup)
        found = hashlib.blake2b(raw(measured.loss).numpy().tobytes(), digest_size=8)
        for t in tree.leaves(state.trained):
            found.update(raw(t).numpy().data)
        out.append(found.hexdigest())
    dist.barrier()
    return out


def measure(axes: dict[str, int], captured: bool, steps: int, wanted: list[str]) -> int | None:
    """Return the first step after which a rank of the mesh has other bits than ``wanted``, None if there is none."""
    limit = PATIENCE + steps * (2.0 if captured else 8.0)
    each = ranks.run(math.prod(axes.values()), digests, axes, captured, steps, timeout=limit)
    return next((i for i in range(steps) for found in each if found[i] != wanted[i]), None)


def oracle(steps: int) -> list[str]:
    """Return the digests of one process."""
    return ranks.run(1, digests, {"fsdp": 1}, False, steps, timeout=PATIENCE + 8.0 * steps)[0]
