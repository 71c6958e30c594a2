"""The last product and the loss as one: cross entropy whose logits never exist whole.

    loss = head.cross_entropy(x, weight, targets)       # blocks.cross_entropy(linear(x, weight), targets)

Logits are a model's largest tensor: of 8192 tokens and a vocabulary of 128k they take 4 GiB in float32, and the loss
makes several of their size. Here the rows (leading dims of ``x`` and t, flattened) are handled ``chunk`` at a time:

    logits [c v]  ->  nll [c]  and  softmax - one-hot [c v]  ->  its product with the weight [c d]

The middle is one op, ``fquant.kernels.ops.nll``: nothing of the size of the logits exists between them and their slope.

The gradient of a loss with respect to its own logits needs no cotangent but a factor a row. So the gradient with
respect to ``x`` is made in the pass that makes the loss, is kept as [rows d], and is multiplied by that factor in the
backward: a frozen head is multiplied by twice in all, as it is where logits are kept. This is the fused linear cross
entropy of Liger kernel (Hsu et al. 2024). Where the weight or an adapter beside it is trained too, the backward makes
the logits again, chunk by chunk, which is four products instead of three; the gradients of chunks are summed in
float32 at least.

*Transforms.* The autograd Function returns the losses and that gradient, as two results. The second is not shown to
the caller, but it is a function of ``x`` and the weight like the first: whoever differentiates the backward reaches
it, and its derivative is that of the same chunks, recorded, their loss in plain torch (``SLOW``). So every order
exists; what the orders above the first record is as large as all logits. Where nothing is differentiated in reverse,
only the losses are made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fquant import tree
from fquant.autodiff import unwrap_dead
from fquant.communication import VocabShard
from fquant.kernels import reference
from fquant.kernels.ops import nll
from fquant.packed_linear import Adapted, Packed, Weight, linear

from . import vocab_parallel
from .blocks import IGNORE
from .reference_gradient import Again, Pair, Verb, put

# A chunk holds its logits and their slope, both in x's dtype. Each may take as much as x itself, which is Liger's rule:
# it makes about vocab / dim chunks however many rows there are, and costs little beside the activations, of which x is
# one. Where x is small the two together may take this much, for a chunk of few rows multiplies slowly: every chunk
# reads the whole weight. More would fall out of a CPU's last cache between one op and the next: of bf16 and 32000 words
# 256 rows were the fastest, 128 and 512 took a tenth more.
CHUNK_BYTES = 32 * 2**20
TILE = 16  # a chunk of more rows has a multiple of this: products handle rows by so many, or by a few times as many


def cross_entropy(
    x: Tensor,
    weight: Weight,
    targets: Tensor,
    count: Tensor | float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """``blocks.cross_entropy(linear(x, weight), targets, count)``, some rows at a time: a float32 scalar, in nats.

    x f[... t d], weight [vocab d] of any kind that ``linear`` takes, or a Part of one; targets int64 or int32
    ``[... t]``, -100 being ignored. The sum of the negative log likelihoods is divided by ``count``, the number of
    targets of the whole global batch; the default is the number counted here (at least 1). The result is float64 for
    float64 ``x``.

    ``chunk`` is how many rows are handled at a time; the default follows from ``CHUNK_BYTES``. Examples mapped over one
    weight are so many more rows, several weights are a loop; but in forward mode and above the first order, inside a
    vmap, it is ``chunk`` rows of each example at a time.

    Raises ValueError where shapes do not fit, for a chunk below 1, and for an adapter with dropout, whose bits depend
    on the place of a row among all rows; TypeError for targets of another dtype, IndexError for one that is neither
    -100 nor in [0, vocab) (on CUDA an assertion on the device); RuntimeError in torch.compile.
    """
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError(_COMPILE)
    if x.shape[:-1] != targets.shape:
        raise ValueError(f"targets: shape {tuple(targets.shape)}, want x's {tuple(x.shape[:-1])}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; wanted at least 1 row")
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets: {targets.dtype}, want int64 or int32")
    vocab = _vocab(weight)
    leaves, structure = tree.flatten(weight)
    rows, chosen = x.reshape(targets.numel(), x.shape[-1]), targets.reshape(targets.numel()).long()  # [n d], [n]
    how = _How(structure, chunk or _rows(x, vocab))
    in_reverse = torch.is_grad_enabled() and any(_reversed(t) for t in (rows, *leaves))
    function, verb, apart = (
        (_Both, _both, vocab_parallel.both) if in_reverse else (_Rows, _losses, vocab_parallel.losses)
    )
    pair = _pair(verb, how)
    if isinstance(weight, VocabShard):
        rows, chosen = vocab_parallel.filled(weight, rows, chosen)
        pair = pair._replace(fast=partial(apart, *how))
    losses, *_ = function.apply(pair, rows, chosen, *leaves)
    return losses.sum() / ((targets != IGNORE).sum().clamp(min=1) if count is None else count)


def _rows(x: Tensor, vocab: int) -> int:
    """How many rows of ``x`` are a chunk."""
    rows = max(1, max(CHUNK_BYTES, 2 * x.nbytes) // (2 * x.itemsize * max(1, vocab)))
    return rows // TILE * TILE if rows > TILE else rows


class _How(NamedTuple):
    """The static half of a call: how the weight is put together, and the rows of a chunk."""

    structure: tree.Structure
    chunk: int

    def weight(self, leaves: Any) -> Any:
        weight = tree.unflatten(self.structure, leaves)
        return weight.whole(weight.closed) if isinstance(weight, VocabShard) else weight

    def split(self, *rows: Tensor) -> Any:
        """The chunks of all ``rows`` side by side; one that is empty where there are none."""
        # torch 2.11 cannot trace the split of none.
        return zip(*(t.split(self.chunk) if len(t) else (t,) for t in rows), strict=True)


class _Loss(NamedTuple):
    """The loss of logits [c v] and targets [c], without its slope and with it."""

    nll: Callable[..., Tensor]
    nll_backward: Callable[..., tuple[Tensor, Tensor]]


FAST, SLOW = _Loss(nll.nll, nll.nll_backward), _Loss(reference.nll, reference.nll_backward)


def _losses(how: _How, loss: _Loss, x: Tensor, targets: Tensor, *leaves: Tensor) -> tuple[Tensor]:
    """x [n d], targets [n] -> nll f32[n]."""
    weight = _cast(how.weight(leaves), x.dtype)
    return (torch.cat([loss.nll(linear(some, weight), chosen, IGNORE) for some, chosen in how.split(x, targets)]),)


def _both(how: _How, loss: _Loss, x: Tensor, targets: Tensor, *leaves: Tensor) -> tuple[Tensor, Tensor]:
    """x [n d], targets [n] -> nll f32[n] and the gradient [n d] of its sum with respect to x, in x's dtype."""
    weight = _cast(how.weight(leaves), x.dtype)
    parts = [_chunk(loss, weight, chosen, some) for some, chosen in how.split(x, targets)]
    losses, dx = zip(*parts, strict=True)
    return torch.cat(losses), torch.cat(dx)


def _chunk(loss: _Loss, weight: Any, targets: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    logits, pull, *_ = torch.func.vjp(lambda x: linear(x, weight), x)  # [c v]
    losses, slope = loss.nll_backward(logits, targets, IGNORE)
    return losses, pull(slope)[0]


class _Rows(Again):
    """``f(x, targets, *leaves)`` row by row: mapped over one weight, it has more rows."""

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, pair: Pair, *tensors: Tensor) -> Any:
        if any(dim is not None for dim in in_dims[3:]):
            return super().vmap(info, in_dims, pair, *tensors)
        x, targets = (
            (t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0))
            for t, dim in zip(tensors[:2], in_dims[1:3], strict=True)
        )
        out = cls.apply(pair, x.flatten(0, 1), targets.flatten(), *tensors[2:])
        return tuple(t.reshape(*targets.shape, *t.shape[1:]) for t in out), (0,) * len(out)


class _Both(_Rows):
    """:func:`_both`, its first result differentiated by means of its second."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Rows.setup_context(ctx, inputs, output)
        ctx.save_for_backward(output[1], *inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (how, _), (g, g_dx) = ctx.pair.slow.args, grads
        dx, x, targets, *leaves = unwrap_dead(ctx.saved_tensors)
        wanted = tuple(i for i, need in enumerate(ctx.needs_input_grad[3:]) if need)
        g = _wide(x.new_zeros(len(x))) if g is None else g
        if g_dx is not None:  # somebody differentiates this backward
            second = partial(_second, how, wanted)
            grad, *found = Again.apply(Pair(second, second), x, targets, g, g_dx, *leaves)
        else:
            grad = (g[:, None] * dx).to(dx.dtype)  # rounded once
            found = Again.apply(_pair(_weights, how, wanted), x, targets, g, *leaves) if wanted else ()
        return None, grad, None, *put([None] * len(leaves), wanted, found)


def _weights(
    how: _How, wanted: tuple[int, ...], loss: _Loss, x: Tensor, targets: Tensor, g: Tensor, *leaves: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of ``(g · nll).sum()`` with respect to the leaves at ``wanted``."""
    at = [leaves[i] for i in wanted]
    sums: list[Any] = [0.0] * len(at)
    for some, chosen, factor in how.split(x, targets, g):
        product = lambda *at, some=some: linear(some, how.weight(put(leaves, wanted, at)))
        logits, pull, *_ = torch.func.vjp(product, *at)
        found = pull(loss.nll_backward(logits, chosen, IGNORE, factor)[1])
        sums = [total + _wide(grad) for total, grad in zip(sums, found, strict=True)]
    return tuple(total.to(leaf.dtype) for total, leaf in zip(sums, at, strict=True))


def _second(
    how: _How, wanted: tuple[int, ...], x: Tensor, targets: Tensor, g: Tensor, g_dx: Tensor, *leaves: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of ``(g · nll).sum() + (g_dx · dx).sum()`` with respect to x and the leaves at ``wanted``."""
    at = [leaves[i] for i in wanted]
    sums: list[Any] = [0.0] * len(at)
    rows = []
    for some, chosen, factor, direction in how.split(x, targets, g, g_dx):
        both = lambda some, *at, chosen=chosen: _chunk(SLOW, how.weight(put(leaves, wanted, at)), chosen, some)
        _, pull, *_ = torch.func.vjp(both, some, *at)
        grad, *found = pull((factor, direction))
        rows.append(grad)
        sums = [total + _wide(grad) for total, grad in zip(sums, found, strict=True)]
    return torch.cat(rows), *(total.to(leaf.dtype) for total, leaf in zip(sums, at, strict=True))


def _pair(verb: Verb, *how: Any) -> Pair:
    return Pair(partial(verb, *how, FAST), partial(verb, *how, SLOW))


def _vocab(weight: Any) -> int:
    match weight:
        case VocabShard(size=size):
            return size
        case Adapted(base=base, lora=lora, key=key):
            if key is not None and lora.dropout > 0:
                raise ValueError(_DROPOUT.format(lora.dropout))
            return _vocab(base)
        case Tensor() | Packed() if len(weight.shape) == 2:
            return weight.shape[0]
        case Tensor() | Packed():
            raise ValueError(f"weight: shape {tuple(weight.shape)}, want [vocab d]")
    raise TypeError(f"weight is a {type(weight).__name__}; wanted Tensor, Packed or Adapted")


def _cast(weight: Any, dtype: torch.dtype) -> Any:
    """A dense weight in ``dtype``, so that ``linear`` does not cast it for every chunk."""
    match weight:
        case Adapted(base=base, lora=lora):
            return Adapted(_cast(base, dtype), lora)
        case Tensor():
            return weight.to(dtype)
    return weight


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _reversed(t: Tensor) -> bool:
    """Whether ``t`` is differentiated in reverse, by autograd or by any torch.func transform around."""
    wrappers: Any = torch._C._functorch  # type: ignore[attr-defined]
    while not t.requires_grad:
        if not wrappers.is_functorch_wrapped_tensor(t):
            return False
        t = wrappers.get_unwrapped(t)
    return True


_COMPILE = (
    "head.cross_entropy cannot be traced by torch.compile; compile what make_fx captured: "
    "torch.compile(make_fx(step)(*args))"
)

_DROPOUT = (
    "weight has an adapter with dropout {}, whose bits depend on where a row lies among all rows; "
    "attach it without a key, or use blocks.cross_entropy of the whole logits"
)
