"""Distillation: the divergence of a student's next-token probabilities from a teacher's, without whole logits.

    loss = distillation.loss(lora.attach(packed, adapters), teacher, tokens, targets, cfg)       # e.g. a bf16 teacher

    y = distillation.divergence(x, head, teacher_x, teacher_head, targets, beta)                 # f32[... t]

Let s and t be the probabilities of student and teacher at a temperature, and m = (1 - beta) · s + beta · t:

    beta = 0        KL(t ‖ s), the forward divergence of Hinton et al. 2015
    beta = 1        KL(s ‖ t), the reverse one
    between         beta · KL(t ‖ m) + (1 - beta) · KL(s ‖ m), the generalised Jensen-Shannon divergence

Values are those of TRL's GKD (Agarwal et al. 2024). They are not multiplied by the temperature's square.

Both models' logits are made for ``chunk`` rows at a time, and the gradient of ``x`` in the same pass. So a frozen head
takes part in two products, and the teacher's in one. For a trained head or adapter the backward recomputes the logits.
The teacher is a constant. Higher orders record as much as whole logits.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fquant import tree
from fquant.autodiff import layers, replace_at, unwrap_dead
from fquant.communication import LOCAL, Comm, VocabShard
from fquant.kernels.reference.causal_attention import capped
from fquant.packed_linear import Weight, linear
from fquant.tree import expect

from .. import decoder
from ..blocks import IGNORE, check_ids, num_targets
from ..config import Config
from ..fused_cross_entropy import CHUNK_LOGITS, again, prepared, vocab_size
from ..reference_gradient import Implementations, KernelWithReferenceGradient, at_least_float32
from ..vocab_parallel import chunks, map_chunks


def loss(
    params: Any,
    teacher: Any,
    tokens: Tensor,
    targets: Tensor,
    cfg: Config,
    teacher_cfg: Config | None = None,
    comm: Comm = LOCAL,
    segments: Tensor | None = None,
    dtype: torch.dtype | None = None,
    count: Tensor | float | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
) -> Tensor:
    """Return the mean divergence f32[] of two decoders over the targets that are not ignored, in nats a token.

    ``teacher`` is of ``teacher_cfg`` (default: ``cfg``) and of one vocabulary with the student. Other
    arguments are those of ``decoder.loss``, ``beta`` and ``temperature`` those of :func:`divergence`.
    """
    check_ids("targets", targets, "the tokens'", tokens.device, tokens.shape)
    other = teacher_cfg or cfg
    x, head = decoder.normed(params, tokens, cfg, comm, segments, dtype)
    y, teacher_head = decoder.normed(teacher, tokens, other, comm, segments, dtype)
    caps = cfg.final_cap, other.final_cap
    losses = divergence(x, head, y, teacher_head, targets, beta, temperature, caps=caps)
    return losses.sum() / (num_targets(targets, params, comm) if count is None else count)


def divergence(
    x: Tensor,
    head: Weight,
    teacher_x: Tensor,
    teacher_head: Weight,
    targets: Tensor,
    beta: float = 0.0,
    temperature: float = 1.0,
    chunk: int | None = None,
    caps: tuple[float | None, float | None] = (None, None),
) -> Tensor:
    """Compute the divergence of each row f32[... t] in nats, 0 where a target is -100.

    x f[... t d] and head [vocab d] are the student's, teacher_x f[... t e] and teacher_head [vocab e] the teacher's, of
    any kind that ``linear`` takes. ``targets`` i64[... t] say which rows count, and nothing else. ``caps`` limit the
    logits of either, as in ``fused_cross_entropy``. Raises ValueError for options, shapes and vocabularies that do not
    fit, and for an adapter of a head with dropout.
    """
    expect(0 <= beta <= 1, f"beta is {beta}; wanted 0 (forward) to 1 (reverse)")
    expect(temperature > 0, f"temperature is {temperature}; wanted more than 0")
    expect(chunk is None or chunk >= 1, f"chunk is {chunk}; wanted at least 1 row")
    check_ids("targets", targets, "x's", x.device, x.shape[:-1])
    check_ids("targets", targets, "the teacher's", teacher_x.device, teacher_x.shape[:-1])
    sizes = vocab, _ = vocab_size(head), vocab_size(teacher_head)
    fix = "distil between models of one tokenizer, and give their tables one number of rows"
    expect(sizes[0] == sizes[1], f"the student has a vocabulary of {sizes[0]} and the teacher of {sizes[1]}; {fix}")
    whole = lambda w: w.whole(w.closed) if isinstance(w, VocabShard) else w
    leaves, structure = tree.flatten(whole(head))
    constants, teacher_structure = tree.flatten(whole(teacher_head))
    if not chunk:
        chunk = max(1, max(CHUNK_LOGITS // 2, x.nbytes // 4) // vocab)  # both models' logits are float32
    static = _Static(structure, teacher_structure, len(leaves), beta, temperature, chunk, caps)
    n = targets.numel()
    rows = x.reshape(n, x.shape[-1]), teacher_x.detach().reshape(n, teacher_x.shape[-1]), (targets != IGNORE).reshape(n)
    every = *rows, *leaves, *(t.detach() for t in constants)
    if torch.is_grad_enabled() and any(inner.requires_grad for t in (rows[0], *leaves) for inner in layers(t)):
        function, verb = _WithGradient, partial(_losses_and_dx, static)
    else:
        function, verb = KernelWithReferenceGradient, partial(_losses_alone, static)
    losses, *_ = function.apply(Implementations(verb, verb, 3), *every)
    return losses.reshape(targets.shape)


class _Static(NamedTuple):
    """The static half of a call: structures of both heads, and options."""

    head: tree.Structure
    teacher_head: tree.Structure
    num_leaves: int
    beta: float
    temperature: float
    chunk: int
    caps: tuple[float | None, float | None]

    def heads(self, leaves: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Any]:
        """Return both heads, cast to these dtypes."""
        heads = self.student(leaves), tree.unflatten(self.teacher_head, list(leaves[self.num_leaves :]))
        return [prepared(w, dtype) for w, dtype in zip(heads, dtypes, strict=True)]

    def student(self, leaves: Sequence[Tensor]) -> Any:
        """Return the student's head."""
        return tree.unflatten(self.head, list(leaves[: self.num_leaves]))


def _losses(static: _Static, heads: Sequence[Any], x: Tensor, y: Tensor, counted: Tensor) -> Tensor:
    """Compute the divergence [c] of some rows in plain torch."""
    logits = (capped(linear(t, w), cap) for t, w, cap in zip((x, y), heads, static.caps, strict=True))
    s, t = ((at_least_float32(z) / static.temperature).log_softmax(-1) for z in logits)  # log-probabilities [c v]
    kl = lambda p, q: (p.exp() * (p - q)).sum(-1)
    if static.beta == 0:
        each = kl(t, s)
    elif static.beta == 1:
        each = kl(s, t)
    else:
        share = torch.full((), static.beta, dtype=s.dtype, device=s.device)
        m = torch.logaddexp(s + torch.log1p(-share), t + share.log())
        each = static.beta * kl(t, m) + (1 - static.beta) * kl(s, m)
    return torch.where(counted, each, 0)


def _losses_alone(static: _Static, x: Tensor, y: Tensor, counted: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """x [n d], y [n e], counted bool[n] -> divergences [n]."""
    heads = static.heads(leaves, (x.dtype, y.dtype))
    return map_chunks(lambda *rows: (_losses(static, heads, *rows),), static.chunk, x, y, counted)


def _losses_and_dx(static: _Static, x: Tensor, y: Tensor, counted: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    """x [n d], y [n e], counted bool[n] -> divergences [n], and the gradient [n d] of their sum."""
    heads = static.heads(leaves, (x.dtype, y.dtype))

    def of_chunk(x: Tensor, y: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        found, pull, *_ = torch.func.vjp(lambda x: _losses(static, heads, x, y, counted), x)
        return found, pull(torch.ones_like(found))[0]

    return map_chunks(of_chunk, static.chunk, x, y, counted)


class _WithGradient(KernelWithReferenceGradient):
    """:func:`_losses_and_dx`; the gradient of the first result is made of the second."""

    saved_results = (1,)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, g_dx: Tensor | None) -> Any:  # type: ignore[override]
        (static,) = ctx.functions.reference.args
        *inputs, dx = unwrap_dead(ctx.saved_tensors)
        x, y, counted, *leaves = inputs
        wanted = tuple(i for i, need in enumerate(ctx.needs_input_grad[4:]) if need)
        g = at_least_float32(x.new_zeros(len(x))) if g is None else g
        apply = KernelWithReferenceGradient.apply
        if g_dx is not None:  # a derivative of this backward
            recorded = partial(_gradients, static, True, wanted)
            grad, *found = apply(Implementations(recorded, recorded), x, y, counted, g, g_dx, *leaves)
        else:
            grad, found = (g[:, None] * dx).to(dx.dtype), ()
            if wanted:
                recorded = partial(_gradients, static, False, wanted)
                found = apply(Implementations(recorded, recorded), x, y, counted, g, dx, *leaves)
        return None, grad, None, None, *replace_at([None] * len(leaves), wanted, found)


def _gradients(
    static: _Static, twice: bool, wanted: tuple[int, ...],
    x: Tensor, y: Tensor, counted: Tensor, g: Tensor, g_dx: Tensor, *leaves: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute the gradients of ``(g · losses).sum()`` with respect to the ``wanted`` leaves.

    If ``twice``, add ``(g_dx · dx).sum()``, and compute that of x too, which is then the first.
    """
    trained, rows, sums = [leaves[i] for i in wanted], list[Tensor](), list[Any]([0.0] * len(wanted))
    once, teacher = static.heads(leaves, (x.dtype, y.dtype))

    def of_chunk(x: Tensor, y: Tensor, counted: Tensor, g: Tensor, g_dx: Tensor) -> Sequence[Tensor]:
        def f(x: Tensor, *trained: Tensor) -> tuple[Tensor, ...]:
            heads = again(static.student(replace_at(leaves, wanted, trained)), once), teacher
            of_x: Callable[[Tensor], Tensor] = lambda x: _losses(static, heads, x, y, counted)
            if not twice:
                return (of_x(x),)
            found, pull, *_ = torch.func.vjp(of_x, x)
            return found, pull(torch.ones_like(found))[0]

        if not twice:
            return torch.func.vjp(lambda *trained: f(x, *trained), *trained)[1]((g,))
        grad, *found = torch.func.vjp(f, x, *trained)[1]((g, g_dx))
        rows.append(grad)
        return found

    for found in map(of_chunk, *chunks(static.chunk, x, y, counted, g, g_dx)):
        sums = [total + at_least_float32(t) for total, t in zip(sums, found, strict=True)]
    cast = tuple(total.to(t.dtype) for total, t in zip(sums, trained, strict=True))
    return (torch.cat(rows), *cast) if twice else cast
