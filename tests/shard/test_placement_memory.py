"""Placement of a checkpoint, read a tensor at a time: no rank ever holds more than its part and one tensor."""

import ctypes
import json
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shard
from fquant import NF4_DQ, quantize, tree
from fquant.io import safetensors
from fquant.kernels import dispatch, reference
from models import decoder, hf
from models.config import Config
from models.hf.config import to_hf
from tests.helpers import ranks

pytestmark = pytest.mark.xdist_group("ranks")

CFG = Config(
    vocab=8192, dim=2048, num_layers=5, num_heads=32, num_kv_heads=8, head_dim=64, hidden=5632, norm_eps=1e-5,
    rope_theta=10000.0, rope_scaling=None, max_positions=64, tied=True, attention_bias=False, mlp_bias=False,
)  # fmt: skip
MIB = 1 << 20


def write_checkpoint(folder: Path) -> int:
    """Write a checkpoint in Hugging Face's layout, with a shard for each block; return its bytes."""
    draw, where, total = torch.Generator().manual_seed(0), {}, 0
    outline = decoder.shapes(CFG, torch.bfloat16)
    for block in decoder.dims(CFG):
        file = f"model-{block}.safetensors"
        tensors = {
            hf.tensor_name(f"{block}.{path}".rstrip("."), CFG): torch.empty_like(t, device="cpu").uniform_(
                -1, 1, generator=draw
            )
            for path, t in tree.items(tree.get(outline, block))
        }
        safetensors.write(folder / file, tensors, {"format": "pt"})
        where |= dict.fromkeys(tensors, file)
        total += tree.nbytes(tensors)
    (folder / hf.INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    (folder / hf.CONFIG).write_text(json.dumps(to_hf(CFG)))
    return total


def resident(which: str) -> int:
    """Return VmRSS (now) or VmHWM (the maximum since its last reset) of this process, in bytes."""
    found = re.search(rf"{which}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def quantized(params):
    return tree.map_at(r"layers\.\d+\.(q|k|v|o|gate|up|down)", partial(quantize, format=NF4_DQ), params)


def place_and_measure(folder):
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 256 * 1024)  # M_MMAP_THRESHOLD: what is freed goes back at once, and is not seen as held
    mesh, rules = shard.mesh(fsdp=dist.get_world_size()), shard.Rules()
    warm = {"w": quantize(torch.ones(64, 64), NF4_DQ)}  # code that is loaded at first use
    shard.collect(shard.place(warm, {"": {"w": "a b"}}, rules, mesh))
    cfg, params = hf.lazy(folder)
    base = quantized(params)
    libc.malloc_trim(0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    placed = shard.place(base, decoder.dims(cfg), rules, mesh, cfg)
    grown = resident("VmHWM") - before
    kept = sum(t.to_local().nbytes for t in tree.leaves(placed))
    layer = shard.collect(placed.layers[3])
    return grown, kept, layer.down.codes, layer.down.scale.codes


def test_a_rank_holds_its_part_and_one_tensor(tmp_path):
    whole = write_checkpoint(tmp_path)
    assert whole > 400e6
    _, params = hf.lazy(tmp_path)
    ranks.kill()  # what tests before this one left in the heaps of these ranks would be counted
    try:
        got = ranks.run(2, place_and_measure, str(tmp_path), timeout=120)
    finally:
        ranks.kill()  # these ranks allocate in another way now
    one = quantize(params.layers[3].down.read(), NF4_DQ)
    largest = max(t.numel() for t in tree.leaves(decoder.shapes(CFG)))
    for grown, kept, codes, scale in got:
        assert torch.equal(codes, one.codes) and torch.equal(scale, one.scale.codes)
        # One tensor, as it is read. (The codes are half as much again, but the largest is not quantised; only the
        # reference kernel works on more, a chunk at a time, at most six times in float32.) The rest is what a process
        # needs anyway.
        work = 0 if dispatch.backend("cpu")[0] == "cpu" else 6 * 4 * reference.CHUNK
        bound = kept + 2 * largest + work + 8 * MIB
        text = (
            f"{whole / MIB:.0f} MiB in all, {kept / MIB:.0f} kept, {grown / MIB:.0f} grown, {bound / MIB:.0f} allowed"
        )
        assert kept < grown <= bound, text
        assert bound < 0.5 * whole, "the bound would not notice a rank that reads the whole"
    assert math.isclose(sum(kept for _, kept, *_ in got), whole * 0.3, rel_tol=0.1)
