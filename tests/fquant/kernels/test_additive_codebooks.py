"""Arrays of learned vectors: decoding equals a naive loop, products equal those of the decoded weight."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fquant import kernels
from fquant.device import HOST
from fquant.format import AQ_2X8, AQ_3X8, NF4, Vectors
from fquant.kernels import additive_codebooks, cpu, packed_ops
from fquant.kernels.spec import Spec, layout
from tests.helpers.devices.placing import on
from tests.helpers.formats import DTYPES, alike, draw, shifted, strided
from tests.helpers.kernels.backends import backend  # noqa: F401
from tests.helpers.kernels.rounding import assert_product

KINDS = {
    "aq_2x8": AQ_2X8,
    "aq_3x8": AQ_3X8,
    "blocks": replace(AQ_3X8, block=32),
    "one stage": replace(AQ_2X8, name="one", vectors=Vectors(4, 1)),
    "five": replace(AQ_2X8, name="five", vectors=Vectors(5, 2)),
    "longer than in C": replace(AQ_2X8, name="longer", vectors=Vectors(cpu.MOST_DIM + 8, 1)),
}
SHAPES = [(6, 64), (3, 40), (5, 77), (1, 3), (2, 3, 24), (16,), (2, 600)]
kinds = pytest.mark.parametrize("format", KINDS.values(), ids=KINDS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


pytestmark = pytest.mark.usefixtures("backend")


def drawn(device, spec, *stack):
    """Draw buffers on the host, and move them."""
    return on(device, draw(spec, *stack))


def naive(buffers, spec):
    """Return the array, computed an element at a time in float32."""
    codes, scale, table = (t.cpu().numpy() for t in buffers)
    how, width = spec.format.vectors, spec.shape[-1]
    table, block = table.reshape(how.stages, 256, how.dim), spec.format.block or width
    codes, scale = codes.reshape(-1, codes.shape[-1]), scale.reshape(-1, scale.shape[-1])
    out = np.zeros((len(codes), width), np.float32)
    for row in range(len(codes)):
        for column in range(width):
            group, place = divmod(column, how.dim)
            total = np.float32(0)
            for stage in range(how.stages):
                value = table[stage, codes[row, group * how.stages + stage], place]
                total = value if stage == 0 else total + value
            out[row, column] = total * scale[row, column // block]
    return torch.tensor(out).reshape(spec.shape).to(spec.dtype)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@kinds
def test_decode_equals_a_naive_loop(format, shape, dtype, device):
    spec = Spec(format, shape, dtype)
    buffers = drawn(device, spec)
    wanted = naive(buffers, spec)
    for given in (buffers, [shifted(b) for b in buffers], [strided(b) for b in buffers]):
        for out in DTYPES:
            assert alike(packed_ops.decode(given, spec, out).cpu(), wanted.to(out))


def test_a_buffer_is_as_the_layout_says():
    """Dim i of codes and scales is dim i of the weight, rows are padded to whole groups, and vectors are flat."""
    leaves = layout(Spec(AQ_3X8, (6, 77), torch.bfloat16))
    assert [(leaf.name, leaf.shape, leaf.dtype) for leaf in leaves] == [
        ("codes", (6, 30), torch.uint8), ("scale", (6, 1), torch.float32), ("vectors", (3 * 256 * 8,), torch.float32)
    ]  # fmt: skip
    assert layout(Spec(replace(AQ_2X8, block=64), (6, 256), torch.bfloat16))[1].shape == (6, 4)


@dtypes
@pytest.mark.parametrize(
    "shape, m", [((24, 100), 5), ((300, 40), 1), ((1, 8), 3), ((24, 100), 0), ((50, 1064), 70)], ids=str
)
@kinds
def test_products(format, shape, m, dtype, device, monkeypatch):
    monkeypatch.setattr(
        additive_codebooks, "TILE", 7 * 4 * shape[1]
    )  # so that most have several tiles, and a short last one
    spec = Spec(format, shape, torch.bfloat16)
    buffers, g = drawn(device, spec), torch.Generator().manual_seed(1)
    w = packed_ops.decode(buffers, spec, dtype)
    x = torch.randn(m, shape[1], generator=g).to(device, dtype)
    y = torch.randn(m, shape[0], generator=g).to(device, dtype)
    for strides in (lambda t: t, strided, lambda t: t.T.contiguous().T):
        assert_product(packed_ops.matmul(strides(x), buffers, spec), x, w.T)
        assert_product(packed_ops.matmul_t(strides(y), buffers, spec), y, w)


@pytest.mark.parametrize("stack", [(3,), (2, 3), (0,)], ids=str)
@kinds
def test_stacks(format, stack, device):
    spec = Spec(format, (24, 40), torch.float32)
    buffers = drawn(device, spec, stack)
    each = [[b.flatten(0, len(stack) - 1)[i] for b in buffers] for i in range(int(np.prod(stack)))]
    x, g = torch.randn(*stack, 5, 40, device=device), torch.randn(*stack, 5, 24, device=device)
    same = lambda got, one: all(map(torch.equal, got.flatten(0, len(stack) - 1), one))
    assert same(
        packed_ops.decode(buffers, spec, torch.float32), [packed_ops.decode(b, spec, torch.float32) for b in each]
    )
    rows = x.flatten(0, -3), g.flatten(0, -3)
    assert same(
        packed_ops.matmul(x, buffers, spec), [packed_ops.matmul(*a, spec) for a in zip(rows[0], each, strict=True)]
    )
    assert same(
        packed_ops.matmul_t(g, buffers, spec), [packed_ops.matmul_t(*a, spec) for a in zip(rows[1], each, strict=True)]
    )
    assert packed_ops.matmul(x, buffers, spec).shape == (*stack, 5, 24)


@pytest.mark.parametrize("name, width", [("matmul", 40), ("matmul_t", 24)])
def test_into_memory_that_is_given(name, width):
    """By the overload of the host, which memory plans call."""
    spec = Spec(AQ_2X8, (24, 40), torch.float32)
    buffers, x = drawn(HOST, spec), torch.randn(5, width)
    out = torch.full((5, 64 - width), torch.nan)
    op = getattr(torch.ops.fquant, name)
    op.out(x, buffers, spec.format.text, spec.shape, spec.dtype, out0=out)
    assert torch.equal(out, getattr(kernels, name)(x, buffers, spec))
    with pytest.raises(ValueError, match=r"a result was to go into torch.float32 \(5, 3\) .* wanted contiguous"):
        getattr(additive_codebooks, name)(x, buffers, spec, torch.zeros(5, 3))


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is created."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.nbytes = max(self.nbytes, out.nbytes)
        return out


@pytest.mark.parametrize("name, width", [("matmul", 512), ("matmul_t", 4096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_a_product_makes_no_dense_weight(name, width, dtype, device):
    spec = Spec(AQ_3X8, (4096, 512), torch.bfloat16)  # 8 MiB in float32
    buffers, x = drawn(device, spec), torch.randn(3, width).to(device, dtype)
    with Largest() as seen:
        getattr(additive_codebooks, name)(x, buffers, spec)
    assert additive_codebooks.TILE <= seen.nbytes <= 2 * additive_codebooks.TILE


def test_bad_buffers():
    spec = Spec(AQ_2X8, (24, 40), torch.float32)
    codes, scale, table = draw(spec)
    x = torch.randn(5, 40)
    with pytest.raises(ValueError, match=r"aq_2x8 \(24, 40\): codes has shape \(24, 8\); wanted \(24, 10\)"):
        packed_ops.matmul(x, [codes[:, :8], scale, table], spec)
    with pytest.raises(ValueError, match=r"vectors has shape \(4095,\); wanted \(4096,\)"):
        packed_ops.matmul(x, [codes, scale, table[1:]], spec)
    with pytest.raises(ValueError, match="got 2 buffers; wanted 3: codes, scale, vectors"):
        packed_ops.decode([codes, scale], spec, torch.float32)
    with pytest.raises(TypeError, match="aq_2x8: codes is torch.int8; wanted torch.uint8"):
        packed_ops.decode([codes.view(torch.int8), scale, table], spec, torch.float32)
    with pytest.raises(ValueError, match="encode got aq_2x8, whose vectors have to be learned; use fquant.quantize"):
        packed_ops.encode(x, AQ_2X8)
    assert packed_ops.encode(torch.randn(5, 64), NF4)[0].shape == (5, 32)
