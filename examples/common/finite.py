"""Numbers of results: a number that is not finite ends a program by an error that names it."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from fquant import Packed, dequantize, tree
from fquant.lazy import Lazy
from fquant.tree import expect
from models.export.folder import not_finite

SMALLER = "use a smaller --lr"
NAMES = {"grad norm": "norm of the gradient"}
LARGEST = 709.0  # nats, above which exp is no finite number


def check(found: Any, where: str, fix: Callable[[], str] = lambda: SMALLER) -> None:
    """Raise ValueError for a number in ``found`` that is not finite: fields of dataclasses, and items of sequences."""
    for path, x in _numbers("", found):
        if not math.isfinite(x):
            raise ValueError(f"{where}: the {NAMES.get(path, path) or 'loss'} is {x}; {fix()}")


def _numbers(path: str, x: Any) -> Iterator[tuple[str, float]]:
    if dataclasses.is_dataclass(x):
        x = {f"{path} " * bool(path) + field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    elif isinstance(x, list | tuple):
        x = {f"{path} {i}".strip(): each for i, each in enumerate(x)}
    elif isinstance(x, float):
        yield path.replace("_", " "), x
    for name, each in x.items() if isinstance(x, dict) else ():
        yield from _numbers(name, each)


def perplexity(nats: float, what: str) -> float:
    """Return exp of the mean loss ``nats`` of ``what``; raise ValueError if it is no finite number."""
    fault = f"{what}: the held-out loss is {nats:g} nats a token, and its perplexity is no finite number"
    expect(nats < LARGEST, f"{fault}; {SMALLER}")  # False for NaN
    return math.exp(nats)


def culprit(*trees: Any) -> str:
    """Return in words which weight of ``trees``, perhaps lazy, has a number that is not finite, or that none has."""
    for path, w in (item for x in trees for item in tree.items(x, is_leaf=lambda x: isinstance(x, Packed | Lazy))):
        w = w.read() if isinstance(w, Lazy) else w
        w = dequantize(w) if isinstance(w, Packed) else w
        if isinstance(w, Tensor) and w.is_floating_point() and (found := not_finite(w)):
            return f"{path} has {found}; wanted finite weights"
    return "all weights are finite, so a product overflows, or a norm is zero; use --dtype f32, or another base"
