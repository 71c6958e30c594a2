"""The quantisers that examples/vqvae.py can train: each a state, the verbs of its kind, and the weights of its losses.

What gradients move of a state is its field ``params``, projections to and from the scalars that are quantised. A Book
has none, and is moved by statistics, which are summed over ranks after the gradient. The entropies of LFQ and the
moments of FSP are no means over rows, and are summed within it, by the ``psum`` that ``apply`` is given.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from fquant import vq
from fquant.vq import fsp, fsq, lfq, residual

Name = Literal["vq", "cosine", "fsq", "fsp", "lfq"]
DECAY, THRESHOLD = 0.95, 1.0  # of a book's averages; a code that gets fewer rows a step begins anew
COMMITMENT, ENTROPY, MOMENTS = 0.25, 0.1, 1.0  # weights of losses beside that of reconstruction
FACTORS = range(8, 2, -1)  # how many levels a scalar may have


class Quantiser(NamedTuple):
    """A way to quantise: ``num_layers`` codes of ``num_codes`` a row."""

    verbs: ModuleType
    state: Any
    num_codes: int
    num_layers: int
    weights: dict[str, float]  # of the losses that apply returns
    update: dict[str, float]  # options of ``update``
    inside: bool  # whether ``apply`` takes a psum


def make(name: Name, num_codes: int, num_layers: int, dim: int, key: Tensor) -> Quantiser:
    """A quantiser of rows f[... dim].

    Raises ValueError for numbers of codes that it cannot have, and for more than one layer where there are none.
    """
    if num_codes < 2:
        raise ValueError(f"--codes is {num_codes}; wanted at least 2")
    if num_layers < 1 or (num_layers > 1 and name not in ("fsq", "lfq")):
        raise ValueError(f"--layers is {num_layers}; wanted 1, or more of --quantiser fsq or lfq")
    sizes = num_codes, num_layers
    match name:
        case "vq" | "cosine":
            book = vq.init(key, num_codes, dim, metric="euclidean" if name == "vq" else "cosine")
            update = {"decay": DECAY, "threshold": THRESHOLD}
            return Quantiser(vq, book, *sizes, {"commitment": COMMITMENT}, update, False)
        case "fsq" if num_layers > 1:
            state = residual.init_fsq(key, levels(num_codes), num_layers, dim)
            return Quantiser(residual, state, *sizes, {}, {}, False)
        case "fsq":
            return Quantiser(fsq, fsq.init(key, levels(num_codes), dim), *sizes, {}, {}, False)
        case "fsp":
            return Quantiser(fsp, fsp.init(key, levels(num_codes), dim), *sizes, {"moments": MOMENTS}, {}, True)
        case "lfq":
            weights = {"commitment": COMMITMENT, "entropy": ENTROPY}
            if num_layers == 1:
                return Quantiser(lfq, lfq.init(key, bits(num_codes), dim), *sizes, weights, {}, True)
            state = residual.init_lfq(key, bits(num_codes), num_layers, dim)
            return Quantiser(residual, state, *sizes, weights, {}, True)


def levels(num_codes: int) -> tuple[int, ...]:
    """As few levels of scalars as multiply to ``num_codes``, the larger first; ValueError where they do not."""
    found = _factors(num_codes)
    if found is None:
        raise ValueError(
            f"--codes is {num_codes}, no product of numbers from {FACTORS[-1]} to {FACTORS[0]}; use 512, 1000, 4096"
        )
    return found


def _factors(n: int) -> tuple[int, ...] | None:
    if n == 1:
        return ()
    found = [(f, *rest) for f in FACTORS if n % f == 0 and (rest := _factors(n // f)) is not None]
    return min(found, key=len, default=None)


def bits(num_codes: int) -> int:
    """log2 of ``num_codes``; ValueError where that is no integer."""
    if num_codes & (num_codes - 1):
        raise ValueError(f"--codes is {num_codes}; wanted a power of 2, use {2 ** round(math.log2(num_codes))}")
    return num_codes.bit_length() - 1


def usage(codes: Tensor, quantiser: Quantiser) -> Tensor:
    """How often each code occurs in ``codes`` i64[...], of several layers [... layers]: f32[layers codes]."""
    each = codes.reshape(-1, quantiser.num_layers)
    known = each >= 0  # -1 is none
    at = torch.where(known, each + torch.arange(quantiser.num_layers) * quantiser.num_codes, 0)
    counts = torch.zeros(quantiser.num_layers * quantiser.num_codes).index_add(0, at.flatten(), known.float().flatten())
    return counts.reshape(quantiser.num_layers, quantiser.num_codes)


def share_used(counts: Tensor) -> list[float]:
    """The share of codes that occur at all, of counts f32[layers codes]."""
    return (counts > 0).float().mean(-1).tolist()


def from_pixels(books: list[vq.Book], images: Tensor, scale: int) -> Tensor:
    """``images`` f[b c h w] with each block the sum of the codes nearest to what those before have left."""
    left = start = blocks(images, scale)
    for book in books:
        left = left - vq.decode(book, vq.encode(book, left))
    return rearrange(start - left, "b h w (c p q) -> b c (h p) (w q)", p=scale, q=scale)


def blocks(images: Tensor, scale: int) -> Tensor:
    """Images f[b c h w] as rows of pixels, f[b h/scale w/scale c·scale·scale]."""
    return rearrange(images, "b c (h p) (w q) -> b h w (c p q)", p=scale, q=scale)
