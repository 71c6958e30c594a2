"""Bits a weight beside errors of weights and of outputs, of every format.

``+i`` is a format that learns vectors, given the mean squares of inputs as importance. Weights are of a normal
distribution, and of one with heavy tails (Student's, of 4 degrees of freedom):

    bits         of all buffers of the packed weight, an element
    weights      |W - Q| / |W|, per cent, Frobenius norms
    outputs      |(W - Q)·X| / |W·X|, per cent, for inputs X whose columns have sizes that vary (log-normal, by a factor
                 of e up or down) and are correlated; importance comes from as many other inputs of the kind

Everything is a function of the seed, and nothing is timed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

import fquant
from fquant import random, tree
from fquant.format import FORMATS
from tests.bench.report import Row

AWARE = "+i"
COLUMNS = tuple(
    name + aware for name, format in FORMATS.items() for aware in ("", AWARE) if format.vectors or not aware
)
DEGREES = 4  # of freedom


def normal(key: Tensor, dim: int) -> Tensor:
    """Draw weights of a normal distribution."""
    return random.normal(key, (dim, dim))


def heavy(key: Tensor, dim: int) -> Tensor:
    """Draw weights of a Student's distribution."""
    chi = random.normal(random.fold(key, "chi"), (DEGREES, dim, dim)).square().mean(0)
    return normal(key, dim) / chi.sqrt()


WEIGHTS: dict[str, Callable[[Tensor, int], Tensor]] = {"normal": normal, "heavy tails": heavy}


def inputs(key: Tensor, tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """Draw two sets of inputs [tokens dim] of one kind: one for importance, one for the errors."""
    mix = torch.eye(dim) + random.normal(random.fold(key, "mix"), (dim, dim)) * dim**-0.5
    size = random.normal(random.fold(key, "size"), (dim,)).exp()
    calibration, test = (random.normal(random.fold(key, name), (tokens, dim)) @ mix * size for name in ("seen", "held"))
    return calibration, test


def measure(kind: str, dim: int, tokens: int, seed: int, done: Callable[[str], None] = lambda name: None) -> list[Row]:
    """Measure the rows of one kind of weights."""
    key = random.fold(random.key(seed), kind)
    w = WEIGHTS[kind](key, dim)
    calibration, test = inputs(random.fold(key, "inputs"), tokens, dim)
    units = {"bits": "bits", "weights": "%", "outputs": "%"}
    found: dict[str, dict[str, float]] = {name: {} for name in units}
    for name in COLUMNS:
        aware = name.endswith(AWARE)
        p = fquant.quantize(w, FORMATS[name.removesuffix(AWARE)], calibration.square().mean(0) if aware else None)
        lost = w - fquant.dequantize(p)
        found["bits"][name] = 8 * tree.nbytes(p) / w.numel()
        found["weights"][name] = 100 * (lost.norm() / w.norm()).item()
        found["outputs"][name] = 100 * ((test @ lost.mT).norm() / (test @ w.mT).norm()).item()
        done(name)
    return [Row(f"{kind}: {row}", unit, found[row], []) for row, unit in units.items()]
