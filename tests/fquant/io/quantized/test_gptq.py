"""Tests of fquant.io.quantized.gptq.

gptqmodel needs a build for CUDA, so the oracle is its layout and its arithmetic by naive loops: int16 differences times
float16 scales, and version 1 by subtraction from whole words. Its packing and its decoder agree with these loops.
"""

import pytest
import torch

from fquant import dequantize
from fquant.io import quantized
from tests.helpers.quantized_tensors import NAME, X, assert_loads, integers, scales, words

K, N = 256, 96
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def config(bits=4, group=64, sym=False, version=2, **more):
    format = {1: "gptq", 2: "gptq_v2"}[version]
    known = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "checkpoint_format": format}
    return known | {"desc_act": False} | more


def weight(bits=4, group=64, sym=False, version=2, g_idx=None, width=K, out=N):
    """Return the tensors of a weight, and the weight as gptqmodel decodes it, f16[out in]."""
    size = width if group == -1 else group
    count = -(-width // size)
    idx = torch.arange(width) // size if g_idx is None else g_idx
    q, s = integers(0, 2**bits, width, out), scales(count, out)
    z = torch.full((count, out), 2 ** (bits - 1)) if sym else integers(0, 2**bits, count, out, seed=2)
    stored = words(z, bits, 1)
    if version == 1 and bits == 3:
        stored = words((z - 1) & 7, 3, 1)
    elif version == 1:
        stored = stored - ONES[bits]
    tensors = {"qweight": words(q, bits, 0), "qzeros": stored, "scales": s, "g_idx": idx.int()}
    decoded = s[idx] * (q - z[idx]).to(torch.int16)
    return {f"{X}.{name}": t for name, t in tensors.items()}, decoded.T.contiguous()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("sym", [False, True])
@pytest.mark.parametrize("group", [16, 32, 96, 128, -1])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_code_scale_and_zero_point(bits, group, sym, version):
    tensors, decoded = weight(bits, group, sym, version)
    p = assert_loads(config(bits, group, sym, version), tensors, decoded)
    assert (p.zero is None) == sym and p.format.bits == (8 if bits == 8 else 4)


def test_a_zero_of_version_1_borrows_from_the_next_field():
    tensors, _ = weight(4, 128, version=1, width=128, out=8)
    z = torch.tensor([[5, 0, 8, 7, 1, 0, 0, 15]])
    stored = words(z, 4, 1) - 0x11111111
    p = quantized.load(
        quantized.method(config(4, 128, version=1)),
        NAME,
        tensors | {f"{X}.qzeros": stored},
        (8, 128),
        torch.float16,
    )
    assert p.zero is not None and p.zero.T.long().equal(z)


def test_groups_in_another_order():
    order = torch.tensor([3, 0, 2, 1]).repeat_interleave(64)
    for bits in (4, 8):
        tensors, decoded = weight(bits, 64, g_idx=order)
        assert_loads(config(bits, 64, desc_act=True), tensors, decoded)


def test_a_file_without_g_idx_and_a_quantised_head():
    tensors, decoded = weight(4, 64)
    del tensors[f"{X}.g_idx"]
    assert_loads(config(), tensors, decoded)
    head = {name.replace(X, "lm_head"): t for name, t in tensors.items()}
    assert_loads(config(lm_head=True), head, decoded, "lm_head.weight")
    assert quantized.names(quantized.method(config(lm_head=True)), "lm_head.weight", {"lm_head.weight"}) == ()


def test_another_dtype_is_rounded_once():
    tensors, decoded = weight(8)
    p = quantized.load(quantized.method(config(8)), NAME, tensors, (N, K), torch.float32)
    assert dequantize(p).dtype == torch.float32 and dequantize(p).half().equal(decoded)


SCATTERED = torch.randperm(K, generator=torch.Generator().manual_seed(0)) // 64
FAULTS = {
    "act-order": ({}, {"g_idx": SCATTERED.int()}, r"g_idx: inputs of a group are scattered \(act-order\), wanted runs"),
    "group too high": ({}, {"g_idx": torch.full((K,), 4).int()}, "g_idx: groups 4 to 4, wanted 0 to 3"),
    "group negative": ({}, {"g_idx": torch.full((K,), -1).int()}, "g_idx: groups -1 to -1, wanted 0 to 3"),
    "g_idx short": ({}, {"g_idx": torch.zeros(K - 1).int()}, r"g_idx: got int32 \[255\], wanted int32 \[256\]"),
    "codes short": ({}, {"qweight": torch.zeros(31, N).int()}, r"qweight: got int32 \[31, 96\], wanted int32 \[32, 96"),
    "codes f32": ({}, {"qweight": torch.zeros(32, N)}, r"qweight: got float32 \[32, 96\], wanted int32 \[32, 96\]"),
    "no zeros": ({}, {"qzeros": None}, r"qzeros: missing, wanted int32 \[4, 12\]; fetch the checkpoint again"),
    "no scales": ({}, {"scales": None}, "scales: missing, wanted float16 or"),
    "scale infinite": ({}, {"scales": torch.full((4, N), torch.inf).half()}, "scales: got values that are NaN or inf"),
    "scales of 8 groups": ({}, {"scales": scales(8, N)}, r"scales: got float16 \[8, 96\], wanted .* \[4, 96\]"),
    "zero under sym": ({"sym": True}, {}, r"qzeros: zero point \d+, wanted 8 by sym; set checkpoint_format to gptq"),
    "group 24": ({"group_size": 24}, {"qzeros": torch.zeros(11, 12).int(), "scales": scales(11, N)},
                 "weight: blocks of 24 elements; wanted a multiple of 16"),
    "bits 8": ({"bits": 8}, {}, r"qweight: got int32 \[32, 96\], wanted int32 \[64, 96\]"),
}  # fmt: skip


@pytest.mark.parametrize("options, changed, message", FAULTS.values(), ids=FAULTS)
def test_refuses(options, changed, message):
    tensors = weight()[0] | {f"{X}.{name}": t for name, t in changed.items()}
    tensors = {name: t for name, t in tensors.items() if t is not None}
    method = quantized.method(config() | options)
    with pytest.raises(ValueError, match=rf"^{X}.{message}"):
        quantized.load(method, NAME, tensors, (N, K), torch.float16)


def test_refuses_inputs_that_are_no_whole_words():
    with pytest.raises(ValueError, match="qweight: 250 inputs of 4 bits, wanted whole words"):
        quantized.like(quantized.method(config()), NAME, weight()[0], (N, 250), torch.float16)
