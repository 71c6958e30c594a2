"""The photographs in scikit-image's wheel, and random patches of them. Nothing is downloaded.

    |<- 2/5 ->|<1/5>|<- 2/5 ->|        training patches come from left and right of the middle fifth of a photograph,
    |  train  |held | train   |        which is held out

The key of a patch decides its place, uniformly over all photographs, and whether it is mirrored. Each rank cuts its own
patches, and together they are those of one process.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fquant import random

PORTRAIT = 2  # height over width of the displayed crop


class Photograph(NamedTuple):
    """A name, and pixels u8[3 h w]."""

    name: str
    pixels: Tensor


class Part(NamedTuple):
    """Some columns of a photograph, u8[3 h w], and the number of places for a patch in it."""

    pixels: Tensor
    places: int


def load() -> list[Photograph]:
    """Load five colour photographs; ValueError if scikit-image is not installed."""
    try:
        from skimage import data
    except ImportError:
        raise ValueError(
            "scikit-image is not installed; wanted its photographs, pip install 'fquant[images]'"
        ) from None
    images = {name: getattr(data, name)() for name in ("astronaut", "chelsea", "coffee", "rocket")}
    images["motorcycle"] = data.stereo_motorcycle()[0]
    return [Photograph(name, torch.tensor(pixels).movedim(-1, 0)) for name, pixels in images.items()]


def parts(photographs: list[Photograph], size: int) -> list[Part]:
    """Return the training parts for patches of ``size`` x ``size``. Raises ValueError if a held-out part is smaller."""
    most = min(min(held(photograph).shape[1:]) for photograph in photographs)
    if not 1 <= size <= most:
        raise ValueError(f"--patch is {size}; wanted 1 to {most}, which fits into every held-out part")
    out = []
    for photograph in photographs:
        first, last = _middle(photograph)
        for pixels in (photograph.pixels[:, :, :first], photograph.pixels[:, :, last:]):
            height, width = pixels.shape[1:]
            out.append(Part(pixels, (height - size + 1) * (width - size + 1)))
    return out


def patches(parts: list[Part], keys: Tensor, size: int) -> Tensor:
    """Cut a patch for each of ``keys`` i64[n]: f32[n 3 size size] in [0, 1]."""
    total = sum(part.places for part in parts)
    high, low, mirrored = random.bits(keys, (len(keys), 3)).unbind(-1)
    places = ((high >> 1) << 32 | low) % total
    out = torch.empty(len(keys), 3, size, size)
    for i, (place, mirror) in enumerate(zip(places.tolist(), mirrored.tolist(), strict=True)):
        for part in parts:
            if place < part.places:
                break
            place -= part.places
        top, left = divmod(place, part.pixels.shape[2] - size + 1)
        patch = part.pixels[:, top : top + size, left : left + size] / 255
        out[i] = patch.flip(-1) if mirror % 2 else patch
    return out


def variance(parts: list[Part]) -> float:
    """Return the variance of all training values in [0, 1]."""
    return float(torch.cat([part.pixels.reshape(-1) for part in parts]).double().div(255).var())


def held(photograph: Photograph) -> Tensor:
    """Return the held-out part, u8[3 h w]."""
    first, last = _middle(photograph)
    return photograph.pixels[:, :, first:last]


def tiles(photographs: list[Photograph], size: int) -> Tensor:
    """Cut the held-out parts into adjacent tiles, f32[n 3 size size] in [0, 1]; remainders at edges are dropped."""
    grids = [held(photograph).unfold(1, size, size).unfold(2, size, size) for photograph in photographs]
    return torch.cat([grid.flatten(1, 2).movedim(0, 1) for grid in grids]) / 255  # of [3 rows columns size size]


def portrait(photograph: Photograph, multiple: int) -> Tensor:
    """Crop the held-out part for display: at most twice as high as wide, f32[3 h w] in [0, 1], sides of a multiple."""
    part = held(photograph)
    width = part.shape[2] // multiple * multiple
    height = min(part.shape[1] // multiple * multiple, PORTRAIT * width)
    top = (part.shape[1] - height) // 8  # faces are near the top
    return part[:, top : top + height, :width] / 255


def _middle(photograph: Photograph) -> tuple[int, int]:
    width = photograph.pixels.shape[2]
    return 2 * width // 5, 3 * width // 5
