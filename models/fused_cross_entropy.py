"""Fused linear cross entropy: the head's product and the loss as one, without whole logits.

    loss = fused_cross_entropy.cross_entropy(x, weight, targets)   # blocks.cross_entropy(linear(x, weight), targets)

Logits are a model's largest tensor: of 8192 tokens and a vocabulary of 128k they take 4 GiB in float32. Here the rows
(leading dims of ``x`` and t, flattened) are handled ``chunk`` at a time; the middle is ``fquant.kernels.ops.nll``:

    logits [c v]  ->  nll [c]  and  softmax - one-hot [c v]  ->  its product with the weight [c d]

The forward pass computes the gradient of ``x`` beside the loss, and the backward multiplies it by one factor a row. A
frozen head takes part in two products in all, as with whole logits (Liger kernel, Hsu et al. 2024). For a trained
weight or adapter the backward recomputes the logits chunk by chunk: four products instead of three.

The autograd Function also returns that gradient, hidden from the caller, as a differentiable function of ``x`` and the
weight. Its derivative is that of the same chunks, recorded, with their loss in plain torch. So every order exists;
orders above the first record as much as whole logits.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fquant import tree
from fquant.autodiff import layers, replace_at, unwrap_dead
from fquant.communication import VocabShard
from fquant.kernels import reference
from fquant.kernels.ops import nll
from fquant.kernels.reference.causal_attention import capped
from fquant.packed_linear import Adapted, Packed, Weight, linear, merged
from fquant.tree import expect

from . import vocab_parallel
from .blocks import IGNORE, check_ids, count_here
from .reference_gradient import Implementations, KernelWithReferenceGradient, at_least_float32
from .vocab_parallel import chunks, map_chunks

# A chunk has as many logits as x has elements, which is Liger's rule, but at least this many, because every chunk reads
# the whole weight. Of bf16 and 32000 words 256 rows were the fastest: 128 and 512 took a tenth more. In float32 the
# products of 128 rows take a quarter longer than those of 256.
CHUNK_LOGITS = 2**23
ROW_MULTIPLE = 16  # a chunk of more rows has a multiple of this: products handle 16 rows, or a few times 16, at once


def cross_entropy(
    x: Tensor,
    weight: Weight,
    targets: Tensor,
    count: Tensor | float | None = None,
    chunk: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Compute ``blocks.cross_entropy(linear(x, weight), targets, count)`` by chunks of rows: a float32 scalar, in nats.

    The sum of :func:`token_losses`, which has the arguments and the errors, is divided by ``count``, the number of
    targets of the global batch. The default is the number counted here (at least 1). Raises ValueError without
    ``count`` for a VocabShard and in a job of several ranks, because other ranks have other targets.
    """
    fix = "give count, the number of targets on all ranks: comm.total((targets != -100).sum())"
    expect(count is not None or not isinstance(weight, VocabShard), f"count: missing beside a VocabShard; {fix}")
    losses = token_losses(x, weight, targets, chunk, cap)
    return losses.sum() / (count_here(targets) if count is None else count)


def token_losses(
    x: Tensor, weight: Weight, targets: Tensor, chunk: int | None = None, cap: float | None = None
) -> Tensor:
    """Compute the negative log likelihood of each target by chunks of rows: f32[... t] in nats, 0 of an ignored target.

    x f[... t d]; weight [vocab d] of any kind that ``linear`` takes, or a VocabShard of one; targets int64 or int32
    ``[... t]``, of which -100 is ignored. float64 ``x`` gives float64. ``chunk`` is the number of rows handled at a
    time; the default follows from ``CHUNK_LOGITS``. ``cap`` limits logits to ``cap * tanh(logit / cap)``; a VocabShard
    then gives the whole head to every process. Raises ValueError if shapes or devices do not fit, and for an adapter
    with dropout. Raises TypeError for targets of another dtype, and RuntimeError in torch.compile. Raises IndexError
    for a target that is neither -100 nor in [0, vocab); on CUDA it is an assertion on the device.
    """
    if torch.compiler.is_dynamo_compiling():
        fix = "capture the step, and Inductor compiles its graph: jit(step, compile=True)"
        raise RuntimeError(f"fused_cross_entropy cannot be traced by torch.compile; {fix}")
    check_ids("targets", targets, "x's", x.device, x.shape[:-1])
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; wanted at least 1 row")
    vocab = vocab_size(weight)
    if cap is not None and isinstance(weight, VocabShard):
        weight = weight.whole(weight.closed)
    leaves, structure = tree.flatten(weight)
    rows, row_targets = x.reshape(targets.numel(), x.shape[-1]), targets.reshape(targets.numel()).long()  # [n d], [n]
    if not chunk:
        chunk = max(1, max(CHUNK_LOGITS, x.numel()) // max(1, vocab))
        chunk = chunk // ROW_MULTIPLE * ROW_MULTIPLE if chunk > ROW_MULTIPLE else chunk
    head = _Head(structure, chunk, cap)
    if torch.is_grad_enabled() and any(inner.requires_grad for t in (rows, *leaves) for inner in layers(t)):
        function, verb, sharded = _LossAndGradient, _nll_and_dx, vocab_parallel.nll_and_dx
    else:
        function, verb, sharded = KernelWithReferenceGradient, _nll, vocab_parallel.nll
    functions = _implementations(verb, head, num_batched=2)
    if isinstance(weight, VocabShard):
        missing = weight.max_tokens - len(rows)  # ignored tokens are appended, so that every process has as many
        rows, row_targets = F.pad(rows, (0, 0, 0, missing)), F.pad(row_targets, (0, missing), value=IGNORE)
        functions = functions._replace(kernel=partial(sharded, structure, chunk))
    losses, *_ = function.apply(functions, rows, row_targets, *leaves)
    return losses[: targets.numel()].reshape(targets.shape)


class _Head(NamedTuple):
    """The static half of a call: the structure of the weight, the rows of a chunk, and the limit of logits."""

    structure: tree.Structure
    chunk: int
    cap: float | None

    def weight(self, leaves: Any) -> Any:
        weight = tree.unflatten(self.structure, leaves)
        return weight.whole(weight.closed) if isinstance(weight, VocabShard) else weight

    def logits(self, x: Tensor, weight: Any) -> Tensor:
        return capped(linear(x, weight), self.cap)


def _implementations(verb: Callable[..., Any], *static: Any, num_batched: int = 0) -> Implementations:
    """Call ``verb`` with the module of the ops, or of the reference, as the loss of logits [c v] and targets [c]."""
    return Implementations(partial(verb, *static, nll), partial(verb, *static, reference), num_batched)


def _nll(head: _Head, loss: Any, x: Tensor, targets: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """x [n d], targets [n] -> nll f32[n]."""
    weight = prepared(head.weight(leaves), x.dtype)
    return map_chunks(lambda x, targets: (loss.nll(head.logits(x, weight), targets, IGNORE),), head.chunk, x, targets)


def _nll_and_dx(head: _Head, loss: Any, x: Tensor, targets: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """x [n d], targets [n] -> nll f32[n], and the gradient [n d] of its sum with respect to x, in x's dtype."""
    weight = prepared(head.weight(leaves), x.dtype)
    return map_chunks(partial(_chunk_nll_and_dx, head, loss, weight), head.chunk, x, targets)


def _chunk_nll_and_dx(head: _Head, loss: Any, weight: Any, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits, pull, *_ = torch.func.vjp(lambda x: head.logits(x, weight), x)  # [c v]
    losses, dlogits = loss.nll_backward(logits, targets, IGNORE)
    return losses, pull(dlogits)[0]


class _LossAndGradient(KernelWithReferenceGradient):
    """:func:`_nll_and_dx`; the gradient of the first result is made of the second."""

    saved_results = (1,)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_dx: Tensor | None) -> Any:  # type: ignore[override]
        head, _ = ctx.functions.reference.args
        x, targets, *leaves, dx = unwrap_dead(ctx.saved_tensors)
        wanted = tuple(i for i, need in enumerate(ctx.needs_input_grad[3:]) if need)
        g = at_least_float32(x.new_zeros(len(x))) if g is None else g
        apply = KernelWithReferenceGradient.apply
        if g_dx is not None:  # a derivative of this backward
            recorded = partial(_double_backward, head, wanted)
            grad, *found = apply(Implementations(recorded, recorded), x, targets, g, g_dx, *leaves)
        else:
            grad = (g[:, None] * dx).to(dx.dtype)  # rounded once
            found = apply(_implementations(_weight_gradients, head, wanted), x, targets, g, *leaves) if wanted else ()
        return None, grad, None, *replace_at([None] * len(leaves), wanted, found)


def _weight_gradients(
    head: _Head, wanted: tuple[int, ...], loss: Any, x: Tensor, targets: Tensor, g: Tensor, *leaves: Tensor
) -> tuple[Tensor, ...]:
    """Compute the gradients of ``(g · nll).sum()`` with respect to the ``wanted`` leaves."""
    trained, once = [leaves[i] for i in wanted], prepared(head.weight(leaves), x.dtype)
    weight = lambda trained: again(head.weight(replace_at(leaves, wanted, trained)), once)

    def of_chunk(x: Tensor, targets: Tensor, g: Tensor) -> Sequence[Tensor]:
        product = lambda *trained: head.logits(x, weight(trained))
        logits, pull, *_ = torch.func.vjp(product, *trained)
        return pull(loss.nll_backward(logits, targets, IGNORE, g)[1])

    return _sums(map(of_chunk, *chunks(head.chunk, x, targets, g)), trained)


def _double_backward(
    head: _Head, wanted: tuple[int, ...], x: Tensor, targets: Tensor, g: Tensor, g_dx: Tensor, *leaves: Tensor
) -> tuple[Tensor, ...]:
    """Compute the gradients of ``(g · nll).sum() + (g_dx · dx).sum()`` with respect to x and the ``wanted`` leaves."""
    trained, rows, once = [leaves[i] for i in wanted], list[Tensor](), prepared(head.weight(leaves), x.dtype)

    def of_chunk(x: Tensor, targets: Tensor, g: Tensor, g_dx: Tensor) -> Sequence[Tensor]:
        weight = lambda trained: again(head.weight(replace_at(leaves, wanted, trained)), once)
        both = lambda x, *trained: _chunk_nll_and_dx(head, reference, weight(trained), x, targets)
        _, pull, *_ = torch.func.vjp(both, x, *trained)
        grad, *found = pull((g, g_dx))
        rows.append(grad)
        return found

    sums = _sums(map(of_chunk, *chunks(head.chunk, x, targets, g, g_dx)), trained)
    return torch.cat(rows), *sums


def _sums(addends: Iterable[Sequence[Tensor]], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Sum in float32 at least, and return the sums in the dtypes of ``like``."""
    sums: list[Any] = [0.0] * len(like)
    for each in addends:
        sums = [total + at_least_float32(t) for total, t in zip(sums, each, strict=True)]
    return tuple(total.to(t.dtype) for total, t in zip(sums, like, strict=True))


def vocab_size(weight: Any) -> int:
    """Return the number of rows of a head; raise the errors of :func:`token_losses` for one that does not fit."""
    match weight:
        case VocabShard(size=size):
            return size
        case Adapted(base=base, lora=lora, key=key):
            if key is not None and lora.dropout > 0:
                fault = f"dropout {lora.dropout}, whose mask depends on the place of a row among all rows"
                fix = "attach it without a key, or use blocks.cross_entropy of the whole logits"
                raise ValueError(f"weight has an adapter with {fault}; {fix}")
            return vocab_size(base)
        case Tensor() | Packed() if len(weight.shape) == 2:
            return weight.shape[0]
        case Tensor() | Packed():
            raise ValueError(f"weight: shape {tuple(weight.shape)}, want [vocab d]")
    raise TypeError(f"weight is a {type(weight).__name__}; wanted Tensor, Packed or Adapted")


def prepared(weight: Any, dtype: torch.dtype) -> Any:
    """Cast a dense weight to ``dtype``, or merge it, once, so that ``linear`` does not do so for every chunk."""
    if isinstance(weight, Adapted):
        return merged(weight) if weight.merge_aware else replace(weight, base=prepared(weight.base, dtype), key=None)
    return weight.to(dtype) if isinstance(weight, Tensor) else weight


def again(weight: Any, once: Any) -> Any:
    """Return ``weight``; if it is merge-aware, merged as in ``once``, which is prepared of an equal one."""
    return merged(weight, once) if isinstance(weight, Adapted) and weight.merge_aware else weight
