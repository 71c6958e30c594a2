"""The photographs in scikit-image's wheel, and random patches of them. Nothing is downloaded.

    |<- 2/5 ->|<1/5>|<- 2/5 ->|        training patches come from left and right of the middle fifth of a photograph,
    |  train  |held | train   |        which is held out

A photograph is its pixels u8[3 h w]. The key of a patch decides its place, uniformly over all photographs, and whether
it is mirrored. Each rank cuts its own patches, and together they are those of one process.
"""

import torch
from torch import Tensor

from fquant import random

PORTRAIT = 2  # height over width of the displayed crop


def load() -> dict[str, Tensor]:
    """Load five colour photographs by name; ValueError if scikit-image is not installed."""
    try:
        from skimage import data
    except ImportError:
        fix = "wanted its photographs, pip install 'fquant[images]'"
        raise ValueError(f"scikit-image is not installed; {fix}") from None
    images = {name: getattr(data, name)() for name in ("astronaut", "chelsea", "coffee", "rocket")}
    images["motorcycle"] = data.stereo_motorcycle()[0]
    return {name: torch.tensor(pixels).movedim(-1, 0) for name, pixels in images.items()}


def parts(photographs: list[Tensor], size: int) -> list[Tensor]:
    """Return the columns to cut training patches of ``size`` x ``size`` from, u8[3 h w] each.

    Raises ValueError if a held-out part is smaller.
    """
    most = min(min(held(photograph).shape[1:]) for photograph in photographs)
    if not 1 <= size <= most:
        raise ValueError(f"--patch is {size}; wanted 1 to {most}, which fits into every held-out part")
    return [part for photograph in photographs for part in _fifths(photograph)[::2]]


def patches(parts: list[Tensor], keys: Tensor, size: int) -> Tensor:
    """Cut a patch for each of ``keys`` i64[n]: f32[n 3 size size] in [0, 1]."""
    places = torch.tensor([(part.shape[1] - size + 1) * (part.shape[2] - size + 1) for part in parts])
    ends = places.cumsum(0)
    high, low, mirrored = random.bits(keys, (len(keys), 3)).unbind(-1)
    chosen = ((high >> 1) << 32 | low) % ends[-1]
    which = torch.searchsorted(ends, chosen, right=True)
    out = torch.empty(len(keys), 3, size, size)
    for i, (part, place, mirror) in enumerate(zip(which, chosen - (ends - places)[which], mirrored, strict=True)):
        top, left = divmod(int(place), parts[part].shape[2] - size + 1)
        patch = parts[part][:, top : top + size, left : left + size] / 255
        out[i] = patch.flip(-1) if mirror % 2 else patch
    return out


def variance(parts: list[Tensor]) -> float:
    """Return the variance of all training values in [0, 1]."""
    return float(torch.cat([part.reshape(-1) for part in parts]).double().div(255).var())


def held(photograph: Tensor) -> Tensor:
    """Return the held-out part, u8[3 h w]."""
    return _fifths(photograph)[1]


def tiles(photographs: list[Tensor], size: int) -> Tensor:
    """Cut the held-out parts into adjacent tiles, f32[n 3 size size] in [0, 1]; remainders at edges are dropped."""
    grids = [held(photograph).unfold(1, size, size).unfold(2, size, size) for photograph in photographs]
    return torch.cat([grid.flatten(1, 2).movedim(0, 1) for grid in grids]) / 255  # of [3 rows columns size size]


def portrait(photograph: Tensor, multiple: int) -> Tensor:
    """Crop the held-out part for display: at most twice as high as wide, f32[3 h w] in [0, 1], sides of a multiple."""
    part = held(photograph)
    width = part.shape[2] // multiple * multiple
    height = min(part.shape[1] // multiple * multiple, PORTRAIT * width)
    top = (part.shape[1] - height) // 8  # faces are near the top
    return part[:, top : top + height, :width] / 255


def _fifths(photograph: Tensor) -> tuple[Tensor, ...]:
    """Return the left, held-out and right columns."""
    width = photograph.shape[2]
    return photograph.tensor_split((2 * width // 5, 3 * width // 5), -1)
