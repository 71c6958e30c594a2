"""The VQ-VAE (van den Oord et al. 2017, "Neural Discrete Representation Learning"): images to a grid of codes and back.

    images [b c h w]  --encode-->  latents [b h/s w/s dim]  --quantiser-->  codes i64[b h/s w/s]
    images [b c h w]  <--decode--  code vectors [b h/s w/s dim]

That is the network of section 4.1, with a convolution to and from the latents, for images whose sides s divides.

The quantiser is an argument: a state of ``fquant.vq``, and ``verbs``, the module of its functions: ``vq`` itself for a
Book, ``vq.fsq`` for an FSQ, ``vq.residual`` for a Residual. Nothing here updates the state or sums over ranks.

    losses, out = loss(params, book, images, key)                     # {"reconstruction": Mean, "commitment": Mean}
    book        = vq.update(book, out.stats)
    images      = from_codes(params, book, to_codes(params, book, images))
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from fquant import random, tree, vq
from fquant.vq import Mean, Quantized

WINDOW = 4  # of the convolutions that halve and double
MIDDLE = 0.5  # of the values of an image, which are in [0, 1]


@tree.value
@dataclass(frozen=True)
class AutoencoderConfig:
    """The sizes of an autoencoder; ``dim`` is that of the quantiser."""

    dim: int = 32  # channels of the latents
    channels: int = 3  # of an image
    hidden: int = 64  # channels inside; half as many next to the image
    inner: int = 32  # channels inside of a residual block
    num_blocks: int = 2  # residual blocks in the encoder, and as many in the decoder
    halvings: int = 2  # a latent stands for 2^halvings x 2^halvings pixels

    def __post_init__(self) -> None:
        for name, got in vars(self).items():
            if got < (least := {"hidden": 2, "num_blocks": 0}.get(name, 1)):
                raise ValueError(f"{name} is {got}; wanted at least {least}")

    @property
    def scale(self) -> int:
        """The pixels along a side of one latent."""
        return 2**self.halvings


@tree.node
class Conv:
    """A convolution: of weight f[out in k k], transposed ones [in out k k], and bias f[out]."""

    weight: Tensor
    bias: Tensor


@tree.node
class ResidualBlock:
    """A residual branch, added to its input: relu, 3 x 3, relu, 1 x 1."""

    wide: Conv
    back: Conv


@tree.node
class Coder:
    """One half of an autoencoder. An encoder applies the fields in order, a decoder in reverse."""

    scales: list[Conv]  # 4 x 4 in steps of 2, s = 2^halvings; transposed in a decoder
    blocks: list[ResidualBlock]
    latent: Conv  # 1 x 1 to dim, or 3 x 3 from dim


@tree.node
class Autoencoder:
    """The parameters of both halves."""

    encoder: Coder
    decoder: Coder


def init(cfg: AutoencoderConfig, key: Tensor, dtype: torch.dtype = torch.float32) -> Autoencoder:
    """Draw parameters from a key as torch's nn.Conv2d and nn.ConvTranspose2d do: uniform in ±1/sqrt(fan in)."""
    half = cfg.hidden // 2
    widths = [cfg.channels, *[half] * (cfg.halvings - 1), cfg.hidden]

    def conv(name: str, out: int, width: int, window: int, transposed: bool = False) -> Conv:
        shape = (width, out, window, window) if transposed else (out, width, window, window)
        key_of_conv, fan_in = random.fold(key, name), math.prod(shape[1:])
        weight = random.kaiming_uniform(random.fold(key_of_conv, "weight"), shape, fan_in)
        bias = random.kaiming_uniform(random.fold(key_of_conv, "bias"), (out,), fan_in)
        return Conv(weight.to(dtype), bias.to(dtype))

    def blocks(coder: str) -> list[ResidualBlock]:
        names = [f"{coder}.blocks.{i}" for i in range(cfg.num_blocks)]
        wide = [conv(f"{name}.wide", cfg.inner, cfg.hidden, 3) for name in names]
        return list(map(ResidualBlock, wide, [conv(f"{name}.back", cfg.hidden, cfg.inner, 1) for name in names]))

    pairs = list(zip(widths, widths[1:], strict=False))
    down = [conv(f"encoder.scales.{i}", wide, thin, WINDOW) for i, (thin, wide) in enumerate(pairs)]
    up = [conv(f"decoder.scales.{i}", thin, wide, WINDOW, True) for i, (thin, wide) in enumerate(reversed(pairs))]
    return Autoencoder(
        Coder(down, blocks("encoder"), conv("encoder.latent", cfg.dim, cfg.hidden, 1)),
        Coder(up, blocks("decoder"), conv("decoder.latent", cfg.hidden, cfg.dim, 3)),
    )


def encode(params: Autoencoder, images: Tensor) -> Tensor:
    """Encode images f[b c h w] in [0, 1] to latents f[b h/s w/s dim] in the dtype of the parameters.

    Raises TypeError unless images are floats, ValueError for other shapes, or sides that s does not divide.
    """
    coder = params.encoder
    channels, side = coder.scales[0].weight.shape[1], 2 ** len(coder.scales)
    if not images.is_floating_point():
        raise TypeError(f"images: got {images.dtype}; wanted floats in [0, 1], use images.float() / 255")
    if images.ndim != 4 or images.shape[1] != channels:
        raise ValueError(f"images: got shape {tuple(images.shape)}; wanted [b {channels} h w]")
    height, width = images.shape[2:]
    if height % side or width % side:
        raise ValueError(f"images: got {height} x {width} pixels; wanted multiples of {side}, crop or pad them")
    x = images.to(coder.latent.weight.dtype) - MIDDLE
    for i, scale in enumerate(coder.scales):
        x = F.conv2d(F.relu(x) if i else x, scale.weight, scale.bias, stride=2, padding=1)
    x = F.relu(_blocks(x, coder.blocks))
    return rearrange(F.conv2d(x, coder.latent.weight, coder.latent.bias), "b d h w -> b h w d")


def decode(params: Autoencoder, latents: Tensor) -> Tensor:
    """Decode latents f[b h/s w/s dim] to images f[b c h w], roughly in [0, 1]; ValueError for another shape."""
    coder = params.decoder
    dim = coder.latent.weight.shape[1]
    if latents.ndim != 4 or latents.shape[-1] != dim:
        raise ValueError(f"latents: got shape {tuple(latents.shape)}; wanted [b h w {dim}]")
    x = rearrange(latents.to(coder.latent.weight.dtype), "b h w d -> b d h w")
    x = _blocks(F.conv2d(x, coder.latent.weight, coder.latent.bias, padding=1), coder.blocks)
    for scale in coder.scales:
        x = F.conv_transpose2d(F.relu(x), scale.weight, scale.bias, stride=2, padding=1)
    return x + MIDDLE


def to_codes(params: Autoencoder, state: Any, images: Tensor, verbs: Any = vq) -> Tensor:
    """Return the codes i64[b h/s w/s ...] of images f[b c h w]."""
    return verbs.encode(state, encode(params, images))


def from_codes(params: Autoencoder, state: Any, codes: Tensor, verbs: Any = vq) -> Tensor:
    """Return the images f[b c h w] in [0, 1] of codes i64[b h/s w/s ...]."""
    return decode(params, verbs.decode(state, codes)).clamp(0, 1)


def forward(
    params: Autoencoder, state: Any, images: Tensor, key: Tensor | None = None, verbs: Any = vq, **options: Any
) -> tuple[Tensor, Quantized]:
    """Reconstruct images f[b c h w]; return them with the output of ``verbs.apply`` for ``key`` and ``options``."""
    out = verbs.apply(state, encode(params, images), key, **options)
    return decode(params, out.x), out


def loss(
    params: Autoencoder, state: Any, images: Tensor, key: Tensor | None = None, verbs: Any = vq, **options: Any
) -> tuple[dict[str, Mean], Quantized]:
    """Return the losses of :func:`forward`, without weights, and the quantiser's output.

    "reconstruction" is the mean square difference of all values of the images; the others are the quantiser's own. All
    are float32 at least.
    """
    decoded, out = forward(params, state, images, key, verbs, **options)
    dtype = torch.promote_types(decoded.dtype, torch.float32)
    square = (decoded.to(dtype) - images.to(dtype)).square().sum()
    return {"reconstruction": Mean(square, square.new_full((), images.numel())), **out.losses}, out


def _blocks(x: Tensor, blocks: list[ResidualBlock]) -> Tensor:
    for block in blocks:
        y = F.conv2d(F.relu(x), block.wide.weight, block.wide.bias, padding=1)
        x = x + F.conv2d(F.relu(y), block.back.weight, block.back.bias)
    return x
