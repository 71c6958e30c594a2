"""A small decoder, its batch and loss, and the sizes and dims of its blocks, for tests on a mesh."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import shard
from fquant import LOCAL, lora, random, tree
from models import decoder
from models.blocks import IGNORE, cross_entropy
from models.config import Config


def config(tied):
    return Config(
        vocab=96, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden=128, norm_eps=1e-5,
        rope_theta=10000.0, rope_scaling=None, max_positions=64, tied=tied, attention_bias=True, mlp_bias=True,
    )  # fmt: skip


def batch(rows):
    """Return tokens and targets [rows 16]; each row has another number of targets that count, and one has none."""
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 96, (rows, 17), generator=draw)
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    for i in range(rows):
        y[i, : (5 * i) % 17] = IGNORE
    y[-1] = IGNORE
    return x, y


def loss(adapters, base, x, y, count, cfg, comm=LOCAL):
    return cross_entropy(decoder.forward(lora.attach(base, adapters), x, cfg, comm), y, count)


def padded(block, n):
    """Return the bytes of a block on the wire: buffers padded to 64 bytes, and the sum to 64 bytes for each rank."""
    lines = sum(-(-t.numel() * t.element_size() // 64) for t in tree.leaves(block))
    return -(-lines // n) * n * 64


def dims_of(block):
    return {"": {path: " ".join(f"d{i}" for i in range(t.ndim)) for path, t in tree.items(block)}}


def drawn(*shape):
    """Return normal numbers of a fixed key."""
    return random.normal(random.key(5), shape)


def any_bits(*shape):
    """Return random bits, including NaNs with payloads, which must arrive too."""
    whole = torch.randint(-(2**15), 2**15, shape, generator=torch.Generator().manual_seed(1)).to(torch.int16)
    return whole.view(torch.bfloat16)


@contextmanager
def mesh_of_one(device: torch.device) -> Iterator[DeviceMesh]:
    """Make a mesh of this rank alone on ``device``, in place of the group that the pool of ranks made."""
    dist.destroy_process_group()
    with mock.patch.dict(os.environ):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        mesh = shard.mesh(device=device, fsdp=1)
    yield mesh
    shard.close()
