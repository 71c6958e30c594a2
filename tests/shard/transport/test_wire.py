"""Quantised messages: their codes are the nearest, and what they decode to does not depend on ranks."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shard.transport import wire
from shard.transport.wire import BLOCK, Message
from tests.helpers.sharding.meshes import drawn

MATRICES = (3, 1, 4)  # blocks of each
VECTORS = 2


def flat(ranks):
    """Return values of three matrices and two vectors, padded to whole blocks of each rank."""
    n = sum(MATRICES) + VECTORS
    out = torch.zeros(-(-n // ranks) * ranks * BLOCK)
    out[: n * BLOCK] = drawn(n * BLOCK) * torch.logspace(-3, 2, n).repeat_interleave(BLOCK)
    out[2 * BLOCK : 3 * BLOCK] = 0  # a block of zeros
    return out


def messages(kind, dtype, ranks):
    """Return what each rank sends, and what all decode."""
    total = sum(MATRICES) + VECTORS
    of = [Message(kind, dtype, MATRICES, total, rank, ranks) for rank in range(ranks)]
    parts = flat(ranks).chunk(ranks)
    scales = None
    if kind.statistic is not None:
        each = torch.stack([wire.magnitudes(part, it) for part, it in zip(parts, of, strict=True)])
        found = each.amax(0) if kind.statistic == "max" else each.sum(0)
        scales = wire.scales_of(found, of[0], [count * BLOCK for count in MATRICES])
    sent = [wire.encode(part, scales, it) for part, it in zip(parts, of, strict=True)]
    assert {t.shape for t in sent} == {(of[0].nbytes(len(parts[0]) // BLOCK),)}
    decoded = {it.rank: wire.decode(torch.cat(sent), scales, it, len(parts[0])) for it in of}
    assert all(torch.equal(decoded[0], other) for other in decoded.values())
    return sent, decoded[0], scales


def rounded(kind, w, scale):
    """Return the values of a matrix as its format has them, by elements."""
    if kind.name == "ternary":
        return (w / scale).round().clamp(-1, 1) * scale
    return (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", wire.WIRES.values(), ids=wire.WIRES)
def test_values(kind, dtype):
    sent, decoded, scales = messages(kind, dtype, 1)
    n, given = sum(MATRICES) * BLOCK, flat(1)
    assert torch.equal(decoded[n : n + VECTORS * BLOCK], given[n : n + VECTORS * BLOCK].to(dtype))
    if kind is wire.INT8:
        w = given[:n].view(-1, BLOCK)
        scale, codes = w.abs().amax(1, keepdim=True) / 127, sent[0][:n].view(torch.int8).view(-1, BLOCK)
        assert torch.equal(decoded[:n], (codes.float() * scale).to(dtype).view(-1))
        assert (codes.double() * scale - w).abs().le(0.5000001 * scale).all()  # the nearest
        assert (codes.abs().amax(1) == 127).sum() == sum(MATRICES) - 1  # of all blocks but that of zeros
        return
    for w, got, scale in zip(given[:n].split([c * BLOCK for c in MATRICES]), decoded[:n].split([c * BLOCK for c in MATRICES]), scales, strict=True):  # fmt: skip # noqa: E501
        want = w.abs().max() / 448 if kind is wire.FP8 else w.abs().double().mean()
        torch.testing.assert_close(scale.double(), want.double(), rtol=1e-6, atol=0)
        assert torch.equal(got, rounded(kind, w, scale).to(dtype))


@pytest.mark.parametrize("ranks", [2, 3, 5, 11])
@pytest.mark.parametrize("kind", wire.WIRES.values(), ids=wire.WIRES)
def test_bits_do_not_depend_on_ranks(kind, ranks):
    """Up to more ranks than blocks."""
    _, want, scales = messages(kind, torch.bfloat16, 1)
    _, got, other = messages(kind, torch.bfloat16, ranks)
    n = (sum(MATRICES) + VECTORS) * BLOCK
    assert torch.equal(got[:n], want[:n]) and not got[n:].any()
    assert scales is None or torch.equal(scales, other)


@pytest.mark.parametrize(("kind", "bits"), [(wire.INT8, 8 + 32 / 256), (wire.FP8, 8), (wire.TERNARY, 2)], ids=str)
def test_bytes(kind, bits):
    """Of one rank those of its content; of many, those of the rank with the most."""
    (one,), _, _ = messages(kind, torch.bfloat16, 1)
    wanted = sum(MATRICES) * BLOCK * bits / 8 + VECTORS * BLOCK * 2
    assert len(one) == math.ceil(wanted / wire.ALIGN) * wire.ALIGN
    many, _, _ = messages(kind, torch.bfloat16, 5)  # the last has the vectors
    assert len(many[0]) == VECTORS * BLOCK * 2


@pytest.mark.parametrize("kind", wire.WIRES.values(), ids=wire.WIRES)
def test_zeros_and_what_is_not_finite(kind):
    """A matrix of zeros is zeros. A NaN or an infinity is not hidden."""
    it = Message(kind, torch.float32, (1, 1), 2, 0, 1)
    for value in (0.0, math.nan, math.inf):
        given = torch.zeros(2 * BLOCK)
        given[3] = value
        scales = None
        if kind.statistic:
            scales = wire.scales_of(wire.magnitudes(given, it), it, [BLOCK, BLOCK])
        got = wire.decode(wire.encode(given, scales, it), scales, it, len(given))
        assert not got[BLOCK:].any()
        if value == 0:
            assert not got.any()
        elif kind is not wire.TERNARY:
            assert not got[:BLOCK].isfinite().all()


@pytest.mark.parametrize("kind", wire.WIRES.values(), ids=wire.WIRES)
def test_fake_tensors_have_the_shapes(kind):
    it, given = Message(kind, torch.bfloat16, (3, 1), 6, 1, 2), flat(2)[: 3 * BLOCK]
    scales = None if kind.statistic is None else torch.ones(2)
    message = wire.encode(given, scales, it)
    decoded = wire.decode(torch.cat([message, message]), scales, it, len(given))
    with FakeTensorMode() as mode:
        fake = None if scales is None else mode.from_tensor(scales)
        sent = wire.encode(mode.from_tensor(given), fake, it)
        got = wire.decode(torch.cat([sent, sent]), fake, it, len(given))
    assert (sent.shape, sent.dtype) == (message.shape, message.dtype)
    assert (got.shape, got.dtype) == (decoded.shape, decoded.dtype)
