"""The quantisers that examples/vqvae/cli.py can train: each a state, the verbs of its kind, and the weights of its losses.

What gradients move of a state are projections to and from scalars, the maps of SimVQ, the values of latent
quantisation, codes that are learnt, networks: ``trained`` takes them out, and ``with_trained`` puts them back. Codes of
other books are moved by statistics, which are summed over ranks after the gradient. The entropies of LFQ and the
moments of FSP are no means over rows, and are summed within it, by the ``psum`` that ``apply`` is given.

*Codes in use.* FSQ and FSP fill the levels of each scalar, but nothing asks scalars to be independent, so that products
of levels stay empty: after 1500 steps of 16 patches FSQ's three scalars of 8 levels used 7.1, 7.5 and 7.3 of them
(perplexity), and together 133 of 512 codes; of 8, 5, 5 and 5 levels 7.9, 4.7, 4.6 and 4.6, and 103 of 1000; FSP 111
and 129. vector-quantize-pytorch gives the same latents the same codes, all 13,696. The number still grows when training
ends; entropies (lfq, bsq) are the losses that ask for independence, and dead codes of a book start again.

Of ``fquant.vq`` are left out ``projection``, through which no gradient passes, ``binary``, which makes 2^n numbers of
n, and ``hierarchical``, whose codes are those of a map of one size, while photographs have any.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from fquant import random, tree, vq
from fquant.vq.codebook import simvq
from fquant.vq.codebook.rows import RowOffset
from fquant.vq.composite import grouped, residual
from fquant.vq.composite.residual import Residual
from fquant.vq.scalar import fsp, fsq, latent, lfq

Name = Literal["vq", "cosine", "learnt", "simvq", "implicit", "fsq", "fsp", "lfq", "bsq", "latent"]
LAYERED = ("vq", "learnt", "simvq", "implicit", "fsq", "lfq")  # of which a residual can be made
LEARN = ("vq", "cosine", "learnt", "implicit")  # from statistics
INSIDE = ("fsp", "lfq", "bsq")  # losses of all ranks' rows
DECAY, THRESHOLD = 0.95, 1.0  # of a book's averages; a code that gets fewer rows a step begins anew
WEIGHTS: dict[str, dict[str, float]] = {  # of losses beside that of reconstruction
    "vq": {"commitment": 0.25},
    "cosine": {"commitment": 0.25},
    "learnt": {"commitment": 1.0},
    "simvq": {"codebook": 1.0, "commitment": 0.25},
    "implicit": {"commitment": 1.0},
    "fsq": {},
    "fsp": {"moments": 1.0},
    "lfq": {"commitment": 0.25, "entropy": 0.1},
    "bsq": {"commitment": 0.25, "entropy": 0.1},
    "latent": {"commitment": 0.1, "quantisation": 0.1},
}
FACTORS = range(8, 2, -1)  # how many levels a scalar may have


class Quantiser(NamedTuple):
    """A way to quantise: ``num_layers`` codes of ``num_codes`` a row."""

    verbs: ModuleType
    state: Any
    num_codes: int
    num_layers: int
    weights: dict[str, float]  # of the losses that apply returns
    update: dict[str, float]  # options of ``update``
    learns: bool  # whether statistics move it, and rows are drawn for codes that are dead
    inside: bool  # whether ``apply`` takes a psum
    trained: str  # the paths of what gradients move


def make(name: Name, num_codes: int, num_layers: int, dim: int, key: Tensor, num_groups: int = 1) -> Quantiser:
    """A quantiser of rows f[... dim]: ``num_layers`` for each of ``num_groups`` parts of a row.

    Raises ValueError for numbers of codes that it cannot have, for more than one layer or group where there are none,
    and for groups that do not divide dim.
    """
    if num_codes < 2:
        raise ValueError(f"--codes is {num_codes}; wanted at least 2")
    for option, number in (("layers", num_layers), ("groups", num_groups)):
        if number < 1 or (number > 1 and name not in LAYERED):
            raise ValueError(f"--{option} is {number}; wanted 1, or more of --quantiser {', '.join(LAYERED)}")
    if name == "implicit" and num_layers == 1:
        raise ValueError("--layers is 1; wanted 2 or more of --quantiser implicit, which looks at the layers before")
    if dim % num_groups:
        raise ValueError(f"--groups is {num_groups}; wanted a number that divides --dim {dim}")
    verbs, state = _made(name, num_codes, num_layers, dim, key, num_groups)
    learns, trained = name in LEARN, r"(.*\.)?(params|net)\..*"
    if name in ("learnt", "implicit"):
        trained += r"|(.*\.)?codes"
    update = {"decay": DECAY, "threshold": THRESHOLD} if learns else {}
    return Quantiser(
        verbs, state, num_codes, num_layers * num_groups, WEIGHTS[name], update, learns, name in INSIDE, trained
    )


def _made(
    name: Name, num_codes: int, num_layers: int, dim: int, key: Tensor, num_groups: int
) -> tuple[ModuleType, Any]:
    if num_groups > 1:
        one = partial(_layers, name, num_codes, num_layers, dim // num_groups)
        return grouped, grouped.init(key, [one] * num_groups)
    if num_layers > 1:
        return residual, _layers(name, num_codes, num_layers, dim, key)
    match name:
        case "vq" | "cosine" | "learnt":
            metric = "cosine" if name == "cosine" else "euclidean"
            return vq, vq.init(key, num_codes, dim, metric=metric, learnable=name == "learnt")
        case "simvq":
            return simvq, simvq.init(key, num_codes, dim)
        case "fsq":
            return fsq, fsq.init(key, levels(num_codes), dim)
        case "fsp":
            return fsp, fsp.init(key, levels(num_codes), dim)
        case "latent":
            return latent, latent.init(key, levels(num_codes), dim)
        case _:
            return lfq, lfq.init(key, bits(num_codes), dim, spherical=name == "bsq")


def _layers(name: Name, num_codes: int, num_layers: int, dim: int, key: Tensor) -> Residual:
    match name:
        case "vq" | "learnt":
            return residual.init_books(key, num_codes, dim, num_layers, learnable=name == "learnt")
        case "simvq":
            return residual.init_simvq(key, num_codes, dim, num_layers)
        case "implicit":
            return residual.init_implicit(key, num_codes, dim, num_layers, depth=1)
        case "fsq":
            return residual.init_fsq(key, levels(num_codes), num_layers, dim)
        case _:
            return residual.init_lfq(key, bits(num_codes), num_layers, dim)


def trained(quantiser: Quantiser, state: Any) -> dict[str, Tensor]:
    """What gradients move of ``state``, by path."""
    return {path: t for path, t in tree.items(state) if re.fullmatch(quantiser.trained, path)}


def with_trained(state: Any, parts: dict[str, Tensor]) -> Any:
    """``state`` with what :func:`trained` takes out replaced."""
    return tree.map_with_path(lambda path, t: parts.get(path, t), state)


def at_rows(state: Any, rows: Tensor, key: Tensor, row_offset: RowOffset, psum: Callable[[Any], Any]) -> Any:
    """``state`` with its books at the k-means of ``rows`` f[... dim], or of what the layers before leave of them.

    What has no plain books stays as it is.
    """
    if isinstance(state, vq.Book):
        return vq.kmeans(state, rows, key, row_offset=row_offset, psum=psum)
    if isinstance(state, grouped.Grouped):
        parts = rows.split([group.dim for group in state.groups], -1)
        each = enumerate(zip(state.groups, parts, strict=True))
        return replace(state, groups=[at_rows(g, part, random.fold(key, i), row_offset, psum) for i, (g, part) in each])
    if not isinstance(state, Residual):
        return state
    layers = []
    for i, layer in enumerate(state.layers):
        if isinstance(layer, vq.Book):
            layer = vq.kmeans(layer, rows, random.fold(key, i), row_offset=row_offset, psum=psum)
            rows = rows - vq.decode(layer, vq.encode(layer, rows))
        layers.append(layer)
    return replace(state, layers=layers)


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
