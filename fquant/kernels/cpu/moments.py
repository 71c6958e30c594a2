"""Steps of optimisers, by csrc/moments.h: one pass over gradient, parameter and moments."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ...format import E4M3, Format, read
from .. import moment_codes, reference
from ..reference.moments import FLOAT32
from .codec import byte_planes
from .library import DTYPES, RULES, Moment, State, Update, call, result

NONE = (None,) * 5
CHUNK = 1024  # elements of moments in float32 that are converted together


def adam_update(
    grad: Tensor, param: Tensor, mean: Tensor, mean_scale: Tensor, square: Tensor, square_scale: Tensor, rates: Tensor,
    mean_format: str, square_format: str, rounding: str, b1: float, b2: float, eps: float, decay: float,
    coupled: bool, apply: bool, key: Tensor | None, start: int,
    out: Sequence[Tensor | None] = NONE,
) -> tuple[Tensor, ...]:  # fmt: skip
    states, formats = [(mean, mean_scale), (square, square_scale)], (mean_format, square_format)
    update = _described(formats, rounding, "adam" if coupled else "adamw", b1, b2, eps, decay, apply)
    if update is None:
        return reference.adam_update(
            grad, param, mean, mean_scale, square, square_scale, rates, mean_format, square_format, rounding, b1, b2,
            eps, decay, coupled, apply, key, start,
        )  # fmt: skip
    return _run(update, grad, param, states, rates, key, start, out)


def momentum_update(
    grad: Tensor, param: Tensor, moment: Tensor, scale: Tensor, rates: Tensor, format: str, rounding: str, rule: str,
    b1: float, b2: float, decay: float, apply: bool, key: Tensor | None, start: int,
    out: Sequence[Tensor | None] = NONE,
) -> tuple[Tensor, ...]:  # fmt: skip
    update = _described((format,), rounding, rule, b1, b2, 0.0, decay, apply)
    if update is None:
        return reference.momentum_update(
            grad, param, moment, scale, rates, format, rounding, rule, b1, b2, decay, apply, key, start
        )
    return _run(update, grad, param, [(moment, scale)], rates, key, start, out)


def _run(
    static: Update,
    grad: Tensor,
    param: Tensor,
    states: Sequence[tuple[Tensor, Tensor]],
    rates: Tensor,
    key: Tensor | None,
    start: int,
    out: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    update = Update.from_buffer_copy(static)
    grad, param, rates = grad.contiguous(), param.contiguous(), rates.contiguous()
    results = [result(out[0], *param.shape, dtype=param.dtype if update.apply else torch.float32)]
    kept = [grad, param, rates, static]
    for i, (codes, scale) in enumerate(states):
        codes, scale = codes.contiguous(), scale.contiguous()
        new = [result(out[1 + 2 * i], *codes.shape, dtype=codes.dtype)]
        new += [result(out[2 + 2 * i], *scale.shape, dtype=scale.dtype)]
        update.states[i] = State(*(t.data_ptr() for t in (codes, scale, *new)))
        kept += [codes, scale]
        results += new
    update.grad, update.param, update.out, update.rates = (t.data_ptr() for t in (grad, param, results[0], rates))
    update.n, update.grad_dtype, update.param_dtype = param.numel(), DTYPES[grad.dtype], DTYPES[param.dtype]
    update.key, update.first = None if key is None else key.data_ptr(), start
    if param.numel():
        call("update", update)
    return tuple(results)


@lru_cache(maxsize=256)
def _described(
    formats: tuple[str, ...], rounding: str, rule: str, b1: float, b2: float, eps: float, decay: float, apply: bool
) -> Update | None:
    """Return the update without tensors; None if C has no codes of a format."""
    found = [Moment(block=CHUNK, bits=32) if text == FLOAT32 else _moment(read(text), rounding) for text in formats]
    moments = [moment for moment in found if moment is not None]
    if len(moments) < len(found):
        return None
    chunk = max(moment.block for moment in moments)
    static = Update(chunk=chunk, b1=b1, rest1=1 - b1, b2=b2, rest2=1 - b2, eps=eps, decay=decay)
    static.rule, static.apply, static.keep = RULES.index(rule), apply, moments
    for i, moment in enumerate(moments):
        static.moments[i] = moment
    return static


@lru_cache(maxsize=64)
def _moment(format: Format, rounding: str) -> Moment | None:
    moment = Moment(block=format.block, bits=format.bits, grid=rounding == "grid")
    moment.least, moment.top = moment_codes.LEAST[rounding], moment_codes.largest(format)
    table = torch.tensor(format.table, dtype=torch.float32, device="cpu")
    order, thresholds = moment_codes.codes(format, rounding)
    parts = moment_codes.segments(format) if rounding == "nearest" else None
    moment.keep = tables = [table, thresholds, torch.tensor(order, dtype=torch.uint8, device="cpu")]
    if parts is not None:
        tables.append(torch.cat(parts[:4]))
        moment.segments, moment.has_sign = tables[-1].data_ptr(), parts.signed
        moment.low, moment.high = moment_codes.ORIGIN, moment_codes.SLOPE
    elif format.bits == 8 and format.table != E4M3:
        cells = moment_codes.cells(format, rounding)
        if cells is None:
            return None
        tables.append(cells.cells)
        moment.cells, moment.low, moment.high = cells.cells.data_ptr(), cells.low, cells.high
        moment.has_sign = len(cells.cells) > cells.high - cells.low + 1
    moment.table, moment.thresholds, moment.order = (t.data_ptr() for t in tables[:3])
    if format.bits == 8:
        tables.append(byte_planes(table))
        moment.planes = tables[-1].data_ptr()
    if list(order) == list(range(2**format.bits)):
        moment.order = None
    return moment
