"""The quantisers that examples/vqvae/cli.py can train: each a state, the verbs of its kind, and weights of its losses.

Gradients move projections, maps, networks, latent values and learnt codes, by path: :func:`trained_leaves`. Statistics,
summed over ranks after the gradient, move the codes of other books. The entropies of LFQ and the moments of FSP are not
means over rows, so the ``psum`` that ``apply`` gets sums them inside the gradient.

*Codes in use.* FSQ and FSP fill the levels of each scalar, but nothing makes scalars independent, so many products of
levels stay empty. After 1500 steps of 16 patches, FSQ's three scalars of 8 levels had perplexities of 7.1, 7.5 and 7.3,
together 133 of 512 codes. 8, 5, 5 and 5 levels had 7.9, 4.7, 4.6 and 4.6, together 103 of 1000; FSP had 111 and 129.
vector-quantize-pytorch gives the same latents the same codes, all 13,696. The number still grows when training ends.
The entropies of lfq and bsq ask for independence, and dead codes of a book start again.

Three quantisers of ``fquant.vq`` are missing. ``random_projection`` has no gradient, ``binary`` makes 2^n numbers of n,
and ``hierarchical`` fixes the size of a map, while photographs have any.
"""

import itertools
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
LEARN = ("vq", "cosine", "learnt", "implicit")  # learn from statistics
INSIDE = ("fsp", "lfq", "bsq")  # have losses of all ranks' rows
UPDATE = {"decay": 0.95, "threshold": 1.0}  # of a book's averages; a code that gets fewer rows a step begins anew
WEIGHTS: dict[str, dict[str, float]] = {  # of the losses beside the reconstruction loss
    **dict.fromkeys(("vq", "cosine"), {"commitment": 0.25}),
    **dict.fromkeys(("learnt", "implicit"), {"commitment": 1.0}),
    **dict.fromkeys(("lfq", "bsq"), {"commitment": 0.25, "entropy": 0.1}),
    "simvq": {"codebook": 1.0, "commitment": 0.25},
    "fsq": {},
    "fsp": {"moments": 1.0},
    "latent": {"commitment": 0.1, "quantisation": 0.1},
}
FACTORS = range(8, 2, -1)  # numbers of levels that a scalar may have


class Quantiser(NamedTuple):
    """A quantiser with ``num_layers`` codes of ``num_codes`` a row."""

    verbs: ModuleType
    state: Any
    num_codes: int
    num_layers: int
    weights: dict[str, float]  # of the losses that apply returns
    learns: bool  # whether statistics move it, and dead codes start again at drawn rows
    inside: bool  # whether ``apply`` takes a psum
    trained: str  # a pattern of the paths of leaves that gradients move


def make(name: Name, num_codes: int, num_layers: int, dim: int, key: Tensor, num_groups: int = 1) -> Quantiser:
    """Make a quantiser of rows f[... dim]: ``num_layers`` layers for each of ``num_groups`` parts of a row."""
    if num_codes < 2:
        raise ValueError(f"--codes is {num_codes}; wanted at least 2")
    for option, number in (("layers", num_layers), ("groups", num_groups)):
        if number < 1 or (number > 1 and name not in LAYERED):
            raise ValueError(f"--{option} is {number}; wanted 1, or more of --quantiser {', '.join(LAYERED)}")
    if name == "implicit" and num_layers == 1:
        raise ValueError("--layers is 1; wanted 2 or more of --quantiser implicit, which looks at the layers before")
    if dim % num_groups:
        raise ValueError(f"--groups is {num_groups}; wanted a number that divides --dim {dim}")
    size: Any = bits(num_codes) if name in ("lfq", "bsq") else num_codes
    size = levels(num_codes) if name in ("fsq", "fsp", "latent") else size
    verbs, state = _init(name, size, num_layers, dim, key, num_groups)
    learns, trained = name in LEARN, r"(.*\.)?(params|net)\..*"
    if name in ("learnt", "implicit"):
        trained += r"|(.*\.)?codes"
    return Quantiser(verbs, state, num_codes, num_layers * num_groups, WEIGHTS[name], learns, name in INSIDE, trained)


def _init(name: Name, size: Any, num_layers: int, dim: int, key: Tensor, groups: int) -> tuple[ModuleType, Any]:
    """Return the verbs and the state of quantisers with ``size`` codes, bits or levels."""
    if groups > 1:
        return grouped, grouped.init(key, [partial(_init_layers, name, size, num_layers, dim // groups)] * groups)
    if num_layers > 1:
        return residual, _init_layers(name, size, num_layers, dim, key)
    if name in ("vq", "cosine", "learnt"):
        metric = "cosine" if name == "cosine" else "euclidean"
        return vq, vq.init(key, size, dim, metric=metric, learnable=name == "learnt")
    verbs = {"simvq": simvq, "fsq": fsq, "fsp": fsp, "lfq": lfq, "bsq": lfq, "latent": latent}[name]
    return verbs, verbs.init(key, size, dim, **({"spherical": True} if name == "bsq" else {}))


def _init_layers(name: Name, size: Any, num_layers: int, dim: int, key: Tensor) -> Residual:
    if name in ("fsq", "lfq"):
        return (residual.init_fsq if name == "fsq" else residual.init_lfq)(key, size, num_layers, dim)
    if name == "simvq":
        return residual.init_simvq(key, size, dim, num_layers)
    if name == "implicit":
        return residual.init_implicit(key, size, dim, num_layers, depth=1)
    return residual.init_books(key, size, dim, num_layers, learnable=name == "learnt")


def trained_leaves(quantiser: Quantiser, state: Any) -> dict[str, Tensor]:
    """Return the leaves of ``state`` that gradients move, by path."""
    return {path: t for path, t in tree.items(state) if re.fullmatch(quantiser.trained, path)}


def replace_leaves(state: Any, leaves: dict[str, Tensor]) -> Any:
    """Return ``state`` with the leaves at these paths replaced."""
    return tree.map_with_path(lambda path, t: leaves.get(path, t), state)


def books_at_kmeans(state: Any, rows: Tensor, key: Tensor, row_offset: RowOffset, psum: Callable[[Any], Any]) -> Any:
    """Return ``state`` with each plain book at the k-means of ``rows`` f[... dim], minus the layers before."""
    again = lambda part, x, i: books_at_kmeans(part, x, random.fold(key, i), row_offset, psum)
    if isinstance(state, vq.Book):
        return vq.kmeans(state, rows, key, row_offset=row_offset, psum=psum)
    if isinstance(state, grouped.Grouped):
        each = zip(state.groups, rows.split([group.dim for group in state.groups], -1), strict=True)
        return replace(state, groups=[again(group, x, i) for i, (group, x) in enumerate(each)])
    if not isinstance(state, Residual):
        return state
    layers = []
    for i, layer in enumerate(state.layers):
        layers.append(again(layer, rows, i))
        if isinstance(layer, vq.Book):
            rows = rows - vq.decode(layers[-1], vq.encode(layers[-1], rows))
    return replace(state, layers=layers)


def levels(num_codes: int) -> tuple[int, ...]:
    """Factor ``num_codes`` into as few levels of scalars as possible, the larger first; ValueError if impossible."""
    for count in range(1, num_codes.bit_length()):
        for factors in itertools.combinations_with_replacement(FACTORS, count):
            if math.prod(factors) == num_codes:
                return factors
    wanted = f"no product of numbers from {FACTORS[-1]} to {FACTORS[0]}; use 512, 1000, 4096"
    raise ValueError(f"--codes is {num_codes}, {wanted}")


def bits(num_codes: int) -> int:
    """Return log2 of ``num_codes``. Raises ValueError if that is no integer."""
    if num_codes & (num_codes - 1):
        raise ValueError(f"--codes is {num_codes}; wanted a power of 2, use {2 ** round(math.log2(num_codes))}")
    return num_codes.bit_length() - 1


def usage(codes: Tensor, quantiser: Quantiser) -> Tensor:
    """Count the codes in ``codes`` i64[...], or [... layers] of several layers: f32[layers codes]."""
    each = codes.reshape(-1, quantiser.num_layers)
    known = each >= 0  # -1 is none
    layers = torch.arange(quantiser.num_layers, device=codes.device)
    at = torch.where(known, each + layers * quantiser.num_codes, 0)
    counts = torch.zeros(quantiser.num_layers * quantiser.num_codes, device=codes.device)
    counts = counts.index_add(0, at.flatten(), known.float().flatten())
    return counts.reshape(quantiser.num_layers, quantiser.num_codes)


def share_used(counts: Tensor) -> list[float]:
    """Return the share of codes that occur at all in each layer, given counts f32[layers codes]."""
    return (counts > 0).float().mean(-1).tolist()


def from_pixels(books: list[vq.Book], images: Tensor, scale: int) -> Tensor:
    """Replace each block of ``images`` f[b c h w] by its residual quantisation with ``books``."""
    rest = start = blocks(images, scale)
    for book in books:
        rest = rest - vq.decode(book, vq.encode(book, rest))
    return rearrange(start - rest, "b h w (c p q) -> b c (h p) (w q)", p=scale, q=scale)


def blocks(images: Tensor, scale: int) -> Tensor:
    """Return images f[b c h w] as rows of pixels, f[b h/scale w/scale c·scale·scale]."""
    return rearrange(images, "b c (h p) (w q) -> b h w (c p q)", p=scale, q=scale)
