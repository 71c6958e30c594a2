"""encode and decode: every instruction set, and the kernels of a card, equal the reference to the bit."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fquant import dequantize, quantize, tree
from fquant.device import HOST
from fquant.format import BLOCKS, INT4_ZERO, INT8, NF4
from fquant.kernels import packed_ops, reference
from fquant.kernels.spec import Spec
from fquant.packed import FLOATS
from tests.helpers.arrays import named, rng
from tests.helpers.devices.placing import on
from tests.helpers.formats import (
    BY_ROWS8,
    CODECS,
    DTYPES,
    ISAS,
    KINDS,
    UNSORTED,
    alike,
    built,
    draw,
    forced,
    own,
    shifted,
    strided,
)

pytestmark = built
normal = lambda shape: torch.randn(shape, generator=rng(0))


def with_one(value):
    """Draw small numbers with one large or bad one among them."""

    def make(shape):
        x = normal(shape) * 1e-3
        x.view(-1)[x.numel() // 2 :][:1] = value
        return x

    return make


def any_bits(shape):
    """Draw finite numbers of uniform bit patterns."""
    x = torch.randint(-(2**31), 2**31 - 1, shape, generator=rng(0), dtype=torch.int64)
    return x.int().view(torch.float32).nan_to_num(1.0, 1.0, -1.0)


INPUTS = {
    "normal": normal,
    "many magnitudes": lambda shape: normal(shape) * torch.randn(shape, generator=rng(1)).mul(8).exp(),
    "zeros": torch.zeros,
    "negative zeros": lambda shape: -torch.zeros(shape),
    "zeros of both signs": lambda shape: with_one(1.0)(shape).trunc(),
    "denormal": lambda shape: normal(shape) * 1e-39,
    "next to nothing": lambda shape: normal(shape) * 2e-45,
    "denormal in float16": lambda shape: normal(shape) * 1e-7,
    "outlier": with_one(3e38),
    "outlier in float16": with_one(-65504.0),
    "all equal": lambda shape: torch.full(shape, -0.3),
    "largest": lambda shape: torch.full(shape, torch.finfo(torch.float32).max),
    "largest in float16": lambda shape: torch.full(shape, -65504.0),
    "any bits": any_bits,
}
BAD = {str(value): with_one(value) for value in (float("nan"), float("inf"), -float("inf"))}
SHAPES = [(1, 1), (5, 64), (3, 65), (7, 100), (130, 7), (2, 4129), (1, 8192 + 31), (2, 3, 70), (128,), (0, 64)]


def assert_encoded(x, format, note=""):
    """Check that all backends where ``x`` is agree on the absmax, and on the codes of finite rows."""
    before = x.clone()
    codes, absmax = reference.encode(x.cpu(), format)
    finite = absmax.isfinite().all(-1)
    for isa in own(x.device):
        with forced(isa):
            got = on(HOST, packed_ops.encode(x, format))
        assert alike(got[1], absmax), f"absmax differs: {isa} {note}"
        assert got[0].shape == codes.shape and alike(got[0][finite], codes[finite]), f"codes differ: {isa} {note}"
    assert alike(x, before)


def assert_decoded(buffers, spec, out, note=""):
    wanted = reference.decode(on(HOST, buffers), spec, out)
    for isa in own(buffers[0].device):
        with forced(isa):
            got = packed_ops.decode(buffers, spec, out).cpu()
        assert alike(got, wanted), f"{isa} {spec} to {out} {note}"


# --- encode -----------------------------------------------------------------------------------------------------------


@named("dtype", FLOATS)
@named("format", CODECS)
def test_encode(format, dtype, device):
    for shape in SHAPES:
        for name, make in INPUTS.items():
            assert_encoded(make(shape).to(device, dtype), format, (name, shape))


@named("dtype", FLOATS)
@named("format", CODECS)
def test_what_is_not_finite_shows_in_the_absmax(format, dtype, device):
    for shape in SHAPES[:-1]:
        for name, make in BAD.items():
            x = make(shape).to(device, dtype)
            for backend in ("reference", *own(device)):
                with forced(backend):
                    absmax = packed_ops.encode(x, format)[1]
                assert (~absmax.isfinite()).sum() == 1, (backend, name, shape)
                assert backend not in ISAS or absmax.isnan().any() == x.isnan().any(), (backend, name, shape)


@given(
    format=st.sampled_from(CODECS), block=st.sampled_from(BLOCKS), dtype=st.sampled_from(FLOATS),
    outer=st.lists(st.integers(0, 3), max_size=2), width=st.integers(1, 300) | st.integers(4000, 9000),
    name=st.sampled_from(list(INPUTS)), place=st.sampled_from([lambda x: x, shifted, strided]),
)  # fmt: skip
def test_encode_any_shape(device, format, block, dtype, outer, width, name, place):
    format = format if format.block is None else replace(format, block=block)
    assert_encoded(place(INPUTS[name]((*outer, width)).to(device, dtype)), format, name)


def around(x):
    """Return each number, the next above and the next below."""
    inf = torch.full_like(x, torch.inf)
    return torch.cat([x, x.nextafter(inf), x.nextafter(-inf)])


@pytest.mark.parametrize("whole", [True, False], ids=["whole blocks", "short blocks"])
@named("format", [f for f in CODECS if f.table is not None])
def test_ties_between_two_codes(format, whole, device):
    """Midpoints of two values, and of the grid's points, at scales where they are exact."""
    ties = around(reference.midpoints(format)[1])
    if format.bits == 8:
        ties = torch.cat(
            [ties, around((torch.arange(65536) * 2.0 - 1) / 65535 - 1), around(torch.arange(-1, 1, 2**-15))]
        )
    width = (format.block or 512) - (not whole)
    rows = torch.nn.functional.pad(ties, (0, -len(ties) % (width - 1))).view(-1, width - 1)
    rows = torch.cat([torch.ones(len(rows), 1), rows], 1).to(device)
    for power in (-126, -20, 0, 1, 100):
        assert_encoded(rows * 2.0**power, format, power)
        assert_encoded(-rows * 2.0**power, format, power)


def test_ties_between_two_integers(device):
    rows = torch.cat([torch.tensor([127.0]), around(torch.arange(-127.5, 127.5))])[None]
    rows = rows * torch.tensor([2.0**-20, 0.25, 1.0, 3.0, 1 / 3, 512.0])[:, None]
    for format in (INT8, replace(INT8, block=32), replace(INT8, block=512)):
        for dtype in FLOATS:
            assert_encoded(rows.to(device, dtype), format, dtype)


def all_halves(dtype):
    """Return all 65536 numbers of 16 bits, in a random order."""
    return torch.randperm(65536, generator=rng(0)).sub(32768).short().view(dtype)


@named("dtype", FLOATS[1:])
@named("format", CODECS)
def test_all_halves_are_read_right(format, dtype, device):
    x = all_halves(dtype).to(device)
    assert_encoded(x[:, None], format)
    assert_encoded(x[x.isfinite()][: 126 * 500].view(-1, 500), format)


# Float32 numbers at, just above and just below the midpoint of two neighbours of 16 bits.
HALVES = {
    str(dtype): around((kind[:-1] + kind[1:]) / 2)
    for dtype in FLOATS[1:]
    for kind in [all_halves(dtype).float().nan_to_num(1.0, 1.0, 1.0).unique()]
} | {"any": any_bits((100_000,)), "beyond": torch.tensor([65519.99, 65520.0, 65536.0, 1e30, 3.4e38, torch.inf])}


@pytest.mark.parametrize("x", HALVES.values(), ids=HALVES)
def test_int8_rounds_to_float16_first(x, device):
    """A row of one element shows the rounding of its absmax."""
    assert_encoded(x[:, None].to(device), INT8)


# --- decode -----------------------------------------------------------------------------------------------------------


@named("dtype", FLOATS)
@named("format", KINDS)
def test_decode(format, dtype, device):
    """A card compiles a kernel for each dtype, so there each shape is decoded to one only."""
    shapes = [(1, 1), (5, 64), (3, 65), (37, 100), (3, 4129), (2, 3, 70), (40, 256), (9000,), (0, 64)]
    for i, shape in enumerate(shapes):
        spec = Spec(format, shape, dtype)
        buffers = on(device, draw(spec, special=True))
        for out in DTYPES if device == HOST else DTYPES[i % 4 :][:1]:
            assert_decoded(buffers, spec, out)


@named("width", [4096, 4128, 4097])
@named("format", [NF4, INT8])
def test_decode_to_more_than_the_caches_hold(format, width):
    """Large results have non-temporal stores."""
    spec = Spec(format, (1100, width), torch.float32)
    buffers = draw(spec, special=True)
    for out in FLOATS[:2]:
        assert_decoded(buffers, spec, out)


@named("format", KINDS)
def test_decode_stacks_and_buffers_that_are_strewn_about(format, device):
    for shape, stack in [
        ((3, 65), (2,)),
        ((4, 128), (2, 3)),
        ((2, 3, 7), (3,)),
        ((5,), (2,)),
        ((3, 64), (0,)),
        ((0, 64), (2,)),
    ]:
        spec = Spec(format, shape, torch.bfloat16)
        buffers = draw(spec, stack)
        each = [reference.decode([b[i] for b in buffers], spec, torch.float16) for i in range(stack[0])]
        wanted = torch.stack(each) if each else torch.empty(*stack, *shape, dtype=torch.float16)
        for place in (shifted, strided, lambda t: t.mT.contiguous().mT if t.ndim > 1 else t):
            assert_decoded([place(b) for b in on(device, buffers)], spec, torch.float16)
        assert alike(packed_ops.decode(on(device, buffers), spec, torch.float16).cpu(), wanted)


@given(
    format=st.sampled_from(KINDS), block=st.sampled_from(BLOCKS), dtype=st.sampled_from(FLOATS),
    out=st.sampled_from(DTYPES), shape=st.lists(st.integers(1, 4), max_size=2),
    width=st.integers(1, 300) | st.integers(4000, 9000), stack=st.lists(st.integers(1, 2), max_size=2),
)  # fmt: skip
def test_decode_any_shape(device, format, block, dtype, out, shape, width, stack):
    format = format if format.block is None else replace(format, block=block)
    spec = Spec(format, (*shape, width), dtype)
    assert_decoded(on(device, draw(spec, stack, seed=width)), spec, out)


@named("out", DTYPES)
@named("dtype", FLOATS)
def test_values_are_rounded_as_torch_rounds(dtype, out, device):
    """NF4's last code has the value of its scale: any float32 is rounded, NaN and infinity included."""
    scale = torch.cat([*HALVES.values(), torch.tensor([torch.nan, -torch.inf])])[:, None]
    for format, code in ((replace(NF4, block=32), 0xFF), (replace(BY_ROWS8, block=32), 0xFF)):
        spec = Spec(format, (len(scale), 1), dtype)
        assert_decoded(on(device, [torch.full((len(scale), 1), code, dtype=torch.uint8), scale]), spec, out)


@pytest.mark.parametrize("block, width", [(32, 128), (64, 128), (64, 192), (128, 384), (256, 8192 + 128)])
@named("dtype", FLOATS)
@named("format", [NF4, INT4_ZERO])
def test_any_scale_beside_any_code(format, dtype, block, width, device):
    """Scales and zero points of any bits, in blocks that are decoded by whole vectors."""
    spec = Spec(replace(format, block=block), (48, width), dtype)
    codes, scale, *zero = draw(spec)
    scale, check = any_bits(scale.shape), lambda buffers, out: assert_decoded(on(device, buffers), spec, out)
    for out in FLOATS:
        check([codes, scale, *zero], out)
        check([codes, scale.abs().clamp(1e-30, 1e30), *(any_bits(z.shape).flip(0) for z in zero)], out)
    scale[::2] = scale[::2].abs().clamp(1e-30, 1e30)  # so that some vectors are plain and others not
    scale[1::3, ::2] = 1.0
    check([codes, scale, *zero], torch.bfloat16)
    for least in (1e-40, 1e-30, 1e-12, 2**-10, 2**-9):  # differences from 0 that are tiny
        small = [torch.where(torch.arange(z.shape[1]) % 2 == 0, least * z.sign(), z) for z in zero]
        check([codes, scale.abs().clamp(1e-33, 1e-20), *small], torch.bfloat16)


# --- both ways, and the whole of it -----------------------------------------------------------------------------------


@named("dtype", FLOATS)
@named("format", KINDS)
def test_quantize_and_dequantize(format, dtype):
    """With nested scales and centres, which quantize computes from the results of encode."""
    for shape in [(6, 128), (5, 99), (3, 4, 40), (1, 300)]:
        w = INPUTS["many magnitudes"](shape).clamp(-3e4, 3e4).to(dtype)
        with forced("reference"):
            wanted = quantize(w, format)
            values = dequantize(wanted)
        for isa in ISAS:
            with forced(isa):
                got = quantize(w, format)
                assert tree.structure(got) == tree.structure(wanted)
                assert all(map(alike, tree.leaves(got), tree.leaves(wanted))), (isa, shape)
                assert alike(dequantize(got), values), (isa, shape)


def test_a_wrong_bit_would_show():
    """The comparisons above detect one wrong bit."""
    spec = Spec(NF4, (4, 65), torch.bfloat16)
    values = reference.decode(draw(spec), spec, torch.float32)
    flip = lambda t, bit: (t.view(torch.int32) ^ bit).view(torch.float32)
    assert alike(values, values.clone()) and not any(alike(values, flip(values, bit)) for bit in (1, -(2**31)))
    assert not alike(torch.tensor([0.0]), torch.tensor([-0.0])) and alike(values * torch.nan, -values * torch.nan)
    encode = partial(reference.encode, torch.ones(1, 65))
    assert not alike(encode(NF4)[0], encode(UNSORTED)[0])
