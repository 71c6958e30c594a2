"""The CUDA kernels in Triton's interpreter or on a card: equal to the reference to the bit, products within bounds.

Without a card, tests marked ``interpreted`` run in a process of their own, where every pointer is checked
(tests/helpers/kernels/interpreter.py).
"""

import importlib
import itertools
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fquant import linear, tree
from fquant.format import BLOCKS, DYNAMIC8, FP4, INT8, NF4, NF4_DQ
from fquant.kernels import cuda_plans, packed_ops, reference
from fquant.kernels.spec import Spec
from fquant.packed import FLOATS, quantize
from tests.helpers.formats import BY_ROWS8, CODECS, DTYPES, KINDS, alike, draw, shifted, strided
from tests.helpers.kernels.interpreter import interpreted, interpreter  # noqa: F401
from tests.helpers.kernels.products import assert_products, operands
from tests.helpers.kernels.rounding import assert_product

if find_spec("triton") is None:
    pytest.skip("triton is not installed; pip install triton", allow_module_level=True)
pytestmark = pytest.mark.xdist_group("interpreter")  # one process for all
named = partial(pytest.mark.parametrize, ids=lambda x: str(getattr(x, "name", x)).removeprefix("torch."))
rng = torch.Generator().manual_seed
PLACES = (lambda t: t, shifted, strided, lambda t: t.mT.contiguous().mT if t.ndim > 1 else t)


# --- encode and decode ------------------------------------------------------------------------------------------------


def extremes(width, dtype):
    """Return rows [11 width] in ``dtype``: finite edge cases."""
    x = torch.randn(11, width, generator=rng(width))
    x[0] *= torch.randn(width, generator=rng(1)).mul(8).exp()
    x[1], x[2] = 0.0, -0.0
    x[3] *= 1e-39  # denormal
    x[4] *= 2e-45
    x[5] *= 1e-3
    x[5, width // 2] = 3e38
    x[6] *= 1e-3
    x[6, -1] = -65504.0  # the largest float16
    x[7], x[8] = -0.3, torch.finfo(torch.float32).max
    x[9] *= 1e-7  # denormal in float16
    middles = reference.midpoints(NF4)[1]
    x[10] = middles[torch.arange(width) % 15]  # ties
    x[10, ::32] = 1.0
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype)


def assert_encoded(x, format):
    codes, absmax = reference.encode(x.cpu(), format)
    finite = absmax.isfinite().all(-1)
    got = [t.cpu() for t in packed_ops.encode(x, format)]
    assert alike(got[1], absmax) and got[0].shape == codes.shape and alike(got[0][finite], codes[finite])


def assert_decoded(buffers, spec, out):
    wanted = reference.decode([b.cpu() for b in buffers], spec, out)
    assert alike(packed_ops.decode(buffers, spec, out).cpu(), wanted)


def drawn(device, spec, *args, **options):
    """Draw buffers on the host, and move them."""
    return [b.to(device) for b in draw(spec, *args, **options)]


@named("dtype", FLOATS)
@named("format", CODECS)
@interpreted
def test_encode(device, format, dtype):
    for width in (1, 64, 225):
        assert_encoded(extremes(width, dtype).to(device), format)


@given(
    format=st.sampled_from(CODECS), block=st.sampled_from(BLOCKS), dtype=st.sampled_from(FLOATS),
    outer=st.lists(st.integers(0, 3), max_size=2), width=st.integers(1, 300) | st.integers(4000, 9000),
    place=st.sampled_from(PLACES), seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def _any_encoding(device, format, block, dtype, outer, width, place, seed):
    format = format if format.block is None else replace(format, block=block)
    x = torch.randn(*outer, width, generator=rng(seed)) * torch.randn(*outer, width, generator=rng(seed)).mul(3).exp()
    most = torch.finfo(dtype).max
    assert_encoded(place(x.clamp(-most, most).to(device, dtype)), format)


@interpreted
def test_encode_any_shape(device):
    _any_encoding(device)


@interpreted
def test_ties_between_two_integers(device):
    """Rows near midpoints of codes, where a division and a product with the reciprocal may differ."""
    halves = torch.cat([torch.tensor([127.0]), torch.arange(-126.5, 127)])
    top = torch.rand(40, 1, generator=rng(0)).half() + 1
    for x in (halves * torch.tensor([[2.0**-20], [0.25], [1.0], [1 / 3], [512.0]]), halves * (top / 127)):
        for format in (INT8, replace(INT8, block=32), replace(INT8, block=512)):
            assert_encoded(x.to(device), format)


@named("bad", [float("nan"), float("inf"), -float("inf")])
@named("format", [NF4, INT8, BY_ROWS8, replace(INT8, name="blocks", block=64)])
@interpreted
def test_what_is_not_finite_shows_in_the_absmax(device, format, bad):
    for dtype, width in itertools.product(FLOATS, (64, 100)):
        x = torch.randn(3, width, generator=rng(0)).to(dtype)
        x[1, width - 1] = bad
        absmax = packed_ops.encode(x.to(device), format)[1]
        assert (~absmax.isfinite()).nonzero().tolist() == [[1, absmax.shape[1] - 1]]


@named("dtype", FLOATS)
@named("format", KINDS)
@interpreted
def test_decode(device, format, dtype):
    for shape, out in zip([(3, 65), (5, 96), (1, 4129)], itertools.cycle(DTYPES), strict=False):
        spec = Spec(format, shape, dtype)
        assert_decoded(drawn(device, spec, special=True), spec, out)


@named("format", [f for f in KINDS if f.scale is not None])
@interpreted
def test_scales_are_numbered_through(device, format):
    """Scales are numbered over rows with gaps, and over several blocks of scales."""
    spec = Spec(format, (6, 4129), torch.bfloat16)
    assert_decoded(drawn(device, spec), spec, torch.bfloat16)


@named("format", [NF4, NF4_DQ, INT8])
@interpreted
def test_nothing(device, format):
    for shape in ((0, 64), (0, 65)):
        spec = Spec(format, shape, torch.bfloat16)
        assert_encoded(torch.empty(shape, device=device), format)
        assert_decoded(drawn(device, spec), spec, torch.float16)


@named("format", [NF4_DQ, INT8, *(f for f in KINDS if f.name in ("centred", "flat_centred", "scale_twice"))])
@interpreted
def test_decode_stacks_and_buffers_that_are_strewn_about(device, format):
    for shape, stack in [((2, 65), (2,)), ((4, 128), (2, 2)), ((2, 2, 7), (2,)), ((5,), (2,)), ((3, 64), (0,))]:
        spec = Spec(format, shape, torch.bfloat16)
        buffers = drawn(device, spec, stack)
        for place in PLACES:
            assert_decoded([place(b) for b in buffers], spec, torch.float16)
        if stack[0]:
            assert_decoded([b[:1].expand(3, *b.shape[1:]) for b in buffers], spec, torch.float32)


@given(
    format=st.sampled_from(KINDS), block=st.sampled_from(BLOCKS), dtype=st.sampled_from(FLOATS),
    out=st.sampled_from(DTYPES), shape=st.lists(st.integers(1, 4), max_size=2),
    width=st.integers(1, 300) | st.integers(4000, 9000), stack=st.lists(st.integers(1, 2), max_size=2),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def _any_decoding(device, format, block, dtype, out, shape, width, stack):
    format = format if format.block is None else replace(format, block=block)
    spec = Spec(format, (*shape, width), dtype)
    assert_decoded(drawn(device, spec, stack, seed=width), spec, out)


@interpreted
def test_decode_any_shape(device):
    _any_decoding(device)


# --- products ---------------------------------------------------------------------------------------------------------


@named("format", KINDS)
@interpreted
def test_products(device, format):
    for shape, dtype, of, rows in [
        ((17, 264), torch.bfloat16, torch.bfloat16, 1),
        ((17, 264), torch.float32, torch.float32, 2),
        ((4, 33), torch.float16, torch.bfloat16, 3),
        ((4, 64), torch.bfloat16, torch.float64, 3),
    ]:
        assert_products(device, format, shape, dtype, of, rows)


@named("format", [f for f in KINDS if f.center or f.scale is not None])
@interpreted
def test_stacks(device, format):
    for width in (256, 33):
        assert_products(device, format, (17, width), torch.bfloat16, torch.bfloat16, 2, stack=(2,))


@named("rows", [0, 1, 3, 8, 9, 16, 17, 40, 64, 65])
@interpreted
def test_numbers_of_rows(device, rows):
    for of in FLOATS:
        assert_products(device, NF4_DQ, (20, 320), of, of, rows)


@interpreted
def test_plans(device):
    some = [plan for plan in cuda_plans.CANDIDATES if not isinstance(plan, cuda_plans.Fused)]  # whose tests are beside
    for plan, format in zip(some, itertools.cycle([NF4_DQ, INT8, BY_ROWS8]), strict=False):
        assert_products(device, format, (12, 1152), torch.bfloat16, torch.bfloat16, 9, plan=plan)


@named("block", BLOCKS)
@interpreted
def test_blocks(device, block):
    """Parts of a step that share a scale, or have several; whole steps, and short ones."""
    for format, width in ((NF4_DQ, 4096), (FP4, 1032), (replace(DYNAMIC8, flat=False), 2048 + 32)):
        assert_products(device, replace(format, block=block), (12, width), FLOATS[1], FLOATS[2], 2)


@named("format", [NF4_DQ, INT8, replace(NF4_DQ, flat=True), replace(INT8, flat=True), replace(NF4, block=512)])
@interpreted
def test_tiles(device, format):
    """Tiles of one, some and all rows, and of all or some columns; blocks that straddle rows."""
    for size, shape in [(1, (3, 192)), (3000, (6, 448)), (3000, (20, 33)), (10**6, (6, 211))]:
        for of in (torch.bfloat16, torch.float64):
            assert_products(device, format, shape, torch.bfloat16, of, 3, plan=cuda_plans.Tiled(size))


@interpreted
def test_tiles_of_packed_scales(device):
    """Tiles begin at high scale numbers, by rows and by columns."""
    for size in (2 * 1600 * 4, 10 * 2 * 512):  # 50 scales a row
        assert_products(
            device, replace(NF4_DQ, block=32), (12, 1600), FLOATS[1], FLOATS[1], 2, plan=cuda_plans.Tiled(size)
        )


@interpreted
def test_tiles_are_bounded(device):
    """The memory of a tile is bounded for any weight."""
    module = importlib.import_module("fquant.kernels.triton.gemm")
    seen, decode_into = [], module.decode_into
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "decode_into", lambda w, out: (seen.append(out.nbytes), decode_into(w, out)))
        for shape, of in itertools.product([(20, 128), (60, 192)], DTYPES[1:]):
            assert_products(device, NF4_DQ, shape, torch.bfloat16, of, 2, plan=cuda_plans.Tiled(1 << 14))
    assert len(seen) > 10 and max(seen) <= 1 << 14


@given(
    format=st.sampled_from(KINDS), block=st.sampled_from(BLOCKS[:6]), dtype=st.sampled_from(FLOATS),
    of=st.sampled_from(DTYPES), rows=st.integers(0, 20), out=st.integers(1, 20), width=st.integers(1, 600),
    stack=st.lists(st.integers(0, 2), max_size=1), seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def _any_products(device, format, block, dtype, of, rows, out, width, stack, seed):
    format = format if format.block is None else replace(format, block=block)
    assert_products(device, format, (out, width // 8 * 8 or width), dtype, of, rows, stack, seed)


@interpreted
def test_any_products(device):
    _any_products(device)


@named("format", [NF4, NF4_DQ, INT8])
@interpreted
def test_operands_that_are_strewn_about(device, format):
    buffers, spec, w, x, g = operands(device, format, (24, 256), torch.bfloat16, torch.bfloat16, 5, (2,))
    for place in PLACES:
        for some in (buffers, [place(b) for b in buffers]):
            assert_product(packed_ops.matmul(place(x), some, spec), x, w.mT)
            assert_product(packed_ops.matmul_t(place(g), some, spec), g, w)
    shared = [b[:1].expand(2, *b.shape[1:]) for b in buffers]
    assert_product(packed_ops.matmul(x, shared, spec), x, w[:1].mT.expand(2, -1, -1))
    if len(buffers) == 2 and format.block:  # a cut, whose rows have gaps
        some, spec = [buffers[0][0, 3:, 32:96], buffers[1][0, 3:, 1:3]], spec._replace(shape=(21, 128))
        assert_product(packed_ops.matmul(x[0, :, 64:192], some, spec), x[0, :, 64:192], w[0, 3:, 64:192].mT)


@interpreted
def test_weights_that_are_rounded_otherwise_would_show(device):
    """The bound excludes weights in bfloat16 instead of float32, and a lost term."""
    buffers, spec, w, x, _ = operands(device, NF4, (16, 256), torch.bfloat16, torch.bfloat16, 3)
    exact = reference.decode([b.cpu() for b in buffers], spec._replace(dtype=torch.float32), torch.float32)
    for wrong in (exact, w.float() * (torch.arange(256, device=w.device) != 100)):
        with pytest.raises(AssertionError, match="are wrong"):
            assert_product(packed_ops.matmul(x, buffers, spec).float(), x.float(), wrong.mT)


@interpreted
def test_transforms(device):
    """linear with these kernels equals linear with the reference under torch.func."""
    w = [quantize(torch.randn(24, 64, generator=rng(i)), NF4_DQ) for i in range(2)]
    stack = tree.map(lambda *leaves: torch.stack(leaves), *w)
    x = torch.randn(2, 3, 64, generator=rng(3))
    loss = lambda x, w: linear(x, w).square().sum()
    there = tree.map(lambda t: t.to(device), (x, stack))
    both = torch.func.vmap(torch.func.grad(loss))(*there).cpu()
    for i in range(2):
        d = reference.decode(tree.leaves(w[i]), Spec(NF4_DQ, (24, 64), torch.float32), torch.float32)
        assert torch.allclose(both[i], 2 * (x[i] @ d.T) @ d, rtol=1e-5, atol=1e-4)


# --- without the interpreter ------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    from fquant.kernels import triton

    assert triton.DEVICES == ("cuda",)
    with pytest.raises(ImportError, match="Triton needs a CUDA device and a CUDA build of torch"):
        triton.load()


def test_without_triton(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("fquant.kernels.triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match="^triton is not installed; pip install triton"):
        importlib.import_module("fquant.kernels.triton")
