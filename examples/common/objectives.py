"""The losses that a step can minimise: of targets, of preferences, or of the distance to another model.

    sft      the mean negative log likelihood of targets
    dpo      preference pairs against the base without adapters (models/losses/preference.py has the kinds)
    orpo     the likelihood of chosen documents, and the odds of chosen over rejected answers
    kto      single answers with labels, and the divergence of mismatched prompts and answers as the point of reference
    distill  the divergence of next-token probabilities from a teacher's, at targets (models/losses/distillation.py)

Losses are sums over this rank's rows, divided by the :func:`counts` of the global batch. So shares of ranks add up. The
reference of preferences is the frozen base, so no second model is held; that of distillation is the teacher. Values are
those of TRL's trainers.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fquant import Comm, tree
from fquant.tree import expect
from models import decoder
from models.config import Config
from models.losses import distillation, preference

from ..data.dataset import IGNORED, Preferences, Rows

Name = Literal["sft", "dpo", "orpo", "kto", "distill"]
Batch: TypeAlias = Rows | Preferences
# The kinds of data.
KINDS = {"sft": "documents", "dpo": "pairs", "orpo": "pairs", "kto": "labelled", "distill": "documents"}
ON_DOCUMENTS = tuple(name for name, kind in KINDS.items() if kind == "documents")  # whose loss is nats a token


@dataclass(frozen=True)
class Objective:
    """The loss of a step, and its options."""

    name: Name = "sft"
    kind: str = "sigmoid"  # of dpo
    beta: float = 0.1  # of distill: 0 for the forward divergence, 1 for the reverse one
    smoothing: float = 0.0  # of dpo: the share of pairs whose label is wrong
    weights: tuple[float, float] = (1.0, 1.0)  # of kto: desirable, undesirable
    temperature: float = 1.0  # of distill
    teacher: Config | None = None  # of distill


@tree.node
class Labelled:
    """Answers with labels, and prompts with answers of other rows, for KTO."""

    rows: Rows
    labels: Tensor  # bool[n]
    mismatched: Rows


def complete(objective: Objective, batch: Batch) -> Any:
    """Return the global ``batch`` with what its loss needs besides."""
    if objective.name != "kto":
        return batch
    assert isinstance(batch, Preferences) and batch.labels is not None
    return Labelled(batch.chosen, batch.labels, mismatched(batch.chosen))


def counts(objective: Objective, batch: Any) -> Tensor:
    """Return the numbers i64[] or i64[2] of the global batch by which losses are divided."""
    if objective.name in ON_DOCUMENTS:
        return (batch.targets >= 0).sum()
    if objective.name == "kto":
        return torch.tensor(len(batch.labels), device=batch.labels.device)
    pairs = torch.tensor(len(batch.chosen.tokens), device=batch.chosen.tokens.device)
    return torch.stack([pairs, (whole(batch.chosen) >= 0).sum()]) if objective.name == "orpo" else pairs


def loss(
    objective: Objective, params: Any, reference: Any, batch: Any, count: Tensor, cfg: Config, comm: Comm,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return the loss f32[] of this rank's ``batch`` over ``count``.

    ``reference`` is the base without adapters, or the teacher.
    """
    if objective.name == "sft":
        rows = batch.tokens, batch.targets
        return decoder.loss(params, *rows, cfg, comm, batch.segments, dtype, count)
    if objective.name == "distill":
        rows = batch.tokens, batch.targets, cfg, objective.teacher, comm, batch.segments, dtype, count
        return distillation.loss(params, reference, *rows, objective.beta, objective.temperature)
    if objective.name == "kto":
        return _kto(objective, params, reference, batch, count, cfg, comm, dtype)
    both = tree.map(lambda a, b: torch.stack([a, b], 1).flatten(0, 1), batch.chosen, batch.rejected)  # in turn
    n = len(both.tokens)
    if objective.name == "dpo":
        lengths = (both.targets >= 0).sum(-1).float()
        policy = -_sums(params, both, cfg, comm, dtype)
        with torch.no_grad():
            unchanged = -_sums(reference, both, cfg, comm, dtype)
        kind = {"kind": objective.kind, "smoothing": objective.smoothing, "lengths": lengths}
        return preference.dpo(policy, unchanged, objective.beta, **kind).sum() / count
    targets = whole(both)
    losses = decoder.token_losses(params, both.tokens, targets, cfg, comm, both.segments, dtype)
    is_answer, is_chosen = both.targets >= 0, torch.arange(n, device=targets.device) % 2 == 0
    policy, lengths = -torch.where(is_answer, losses, 0.0).sum(-1), is_answer.sum(-1).float()
    likelihood = torch.where(is_chosen[:, None], losses, 0.0).sum() / count[1]
    return likelihood + preference.orpo(policy, lengths, objective.beta).sum() / count[0]


def _sums(params: Any, rows: Rows, cfg: Config, comm: Comm, dtype: torch.dtype) -> Tensor:
    """Return the negative log likelihood f32[n] of the targets of each row."""
    return decoder.token_losses(params, rows.tokens, rows.targets, cfg, comm, rows.segments, dtype).sum(-1)


def _kto(
    objective: Objective, params: Any, base: Any, batch: Labelled, count: Tensor, cfg: Config, comm: Comm,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    policy = -_sums(params, batch.rows, cfg, comm, dtype)
    with torch.no_grad():
        reference = -_sums(base, batch.rows, cfg, comm, dtype)
        others = [-_sums(x, batch.mismatched, cfg, comm, dtype).double() for x in (params, base)]
    point, weights = preference.kto_divergence(*others, comm=comm).float(), objective.weights
    return preference.kto(policy, reference, batch.labels, point, objective.beta, weights).sum() / count


def num_right(
    objective: Objective, params: Any, base: Any, batch: Any, cfg: Config, comm: Comm, dtype: torch.dtype
) -> Tensor:
    """Return the number f64[] of pairs whose chosen answer is preferred, or of labels that are met.

    Preferred is the answer that gained more likelihood over the base; for orpo, which has no reference, the likelier
    one a token.
    """
    if objective.name == "kto":
        gained = _sums(base, batch.rows, cfg, comm, dtype) - _sums(params, batch.rows, cfg, comm, dtype)
        return ((gained > 0) == batch.labels).double().sum()
    chosen, rejected = (
        _sums(params, rows, cfg, comm, dtype) / (rows.targets >= 0).sum(-1)
        if objective.name == "orpo"
        else _sums(params, rows, cfg, comm, dtype) - _sums(base, rows, cfg, comm, dtype)
        for rows in (batch.chosen, batch.rejected)
    )
    return (chosen < rejected).double().sum()


def whole(rows: Rows) -> Tensor:
    """Return targets i64[n t] that include prompts: every next token of a document that has a row of its own."""
    assert rows.segments is not None
    follows = rows.segments[:, 1:] == 0
    inside = torch.where(follows, rows.tokens[:, 1:], IGNORED)
    return torch.cat([inside, rows.targets[:, -1:]], 1)


def mismatched(rows: Rows) -> Rows:
    """Return rows with the prompt of each row and the answer of the one before, cut at their width, as in TRL's KTO."""
    assert rows.segments is not None
    n, width = rows.tokens.shape
    expect(n > 1, "kto: got a batch of one row, wanted two or more to mismatch; use a larger --batch")
    is_target = rows.targets >= 0
    begins = is_target.int().argmax(-1) + 1  # the place of the answer's first token
    lengths = (rows.segments == 0).sum(-1)  # of documents, all of whose tokens but the last may have a target
    last = torch.where(is_target[:, -1], rows.targets[:, -1], 0)  # the token behind a row that was cut
    tokens = torch.cat([rows.tokens, last[:, None]], 1)
    ends = lengths + is_target[:, -1].int()
    other = torch.arange(n, device=tokens.device).roll(1)
    place = torch.arange(width + 1, device=tokens.device).expand(n, -1)
    source = place - begins[:, None] + begins[other][:, None]
    is_prompt = place < begins[:, None]
    found = torch.where(is_prompt, tokens, tokens[other].gather(1, source.clamp(0, width)))
    total = begins + ends[other] - begins[other]
    is_inside = place < total[:, None]
    found = torch.where(is_inside, found, 0)
    learn = (~is_prompt & is_inside)[:, 1:]
    targets = torch.where(learn, found[:, 1:], IGNORED)
    return Rows(found[:, :-1], targets, (~is_inside)[:, :-1].long())
