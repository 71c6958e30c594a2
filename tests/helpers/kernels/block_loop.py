"""The bytes and the values of a packed array by a loop over its blocks in float64, an oracle for any format.

The loop finds the scale of a block by the rule that the format states, and reads the codes of a row from its bits, one
at a time. A code has to be that of the nearest value, and a decoded value that of its code:

    scale           that of the rule, within the rounding of float32; nested ones by the same loop
    zero point      an integer within half a step of where zero is
    code            nearest to x / scale + zero, with the scale that ``round_to_nearest`` states
    decoded value   (table[code] - zero) * scale + offset, within the rounding of float32

Values below float32's least normal number may become zeros, as ``fquant.quantize`` documents.
"""

import math
from dataclasses import replace

import numpy as np
import torch

from fquant import dequantize, quantize, tree
from fquant.format import E8M0
from fquant.kernels.spec import Spec, layout
from fquant.packed import Packed

TINY = 2.0**-126  # float32's least normal number
FLOAT16 = 65504.0


def values_of(format):
    """Return the value f64[codes] of every code, NaN where it is no number."""
    signed = [(code + 128) % 256 - 128 for code in range(256)]
    return np.array(format.table or [code / 127 for code in signed])


def numbers(format):
    """Return the values of codes that are numbers, sorted."""
    table = values_of(format)
    return np.sort(table[np.isfinite(table)])


def fitting(w, format):
    """Return ``w`` as numbers that ``format`` is for."""
    if format.vectors or format.zero or numbers(format)[0] < 0:
        return w
    return w.abs() if format.table != E8M0 else torch.ldexp(torch.ones_like(w), (4 * w).clamp(-14, 14).int())


def by_float16(format):
    """Return True for INT8, which rounds to float16 first, and for scales in it."""
    return format.table is None and not format.vectors or format.scale is not None and by_float16(format.scale)


def scale_of(x, format):
    """Return the scale of a block f64[n], and its zero point before it is rounded."""
    top, values = float(np.abs(x).max()), numbers(format)
    if format.vectors:
        return float(np.sqrt(np.square(x).mean())), 0.0
    if format.in_absmax:
        return top, 0.0
    if format.table == E8M0:
        return 1.0, 0.0
    if format.zero:
        low, high = min(x.min(), 0.0), max(x.max(), 0.0)
        scale = (high - low) / (values[-1] - values[0])
        return scale, float(np.clip(values[0] - low / max(scale, TINY), values[0], values[-1]))
    if format.mean:
        return max(float(np.abs(x).mean()), 1e-5), 0.0
    largest = min(values[-1], -values[0]) if values[0] < 0 else values[-1]
    if format.power:
        return math.ldexp(1.0, math.frexp(top)[1] - math.frexp(largest)[1]) if top else TINY, 0.0
    return top / (format.unit or largest), 0.0


def codes_of(row, bits, count):
    """Return the first ``count`` codes of a row of bytes, the first one in the highest bits."""
    stream = "".join(f"{byte:08b}" for byte in row)
    return [int(stream[i * bits : (i + 1) * bits], 2) for i in range(count)]


def in_rows(t, p):
    """Return a buffer of a packed array by the rows along which its blocks run, in numpy."""
    return t.reshape(1 if p.format.flat else math.prod(p.shape[:-1]), -1).numpy()


def blocks_of(format, width):
    step = format.block or width
    return [slice(i, min(i + step, width)) for i in range(0, width, step)]


def check(w, p):
    """Check every buffer of the packed ``w``, and its decoded values, against the loop."""
    format, offset = p.format, 0.0 if p.offset is None else p.offset.item()
    shapes = [(tuple(t.shape), t.dtype) for t in tree.leaves(p)]
    assert shapes == [(leaf.shape, leaf.dtype) for leaf in layout(Spec(format, p.shape, p.dtype))]
    assert all(t.isfinite().all() for t in tree.leaves(p))
    x = in_rows(w.double(), p) - offset
    assert p.offset is None or abs(x.mean()) <= 1e-6 * np.abs(x).max()
    if isinstance(p.scale, Packed):
        exact = quantize(w, format.plain).scale
        check(exact, p.scale)
        kept = in_rows(dequantize(p.scale).double(), p)
        exact = kept if format.scale_first else in_rows(exact.double(), p)
    else:
        exact = kept = in_rows(p.scale.double(), p)
        check_scales(x, kept, format)
    zero = np.zeros_like(kept) if p.zero is None else in_rows(p.zero.double(), p)
    assert (zero == np.round(zero)).all()
    out, size = np.zeros_like(x), np.zeros_like(x)
    for r, row in enumerate(in_rows(p.codes.view(torch.uint8), p)):
        units = sums_of(row, p) if format.vectors else values_of(format)[codes_of(row, format.bits, x.shape[1])]
        for b, at in enumerate(blocks_of(format, x.shape[1])):
            if exact[r, b] >= TINY and not format.vectors:
                slack = abs(offset) * 2**-22 / exact[r, b]
                check_codes(x[r, at], units[at], exact[r, b], zero[r, b], slack, format)
            out[r, at] = (units[at] - zero[r, b]) * kept[r, b] + offset
            size[r, at] = (np.abs(units[at]) + abs(zero[r, b])) * abs(kept[r, b]) + abs(offset)
    found = in_rows(dequantize(replace(p, dtype=torch.float32)).double(), p)
    assert (np.abs(found - out) <= 2**-21 * size + 2 * TINY).all()
    if format.vectors and x.size < 256 * format.vectors.dim:  # each group is a vector of its own
        assert np.abs(out - x).max() <= 1e-6 * np.abs(x).max() + 2 * TINY


def check_scales(x, scale, format):
    wanted = np.array([[scale_of(row[at], format)[0] for at in blocks_of(format, x.shape[1])] for row in x])
    if format.shared:
        wanted[:] = max(np.abs(x).mean(), 1e-5) if format.mean else wanted.max()
    close = 2**-11 if format.table is None and not format.vectors else 2**-21  # INT8 rounds to float16 first
    assert (np.abs(scale - wanted) <= close * wanted + 2 * TINY).all()


def check_codes(x, units, scale, zero, slack, format):
    """Check that the values of codes f64[n] are the nearest ones to a block f64[n] in units of its scale."""
    assert not format.zero or abs(zero - scale_of(x, format)[1]) <= 0.5001
    y = x / scale + zero
    least = np.abs(numbers(format) - y[:, None]).min(1)
    if format.table is None:
        slack += 2**-10 * np.abs(y).max()  # float16 again
    elif format.in_absmax and format.bits == 8:
        slack += 2**-15  # values are looked up on a grid
    assert (np.abs(units - y) <= least + slack + 2**-21 * (np.abs(y) + abs(zero))).all()


def sums_of(row, p):
    """Return the sums of vectors that a row of bytes picks."""
    stages = p.format.vectors.stages
    vectors = p.vectors.double().reshape(stages, 256, -1).numpy()
    groups = row.reshape(-1, stages)
    return sum(vectors[s][groups[:, s]] for s in range(stages)).reshape(-1)
