"""The loss of logits and its gradient as two ops, for models whose last operation is the loss.

    nll(logits, targets, ignore)                         [c v], i64[c] to f32[c]: logsumexp(row) - row[target]
    nll_backward(logits, targets, ignore, factor=None)    the same, and (softmax(row) - one-hot(target)) · factor [c v]

In plain torch the loss of a chunk of bfloat16 logits is a dozen passes over float32 tensors of its size: a cast, a
logsumexp, a softmax, a scatter, and so on. Here a row is read once, or twice for the gradient, and computed in float32
in registers; only the result is written. The reference defines the results. The kernels are within a few roundings of
it, not equal to the bit. Infinities and NaN come out as there.

float64 and devices without a kernel take the reference. The ops have no derivatives: the second is the derivative of
the first. For higher orders, differentiate the reference. Under vmap, rows are merged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..arguments import COMPUTED, sum_dtype
from ..dispatch import backend
from ..registry import map_rows, register

SCHEMAS = {
    "nll": "(Tensor logits, Tensor targets, int ignore) -> Tensor",
    "nll_backward": "(Tensor logits, Tensor targets, int ignore, Tensor? factor=None) -> (Tensor, Tensor)",
}


def nll(logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
    """Return the negative log likelihood of each row's target, f32[c] in nats, zero in rows whose target is ``ignore``.

    logits [c v] in f32, bf16, f16 or f64 (the result is then f64); targets i64[c].

    Raises TypeError for another dtype, ValueError for other shapes or devices. Raises IndexError for a target that is
    neither in [0, v) nor ``ignore``; on CUDA that is an assertion on the device, which stops the program, as in torch.
    """
    return _OPS["nll"](logits, targets, ignore)


def nll_backward(logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return :func:`nll` and the gradient of ``(factor * nll).sum()`` with respect to the logits, [c v] in their dtype.

    ``factor`` is f32[c] (f64 for f64; default: ones). The gradient is rounded once, after the factor, and is zero in
    ignored rows. Raises what :func:`nll` does.
    """
    return _OPS["nll_backward"](logits, targets, ignore, factor)


def _nll(logits: Tensor, targets: Tensor, ignore: int, **out: Tensor) -> Tensor:
    _check("nll", logits, targets)
    _check_values("nll", targets, logits.shape[1], ignore)
    return backend(logits.device.type)[1].nll(logits, targets, ignore, **out)


def _nll_fake(logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
    _check("nll", logits, targets)
    return logits.new_empty(len(logits), dtype=sum_dtype(logits))


def _nll_backward(
    logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None = None, **out: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    _check("nll_backward", logits, targets, factor)
    _check_values("nll_backward", targets, logits.shape[1], ignore)
    return backend(logits.device.type)[1].nll_backward(logits, targets, ignore, factor, **out)


def _nll_backward_fake(
    logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    _check("nll_backward", logits, targets, factor)
    return logits.new_empty(len(logits), dtype=sum_dtype(logits)), logits.new_empty(logits.shape)


def _check(name: str, logits: Tensor, targets: Tensor, factor: Tensor | None = None) -> None:
    if logits.dtype not in COMPUTED:
        raise TypeError(f"{name} got logits {logits.dtype}; wanted f32, bf16, f16 or f64")
    if logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"{name} got logits {tuple(logits.shape)}; wanted [c v], v being at least 1")
    for part, t, dtype in (("targets", targets, torch.int64), ("factor", factor, sum_dtype(logits))):
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
    """Raise IndexError for a target outside of its row."""
    wrong = ((targets < 0) | (targets >= vocab)) & (targets != ignore)
    wanted = f"wanted one in [0, {vocab}), or {ignore} to ignore it"
    if targets.is_cuda:
        torch._assert_async(~wrong.any(), f"{name} got another target; {wanted}")  # without waiting for the device
    elif wrong.any():
        row = int(wrong.nonzero()[0])
        raise IndexError(f"{name} got target {int(targets[row])} in row {row}; {wanted}")


_FIX = (
    "it computes values only: differentiate fquant.kernels.reference.nll, the same in plain torch, or call this one "
    "inside an autograd Function whose backward multiplies by the slope"
)
_VERBS = {"nll": (_nll, _nll_fake), "nll_backward": (_nll_backward, _nll_backward_fake)}
_OPS = {
    name: register(name, SCHEMAS[name], real, fake, lambda *args, name=name: map_rows(_OPS[name], *args), _FIX)
    for name, (real, fake) in _VERBS.items()
}
