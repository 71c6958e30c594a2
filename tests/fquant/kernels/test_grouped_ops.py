"""The ops of grouped products: every backend, members of packed stacks, torch's own checks, errors, FLOPs."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fquant import dequantize, quantize, tree
from fquant.format import AQ_2X8, DYNAMIC8, INT4_ZERO, NF4, NF4_DQ
from fquant.kernels import dispatch, grouped_ops, packed_ops
from fquant.kernels.dispatch import VARIABLE
from fquant.kernels.spec import Spec
from fquant.packed import buffers
from tests.helpers.arrays import randn
from tests.helpers.devices.placing import on

COUNTS = torch.tensor([4, 0, 1, 2])
FORMATS = {
    "nf4": NF4, "nf4_dq": NF4_DQ, "centred": replace(NF4_DQ, name="centred", center=True),
    "zero": replace(INT4_ZERO, block=32), "vectors": AQ_2X8,
    "nested in rows": replace(NF4, name="rows", scale=replace(DYNAMIC8, name="dynamic8_rows", flat=False)),
    "nested twice": replace(NF4, name="twice", scale=replace(DYNAMIC8, name="dynamic8_dq", scale=DYNAMIC8)),
}  # fmt: skip


def spec_of(p):
    return Spec(p.format, p.shape, p.dtype)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_members(format, device):
    """Every matrix of a stack decodes to its part of the whole; odd sizes cut nested blocks in their middle."""
    w = randn(4, 17, 100).to(device)
    each = tree.map(lambda *t: torch.stack(t), *[quantize(matrix, format) for matrix in w])
    for p in (quantize(w, format), each):
        for e, wanted in enumerate(dequantize(p)):
            assert torch.equal(packed_ops.decode(*grouped_ops.member(buffers(p), spec_of(p), e), p.dtype), wanted)
        assert grouped_ops.num_groups(buffers(p), spec_of(p)) == 4


@pytest.mark.parametrize("forced", [None, "reference"])
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_backends(monkeypatch, format, forced, device):
    p = quantize(randn(4, 17, 100), format)
    there, counts, weight = on(device, p), COUNTS.to(device), dequantize(p)
    monkeypatch.setenv(VARIABLE, forced or dispatch.BY_DEVICE[device.type])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for transposed, x in ((False, randn(7, 100).to(dtype)), (True, randn(7, 17).to(dtype))):
            got = grouped_ops.packed(x.to(device), counts, buffers(there), spec_of(p), transposed).cpu()
            wanted = grouped_ops.dense(x, COUNTS, weight.to(dtype), transposed)
            rtol, atol = {torch.bfloat16: (2e-2, 0.3)}.get(dtype, (1e-5, 1e-4))
            torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)


def test_ops_are_described_right():
    is_tensor = lambda t: isinstance(t, torch.Tensor)
    p, x, g = quantize(randn(4, 16, 64), NF4_DQ), randn(7, 64), randn(7, 16)
    fields = (buffers(p), p.format.text, p.shape, p.dtype)
    for op, args in (
        ("grouped_matmul", (x, COUNTS, *fields)), ("grouped_matmul_t", (g, COUNTS, *fields)),
        ("grouped_mm", (x, COUNTS, randn(4, 16, 64), False)), ("grouped_outer", (g, x, COUNTS)),
    ):  # fmt: skip
        with FlopCounterMode(display=False) as counter:
            real = getattr(torch.ops.fquant, op)(*args)
        with FakeTensorMode() as mode:
            fake = getattr(torch.ops.fquant, op)(*tree.map(lambda t: mode.from_tensor(t) if is_tensor(t) else t, args))
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
        assert counter.get_total_flops() == 2 * 7 * 16 * 64


W, X = randn(4, 16, 64), randn(7, 64)
P = quantize(W, NF4)
BAD = {
    "sum": (lambda: grouped_ops.dense(X, COUNTS + 1, W), ValueError, "grouped_mm got counts of 11 rows, .* for 7 rows"),
    "sum of outer": (lambda: grouped_ops.outer(X, X, COUNTS * 2), ValueError, "grouped_outer got counts of 14 rows"),
    "sum of packed": (
        lambda: grouped_ops.packed(X, COUNTS * 0, buffers(P), spec_of(P)), ValueError, "grouped_matmul got counts of 0",
    ),
    "counts": (lambda: grouped_ops.dense(X, COUNTS.int(), W), TypeError, "counts torch.int32 beside x"),
    "dtype": (lambda: grouped_ops.dense(X, COUNTS, W.double()), TypeError, "w torch.float64 beside x torch.float32"),
    "dims": (lambda: grouped_ops.dense(X, COUNTS, W[0]), ValueError, r"weights \(16, 64\); wanted \[groups out in\]"),
    "width": (lambda: grouped_ops.dense(X, COUNTS, W, True), ValueError, r"wanted x \[rows 16\]"),
    "rows of outer": (lambda: grouped_ops.outer(X, X[:6], COUNTS), ValueError, r"wanted b \(7, 64\)"),
    "integers": (lambda: grouped_ops.dense(X.long(), COUNTS, W), TypeError, "wanted f32, bf16, f16 or f64"),
    "shape": (
        lambda: grouped_ops.packed(X, COUNTS, buffers(P), spec_of(P)._replace(shape=(64,))), ValueError,
        r"wanted a stack of \[out in\], or \[groups out in\]",
    ),
    "gradient": (
        lambda: grouped_ops.dense(X.clone().requires_grad_(), COUNTS, W), TypeError,
        "a gradient through grouped_mm was asked for; .* differentiate fquant.grouped_linear",
    ),
}  # fmt: skip


@pytest.mark.parametrize("call, error, message", BAD.values(), ids=BAD)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
