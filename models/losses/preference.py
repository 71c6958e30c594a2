"""Preference losses: DPO and its kin, ORPO and KTO, as functions of the log-probabilities of sequences.

    losses    = decoder.token_losses(lora.attach(base, adapters), tokens, targets, cfg, segments=segments)   # [n t]
    reference = decoder.token_losses(base, tokens, targets, cfg, segments=segments)
    policy, reference = (preference.log_probs(x, sequences, 2 * pairs) for x in (losses, reference))         # [2 p]
    loss = preference.dpo(policy, reference).sum() / count_of_pairs                           # of all ranks

The frozen base without adapters is the reference, so that no second model is held. Whole logits never exist: the sum
over a sequence has the gradient of its tokens, by ``fused_cross_entropy.token_losses``.

*Sequences.* Rows may hold several sequences, one after another, in any order. ``sequences`` i64[n t] numbers the
sequence that each token belongs to; tokens of padding have the number of sequences. Prompts count as little as padding:
their targets are ignored. Sequence 2i is the answer that is chosen for prompt i, and 2i + 1 the rejected one.

Sources: DPO, Rafailov et al. 2023; its conservative form, Mitchell 2023; hinge (SLiC), Zhao et al. 2023; IPO, Azar et
al. 2023; robust DPO, Chowdhury et al. 2024; EXO, Ji et al. 2024; NCA, Chen et al. 2024; BCO, Jung et al. 2024; SPPO, Wu
et al. 2024; APO, D'Oosterlinck et al. 2024; ORPO, Hong et al. 2024; KTO, Ethayarajh et al. 2024. Values equal TRL's.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fquant.communication import LOCAL, Comm
from fquant.tree import expect

from ..blocks import IGNORE

Loss = Callable[[Tensor, Tensor, float, float], Tensor]  # log-ratios of chosen and rejected, beta, smoothing -> [p]


def log_probs(losses: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
    """Sum the log-probabilities of the targets of each sequence: f32[... t], i64[... t] -> f32[num_sequences].

    ``losses`` are negative log likelihoods, 0 of ignored targets (``fused_cross_entropy.token_losses``).
    """
    return -_sums(losses, sequences, num_sequences)


def lengths(targets: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
    """Count the targets of each sequence that are not ignored: i64[... t], i64[... t] -> f32[num_sequences]."""
    return _sums((targets != IGNORE).float(), sequences, num_sequences)


def _sums(values: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
    if values.shape != sequences.shape:
        got = f"sequences {tuple(sequences.shape)} beside tokens {tuple(values.shape)}"
        raise ValueError(f"got {got}; wanted one shape, the number of each token's sequence")
    values = values.flatten()
    found = values.new_zeros(num_sequences + 1).index_add(0, sequences.flatten().long(), values)
    return found[:-1]  # the last is padding


def dpo(
    policy: Tensor,
    reference: Tensor,
    beta: float = 0.1,
    smoothing: float = 0.0,
    kind: str = "sigmoid",
    lengths: Tensor | None = None,
) -> Tensor:
    """Compute the DPO loss f32[p] of each pair from the log-probabilities f32[2 p] of its sequences.

    ``beta`` holds the policy to the reference. ``kind`` is sigmoid, hinge, ipo, robust, exo_pair, nca_pair, bco_pair,
    sppo_hard, apo_zero, apo_down or sigmoid_norm. ``smoothing`` is the share of pairs whose label is wrong: of sigmoid
    (conservative DPO), robust and exo_pair. ipo and sigmoid_norm take log-ratios a token, so they need the ``lengths``
    f32[2 p] of sequences. Raises ValueError for another kind, and for options that do not fit.
    """
    expect(kind in KINDS, f"kind is {kind!r}; wanted one of {', '.join(KINDS)}")
    expect(0 <= smoothing < 0.5, f"smoothing is {smoothing}; wanted 0 <= smoothing < 0.5")
    fault = f"smoothing is {smoothing}, which {kind} has no use for; use one of {', '.join(SMOOTHED)}"
    expect(not smoothing or kind in SMOOTHED, fault)
    expect(smoothing > 0 or kind != "exo_pair", "smoothing is 0, and exo_pair takes its logarithm; use 1e-3")
    _check_pairs(policy)
    ratios = policy - reference
    if kind in NORMED:
        fix = "give preference.lengths(targets, sequences, num_sequences)"
        expect(lengths is not None, f"{kind} needs the lengths of sequences; {fix}")
        assert lengths is not None
        ratios = ratios / lengths.clamp(min=1)
    chosen, rejected = _pairs(ratios)
    return KINDS[kind](chosen, rejected, beta, smoothing)


def _sigmoid(chosen: Tensor, rejected: Tensor, beta: float, smoothing: float) -> Tensor:
    z = beta * (chosen - rejected)
    return -(1 - smoothing) * F.logsigmoid(z) - smoothing * F.logsigmoid(-z)


def _robust(chosen: Tensor, rejected: Tensor, beta: float, smoothing: float) -> Tensor:
    z = beta * (chosen - rejected)
    return (-(1 - smoothing) * F.logsigmoid(z) + smoothing * F.logsigmoid(-z)) / (1 - 2 * smoothing)


def _exo_pair(chosen: Tensor, rejected: Tensor, beta: float, smoothing: float) -> Tensor:
    z = beta * (chosen - rejected)
    number = lambda s: torch.full((), s, dtype=z.dtype, device=z.device)
    log_smoothing, log_rest = (number(s).log() for s in (smoothing, 1 - smoothing))
    of = lambda z, log_share: z.sigmoid() * (F.logsigmoid(z) - log_share)
    return of(z, log_rest) + of(-z, log_smoothing)


def _nca_pair(chosen: Tensor, rejected: Tensor, beta: float, _: float) -> Tensor:
    each = 0.5 * (F.logsigmoid(-beta * chosen) + F.logsigmoid(-beta * rejected))
    return -F.logsigmoid(beta * chosen) - each


SMOOTHED = ("sigmoid", "robust", "exo_pair")
NORMED = ("ipo", "sigmoid_norm")
KINDS: dict[str, Loss] = {
    "sigmoid": _sigmoid,
    "hinge": lambda c, r, beta, _: torch.relu(1 - beta * (c - r)),
    "ipo": lambda c, r, beta, _: (c - r - 1 / (2 * beta)) ** 2,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": lambda c, r, beta, _: -F.logsigmoid(beta * c) - F.logsigmoid(-beta * r),
    "sppo_hard": lambda c, r, beta, _: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
    "apo_zero": lambda c, r, beta, _: 1 - torch.sigmoid(beta * c) + torch.sigmoid(beta * r),
    "apo_down": lambda c, r, beta, _: torch.sigmoid(beta * c) + 1 - torch.sigmoid(beta * (c - r)),
    "sigmoid_norm": _sigmoid,
}


def orpo(policy: Tensor, lengths: Tensor, beta: float = 0.1) -> Tensor:
    """Compute ORPO's odds ratio loss f32[p] of each pair from the log-probabilities and lengths f32[2 p] of sequences.

    The whole loss is the mean of this plus the negative log likelihood a token of the chosen sequences, of prompts and
    answers in TRL. It needs no reference. ``beta`` is the weight of this part, the paper's lambda.
    """
    _check_pairs(policy)
    chosen, rejected = _pairs(policy / lengths.clamp(min=1))
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return -beta * F.logsigmoid(log_odds)


def kto(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    divergence: Tensor | float,
    beta: float = 0.1,
    weights: tuple[float, float] = (1.0, 1.0),
    kind: str = "kto",
) -> Tensor:
    """Compute the KTO loss f32[s] of each sequence from its log-probabilities f32[s] and its label bool[s].

    ``divergence`` is :func:`kto_divergence`; ``weights`` are those of desirable and undesirable sequences. ``kind`` is
    kto, or apo_zero_unpaired, which has no use for a divergence. Raises ValueError for another kind.
    """
    expect(kind in ("kto", "apo_zero_unpaired"), f"kind is {kind!r}; wanted kto or apo_zero_unpaired")
    sign = torch.where(desirable, 1.0, -1.0).to(policy.dtype)
    point = divergence if kind == "kto" else 0.0
    weight = torch.where(desirable, weights[0], weights[1]).to(policy.dtype)
    return weight * (1 - torch.sigmoid(beta * sign * (policy - reference - point)))


def kto_divergence(
    policy: Tensor, reference: Tensor, count: Tensor | float | None = None, comm: Comm = LOCAL
) -> Tensor:
    """Estimate the divergence f32[] of policy and reference, a constant, from mismatched sequences f32[s].

    Each has the prompt of one example and the answer of another. The estimate is the mean over the sequences of all
    ranks of ``comm``, or their sum over ``count``, raised to at least 0.
    """
    each = (policy - reference).detach()
    total, number = comm.total(torch.stack([each.sum(), torch.ones_like(each).sum()]))
    return (total / (number if count is None else count)).clamp(min=0)


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values f32[p] of chosen and of rejected sequences: [2 p] -> two [p]."""
    return x[0::2], x[1::2]


def _check_pairs(policy: Tensor) -> None:
    if policy.ndim != 1 or policy.shape[0] % 2:
        raise ValueError(f"got log-probabilities {tuple(policy.shape)}; wanted [2 p], chosen and rejected in turn")


def _log1mexp(x: Tensor) -> Tensor:
    """Compute log(1 - exp(x)) of x < 0 without cancellation (Maechler 2012), with a finite gradient."""
    near = x > -0.6931471805599453
    return torch.where(near, _at(x, near, lambda x: (-torch.expm1(x)).log(), -0.1),
                       _at(x, ~near, lambda x: torch.log1p(-x.exp()), -1.0))  # fmt: skip


def _at(x: Tensor, there: Tensor, f: Callable[[Tensor], Tensor], elsewhere: float) -> Tensor:
    """Apply ``f`` where ``there`` is true, and to the constant ``elsewhere`` where it is not, so that no NaN arises."""
    return f(torch.where(there, x, elsewhere))
