"""The loss of logits and its gradient as two ops, for models whose last operation is the loss.

    nll(logits, targets, ignore)                         [c v], i64[c] to f32[c]: logsumexp(row) - row[target]
    nll_backward(logits, targets, ignore, factor=None)    the same, and (softmax(row) - one-hot(target)) · factor [c v]

In plain torch the loss of a chunk of bfloat16 logits is a dozen passes over float32 tensors of its size. Here a row is
read once, or twice for the gradient, and computed in float32 in registers. The reference defines the results. The
kernels are within a few roundings of it, not equal to the bit. Infinities and NaN come out as there.

float64 and devices without a kernel take the reference. The ops have no derivatives: the second is the derivative of
the first. For higher orders, differentiate the reference. Under vmap, rows are merged.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_beside, check_floats, sum_dtype
from ..registry import by_backend, map_rows, register


def nll(logits: Tensor, targets: Tensor, ignore: int) -> Tensor:
    """Return the negative log likelihood of each row's target, f32[c] in nats, zero in rows whose target is ``ignore``.

    logits [c v] in f32, bf16, f16 or f64 (the result is then f64); targets i64[c].
    Raises TypeError for another dtype, ValueError for other shapes or devices. Raises IndexError for a target that is
    neither in [0, v) nor ``ignore``; on CUDA that is an assertion on the device, which stops the program, as in torch.
    """
    return _NLL(logits, targets, ignore)


def nll_backward(logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return :func:`nll` and the gradient of ``(factor * nll).sum()`` with respect to the logits, [c v] in their dtype.

    ``factor`` is f32[c] (f64 for f64; default: ones). The gradient is rounded once, after the factor, and is zero in
    ignored rows. Raises what :func:`nll` does.
    """
    return _NLL_BACKWARD(logits, targets, ignore, factor)


def _check(op: str, logits: Tensor, targets: Tensor, ignore: int, factor: Tensor | None = None) -> None:
    check_floats(op, logits, "logits")
    if logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"{op} got logits {tuple(logits.shape)}; wanted [c v], v being at least 1")
    rows = logits.shape[:1]
    parts = {"targets": (targets, rows, torch.int64), "factor": (factor, rows, sum_dtype(logits))}
    check_beside(op, "logits", logits, **parts)


def _real(op: str, logits: Tensor, targets: Tensor, ignore: int, *factor: Tensor | None, **out: Any) -> Any:
    vocab = logits.shape[1]
    wrong = ((targets < 0) | (targets >= vocab)) & (targets != ignore)
    wanted = f"wanted one in [0, {vocab}), or {ignore} to ignore it"
    if targets.is_cuda:
        torch._assert_async(~wrong.any(), f"{op} got another target; {wanted}")  # without waiting for the device
    elif wrong.any():
        row = int(wrong.nonzero()[0])
        raise IndexError(f"{op} got target {int(targets[row])} in row {row}; {wanted}")
    return by_backend(op, logits, targets, ignore, *factor, **out)


_FIX = (
    "it computes values only: differentiate fquant.kernels.reference.nll, the same in plain torch, or call this one "
    "inside an autograd Function whose backward multiplies by the slope"
)
_losses = lambda logits, *_: logits.new_empty(len(logits), dtype=sum_dtype(logits))
_slopes = lambda logits, *_: (_losses(logits), logits.new_empty(logits.shape))
_NLL = register(nll, _check, _losses, map_rows, _FIX, real=partial(_real, "nll"))
_NLL_BACKWARD = register(nll_backward, _check, _slopes, map_rows, _FIX, real=partial(_real, "nll_backward"))
