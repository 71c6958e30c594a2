"""The loss of logits as two ops, for models whose loss is the last thing that they do.

    nll(logits, targets, ignore)                       [c v], i64[c] to f32[c]: logsumexp(row) - row[target]
    nll_backward(logits, targets, ignore, factor=None)    the same, and softmax(row) - one-hot(target) [c v], times factor

In plain torch the loss of a chunk of logits in bfloat16 is a dozen passes over tensors in float32 of its size: a cast,
a logsumexp, a softmax, a scatter, and so on. Here a row is read, twice where its slope is wanted, handled in float32 in
registers, and what is written is the result. What they are is defined by ``reference.py``, and they are within a few
roundings of it rather than equal to the bit; what is infinite or not a number comes out as it does there.

The ops are registered beside the others of ``fquant::`` and computed by the same table of backends, on devices that it
does not name, and of float64, by the reference. They have no derivatives: the second is that of the first, and whoever
wants the derivatives of both differentiates the reference. Mapped rows are more rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch import backend
from ..registry import register
from ..spec import FLOATS

SCHEMAS = {
    "nll": "(Tensor logits, Tensor targets, int ignore) -> Tensor",
    "nll_backward": "(Tensor logits, Tensor targets, int ignore, Tensor? factor=None) -> (Tensor, Tensor)",
}


def nll(logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
    """The negative log likelihood of every row's target, f32[c] in nats, zero in rows whose target is ``ignore``.

    logits [c v] in f32, bf16, f16 or f64, of which the result is f64; targets i64[c].

    Raises TypeError for another dtype, ValueError for other shapes or devices, and IndexError for a target that is
    neither in [0, v) nor ``ignore``; on CUDA that is an assertion on the device, as in torch, which stops the program.
    """
    return _OPS["nll"](logits, targets, ignore)


def nll_backward(logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """:func:`nll`, and the gradient of ``(factor * nll).sum()`` with respect to the logits: [c v] in their dtype.

    The gradient is rounded once, after ``factor`` f32[c] (f64 of f64; default: ones) is multiplied in; it is zero in
    rows to ignore. Raises what :func:`nll` does.
    """
    return _OPS["nll_backward"](logits, targets, ignore, factor)


def _nll(logits: Tensor, targets: Tensor, ignore: int, **out: Tensor) -> Tensor:
    _check("nll", logits, targets)
    _check_values("nll", targets, logits.shape[1], ignore)
    return backend(logits.device.type)[1].nll(logits, targets, ignore, **out)


def _nll_fake(logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
    _check("nll", logits, targets)
    return logits.new_empty(len(logits), dtype=_wide(logits))


def _nll_backward(
    logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None = None, **out: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    _check("nll_backward", logits, targets, factor)
    _check_values("nll_backward", targets, logits.shape[1], ignore)
    return backend(logits.device.type)[1].nll_backward(logits, targets, ignore, factor, **out)


def _nll_slope_fake(
    logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    _check("nll_backward", logits, targets, factor)
    return logits.new_empty(len(logits), dtype=_wide(logits)), logits.new_empty(logits.shape)


def _check(name: str, logits: Tensor, targets: Tensor, factor: Tensor | None = None) -> None:
    if logits.dtype not in (*FLOATS, torch.float64):
        raise TypeError(f"{name} got logits {logits.dtype}; wanted f32, bf16, f16 or f64")
    if logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"{name} got logits {tuple(logits.shape)}; wanted [c v], v being at least 1")
    for part, t, dtype in (("targets", targets, torch.int64), ("factor", factor, _wide(logits))):
        if t is None:
            continue
        if t.dtype is not dtype:
            raise TypeError(f"{name} got {part} {t.dtype} beside logits {logits.dtype}; wanted {dtype}")
        if t.shape != logits.shape[:1]:
            raise ValueError(
                f"{name} got {part} {tuple(t.shape)} and logits {tuple(logits.shape)}; wanted one number a row"
            )
        if t.device != logits.device:
            raise ValueError(f"{name} got logits on {logits.device} and {part} on {t.device}; move one")


def _check_values(name: str, targets: Tensor, vocab: int, ignore: int) -> None:
    """Refuse a target that would be read or written beside its row."""
    wrong = ((targets < 0) | (targets >= vocab)) & (targets != ignore)
    wanted = f"wanted one in [0, {vocab}), or {ignore} to ignore it"
    if targets.is_cuda:
        torch._assert_async(~wrong.any(), f"{name} got another target; {wanted}")  # nobody waits for the device
    elif wrong.any():
        row = int(wrong.nonzero()[0])
        raise IndexError(f"{name} got target {int(targets[row])} in row {row}; {wanted}")


def _vmap(name: str, info: Any, in_dims: Any, *args: Any) -> Any:
    rows = [
        arg if not isinstance(arg, Tensor) else (arg.movedim(at, 0) if at is not None else arg.expand(b, *arg.shape))
        for arg, at, b in ((arg, at, info.batch_size) for arg, at in zip(args, in_dims, strict=True))
    ]
    out = _OPS[name](*(t.flatten(0, 1) if isinstance(t, Tensor) else t for t in rows))
    each = lambda t: t.unflatten(0, rows[0].shape[:2])
    return (each(out), 0) if isinstance(out, Tensor) else (tuple(map(each, out)), (0, 0))


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


_FIX = (
    "it computes values only: differentiate fquant.kernels.reference.nll, the same in plain torch, or call this one "
    "inside an autograd Function whose backward multiplies by the slope"
)
_VERBS = {"nll": (_nll, _nll_fake), "nll_backward": (_nll_backward, _nll_slope_fake)}
_OPS = {
    name: register(name, SCHEMAS[name], real, fake, partial(_vmap, name), _FIX) for name, (real, fake) in _VERBS.items()
}
