"""The values of every known format: zeros, outliers, the ends of the range, odd shapes, and what is refused.

The oracle is a loop over blocks in float64 (``tests/helpers/kernels/block_loop.py``). Bytes are compared with those of
peers in the tests of the recipes. The formats are all that the package names, each with other blocks, and those of the
tests of kernels.

Formats have roles: moments may have no sign, and E8M0 is for powers of two. So each is given numbers that it is for.
"""

import math
import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from fquant import dequantize, quantize, tree
from fquant.format import E8M0, INT4, INT4_ZERO, TERNARY
from tests.helpers.arrays import named, rng, same_bits
from tests.helpers.formats import BLOCKS, KINDS, KNOWN
from tests.helpers.kernels.block_loop import FLOAT16, TINY, by_float16, check, fitting, numbers

UNNAMED = (
    *KINDS,
    replace(INT4, name="thirds", table=tuple(i / 3 for i in range(-8, 8))),
    replace(INT4_ZERO, name="signed_zero", table=INT4.table),
    replace(TERNARY, name="mean of a row", shared=False),
)
ALL = {format.name: format for format in UNNAMED} | KNOWN | BLOCKS
every = pytest.mark.parametrize("format", ALL.values(), ids=ALL)
known = pytest.mark.parametrize("format", KNOWN.values(), ids=KNOWN)


def weight(format, *shape, dtype=torch.float32):
    """Draw rows of many sizes, with a row of zeros, a whole block of zeros and equal values."""
    w = torch.randn(shape, generator=rng(0)) * torch.randn(*shape[:-1], 1, generator=rng(1)).exp()
    if shape[-2] > 2:
        w[..., 1, :], w[..., 2, 16:32], w[..., 2, 40:48] = 0.0, 0.0, 0.75
    return fitting(w, format).to(dtype)


# --- blocks -----------------------------------------------------------------------------------------------------------

SHAPES = [(5, 161), (1, 161), (5, 1), (1, 1), (4, 16), (3, 2, 33)]


@every
def test_blocks_are_those_of_a_loop(format):
    for shape in SHAPES:
        w = weight(format, *shape)
        check(w, quantize(w, format))


@every
def test_a_view_has_the_bytes_of_its_copy(format):
    """Means and vectors of an array too, whose sums must not be in the order of its strides."""
    w = weight(format, 12 if format.vectors else 60, 130)
    for view in (w.T, w[:, ::2], w[3:, 5:], w[:1].expand(4, -1), w.unflatten(0, (3, -1)).transpose(0, 1)):
        got, wanted = quantize(view, format), quantize(view.contiguous().clone(), format)
        assert all(map(same_bits, tree.leaves(got), tree.leaves(wanted)))


@every
def test_halves_are_quantised_as_their_values(format):
    for dtype in (torch.bfloat16, torch.float16):
        w = weight(format, 5, 161, dtype=dtype)
        got, wanted = quantize(w, format), quantize(w.float(), format)
        assert all(map(same_bits, tree.leaves(got), tree.leaves(wanted)))
        assert same_bits(dequantize(got), dequantize(wanted).to(dtype))


# --- zeros ------------------------------------------------------------------------------------------------------------


@every
def test_zeros_are_exact(format):
    """Zeros are exact in any block if the table has zero and no grid, and else, but for TINY, in blocks of zeros."""
    w = weight(format, 6, 161)
    blank = torch.zeros_like(w)
    on_a_grid = format.in_absmax and format.bits == 8 and format.table is not None
    exact = not (format.vectors or format.center or on_a_grid) and (format.zero or 0 in numbers(format))
    for x in (w, torch.cat([w, blank]), blank, -blank, blank[:1, :1]):
        p = quantize(x, format)
        back = dequantize(p)
        assert all(t.isfinite().all() for t in tree.leaves((p, back)))
        if exact:
            assert not back[x == 0].any()
        else:
            assert x.any() or back.abs().max() <= TINY
            assert format.flat or format.center or format.scale or not back[(x == 0).all(1)].any()


# --- outliers ---------------------------------------------------------------------------------------------------------


@every
def test_an_outlier_stays_in_its_block(format):
    """Codes and scales of other blocks keep their bytes, and their values, but for what nested scales share."""
    w = weight(format, 5, 256)
    plain, width = format.plain, w.numel() if format.flat else 256
    block = min(format.block or width, width)
    at = 2 * 256 + 100
    own = torch.zeros(5 * 256, dtype=torch.bool)
    start = at // width * width + at % width // block * block
    own[start : start + block] = True
    own = own.reshape(5, 256)
    for size in (60000.0, 2.0**100):
        if size > FLOAT16 and by_float16(format):
            continue
        x = w.clone()
        x.view(-1)[at] = fitting(torch.tensor(size), format)
        p = quantize(x, format)
        check(x, p)
        if plain.shared or plain.center or plain.vectors:
            continue
        got, before = dequantize(quantize(x, plain)), dequantize(quantize(w, plain))
        assert torch.equal(got[~own], before[~own])
        if format.scale is not None and not format.scale_first:
            assert same_bits(p.codes, quantize(x, plain).codes)
            if format.power:
                assert torch.equal(dequantize(p), got)


# --- the ends of the range --------------------------------------------------------------------------------------------

SIZES = (3.4e38, 3e38, 1e38, 6.5e4, 1e4, 1.0, 1e-4, 1e-6, 1e-30, 1e-36, 1e-37, 1e-38, 1e-39, 1e-41, 1e-44)
REFUSED = (  # the errors of formats that cannot hold a scale, or of a dtype that cannot hold a decoded value
    r"^[\d.e+]+ is beyond float16's 65504, to which int8 rounds first; use another format$|"
    r"^\w+: a block has values up to [\d.e+]+, and their range is beyond float32; use another format$|"
    r"^\w+: values up to [\d.e+]+ decode beyond (float32|float16|bfloat16); divide the weight, or use a wider dtype"
)


def sized(unit, size, format):
    """Return ``unit`` f64, of which the largest is 1, times a size, that E8M0 rounds to a power of two."""
    return unit * (size if format.table != E8M0 else 2.0 ** math.floor(math.log2(size)))


@named("dtype", [torch.float32, torch.bfloat16, torch.float16])
@known
def test_the_error_at_the_ends_of_the_range_is_that_at_one(format, dtype):
    """Relative to the largest value, and but for values that are subnormal; or the weight is refused."""
    unit = fitting(torch.randn(2 if format.vectors else 8, 256, generator=rng(0)), format).double()
    unit = unit / unit.abs().max()
    usual = (dequantize(quantize(unit.float(), format)) - unit).abs().max().item()
    usual = max(usual, {"mxfp4": 0.2, "mxfp8": 0.13}.get(format.name, 0))  # whose errors change within a power of two
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    floor = 2 * TINY if dtype != torch.float16 else 2**-24
    for size in SIZES:
        x = sized(unit, size, format).to(dtype)
        if not x.isfinite().all():
            continue
        try:
            p = quantize(x, format)
        except ValueError as error:
            assert re.search(REFUSED, str(error))
            assert size > FLOAT16 if by_float16(format) else 4 * size > torch.finfo(dtype).max
            continue
        assert all(t.isfinite().all() for t in tree.leaves(p))
        got = (dequantize(p).double() - x.double()).abs().max().item()
        most = 1.0 if format.mean and size < 1e-3 else 1.25 * usual  # a mean is at least 1e-5
        assert got <= (most + rounding) * x.double().abs().max().item() + floor, size


@every
def test_rows_of_all_sizes_beside_each_other(format):
    """Normal values, and equal ones of each sign, that end above and below the range of float32's normal numbers."""
    most = FLOAT16 if by_float16(format) else 1e36 if format.mean else 2e38  # whose sum is finite
    sizes = [size for size in SIZES if size < most]
    unit = fitting(torch.randn(3, 48, generator=rng(3)), format).double()
    unit = unit / unit.abs().max()
    unit[1], unit[2] = 1.0, fitting(torch.tensor(-1.0), format)
    w = torch.cat([sized(unit, size, format) for size in sizes]).float()
    p = quantize(w, format)
    check(w, p)
    if format.rows_alone and format.scale is None:
        alone = torch.cat([dequantize(quantize(row[None], format)) for row in w])
        assert torch.equal(dequantize(p), alone)


# --- refused ----------------------------------------------------------------------------------------------------------


@every
def test_values_that_are_not_finite_raise_with_their_path(format):
    for bad, (row, column) in ((math.nan, (0, 0)), (math.inf, (2, 70)), (-math.inf, (3, 99))):
        w = weight(format, 4, 100)
        params = {"layers": [{"q": w}, {"q": w.clone()}]}
        params["layers"][1]["q"][row, column] = bad
        message = (
            rf"^layers\.1\.q: 1 of 400 values are NaN or infinite, the first at row {row}, column {column}; "
            "a quantised weight must be finite$"
        )
        with pytest.raises(ValueError, match=message):
            tree.map_at(r"layers\.\d+\.q", partial(quantize, format=format), params)


@every
def test_what_has_no_columns_is_refused(format):
    for shape in ((5, 0), (0, 0), ()):
        w = torch.ones(shape)
        with pytest.raises(ValueError, match=rf"got shape {re.escape(str(shape))}; wanted at least one element"):
            quantize(w, format)
    if format.flat:
        assert dequantize(quantize(torch.ones(7), format)).shape == (7,)
    else:
        with pytest.raises(ValueError, match=r"got shape \(7,\); wanted a matrix \[out in\], leave norms and biases"):
            quantize(torch.ones(7), format)
