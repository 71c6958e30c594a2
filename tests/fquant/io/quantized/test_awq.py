"""Tests of fquant.io.quantized.awq.

autoawq needs kernels for CUDA, so the oracle is the loop that packs in its ``from_linear``, and its arithmetic: integer
differences times float16 scales. The decoder in its packing_utils.py agrees with this.
"""

import pytest
import torch

from fquant.io import quantized
from tests.helpers.quantized_tensors import NAME, X, assert_loads, integers, scales

K, N = 256, 48
ORDER = {"gemm": [0, 2, 4, 6, 1, 3, 5, 7], "gemv": list(range(8))}


def pack(fields, version):
    """Pack int64 [rows columns] fields of 4 bits, as the loops of autoawq do."""
    out = torch.zeros(fields.shape[0], fields.shape[1] // 8, dtype=torch.int32)
    for column in range(out.shape[1]):
        for i, at in enumerate(ORDER[version]):
            out[:, column] |= fields[:, column * 8 + at].int() << (4 * i)
    return out


def weight(group=64, version="gemm", width=K, out=N):
    """Return the tensors of a weight, and the weight as autoawq decodes it, f16[out in]."""
    size = width if group == -1 else group
    q, z, s = integers(0, 16, out, width), integers(0, 16, out, width // size, seed=2), scales(out, width // size)
    decoded = (q - z.repeat_interleave(size, 1)) * s.repeat_interleave(size, 1)
    if version == "gemm":
        tensors = {"qweight": pack(q.T, version), "qzeros": pack(z.T, version), "scales": s.T.contiguous()}
    else:
        groups, multiple = width // size, {64: 2, 32: 4}.get(size, 1)
        count = -(-(-(-groups // 8)) // multiple) * multiple * 8  # noqa: B002
        fill = lambda t: torch.nn.functional.pad(t, (0, count - t.shape[1]))
        tensors = {"qweight": pack(q, version), "qzeros": pack(fill(z), version), "scales": fill(s)}
    return {f"{X}.{name}": t for name, t in tensors.items()}, decoded


@pytest.mark.parametrize("version", ["gemm", "gemv"])
@pytest.mark.parametrize("group", [32, 64, 96, 128, -1])
def test_every_code_scale_and_zero_point(group, version):
    tensors, decoded = weight(group, version, width=192 if group == 96 else K)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": version}
    assert_loads(config, tensors, decoded)


def test_the_keys_of_autoawq():
    tensors, decoded = weight(128)
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}
    assert_loads(config | {"modules_to_not_convert": None}, tensors, decoded)


FAULTS = {
    "no zeros": ({}, {"qzeros": None}, "qzeros: missing, wanted int32"),
    "transposed": ({}, {"qweight": torch.zeros(N, K // 8).int()}, r"qweight: got int32 \[48, 32\], wanted int32 \[256"),
    "zeros of one group": ({}, {"qzeros": torch.zeros(1, 6).int()}, r"qzeros: got int32 \[1, 6\], wanted int32 \[4"),
    "scale NaN": ({}, {"scales": torch.full((4, N), torch.nan).half()}, "scales: got values that are NaN or infinite"),
    "scales int": ({}, {"scales": torch.zeros(4, N).int()}, "scales: got int32"),
    "group that does not divide": ({"group_size": 96}, {}, "qweight: 48 outputs of 256 inputs, wanted multiples of 8"),
}  # fmt: skip


@pytest.mark.parametrize("options, changed, message", FAULTS.values(), ids=FAULTS)
def test_refuses(options, changed, message):
    tensors = weight()[0] | {f"{X}.{name}": t for name, t in changed.items()}
    tensors = {name: t for name, t in tensors.items() if t is not None}
    method = quantized.method({"quant_method": "awq", "bits": 4, "group_size": 64} | options)
    with pytest.raises(ValueError, match=rf"^{X}.{message}"):
        quantized.load(method, NAME, tensors, (N, K), torch.float16)
