"""Calibration of the weights of a model.

    base = calibrate(params, batches, loss, r"layers\\.\\d+\\.(q|k|v|o|gate|up|down)", gptq(INT4_ZERO))

A *method* is a function from a weight and the statistics of its inputs to what replaces it. Several patterns are groups
that are done in order. Later groups then meet the inputs that the quantised earlier ones give, and the statistics of
one group are in memory, ``4 · in²`` bytes a weight.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from .. import tree
from ..format import Format
from ..packed import quantize
from ..tree import expect
from .statistics import Statistics, collect

Method: TypeAlias = Callable[[Any, Any], Any]  # (w f[out in], Statistics) -> Packed or Scaled


def calibrate(
    params: Any,
    batches: Iterable[Any],
    loss: Callable[[Any, Any], Tensor],
    pattern: str | Sequence[str],
    method: Method,
) -> Any:
    """Return ``params`` with each weight that matches ``pattern`` replaced by ``method(w, statistics)``.

    ``pattern`` is one regex of paths, or several groups in order. ``loss(params, batch)`` f[] is a scalar that depends
    on all these weights. Raises ValueError without batches, if a group matches no path, and what the method raises.
    """
    batches, groups = list(batches), [pattern] if isinstance(pattern, str) else list(pattern)
    expect(batches, "calibrate: got no batches; wanted calibration data")
    for group in groups:
        stats = collect(loss, params, batches, group)
        params = tree.map_with_path(partial(_replaced, stats, method), params)
    return params


def _replaced(stats: dict[str, Statistics], method: Method, path: str, w: Any) -> Any:
    return method(w, stats[path]) if path in stats else w


def importance(format: Format) -> Method:
    """Return the method that learns vectors with the mean squares of the inputs as weights of the squared error."""
    return lambda w, stats: quantize(w, format, importance=stats.second.diagonal() / stats.count)


def round_to_nearest(format: Format) -> Method:
    """Return the method that needs no statistics: :func:`fquant.quantize`."""
    return lambda w, stats: quantize(w, format)
