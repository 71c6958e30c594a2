"""Quantised weights and folders in the layouts of other libraries, packed by naive loops, and the check of a weight."""

import json
import shutil

import safetensors.torch
import torch

from fquant import dequantize, tree
from fquant.io import quantized
from models import hf
from tests.helpers.arrays import rng, same_bits
from tests.helpers.hf_models import random_params

NAME = "model.layers.0.self_attn.q_proj.weight"
X = NAME.removesuffix(".weight")


def integers(low, high, *shape, seed=0):
    """Draw int64 from low to high, without high."""
    return torch.randint(low, high, shape, generator=rng(seed))


def scales(*shape, dtype=torch.float16, seed=1):
    """Draw positive scales of weights."""
    return (torch.rand(shape, generator=rng(seed)) * 0.02 + 0.001).to(dtype)


def words(fields, bits, dim):
    """Pack int64 fields along ``dim`` into int32 words without gaps, the first in the lowest bits."""
    rows = []
    for row in fields.movedim(dim, -1).tolist():
        number = sum(field << (bits * i) for i, field in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append([int.from_bytes((number >> 32 * i & 0xFFFFFFFF).to_bytes(4, "little"), "little", signed=False)
                     for i in range(count)])  # fmt: skip
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32).movedim(-1, dim).contiguous()


def nibbles(codes):
    """Pack int64 [... n] codes of 4 bits into bytes, the first in the low half."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)


def assert_loads(config, tensors, wanted, weight=NAME, dtype=None):
    """Check that ``weight`` decodes to the bits of ``wanted``, and that ``like`` agrees; return the Packed."""
    method, shape, dtype = quantized.method(config), tuple(wanted.shape), dtype or wanted.dtype
    parts = quantized.names(method, weight, {*tensors, "model.norm.weight"})
    assert set(parts) == set(tensors) and len(parts) == len(tensors)
    assert hash(method) == hash(quantized.method(config))
    packed = quantized.load(method, weight, tensors, shape, dtype)
    like = quantized.like(method, weight, {name: t.to("meta") for name, t in tensors.items()}, shape, dtype)
    assert tree.structure(packed) == tree.structure(like)
    for ours, meta in zip(tree.leaves(packed), tree.leaves(like), strict=True):
        assert meta.is_meta and ours.device.type == "cpu" and ours.is_contiguous()
        assert (ours.dtype, ours.shape) == (meta.dtype, meta.shape)
    assert same_bits(dequantize(packed), wanted)
    return packed


def quantize_folder(folder, tensors, config):
    """Write the tensors and the quantization_config of a folder."""
    safetensors.torch.save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))


def gptq(folder, cfg, group=16):
    """Write a GPTQ folder of random codes and zero points, with its decoded weights in the folder ``dense`` beside it.

    Return its tensors and its quantization_config.
    """
    folder.mkdir()
    dense = folder.parent / f"{folder.name}-dense"
    hf.save(dense, cfg, random_params(cfg, torch.float16))
    tensors = safetensors.torch.load_file(dense / "model.safetensors")
    held = {name: t for name, t in tensors.items() if "_proj" not in name}
    for name in tensors.keys() - held.keys():
        (out, width), module = tensors[name].shape, name.removesuffix(".weight")
        q, z = integers(0, 16, width, out), integers(0, 16, width // group, out, seed=2)
        s, idx = 3 * scales(width // group, out), torch.arange(width) // group
        tensors[name] = (s[idx] * (q - z[idx]).to(torch.int16)).T.contiguous()
        parts = {"qweight": words(q, 4, 0), "qzeros": words(z, 4, 1), "scales": s, "g_idx": idx.int()}
        held |= {f"{module}.{part}": t for part, t in parts.items()}
    safetensors.torch.save_file(tensors, dense / "model.safetensors")
    shutil.copy(dense / "config.json", folder)
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "checkpoint_format": "gptq_v2"}
    config |= {"desc_act": False, "sym": False}
    quantize_folder(folder, held, config)
    return held, config
