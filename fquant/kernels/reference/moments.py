"""Updates of parameters by moments: decode, update, encode again, each operation in float32."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...format import Format, num_blocks, read
from ..spec import Spec
from .codec import decode
from .random_bits import fold
from .stochastic_rounding import round_by

FLOAT32 = "float32"  # in place of a format, of a moment that is not packed
Results = tuple[Tensor, ...]


def _one_by_one(update: Callable[..., Results]) -> Callable[..., Results]:
    """Let ``update`` take rates f32[n 3] too, those of each index of dim 0, and leave what is not active."""

    @wraps(update)
    def run(grad: Tensor, param: Tensor, *rest: Any) -> Results:
        *given, apply, key, start, active = rest
        count = [isinstance(x, str) for x in given].index(True)
        tensors, static = (grad, param, *given[:count]), given[count:]
        if tensors[-1].ndim > 1 and len(param):
            keys, actives = ([None] * len(param) if t is None else t.unbind() for t in (key, active))
            each = zip(*(t.unbind() for t in tensors), keys, actives, strict=True)
            found = [run(*one, *static, apply, k, start, a) for *one, k, a in each]
            return tuple(torch.stack(some) for some in zip(*found, strict=True))
        old = param if apply else torch.zeros_like(param, dtype=torch.float32), *tensors[2:-1]
        if not param.numel():
            return tuple(t.clone() for t in old)
        new = update(*tensors, *static, apply, key, start)
        return new if active is None else tuple(torch.where(active, *pair) for pair in zip(new, old, strict=True))

    return run


@_one_by_one
def adam_update(
    grad: Tensor, param: Tensor, mean: Tensor, mean_scale: Tensor, square: Tensor, square_scale: Tensor, rates: Tensor,
    mean_format: str, square_format: str, rounding: str, b1: float, b2: float, eps: float, decay: float,
    coupled: bool, apply: bool, key: Tensor | None, start: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    g, p, (factor, by1, by2) = grad.float(), param.float(), rates.unbind()
    if coupled:
        g = g + decay * p
    m = b1 * _decoded(mean, mean_scale, mean_format, p) + (1 - b1) * g
    v = b2 * _decoded(square, square_scale, square_format, p) + (1 - b2) * (g * g)
    root = v.double().sqrt().float()  # a fifth of torch's roots in float32 on CPUs are a bit off
    change = (m * by1) / (root * by2 + eps)
    if mean_format == FLOAT32:
        change = (m / by1) / ((v / by2).double().sqrt().float() + eps)
    change = factor * (change if coupled else change + decay * p)
    stored = _encoded(m, mean_format, rounding), _encoded(v, square_format, rounding, square=True)
    return _result(param, change, apply, key, start), *stored[0], *stored[1]


@_one_by_one
def momentum_update(
    grad: Tensor, param: Tensor, moment: Tensor, scale: Tensor, rates: Tensor, format: str, rounding: str, rule: str,
    b1: float, b2: float, decay: float, apply: bool, key: Tensor | None, start: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    g, p, factor = grad.float(), param.float(), rates[0]
    m = _decoded(moment, scale, format, p)
    if rule == "lion":
        change = factor * (torch.sign(b1 * m + (1 - b1) * g) + decay * p)
        m = b2 * m + (1 - b2) * g
    elif rule in ("mean", "nesterov_mean"):
        g = g + decay * p
        m = b1 * m + (1 - b1) * g
        change = factor * ((1 - b1) * g + b1 * m if rule == "nesterov_mean" else m)
    else:
        g = g + decay * p
        m = b1 * m + g
        change = factor * (g + b1 * m if rule == "nesterov" else m)
    return _result(param, change, apply, key, start), *_encoded(m, format, rounding)


def _result(param: Tensor, change: Tensor, apply: bool, key: Tensor | None, start: int) -> Tensor:
    if not apply:
        return change.contiguous()
    new = param + change
    if key is None or param.dtype is torch.float32:
        return new.to(param.dtype).contiguous()
    place = torch.arange(start, start + new.numel(), dtype=torch.int64, device=new.device).view(new.shape)
    return round_by(new.contiguous(), param.dtype, fold(key, place))


def _decoded(codes: Tensor, scale: Tensor, format: str, like: Tensor) -> Tensor:
    if format == FLOAT32:
        return codes
    return decode([codes, scale], Spec(read(format), tuple(like.shape), torch.float32), torch.float32)


def _encoded(x: Tensor, text: str, rounding: str, square: bool = False) -> tuple[Tensor, Tensor]:
    if text == FLOAT32:
        return x.contiguous(), x.new_empty(0)
    codes, scale = encode_moment(x.flatten(), format := read(text), rounding, square)
    return codes.view(x.shape) if format.bits == 8 else codes, scale


def encode_moment(x: Tensor, format: Format, rounding: str, square: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise a moment x f32[n], or a mean of squares, to codes u8[bytes] and scales f32[blocks]."""
    assert format.block is not None
    whole = len(x) // format.block * format.block
    parts = [_blocks(part.unflatten(0, (-1, size)), format, rounding, size < format.block, square)
             for part, size in ((x[:whole], format.block), (x[whole:], len(x) - whole)) if len(part)]  # fmt: skip
    index, scale = (torch.cat(some) for some in zip(*parts, strict=True))
    assert len(scale) == num_blocks(format, len(x))
    if format.bits == 4:
        index = F.pad(index, (0, len(index) % 2))
        index = index[0::2] << 4 | index[1::2]
    return index, scale


def _blocks(x: Tensor, format: Format, rounding: str, short: bool, square: bool) -> Sequence[Any]:
    from ..moment_codes import codes, scaled  # which has the grid of this package

    order, thresholds = codes(format, rounding)
    y, scale = scaled(x, x.abs().amax(-1), format, rounding, short, square)
    index = torch.bucketize(y, thresholds.to(y.device), right=True)
    return torch.tensor(order, dtype=torch.uint8, device=y.device)[index].flatten(), scale
