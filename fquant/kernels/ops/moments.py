"""Steps of optimisers as two ops: a moment is decoded, updated and encoded in one pass over memory.

    adam_update        two moments: AdamW, and Adam, whose decay is coupled to the gradient
    momentum_update    one: SGD with momentum (``sgd``, ``nesterov``), Lion, a mean (``mean``, ``nesterov_mean``)

AdamW with moments of 8 bits reads and writes 16 bytes an element, and 28 in float32. A moment is its codes and its
scales, of a flat format (``fquant/format/known.py``); ``moment_codes.py`` defines the codes. With decoded moments m and
v, gradient g and parameter p in float32, in this order of operations:

    adamw     m = b1·m + (1-b1)·g;  v = b2·v + (1-b2)·g²;  change = f · ((m·r1) / (sqrt(v)·r2 + eps) + decay·p)
    adam      g = g + decay·p, and change = f · (m·r1) / (sqrt(v)·r2 + eps)
    sgd       g = g + decay·p;  m = b1·m + g;  change = f · m
    nesterov  the same, and change = f · (g + b1·m)
    mean      g = g + decay·p;  m = b1·m + (1-b1)·g;  change = f · m, or for nesterov_mean f · ((1-b1)·g + b1·m)
    lion      change = f · (sign(b1·m + (1-b1)·g) + decay·p);  m = b2·m + (1-b2)·g

``rates`` f32[3] are f, minus the learning rate, r1 = 1 / (1 - b1^t) and r2 = 1 / sqrt(1 - b2^t). The first result is
the change f32, or with ``apply`` the parameter p + change, rounded to its dtype. With ``key`` i64[] it is rounded
stochastically to 16 bits, by the words of the key from number ``start`` on. The moments that it depends on are not
rounded; the codes and scales of the new ones follow.

A moment in float32 has the text ``float32`` in place of a format, its values as codes, and scales f32[0]. Both moments
of Adam are then in float32, and divided as in torch: r1 = 1 - b1^t, r2 = 1 - b2^t, (m/r1) / (sqrt(v/r2) + eps).

With ``active`` bool[] that is False, parameter and moments stay as they are, and the change is zero.

Rates f32[n 3] are those of n updates in one call, of what index i of dim 0 of every tensor holds. Then ``key`` is
i64[n], and ``active`` bool[n]. This is also what vmap calls. A moment's blocks start anew at each index.

The results of all backends have the same bits. NaN or infinity in a gradient makes the scale of its block so. From then
on every moment of the block is NaN or infinite. There are no derivatives.
"""

from typing import Any

import torch
from torch import Tensor

from ...autodiff import to_front
from ...format import read
from ..arguments import check_beside
from ..moment_codes import ROUNDINGS
from ..reference.moments import FLOAT32
from ..registry import register
from ..spec import FLOATS, Spec, layout

RULES = ("sgd", "nesterov", "lion", "mean", "nesterov_mean")


def adam_update(
    grad: Tensor, param: Tensor, mean: Tensor, mean_scale: Tensor, square: Tensor, square_scale: Tensor, rates: Tensor,
    mean_format: str, square_format: str, rounding: str, b1: float, b2: float, eps: float, decay: float,
    coupled: bool, apply: bool, key: Tensor | None, start: int, active: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the change f32 or the parameter, and codes and scales of the new mean and the new mean of squares.

    ``grad`` and ``param`` f32, bf16 or f16 of one shape; codes u8 and scales f32 of formats with these texts, or values
    f32 of the text ``float32``. With rates f32[n 3] each has n of these in dim 0. Raises TypeError for other dtypes,
    ValueError for other shapes or devices, or for a format of no moment.
    """
    return _ADAM(
        grad, param, mean, mean_scale, square, square_scale, rates, mean_format, square_format, rounding, b1, b2, eps,
        decay, coupled, apply, key, start, active,
    )  # fmt: skip


def momentum_update(
    grad: Tensor, param: Tensor, moment: Tensor, scale: Tensor, rates: Tensor, format: str, rounding: str, rule: str,
    b1: float, b2: float, decay: float, apply: bool, key: Tensor | None, start: int, active: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the change f32 or the parameter, and codes and scales of the new moment; ``rule`` is one of RULES.

    Arguments and errors are as in :func:`adam_update`.
    """
    return _MOMENTUM(
        grad, param, moment, scale, rates, format, rounding, rule, b1, b2, decay, apply, key, start, active
    )


def _check(op: str, grad: Tensor, param: Tensor, rates: Tensor, rounding: str, end: Any, *states: Any) -> None:
    for name, t in (("grad", grad), ("param", param)):
        if t.dtype not in FLOATS:
            raise TypeError(f"{op} got {name} {t.dtype} {tuple(t.shape)}; wanted f32, bf16 or f16")
    if rounding not in ROUNDINGS:
        raise ValueError(f"{op} got the rounding {rounding!r}; wanted one of {', '.join(ROUNDINGS)}")
    check_beside(op, "param", param, grad=(grad, tuple(param.shape), grad.dtype))
    many = tuple(param.shape[:1]) if rates.ndim > 1 else ()  # of dim 0, if it numbers updates
    one = tuple(param.shape[len(many) :])
    key, start, active = end
    check_beside(op, "param", param, rates=(rates, (*many, 3), torch.float32))
    check_beside(op, "param", param, key=(key, many, torch.int64), active=(active, many, torch.bool))
    if start < 0:
        raise ValueError(f"{op} got the start {start}; wanted at least 0")
    if len({text == FLOAT32 for text, *_ in states}) > 1:
        raise ValueError(f"{op} got one moment in float32 and one packed; wanted both in one form")
    for text, codes, scale in states:
        if text == FLOAT32:
            values = codes, tuple(param.shape), torch.float32
            check_beside(op, "param", param, moment=values, scale=(scale, (*many, 0), torch.float32))
            continue
        format = read(text)
        fits = format.flat and format.table and format.block and not (format.center or format.zero or format.scale)
        if not fits:
            raise ValueError(f"{op} got a moment in {format.name}; wanted a flat format with a table and blocks")
        if rounding == "grid" and not (format.bits == 8 and format.in_absmax):
            raise ValueError(f"{op} got the rounding grid of {format.name}; wanted 8 bits in units of the absmax")
        leaves = zip(layout(Spec(format, one, torch.float32)), (codes, scale), strict=True)
        named = {leaf.name: (t, (*many, *leaf.shape), leaf.dtype) for leaf, t in leaves}
        check_beside(op, "param", param, **named)


def _check_adam(op: str, grad: Tensor, param: Tensor, *rest: Any) -> None:
    mean, mean_scale, square, square_scale, rates, mean_format, square_format, rounding, *_ = rest
    states = (mean_format, mean, mean_scale), (square_format, square, square_scale)
    _check(op, grad, param, rates, rounding, rest[-3:], *states)


def _check_momentum(op: str, grad: Tensor, param: Tensor, *rest: Any) -> None:
    moment, scale, rates, format, rounding, rule, *_ = rest
    if rule not in RULES:
        raise ValueError(f"{op} got the rule {rule!r}; wanted one of {', '.join(RULES)}")
    _check(op, grad, param, rates, rounding, rest[-3:], (format, moment, scale))


def _empty(grad: Tensor, param: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, apply, _, _, _ = rest
    dtype = param.dtype if apply else torch.float32
    state = rest[: [isinstance(x, Tensor) for x in rest].index(False) - 1]  # without the rates
    fresh = lambda t, dtype: t.new_empty(t.shape, dtype=dtype)
    return fresh(param, dtype), *(fresh(t, t.dtype) for t in state)


def _vmap(op: Any, info: Any, in_dims: Any, *args: Any) -> Any:
    each = zip(args, in_dims, strict=True)
    many = [to_front(t, dim, info.batch_size) if isinstance(t, Tensor) else t for t, dim in each]
    rates: Tensor = many[[isinstance(x, str) for x in args].index(True) - 1]
    if rates.ndim == 2:
        results = op(*many)
    else:  # the updates of an op of many are mapped
        merged = op(*(t.flatten(0, 1) if isinstance(t, Tensor) else t for t in many))
        results = tuple(t.unflatten(0, rates.shape[:2]) for t in merged)
    return results, (0,) * len(results)


_FIX = "a step with packed moments has none; keep the moments in float32, or detach its arguments"
_ADAM = register(adam_update, _check_adam, _empty, _vmap, _FIX)
_MOMENTUM = register(momentum_update, _check_momentum, _empty, _vmap, _FIX)
