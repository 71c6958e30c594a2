"""Recipes of quantised training, as values, and the weight that has one.

    params = attach(params, r"layers\\.\\d+\\.(q|k|v|o|gate|up|down)", INT8_MIXED)      # inside the loss
    y = linear(x, w)                                                                 # w a Trainable: by its recipe

A :class:`Trainable` is a weight in full precision beside the recipe of its products. It is made inside the loss, as an
adapter is attached, so gradients and optimisers see the plain tree. There are two kinds of recipe:

* :class:`Products` names the formats of the two operands of each of the three products of a linear layer. An operand is
  quantised along the dim that is summed, so each product has two scales a result. None: that product is not quantised.
* :class:`FakeQuantization` multiplies with ``fake_quantize(w)`` and quantised x, for a model that will be quantised.
  BitNet b1.58 is one: ternary weights with one scale, and x in int8 by tokens.

                    y = x · Wᵀ               gx = g · W              gW = gᵀ · x
    INT8_MIXED      int8 · int8              int8 · int8             int8 · int8        (torchao's int8 mixed precision)
    FP8_ROWWISE     e4m3 · e4m3              e4m3 · e4m3             e4m3 · e4m3
    FP8_ROWWISE_HP  e4m3 · e4m3              e4m3 · e4m3             in x's dtype       (rowwise_with_gw_hp)
    FP8_TENSORWISE  e4m3 · e4m3              e5m2 · e4m3             e5m2 · e4m3, one scale an operand
    BITNET          int8 · ternary           g · ternary             gᵀ · int8

Sources: int8 training, Wortsman et al. 2023 (SwitchBack) and torchao's ``int8_mixed_precision_training``; fp8,
Micikevicius et al. 2022 and ``torchao.float8``, whose power-of-two scales of rows are not copied; BitNet b1.58, Ma et
al. 2024; quantisation-aware training, Jacob et al. 2018, gradients as in Bengio et al. 2013.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from .. import tree
from ..communication import AfterLoad, Loadable
from ..dynamic_quantization import Activations, Outliers
from ..format import FP8_E4M3, FP8_E5M2, FP8_TENSOR, INT8_ROW, TERNARY, Format
from ..tree import expect, node, static, value

Pair = tuple[Format, Format]


def _check_formats(what: str, *formats: Format) -> None:
    for format in formats:
        learned = f"{what}: {format.name} has learned vectors, which training would have to learn at each step"
        expect(format.vectors is None, f"{learned}; wanted another format")


@value
@dataclass(frozen=True)
class Products:
    """The formats of (x, W) in ``x · Wᵀ``, of (g, W) in ``g · W``, and of (g, x) in ``gᵀ · x``; None: as they are.

    Raises TypeError for other than pairs of formats, and ValueError for a format with learned vectors.
    """

    output: Pair | None = None
    grad_input: Pair | None = None
    grad_weight: Pair | None = None

    def __post_init__(self) -> None:
        for name in ("output", "grad_input", "grad_weight"):
            pair = getattr(self, name)
            if pair is None:
                continue
            fits = isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(f, Format) for f in pair)
            expect(fits, f"products: {name} is {pair!r}; wanted two formats, or None", TypeError)
            _check_formats(f"products: {name}", *pair)


@value
@dataclass(frozen=True)
class FakeQuantization:
    """The format that the weight will have, and that of x; None: in full precision.

    Raises TypeError for other than formats, and ValueError for a format with learned vectors.
    """

    weight: Format | None = None
    act: Activations | None = None

    def __post_init__(self) -> None:
        kinds = (Format, type(None)), (Format, Outliers, type(None))
        for name, kind in zip(("weight", "act"), kinds, strict=True):
            got = getattr(self, name)
            expect(isinstance(got, kind), f"fake quantisation: {name} is {got!r}; wanted a format or None", TypeError)
            _check_formats(f"fake quantisation: {name}", *[got] if isinstance(got, Format) else [])


Recipe = Products | FakeQuantization


@node
class Trainable:
    """A weight [out in] in full precision, or any other kind of weight, and the recipe of its products."""

    weight: Any
    recipe: Recipe = static()


_E5M2_TENSOR = replace(FP8_E5M2, name="fp8_e5m2_tensor", shared=True)
INT8_MIXED = Products(*[(INT8_ROW, INT8_ROW)] * 3)
FP8_ROWWISE = Products(*[(FP8_E4M3, FP8_E4M3)] * 3)
FP8_ROWWISE_HP = replace(FP8_ROWWISE, grad_weight=None)
FP8_TENSORWISE = Products((FP8_TENSOR, FP8_TENSOR), *[(_E5M2_TENSOR, FP8_TENSOR)] * 2)
BITNET = FakeQuantization(TERNARY, INT8_ROW)
RECIPES: dict[str, Recipe] = {
    "int8": INT8_MIXED, "fp8_rowwise": FP8_ROWWISE, "fp8_rowwise_hp": FP8_ROWWISE_HP, "fp8_tensorwise": FP8_TENSORWISE,
    "bitnet": BITNET,
}  # fmt: skip


def attach(params: Any, pattern: str, recipe: Recipe) -> Any:
    """Return ``params`` with a :class:`Trainable` in place of each weight whose path matches the regex ``pattern``.

    A block that is not loaded waits for ``load``. Raises ValueError if no path matches, and TypeError for a subtree
    that is no matrix of floats.
    """
    found = list[str]()
    out = _Attach(pattern, recipe)(params, found)
    waits = lambda x: any(isinstance(leaf, AfterLoad) for leaf in tree.leaves(x, is_leaf=_is_waiting))
    if not found and not waits(out):
        raise ValueError(f"{pattern!r} matches no path; the tree has {', '.join(tree.paths(params)[:8])}, ...")
    return out


@dataclass(frozen=True)
class _Attach:
    """``attach`` below ``prefix``, a path and a dot; a value, because it is a static field of an AfterLoad."""

    pattern: str
    recipe: Recipe
    prefix: str = ""

    def __call__(self, x: Any, found: Any = ()) -> Any:
        path = self.prefix[:-1]
        if isinstance(x, Loadable):
            return AfterLoad(x, (), self)
        if path and re.fullmatch(self.pattern, path):
            if isinstance(found, list):
                found.append(path)
            with tree.at(path):
                return _trainable(x, self.recipe)
        inside = lambda name, child: replace(self, prefix=f"{self.prefix}{name}.")(child, found)
        return tree.map_children(inside, x)


def _is_waiting(x: Any) -> bool:
    return isinstance(x, AfterLoad)


def _trainable(w: Any, recipe: Recipe) -> Trainable:
    got = f"got {getattr(w, 'dtype', type(w).__name__)} {tuple(getattr(w, 'shape', ()))}"
    fits = isinstance(w, Tensor) and w.is_floating_point() and w.ndim == 2
    expect(fits, f"{got}; wanted a matrix of floats to train by a recipe", TypeError)
    return Trainable(w, recipe)
