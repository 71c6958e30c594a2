"""Dither: the size of the random update beside the rounding of the base, and what it is good for."""

import pytest
import torch

from fquant import lora, quantize, random
from fquant.format import INT8, NF4
from fquant.lora import Lora
from fquant.packed import dequantize
from fquant.packed_linear import scaling
from tests.helpers.arrays import assert_equal


def draw(name, *shape):
    return random.normal(random.fold(random.key(11), name), shape)


@pytest.mark.parametrize("strength", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("format", [NF4, INT8], ids=str)
def test_dither_is_as_large_as_rounding(format, strength):
    """Compare with the error of rounding normal weights; the values depend on the key and the path alone."""
    w = draw("w", 256, 512)
    base = {"w": quantize(w, format), "k": w}
    start = lora.init(base, "w|k", 16, alpha=8.0, key=1)
    got = lora.dither(base, start, 5, strength)
    part = got["w"]
    size = (scaling(part) * part.b @ part.a).square().mean().sqrt()
    error = (dequantize(base["w"]) - w).square().mean().sqrt()
    torch.testing.assert_close(size, strength * error, rtol=0.15, atol=1e-9)
    assert got["k"] is start["k"]
    assert_equal(lora.dither(base, {"w": start["w"]}, 5, strength)["w"], part)
    with pytest.raises(ValueError, match="strength is -1; wanted at least 0"):
        lora.dither(base, start, strength=-1)


@pytest.mark.parametrize("strength, share", [(0.0, 0.05), (3.0, 0.6)])
def test_dither_lets_small_updates_through(strength, share):
    """An update of a tenth of a rounding error vanishes in a merge, unless the weights are off the format's values."""
    base = {"w": quantize(draw("w", 256, 512), NF4)}
    start = lora.dither(base, lora.init(base, "w", 16, alpha=16.0, key=1), 5, strength)
    update = draw("u", 256, 1) @ draw("v", 1, 512)
    update = update * 0.01 / update.square().mean().sqrt()
    more = Lora(torch.cat([start["w"].a, draw("v", 1, 512)]), torch.cat([start["w"].b, draw("u", 256, 1)], 1))
    assert scaling(start["w"]) == 1.0
    factor = 0.01 / (more.b[:, -1:] @ more.a[-1:]).square().mean().sqrt()
    more = Lora(more.a, torch.cat([more.b[:, :-1], factor * more.b[:, -1:]], 1), alpha=17.0)
    before, after = (dequantize(lora.merge_packed(base, {"w": x})[0]["w"]) for x in (start["w"], more))
    arrived = ((after - before) * update).sum() / update.square().sum()  # the part along the update
    assert arrived > share if strength else arrived < share, arrived


def test_refusals():
    base = {"w": quantize(draw("w", 8, 64), NF4)}
    dora = lora.init(base, "w", 2, dora=True)
    with pytest.raises(ValueError, match="w: got DoRA, which merge-aware training does not support"):
        lora.dither(base, dora)
    with pytest.raises(ValueError, match="w: got a str, wanted a weight; read or load it first"):
        lora.dither({"w": "x"}, lora.init(base, "w", 2))
