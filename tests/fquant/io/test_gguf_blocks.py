"""Tests of fquant.io.gguf_blocks: bytes equal those of the gguf package, or of ggml's recipe as a loop of scalars."""

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from fquant.io.gguf_blocks import KINDS, decode, encode

f32 = np.float32
THEIRS = {kind: GGMLQuantizationType[kind.upper()] for kind in KINDS}


def weights(rows=48, width=512):
    """Rows of ordinary, tiny, huge, one-sided, constant, coarse and heavy-tailed values."""
    g = torch.Generator().manual_seed(0)
    w = 0.03 * torch.randn(rows, width, generator=g)
    w[0], w[1, :256], w[2, :32] = 0, 0, 0.5
    w[3], w[4] = w[3].abs(), -w[4].abs()
    w[5] *= torch.exp(3 * torch.randn(width, generator=g))
    w[6] = (20 * w[6]).round()
    w[7] = w[7].bfloat16().float()
    w[8] *= 1e-6
    w[9] *= 1e5
    w[10, 7] = -3.0
    return w


def test_kinds_are_those_of_the_package():
    for kind, ours in KINDS.items():
        assert THEIRS[kind] == ours.code and GGML_QUANT_SIZES[THEIRS[kind]] == (ours.elements, ours.nbytes)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_encode_has_the_bytes_of_the_package(kind):
    w = weights()
    assert np.array_equal(encode(w, kind).numpy(), quants.quantize(w.numpy(), THEIRS[kind]).view(np.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_decode_has_the_bits_of_the_package(kind):
    random = torch.randint(0, 256, (64, 4 * KINDS[kind].nbytes), generator=torch.Generator().manual_seed(1))
    for rows in (encode(weights(), kind), random.to(torch.uint8)):
        with np.errstate(all="ignore"):  # random bytes have infinite scales
            got, wanted = decode(rows, kind).numpy(), quants.dequantize(rows.numpy(), THEIRS[kind])
        assert np.array_equal(got, wanted, equal_nan=True)


def nearest(x, low, high):
    return np.clip(np.rint(x), low, high).astype(f32)


def fit_q4_k(x):
    """Scale and minimum of a group: ggml's make_qkx2_quants, one number at a time."""
    total = f32(0)
    for v in x:
        total = total + v * v
    w = np.sqrt(total / f32(32)) + np.abs(x)
    low, high = min(x.min(), f32(0)), x.max()
    sum_w = sum_x = error = f32(0)
    for wi, xi in zip(w, x, strict=True):
        sum_w, sum_x = sum_w + wi, sum_x + wi * xi
    if high == low:
        return f32(0), -low, np.zeros(32, f32)
    inverse = f32(15) / (high - low)
    scale = f32(1) / inverse
    codes = nearest(inverse * (x - low), 0, 15)
    for wi, xi, c in zip(w, x, codes, strict=True):
        error = error + wi * ((scale * c + low - xi) * (scale * c + low - xi))
    for step in range(21):
        tried = nearest((f32(-1) + f32(0.1) * f32(step) + f32(15)) / (high - low) * (x - low), 0, 15)
        sum_l = sum_l2 = sum_xl = its_error = f32(0)
        for wi, xi, c in zip(w, x, tried, strict=True):
            sum_l, sum_l2, sum_xl = sum_l + wi * c, sum_l2 + wi * c * c, sum_xl + wi * c * xi
        determinant = sum_w * sum_l2 - sum_l * sum_l
        if determinant <= 0:
            continue
        a, b = (sum_w * sum_xl - sum_x * sum_l) / determinant, (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        if b > 0:
            a, b = sum_xl / sum_l2, f32(0)
        for wi, xi, c in zip(w, x, tried, strict=True):
            its_error = its_error + wi * ((a * c + b - xi) * (a * c + b - xi))
        if its_error < error:
            error, scale, low, codes = its_error, a, b, tried
    return scale, -low, codes


def q4_k(x):
    """The 144 bytes of 256 weights: ggml's quantize_row_q4_K_ref."""
    fits = [fit_q4_k(group) for group in x.reshape(8, 32)]
    tops = [max(f32(0), *(fit[i] for fit in fits)) for i in (0, 1)]
    s, m = (
        [int(nearest(f32(63) / top * fit[i], 0, 63)) if top > 0 else 0 for fit in fits] for i, top in enumerate(tops)
    )
    d, dmin = (np.float16(top / f32(63)) for top in tops)
    codes = []
    for group, fit, its_s, its_m in zip(x.reshape(8, 32), fits, s, m, strict=True):
        step = f32(d) * f32(its_s)
        again = fit[2] if step == 0 else nearest((group + f32(dmin) * f32(its_m)) / step, 0, 15)
        codes.append(again.astype(np.uint8))
    packed = [s[j] | s[j + 4] >> 4 << 6 for j in range(4)] + [m[j] | m[j + 4] >> 4 << 6 for j in range(4)]
    packed += [s[j] & 15 | (m[j] & 15) << 4 for j in range(4, 8)]
    runs = [codes[j] | codes[j + 1] << 4 for j in range(0, 8, 2)]
    return np.concatenate([np.array([d, dmin]).view(np.uint8), np.array(packed, np.uint8), *runs])


def test_q4_k_has_the_bytes_of_ggmls_recipe():
    w = weights()[:12, :256]
    wanted = np.stack([q4_k(row) for row in w.numpy()])
    assert np.array_equal(encode(w, "q4_k").numpy(), wanted)


def fit_q6_k(x):
    """Scale and codes of a group: ggml's make_qx_quants with rmse_type 1, one number at a time."""
    largest = x[np.abs(x).argmax()]
    if abs(largest) < 1e-15:
        return f32(0), np.zeros(16, f32)
    best = scale = f32(0)
    for step in (0, *range(-9, 0), *range(1, 10)):
        tried = nearest(-(f32(32) + f32(0.1) * f32(step)) / largest * x, -32, 31)
        sum_xl = sum_l2 = f32(0)
        for xi, c in zip(x, tried, strict=True):
            w = xi * xi
            sum_xl, sum_l2 = sum_xl + w * xi * c, sum_l2 + w * c * c
        if step == 0 or (sum_l2 > 0 and sum_xl * sum_xl > best * sum_l2):
            scale, codes = sum_xl / sum_l2, tried + 32
            best = scale * sum_xl
    return scale, codes


def q6_k(x):
    """The 210 bytes of 256 weights: ggml's quantize_row_q6_K_ref."""
    fits = [fit_q6_k(group) for group in x.reshape(16, 16)]
    largest = max((fit[0] for fit in fits), key=abs)
    if abs(largest) < 1e-15:
        return np.zeros(210, np.uint8)
    inverse = f32(-128) / largest
    d = np.float16(f32(1) / inverse)
    s = [int(nearest(inverse * fit[0], -128, 127)) for fit in fits]
    codes = []
    for group, fit, its in zip(x.reshape(16, 16), fits, s, strict=True):
        step = f32(d) * f32(its)
        codes.append(fit[1] if step == 0 else nearest(group / step, -32, 31) + 32)
    q = np.concatenate(codes).astype(np.uint8).reshape(2, 4, 32)
    low = np.concatenate([q[:, 0] & 15 | (q[:, 2] & 15) << 4, q[:, 1] & 15 | (q[:, 3] & 15) << 4], 1)
    high = q[:, 0] >> 4 | q[:, 1] >> 4 << 2 | q[:, 2] >> 4 << 4 | q[:, 3] >> 4 << 6
    scales = np.array(s, np.int8).view(np.uint8)
    return np.concatenate([low.ravel(), high.ravel(), scales, np.array([d]).view(np.uint8)])


def test_q6_k_has_the_bytes_of_ggmls_recipe():
    w = weights()[:12, :256]
    wanted = np.stack([q6_k(row) for row in w.numpy()])
    assert np.array_equal(encode(w, "q6_k").numpy(), wanted)


def test_q4_k_is_better_than_the_ends_of_each_group():
    """Compare with a scale and a minimum in float32 that the extremes of a group give."""
    w = 0.03 * torch.randn(64, 1024, generator=torch.Generator().manual_seed(2))
    low, high = (t.clamp(max=0) if i == 0 else t for i, t in enumerate(w.reshape(-1, 32).aminmax(dim=1, keepdim=True)))
    step = (high - low) / 15
    naive = (((w.reshape(-1, 32) - low) / step).round() * step + low).reshape(w.shape)
    error = lambda x: (x - w).square().mean().sqrt().item()
    assert error(decode(encode(w, "q4_k"), "q4_k")) < 0.99 * error(naive)


# Relative root mean square errors of normal weights.
ERRORS = {"f32": 0.0, "f16": 2.2e-4, "bf16": 1.8e-3, "q8_0": 5.4e-3, "q6_k": 1.8e-2, "q4_k": 7.2e-2, "q4_0": 9.3e-2}


@pytest.mark.parametrize("kind", KINDS)
def test_error(kind):
    w = torch.randn(64, 4096, generator=torch.Generator().manual_seed(3))
    got = ((decode(encode(w, kind), kind) - w).square().mean().sqrt()).item()
    assert ERRORS[kind] * 0.9 <= got <= ERRORS[kind] * 1.05


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_do_not_show(kind, monkeypatch):
    w = weights()[:12]
    whole = encode(w, kind)
    monkeypatch.setattr("fquant.io.gguf_blocks.CHUNK", 256)
    assert torch.equal(encode(w, kind), whole)


WRONG = {
    "width": ((2, 100), 1.0, "q4_k", "width 100 is not a multiple of the 256 elements of a block of q4_k; use f16"),
    "narrow": ((2, 96), 1.0, "q4_k", "width 96 .* use q8_0 or q4_0"),
    "nan": ((2, 256), float("nan"), "q8_0", "q8_0: got a weight that is NaN or infinite"),
    "infinite": ((2, 256), float("inf"), "f32", "f32: got a weight that is NaN or infinite"),
    "beyond float16": ((2, 256), 1e5, "f16", "f16: got 100000, beyond the range of float16; use f32 or bf16"),
    "scale": ((2, 256), 1e9, "q4_0", "q4_0: got a scale of 1.25e.08, beyond float16"),
}


@pytest.mark.parametrize("shape, fill, kind, fault", WRONG.values(), ids=WRONG)
def test_refused(shape, fill, kind, fault):
    with pytest.raises(ValueError, match=fault):
        encode(torch.full(shape, fill), kind)
