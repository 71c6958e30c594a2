"""Steps of optimisers, by csrc/moments.h: one pass over gradient, parameter and moments."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...format import E4M3, Format, read
from .. import moment_codes, reference
from ..reference.moments import FLOAT32
from .codec import byte_planes
from .library import DTYPES, RULES, Moment, State, Update, call, result

NONE = (None,) * 5
CHUNK = 1024  # elements of moments in float32 that are converted together


def adam_update(*args: Any, out: Sequence[Tensor | None] = NONE) -> tuple[Tensor, ...]:
    return _run("adam_update", args, out)


def momentum_update(*args: Any, out: Sequence[Tensor | None] = NONE) -> tuple[Tensor, ...]:
    return _run("momentum_update", args, out)


def _run(name: str, args: Sequence[Any], out: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    update = describe(name, args)
    if update is None:
        return getattr(reference, name)(*args)
    grad, *others = args[: count_tensors(args)]
    tensors = [grad if update.rows else grad.contiguous(), *(t.contiguous() for t in others)]
    key, active = (t if t is None else t.contiguous() for t in (args[-3], args[-1]))
    param, *old, _ = others
    wanted = [(param, param.dtype if update.apply else torch.float32), *((t, t.dtype) for t in old)]
    results = [result(place, *t.shape, dtype=dtype) for place, (t, dtype) in zip(out, wanted, strict=False)]
    point(update, tensors, key, active, results)
    if param.numel():
        call("update", update)
    return tuple(results)


def count_tensors(args: Sequence[Any]) -> int:
    """Return how many tensors are in front of the first format: gradient, parameter, moments and rates."""
    return [isinstance(x, str) for x in args].index(True)


def describe(name: str, args: Sequence[Any]) -> Update | None:
    """Return the update of a call of an op, without addresses; None if C has no codes of a format."""
    count = count_tensors(args)
    (grad, param, *_, rates), options, (apply, _, start, _) = args[:count], args[count:-4], args[-4:]
    if name == "adam_update":
        *formats, rounding, b1, b2, eps, decay, coupled = options
        rule = "adam" if coupled else "adamw"
    else:
        format, rounding, rule, b1, b2, decay = options
        formats, eps = [format], 0.0
    static = _described((*formats,), rounding, rule, b1, b2, eps, decay, apply)
    if static is None:
        return None
    update = Update.from_buffer_copy(static)
    update.keep = static
    if static.moments[0].bits == 32 and grad.ndim > rates.ndim and _is_transposed(grad):
        update.rows, update.columns = grad.shape[-2:]
    update.grad_dtype, update.param_dtype = DTYPES[grad.dtype], DTYPES[param.dtype]
    update.count = len(rates) if rates.ndim > 1 else 1
    update.n, update.first = param.numel() // max(1, update.count), start
    return update


def point(
    update: Update, tensors: Sequence[Tensor], key: Tensor | None, active: Tensor | None, results: Sequence[Tensor]
) -> None:
    """Fill in the addresses of the tensors in front of the formats, of key and active, and of the results."""
    grad, param, *old, rates = (t.data_ptr() for t in tensors)
    out, *new = (t.data_ptr() for t in results)
    update.grad, update.param, update.rates, update.out = grad, param, rates, out
    update.key, update.active = (None if t is None else t.data_ptr() for t in (key, active))
    for i in range(len(old) // 2):
        update.states[i] = State(*old[2 * i : 2 * i + 2], *new[2 * i : 2 * i + 2])


def _is_transposed(x: Tensor) -> bool:
    """Return True if ``x`` has the memory of contiguous matrices that are the transposes of its own."""
    return min(x.shape[-2:]) > 1 and x.mT.is_contiguous()


@lru_cache(maxsize=256)
def _described(
    formats: tuple[str, ...], rounding: str, rule: str, b1: float, b2: float, eps: float, decay: float, apply: bool
) -> Update | None:
    """Return the update without tensors; None if C has no codes of a format."""
    found = [
        Moment(block=CHUNK, bits=32) if text == FLOAT32 else _moment(read(text), rounding, square=i == 1)
        for i, text in enumerate(formats)
    ]
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
def _moment(format: Format, rounding: str, square: bool) -> Moment | None:
    moment = Moment(block=format.block, bits=format.bits, grid=rounding == "grid")
    moment.least, moment.top = moment_codes.LEAST[rounding], moment_codes.largest(format)
    moment.floor = moment_codes.floor(format, rounding) if square else 0.0
    table = torch.tensor(format.table, dtype=torch.float32, device="cpu")
    order, thresholds = moment_codes.codes(format, rounding)
    parts = moment_codes.segments(format) if rounding != "grid" else None
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
