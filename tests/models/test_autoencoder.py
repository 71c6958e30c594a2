"""The VQ-VAE against torch's modules, finite differences in float64, and loops under the transforms."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from fquant import jit, random, tree, vq
from fquant.vq.composite import residual
from fquant.vq.scalar import fsp, fsq, lfq
from models import autoencoder
from models.autoencoder import AutoencoderConfig
from tests.helpers.cases import slow_after
from tests.helpers.vq.peers import assert_close

SMALL = AutoencoderConfig(dim=6, hidden=8, inner=4, num_blocks=2, halvings=2)
KEY = random.key(5)
QUANTISERS = {  # verbs, a state for rows of 6, and options of apply
    "vq": (vq, vq.init(0, 16, 6), {"draw": True}),
    "learnable": (vq, vq.init(0, 16, 6, learnable=True), {"losses": ("commitment", "orthogonal")}),
    "cosine": (vq, vq.init(0, 16, 6, metric="cosine"), {"temperature": 0.5}),
    "affine": (vq, vq.init(0, 16, 6, affine=True), {"gradient": vq.straight_through}),
    "fsq": (fsq, fsq.init(0, (5, 4, 3), 6), {}),
    "fsp": (fsp, fsp.init(0, (5, 4, 3), 6), {}),
    "lfq": (lfq, lfq.init(0, 4, 6), {"inv_temperature": 2.0}),
    "residual fsq": (residual, residual.init_fsq(0, (5, 4, 3), 3, 6, dropout=True), {}),
    "residual lfq": (residual, residual.init_lfq(0, 6, 2), {}),
}


def images(number=3, height=16, width=24, channels=3, dtype=torch.float32, seed=0):
    key = random.fold(random.key(seed), "images")
    return random.uniform(key, (number, channels, height, width), torch.float64).to(dtype)


def params(seed=0, cfg=SMALL, dtype=torch.float32):
    return autoencoder.init(cfg, random.key(seed), dtype)


def total(weights, state, x, key=KEY, verbs=vq, **options):
    losses, out = autoencoder.loss(weights, state, x, key, verbs, **options)
    return sum(vq.mean(loss).sum() for loss in losses.values()), (losses, out.codes, out.stats)


def value(weights, *args, **options):
    return total(weights, *args, **options)[0]


# --- what it computes


class Block(nn.Module):
    def __init__(self, of):
        super().__init__()
        width, inner = of.wide.weight.shape[1], of.wide.weight.shape[0]
        self.net = nn.Sequential(
            nn.ReLU(), nn.Conv2d(width, inner, 3, padding=1), nn.ReLU(), nn.Conv2d(inner, width, 1)
        )
        for layer, conv in zip(self.net[1::2], (of.wide, of.back), strict=True):
            fill(layer, conv)

    def forward(self, x):
        return x + self.net(x)


def fill(layer, conv):
    layer.weight.data, layer.bias.data = conv.weight.clone(), conv.bias.clone()
    return layer


def peer(weights):
    """Build the autoencoder of torch's modules: an encoder to [b dim h w], a decoder from it."""
    down, up = weights.encoder.scales, weights.decoder.scales
    encoder: list[nn.Module] = []
    decoder: list[nn.Module] = [fill(nn.Conv2d(SMALL.dim, SMALL.hidden, 3, padding=1), weights.decoder.latent)]
    for conv in down:
        encoder += [fill(nn.Conv2d(conv.weight.shape[1], len(conv.weight), 4, 2, 1), conv), nn.ReLU()]
    encoder[-1:] = map(Block, weights.encoder.blocks)  # these begin with a relu
    encoder += [nn.ReLU(), fill(nn.Conv2d(SMALL.hidden, SMALL.dim, 1), weights.encoder.latent)]
    decoder += list(map(Block, weights.decoder.blocks))
    for conv in up:
        decoder += [nn.ReLU(), fill(nn.ConvTranspose2d(len(conv.weight), conv.weight.shape[1], 4, 2, 1), conv)]
    return nn.Sequential(*encoder).double(), nn.Sequential(*decoder).double()


def test_is_the_network_of_torchs_layers():
    weights, x = params(dtype=torch.float64), images(dtype=torch.float64)
    encoder, decoder = peer(weights)
    latents = encoder(x - 0.5)
    torch.testing.assert_close(autoencoder.encode(weights, x), latents.movedim(1, -1))
    torch.testing.assert_close(autoencoder.decode(weights, latents.movedim(1, -1)), decoder(latents) + 0.5)
    assert sum(p.numel() for m in (encoder, decoder) for p in m.parameters()) == tree.nbytes(weights) // 8


def unclamped(weights, state, codes, verbs):
    return autoencoder.decode(weights, verbs.decode(state, codes))


@pytest.mark.parametrize("verbs, state, options", QUANTISERS.values(), ids=QUANTISERS)
def test_every_quantiser(verbs, state, options):
    weights, x = params(), images()
    made, out = autoencoder.forward(weights, state, x, KEY, verbs, **options)
    assert made.shape == x.shape and out.codes.shape[:3] == (3, 4, 6) and out.codes.dtype == torch.int64
    assert_close(made, autoencoder.decode(weights, out.x), 0)
    losses, again = autoencoder.loss(weights, state, x, KEY, verbs, **options)
    assert losses.keys() == {"reconstruction", *out.losses} and torch.equal(again.codes, out.codes)
    assert_close(vq.mean(losses["reconstruction"]), (made - x).square().mean(), 1e-6)
    assert_close({name: losses[name] for name in out.losses}, out.losses, 0)
    verbs.update(state, out.stats)

    codes = autoencoder.to_codes(weights, state, x, verbs)
    assert torch.equal(codes, verbs.encode(state, autoencoder.encode(weights, x)))
    bright = tree.map_at(r"decoder\.scales\.1\.bias", lambda t: t + torch.tensor([0.6, -0.6, 0.0]), weights)
    back, plain = (f(bright, state, codes, verbs) for f in (autoencoder.from_codes, unclamped))
    assert plain.min() < 0 and plain.max() > 1
    assert_close(back, plain.clamp(0, 1), 0)


@pytest.mark.parametrize("halvings, blocks, channels", [(1, 0, 1), (2, 1, 3), (3, 2, 4)])
def test_sizes(halvings, blocks, channels):
    cfg = AutoencoderConfig(dim=5, channels=channels, hidden=6, inner=3, num_blocks=blocks, halvings=halvings)
    weights, x = params(cfg=cfg), images(2, 16, 8, channels)
    latents = autoencoder.encode(weights, x)
    assert latents.shape == (2, 16 // cfg.scale, 8 // cfg.scale, 5)
    assert autoencoder.decode(weights, latents).shape == x.shape
    assert len(weights.encoder.blocks) == len(weights.decoder.blocks) == blocks


def test_init_is_of_its_key_and_of_torchs_bounds():
    first, second = params(1), params(2)
    assert_close(params(1), first, 0)
    for (path, t), u in zip(tree.items(first), tree.leaves(second), strict=True):
        assert not torch.equal(t, u), path
    for layer in (nn.Conv2d(12, 40, 3), nn.ConvTranspose2d(40, 12, 4)):
        name = "blocks.0.wide" if isinstance(layer, nn.Conv2d) else "scales.1"
        cfg = (
            AutoencoderConfig(hidden=12, inner=40)
            if name.startswith("b")
            else AutoencoderConfig(hidden=40, channels=12)
        )
        coder = params(cfg=cfg).encoder if name.startswith("b") else params(cfg=replace(cfg, halvings=1)).decoder
        weight = tree.get(coder, name if name.startswith("b") else "scales.0").weight
        assert weight.shape == layer.weight.shape
        assert weight.abs().max().item() == pytest.approx(layer.weight.abs().max().item(), rel=0.02)


# --- its derivatives


def test_gradient_is_that_of_differences():
    """Compare with differences in float64; the straight-through offset and the commitment's codes are constants."""
    weights, x = params(dtype=torch.float64), images(dtype=torch.float64)
    book = tree.map(torch.Tensor.double, vq.init(0, 16, 6))
    got = grad(partial(value, gradient=vq.straight_through))(weights, book, x)
    start = autoencoder.encode(weights, x)
    q = vq.decode(book, vq.encode(book, start))

    def smooth(weights):
        latents = autoencoder.encode(weights, x)
        made = autoencoder.decode(weights, latents + (q - start))
        return (made - x).square().mean() + (latents - q).square().mean()

    step = 1e-6  # so small that no relu turns
    for i, (path, t) in enumerate(tree.items(weights)):
        way = random.normal(random.key(i), tuple(t.shape), torch.float64)
        ends = []
        for sign in (1, -1):
            leaves, structure = tree.flatten(weights)
            leaves[i] = t + sign * step * way
            ends.append(smooth(tree.unflatten(structure, leaves)))
        slope = (ends[0] - ends[1]) / (2 * step)
        mine = (tree.leaves(got)[i] * way).sum()
        assert mine.item() == pytest.approx(slope.item(), rel=1e-5, abs=1e-9), path


def test_float32_gradient_is_that_of_float64():
    x = images(dtype=torch.float64)
    both = []
    for dtype in (torch.float32, torch.float64):
        weights = tree.map(lambda t, dtype=dtype: t.to(dtype), params())
        both.append(grad(value)(weights, tree.map(lambda t, dtype=dtype: t.to(dtype), vq.init(0, 16, 6)), x.to(dtype)))
    assert_close(tree.map(torch.Tensor.double, both[0]), both[1], 1e-5)


@pytest.mark.parametrize("name", slow_after(3, QUANTISERS))
def test_captured_to_the_bit(name):
    verbs, state, options = QUANTISERS[name]
    step = torch.func.grad_and_value(partial(total, verbs=verbs, **options), has_aux=True)
    wanted, got = (f(params(), state, images(), KEY) for f in (step, jit(lambda *args: step(*args))))
    for (path, a), b in zip(tree.items(got), tree.leaves(wanted), strict=True):
        assert torch.equal(a, b), path


@pytest.mark.parametrize("name", QUANTISERS)
def test_many_seeds_at_once(name):
    """Map stacked states, keys and images, in float64, so that no rounding decides on a code."""
    verbs, state, options = QUANTISERS[name]
    double = lambda t: t.double() if t.is_floating_point() else t
    f = torch.func.grad_and_value(partial(total, verbs=verbs, **options), has_aux=True)
    states = [tree.map(lambda t, i=i: double(t) * (1 + i / 10), state) for i in range(3)]
    given = lambda seed: (params(seed, dtype=torch.float64), states[seed], images(dtype=torch.float64, seed=seed))
    each = [(*given(seed), random.key(seed)) for seed in range(3)]
    stack = lambda *trees: tree.map(lambda *leaves: torch.stack(leaves), *trees)
    together = vmap(f)(*(stack(*column) for column in zip(*each, strict=True)))
    assert_close(together, stack(*(f(*one) for one in each)), 1e-9)


def test_bf16_has_losses_and_state_of_float32():
    weights, x = params(dtype=torch.bfloat16), images(dtype=torch.bfloat16)
    losses, out = autoencoder.loss(weights, vq.init(0, 16, 6), x)
    assert out.x.dtype == torch.bfloat16 and out.stats.sums.dtype == torch.float32
    assert all(leaf.dtype == torch.float32 for leaf in tree.leaves(losses))
    exact, _ = autoencoder.loss(params(), vq.init(0, 16, 6), images())
    assert vq.mean(losses["reconstruction"]).item() == pytest.approx(vq.mean(exact["reconstruction"]).item(), rel=0.02)


# --- bad input

WRONG = {
    "integers": (
        lambda: autoencoder.encode(params(), torch.zeros(1, 3, 8, 8, dtype=torch.uint8)),
        "images: got torch.u",
    ),
    "no batch": (lambda: autoencoder.encode(params(), images()[0]), r"got shape \(3, 16, 24\); wanted \[b 3 h w\]"),
    "channels": (lambda: autoencoder.encode(params(), images(channels=1)), r"wanted \[b 3 h w\]"),
    "sides": (lambda: autoencoder.encode(params(), images(2, 16, 18)), "got 16 x 18 pixels; wanted multiples of 4"),
    "latents": (lambda: autoencoder.decode(params(), torch.zeros(2, 4, 4, 5)), r"latents: .* wanted \[b h w 6\]"),
    "hidden": (lambda: AutoencoderConfig(hidden=1), "hidden is 1; wanted at least 2"),
    "dim": (lambda: AutoencoderConfig(dim=0), "dim is 0; wanted at least 1"),
    "quantiser": (lambda: autoencoder.forward(params(), vq.init(0, 4, 5), images()), r"for a book of 5 dims"),
}


@pytest.mark.parametrize("call, message", WRONG.values(), ids=WRONG)
def test_bad_input(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
