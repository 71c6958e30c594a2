"""matmul and matmul_t: within the rounding of their dtype of the exact product, and within the memory of a tile."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fquant import dequantize, kernels, quantize, tree
from fquant.device import HOST
from fquant.format import BLOCKS, FP4, INT4_ZERO, INT8, NF4, NF4_DQ
from fquant.kernels import cpu, packed_ops, reference
from fquant.kernels.cpu import codec, library
from fquant.kernels.spec import Spec
from fquant.packed import FLOATS
from tests.helpers.arrays import named
from tests.helpers.cases import slow_after
from tests.helpers.devices.placing import on
from tests.helpers.formats import DTYPES, ISAS, KINDS, alike, built, draw, forced, own, shifted, strided
from tests.helpers.kernels.rounding import assert_product, bound, product_of
from tests.helpers.kernels.threads import num_threads
from tests.helpers.live_memory import Peak

pytestmark = built
OPS = ("matmul", "matmul_t")
SHAPES = [(1, 1), (37, 100), (21, 384), (3, 4129), (5, 4224), (70, 640)]
ROWS = (0, 1, 2, 3, 4, 5, 7, 9, 16, 33, 49, 101)
each_op = named("op", OPS)
each_dtype = named("dtype", DTYPES)
each_kind = named("format", KINDS)


def rows_of_x(rows, n, dtype, seed=0):
    """Return rows that are in turn ordinary, huge beside tiny, cancelling, mostly zero, denormal."""
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(seed))
    x[1::5] *= torch.where(torch.arange(n) % 7 == 3, 1e2, 1e-4)
    x[2::5, 1::2] = -x[2::5, 0 : n // 2 * 2 : 2]
    x[3::5, 1:] = 0.0
    x[4::5] *= 1e-39 if dtype == torch.float32 else 1e-7
    return x.to(dtype)


def weight(op, buffers, spec, dtype):
    """Return the factor of x [n k], decoded by the reference."""
    w = reference.decode(buffers, spec, dtype)
    return w.mT if op == "matmul" else w


def product(op, *args):
    return getattr(kernels, op)(*args)


def assert_products(op, x, buffers, spec, w, note=""):
    """Check the products of all backends of the device of ``buffers``; ``w`` are the values, on the host."""
    device = buffers[0].device
    x = x.to(device)
    check = product_of(x, w)  # whose bound is that of its device
    for isa in own(device):
        with forced(isa):
            check(product(op, x, buffers, spec), (isa, spec, len(x), note))


def assert_picked(op, buffers, spec, w, start, size):
    """Check that unit vectors ``start`` to ``start + size`` pick out rows of ``w``, on the host, to the bit."""
    device = buffers[0].device
    x = torch.eye(len(w), dtype=w.dtype, device=device)[start : start + size]
    for isa in own(device):
        with forced(isa):
            assert torch.equal(product(op, x, buffers, spec).cpu(), w[start : start + size]), (isa, spec, start)


def tiled(patch, size):
    """Let torch multiply tiles of ``size`` bytes."""
    patch.setattr(codec, "TILE", size)


# --- values -----------------------------------------------------------------------------------------------------------


@each_op
@each_dtype
@each_kind
def test_product(format, dtype, op, device):
    """A card compiles a kernel for each dtype of a weight, so there a shape has one only."""
    for i, shape in enumerate(SHAPES):
        every = {dtype if dtype in FLOATS else torch.bfloat16, FLOATS[i % 3]}
        for kind in every if device == HOST else FLOATS[i % 3 :][:1]:
            spec = Spec(format, shape, kind)
            buffers = draw(spec)
            w, there = weight(op, buffers, spec, dtype), on(device, buffers)
            for rows in ROWS[i % 3 :: 3]:
                assert_products(op, rows_of_x(rows, len(w.mT[0]), dtype, seed=rows), there, spec, w)


@each_op
@named("block", BLOCKS)
@named("format", [NF4_DQ, replace(INT8, name="int8_blocks"), INT4_ZERO])
def test_product_of_blocks(format, block, op, device):
    """Widths of whole vectors of codes, but not always of whole blocks."""
    for shape in [(19, 128), (35, 384), (18, 4224)]:
        spec = Spec(replace(format, block=block), shape, torch.bfloat16)
        buffers = draw(spec)
        w, there = weight(op, buffers, spec, torch.bfloat16), on(device, buffers)
        for rows in (1, 4, 6, 40):
            assert_products(op, rows_of_x(rows, len(w.mT[0]), torch.bfloat16), there, spec, w)


@pytest.mark.each_value
@each_op
@each_dtype
@each_kind
def test_product_by_tiles(format, dtype, op, monkeypatch):
    cases = [((1, 1), 2, 1), ((37, 100), 7, 1), ((37, 100), 1, 3000), ((21, 384), 33, 3000), ((33, 4129), 3, 40_000)]
    for shape, rows, size in cases:
        spec = Spec(format, shape, torch.bfloat16)
        buffers = draw(spec)
        w = weight(op, buffers, spec, dtype)
        tiled(monkeypatch, size)
        assert_products(op, rows_of_x(rows, len(w.mT[0]), dtype), buffers, spec, w, size)


@pytest.mark.each_value
@each_op
@each_dtype
@each_kind
def test_unit_vectors_pick_out_the_weight(format, dtype, op, device, monkeypatch):
    """All but one term are zero, so nothing is rounded, and the result is the decoded weight."""
    for shape in [(37, 100), (21, 384)]:
        spec = Spec(format, shape, torch.float16 if dtype == torch.float16 else torch.float32)
        buffers = draw(spec)
        w, there = weight(op, buffers, spec, dtype), on(device, buffers)
        for size in (8, 64):
            for start in range(0, len(w), size):
                assert_picked(op, there, spec, w, start, size)
        with monkeypatch.context() as patch:
            tiled(patch, 5000)  # on the host
            assert torch.equal(product(op, torch.eye(len(w), dtype=dtype, device=device), there, spec).cpu(), w), spec


@given(
    op=st.sampled_from(OPS), format=st.sampled_from(KINDS), block=st.sampled_from(BLOCKS),
    own=st.sampled_from(FLOATS), dtype=st.sampled_from(DTYPES), rows=st.integers(0, 100), out=st.integers(1, 90),
    width=st.integers(1, 400) | st.sampled_from([512, 4096, 4100, 8320]), tile=st.none() | st.integers(1, 100_000),
)  # fmt: skip
def test_product_of_any_shape(op, format, block, own, dtype, rows, out, width, tile):
    spec = Spec(format if format.block is None else replace(format, block=block), (out, width), own)
    buffers = draw(spec, seed=width)
    w = weight(op, buffers, spec, dtype)
    with pytest.MonkeyPatch.context() as patch:
        if tile is not None:
            tiled(patch, tile)
        assert_products(op, rows_of_x(rows, len(w.mT[0]), dtype), buffers, spec, w)


@pytest.mark.parametrize("block", [64, 128, None], ids=str)
@each_op
def test_each_block_has_its_own_zero_point(op, block, device):
    """In the fastest kind of product, each element of a weight with a table of integers is picked out."""
    spec = Spec(replace(INT4_ZERO, block=block), (21, 384), torch.bfloat16)
    buffers = draw(spec)
    assert buffers[-1].unique().numel() > 8
    w, there = weight(op, buffers, spec, torch.bfloat16), on(device, buffers)
    for size in (1, 3, 64):
        for start in range(0, len(w), size):
            assert_picked(op, there, spec, w, start, size)


PLACES = {
    "shifted": shifted,
    "strided": strided,
    "transposed": lambda t: t.mT.contiguous().mT,
    "expanded": lambda t: t[..., :1].expand_as(t),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@each_op
def test_x_may_lie_anywhere_and_is_left_alone(op, place, device):
    for format in (NF4_DQ, INT8):
        spec = Spec(format, (64, 128), torch.bfloat16)
        drawn = draw(spec)
        buffers = [shifted(b.to(device)) for b in drawn]
        for dtype in DTYPES:
            w = weight(op, drawn, spec, dtype)
            for rows in (1, 6, 120):
                x = place(rows_of_x(rows, len(w.mT[0]), dtype).to(device))
                before = [t.clone() for t in (x, *buffers)]
                assert_products(op, x, buffers, spec, w, dtype)
                assert all(map(alike, (x, *buffers), before))


def test_many_wide_rows_that_begin_within_a_word():
    """Such an x is read by words without a copy if it is aligned to words and there are no tiles, and copied if not."""
    spec, rows = Spec(NF4_DQ, (4096, 64), torch.bfloat16), 800
    buffers, x = draw(spec), rows_of_x(rows, 4096, torch.bfloat16)
    within = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view_as(x).copy_(x)
    assert x.data_ptr() % 4 == 0 and within.data_ptr() % 4 == 2
    room = {}
    for which, g in {"at a word": x, "within": within}.items():
        with Peak() as peak:
            room[which] = cpu.matmul_t(g, buffers, spec), peak.most
    assert alike(room["within"][0], room["at a word"][0])
    if ISAS[-1] == "cpu:avx512_bf16":
        assert room["at a word"][1] + (2 << 20) < room["within"][1] < 8 << 20


@each_op
@each_kind
def test_stacks(format, op):
    """Each weight of a stack is multiplied as if it were alone."""
    for stack, rows in [((2,), 3), ((2, 3), 40), ((2,), 0), ((0,), 3), ((2, 0), 0)]:
        spec = Spec(format, (10, 70), torch.bfloat16)
        buffers = draw(spec, stack)
        n, k = spec.shape if op == "matmul_t" else spec.shape[::-1]
        x = strided(rows_of_x(rows * torch.Size(stack).numel(), n, torch.float32).view(*stack, rows, n))
        got = product(op, x, [strided(b) for b in buffers], spec)
        assert got.shape == (*stack, rows, k)
        for i in torch.cartesian_prod(*map(torch.arange, stack)).view(-1, len(stack)).tolist():
            one = tuple(i)
            assert alike(got[one], product(op, x[one], [b[one] for b in buffers], spec))


@each_op
@each_dtype
@named("format", [NF4_DQ, INT8, replace(NF4, name="flat", flat=True)])
def test_sizes_of_zero(format, dtype, op, device):
    for shape in [(0, 64), (5, 0), (0, 0)]:
        spec = Spec(format, shape, torch.bfloat16)
        n, k = shape if op == "matmul_t" else shape[::-1]
        for rows in (0, 3, 300):
            got = product(op, torch.ones(rows, n, dtype=dtype, device=device), on(device, draw(spec)), spec)
            assert torch.equal(got.cpu(), torch.zeros(rows, k, dtype=dtype))


@each_op
def test_float16_overflows_to_infinity_as_torchs_does(op, device):
    spec = Spec(INT8, (4, 64), torch.float16)
    buffers = [torch.full((4, 64), 127, dtype=torch.int8), torch.full((4, 1), 3000.0)]
    there = on(device, buffers)
    for rows in (1, 40):
        x = torch.full((rows, 64 if op == "matmul" else 4), 30.0, dtype=torch.float16)
        x[:, 0] = -x[:, 0]
        wanted, x = x @ weight(op, buffers, spec, torch.float16), x.to(device)
        assert torch.equal(product(op, x, there, spec).cpu(), wanted) and product(op, -x, there, spec).isneginf().all()


# --- threads and memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", slow_after(1, [NF4_DQ, INT8]))
def test_the_number_of_threads_changes_no_bit(format):
    w = torch.randn(300, 512, generator=torch.Generator().manual_seed(0))
    spec = Spec(format, (300, 512), torch.bfloat16)
    buffers = draw(spec)
    rows = [*itertools.product((1, 6, 16), FLOATS), (100, FLOATS[0]), (600, FLOATS[1]), (100, FLOATS[2])]
    x = {op: [rows_of_x(m, n, d) for m, d in rows] for op, n in zip(OPS, (512, 300), strict=True)}

    def everything():
        products = [product(op, t, buffers, spec) for op in OPS for t in x[op]]
        return [*packed_ops.encode(w, format), *(packed_ops.decode(buffers, spec, out) for out in FLOATS), *products]

    for isa in ISAS:
        with forced(isa):
            with num_threads(1):
                wanted = everything()
            for n in (2, 5):
                with num_threads(n):
                    assert all(map(alike, everything(), wanted)), (isa, n)
            with num_threads(5), ThreadPoolExecutor(3) as pool:
                calls = [pool.submit(everything) for _ in range(4)]
                assert all(alike(a, b) for call in calls for a, b in zip(call.result(), wanted, strict=True)), isa


@each_op
@named("dtype", FLOATS)
@named("format", [NF4_DQ, INT8])
def test_a_row_has_the_same_bits_beside_any_others(format, dtype, op):
    """Of nine rows and more. Rows lie at the ends of tiles and within them, and so do columns and words."""
    spec = Spec(format, (83, 1098), torch.bfloat16)
    buffers = draw(spec)
    x = rows_of_x(600, 1098 if op == "matmul" else 83, dtype)
    for isa in ISAS:
        with forced(isa):
            y = product(op, x, buffers, spec)
            for start, count in ((0, 9), (1, 16), (3, 33), (40, 50), (500, 100), (77, 520)):
                part = product(op, x[start : start + count], buffers, spec)
                assert alike(part, y[start : start + count]), (isa, start, count)


def test_torch_multiplies_as_before_between_our_products():
    """Its libraries set the shape of the machine's tiles as well, once for each thread."""
    spec = Spec(NF4_DQ, (96, 256), torch.bfloat16)
    buffers, x = draw(spec), rows_of_x(90, 256, torch.bfloat16)
    small, codes = x[:7, :40], torch.arange(-60, 60, dtype=torch.int8).view(40, 3).repeat(1, 8)
    theirs = lambda: (x @ x.mT, small @ small.mT, torch._int_mm(codes, codes.mT.contiguous()[:, :40]))
    ours = lambda: [product(op, x[:, :n], buffers, spec) for op, n in zip(OPS, (256, 96), strict=True)]
    wanted = theirs(), ours()
    for isa in ISAS:
        with forced(isa):
            again = ours()
            assert all(alike(a, b) for _ in range(3) for a, b in zip(theirs(), wanted[0], strict=True)), isa
            assert all(map(alike, ours(), again)), isa
    assert all(map(alike, ours(), wanted[1]))


@each_op
@each_dtype
@named("format", [NF4_DQ, INT8, replace(NF4_DQ, name="flat", flat=True)])
def test_no_more_than_a_tile_is_decoded_at_a_time(format, dtype, op, monkeypatch):
    """Products whose blocks straddle rows decode a tile at a time, beside the room of the product of a tile."""
    monkeypatch.setattr(codec, "TILE", 1 << 16)
    spec = Spec(format, (512, 1025 if format.flat else 1024), torch.bfloat16)
    if not format.flat and dtype != torch.float64:
        return
    buffers = draw(spec)
    w = weight(op, buffers, spec, dtype)
    for rows in (1, 20, 260):
        x = torch.randn(rows, len(w.mT[0]), generator=torch.Generator().manual_seed(rows)).to(dtype)
        with Peak() as peak:
            y = getattr(cpu, op)(x, buffers, spec)
        assert_product(y, x, w)
        sums = max(4, dtype.itemsize) * (y.numel() + x.numel()) if op == "matmul_t" else 0
        high = codec.TILE // (1025 * max(2, dtype.itemsize))
        tile = torch.ones(high, 1025, dtype=torch.float32 if op == "matmul_t" else dtype)
        part = torch.ones(rows, high if op == "matmul_t" else 1025, dtype=tile.dtype)
        with Peak() as product:
            if dtype != torch.float64:
                cpu.ordered_matmul(part, tile if op == "matmul_t" else tile.mT)
        assert peak.most - y.nbytes - sums - product.most <= 3 * codec.TILE, rows


@each_op
@named("dtype", FLOATS)
def test_memory_beside_a_product_is_8_mib_for_any_weight(dtype, op):
    """With two threads; or the room of 16 rows of x, if x is so wide that they need more."""
    for out, width in [(4096, 4096), (128_256, 4096), (14_336, 4096), (4096, 28_672), (64, 500_000), (500_000, 64)]:
        w = library.Packed(rows=out, width=width, block=64, bits=4, dtype=1)
        call = getattr(cpu.load(), f"fquant_{op}")
        for rows in (16, 100, 512, 513, 5000):
            for isa in range(len(cpu.isas())):
                room = call(isa, 2, w, 0, rows, 0, library.DTYPES[dtype], None)  # NULL: returns the bytes
                inner = width if op == "matmul" else out
                assert room <= max(8 << 20, (2 << 20) + 16 * 4 * (inner + 1024) * 33 // 32), (out, width, rows, isa)


@pytest.mark.slow  # 7 GiB
@named("format", [NF4_DQ, INT8, replace(NF4, name="flat", flat=True)])
def test_more_than_2_to_the_31_elements(format):
    """1025 times the same 64 rows: each copy gives the results of the rows alone."""
    times, width = 1025, 32768 + 32 * format.flat  # flat blocks then straddle rows, but not these 64
    few = torch.randn(64, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert times * few.numel() > 2**31
    p, alone = quantize(few.repeat(times, 1), format), quantize(few, format.plain)
    absmax = (p.scale if format.scale is None else dequantize(p.scale)).view(times, *alone.scale.shape)
    assert (p.codes.view(times, -1) == alone.codes.view(1, -1)).all() and (absmax == absmax[:1]).all()
    assert format.scale is not None or alike(absmax[0], alone.scale)
    w = dequantize(replace(alone, scale=absmax[0]))
    assert all(alike(part, w) for part in dequantize(p).split(64))
    for rows in (1, 40):
        x = rows_of_x(rows, width, torch.bfloat16)
        y = packed_ops.matmul(x, tree.leaves(p), spec := Spec(format, p.shape, p.dtype))
        for i in (0, 500, 1024):
            assert_product(y[:, 64 * i : 64 * i + 64], x, w.mT, (rows, i))
            g = torch.zeros(rows, times * 64, dtype=torch.bfloat16)
            g[:, 64 * i : 64 * i + 64] = rows_of_x(rows, 64, torch.bfloat16)
            assert_product(packed_ops.matmul_t(g, tree.leaves(p), spec), g[:, 64 * i : 64 * i + 64], w, (rows, i))


# --- errors that the bound excludes -----------------------------------------------------------------------------------

WRONG = {  # what a kernel may get wrong, as a function of x [m n] and w [n k]
    "the last column is left out": (FLOATS, lambda x, w: x[:, :-1] @ w[:-1]),
    "weights rounded to bfloat16": (FLOATS[::2], lambda x, w: x @ w.bfloat16().double()),
    "weights not rounded": (FLOATS[1:], None),
    "sums in bfloat16": (FLOATS, lambda x, w: (x[:, None] * w.T).bfloat16().sum(-1).double()),
    "cut off, not rounded": (FLOATS[1:], lambda x, w: (x @ w) * (1 - 2.0**-8)),
    "a scale is off by a little": (FLOATS[:1], lambda x, w: x @ w * (1 + 2.0**-12)),
}


@named("n", [64, 200])
@named("wrong", WRONG)
def test_the_bound_excludes(wrong, n):
    dtypes, f = WRONG[wrong]
    for dtype in dtypes:
        x = rows_of_x(5, n, dtype)[:3]
        exact_w = reference.decode(draw(spec := Spec(FP4, (40, n), torch.float32)), spec, torch.float32).mT
        w = exact_w.to(dtype)
        got = x.double() @ exact_w.double() if f is None else f(x.double(), w.double())
        with pytest.raises(AssertionError, match="are wrong, the first at"):
            assert_product(got.to(dtype), x, w)
        assert_product((x.double() @ w.double()).to(dtype), x, w)
        assert bound(x, w).isfinite().all()
