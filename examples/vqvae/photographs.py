"""The photographs that scikit-image's wheel carries, and patches of them. Nothing is fetched.

    |<- 2/5 ->|<1/5>|<- 2/5 ->|        patches to train on are cut left and right of the middle fifth of a photograph,
    |  train  |held | train   |        which is held out

A patch is a function of its key: where it is cut, all places in all photographs being as likely, and whether it is
mirrored. So ranks cut their own, and together the same as one process.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fquant import random

PORTRAIT = 2  # height over width of what is shown of a held-out part


class Photograph(NamedTuple):
    """A name, and pixels u8[3 h w]."""

    name: str
    pixels: Tensor


class Part(NamedTuple):
    """Some columns of a photograph, u8[3 h w], and how many places there are to cut a patch."""

    pixels: Tensor
    places: int


def load() -> list[Photograph]:
    """The photographs in colour: a person, a cat, a cup, a rocket and a motorcycle.

    Raises ValueError where scikit-image is not installed.
    """
    try:
        from skimage import data
    except ImportError:
        raise ValueError(
            "scikit-image is not installed; wanted its photographs, pip install 'fquant[images]'"
        ) from None
    found = {name: getattr(data, name)() for name in ("astronaut", "chelsea", "coffee", "rocket")}
    found["motorcycle"] = data.stereo_motorcycle()[0]
    return [Photograph(name, torch.tensor(pixels).movedim(-1, 0)) for name, pixels in found.items()]


def parts(photographs: list[Photograph], size: int) -> list[Part]:
    """What to train on, to cut patches of ``size`` x ``size`` from; ValueError where they are too large for any."""
    most = min(min(held(photograph).shape[1:]) for photograph in photographs)
    if not 1 <= size <= most:
        raise ValueError(
            f"--patch is {size}; wanted 1 to {most}, which fits into the held-out part of every photograph"
        )
    found = []
    for photograph in photographs:
        first, last = _middle(photograph)
        for pixels in (photograph.pixels[:, :, :first], photograph.pixels[:, :, last:]):
            height, width = pixels.shape[1:]
            found.append(Part(pixels, (height - size + 1) * (width - size + 1)))
    return found


def patches(parts: list[Part], keys: Tensor, size: int) -> Tensor:
    """A patch for each of ``keys`` i64[n], f32[n 3 size size] in [0, 1]."""
    total = sum(part.places for part in parts)
    high, low, mirrored = random.bits(keys, (len(keys), 3)).unbind(-1)
    found = torch.empty(len(keys), 3, size, size)
    for i, (place, mirror) in enumerate(
        zip((((high >> 1) << 32 | low) % total).tolist(), mirrored.tolist(), strict=True)
    ):
        for part in parts:
            if place < part.places:
                break
            place -= part.places
        top, left = divmod(place, part.pixels.shape[2] - size + 1)
        patch = part.pixels[:, top : top + size, left : left + size] / 255
        found[i] = patch.flip(-1) if mirror % 2 else patch
    return found


def variance(parts: list[Part]) -> float:
    """Of all values to train on, in [0, 1]."""
    return float(torch.cat([part.pixels.reshape(-1) for part in parts]).double().div(255).var())


def held(photograph: Photograph) -> Tensor:
    """The part that is held out, u8[3 h w]."""
    first, last = _middle(photograph)
    return photograph.pixels[:, :, first:last]


def tiles(photographs: list[Photograph], size: int) -> Tensor:
    """The held-out parts in tiles beside each other, f32[n 3 size size] in [0, 1]; what is left at an edge is not."""
    found = []
    for photograph in photographs:
        cut = held(photograph).unfold(1, size, size).unfold(2, size, size)  # [3 rows columns size size]
        found.append(cut.flatten(1, 2).movedim(0, 1))
    return torch.cat(found) / 255


def portrait(photograph: Photograph, multiple: int) -> Tensor:
    """Of the held-out part what is shown: twice as high as wide, f32[3 h w] in [0, 1], sides multiples of a number."""
    part = held(photograph)
    width = part.shape[2] // multiple * multiple
    height = min(part.shape[1] // multiple * multiple, PORTRAIT * width)
    top = (part.shape[1] - height) // 8  # faces are near the top
    return part[:, top : top + height, :width] / 255


def _middle(photograph: Photograph) -> tuple[int, int]:
    width = photograph.pixels.shape[2]
    return 2 * width // 5, 3 * width // 5
