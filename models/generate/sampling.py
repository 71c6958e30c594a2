"""The choice of the next token from logits: greedy, or a draw from filtered probabilities.

    token = sample(logits, GREEDY)
    token = sample(logits, Sampling(temperature=0.7, top_k=40, top_p=0.9), key)

The order is that of transformers' ``GenerationMixin._get_logits_processor``. First come the penalty of repetition
(Keskar et al. 2019) and the temperature. Filters then set logits to -inf: top-k, top-p (Holtzman et al. 2020) and min-p
(Nguyen et al. 2024). A draw inverts the cumulative distribution at one uniform number. So it depends on the key and on
the probabilities of its own row alone, not on other rows of a batch.
"""

import dataclasses
import math

import torch
from torch import Tensor

from fquant import random, tree


@tree.value
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Describe how to draw a token; temperature 0 takes the likeliest. Raises ValueError for values out of range.

    ``top_k`` keeps the k largest logits, and those equal to the last of them. ``top_p`` keeps the fewest tokens whose
    probabilities sum to p. ``min_p`` keeps tokens of at least p times the largest probability. None keeps all.
    ``repetition_penalty`` divides positive logits of tokens that the text has, and multiplies negative ones; at
    temperature 0 too.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; wanted a number from 0, which is greedy")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; wanted at least 1, or None for all tokens")
        for name in ("top_p", "min_p"):
            if (got := getattr(self, name)) is not None and not 0 <= got <= 1:
                raise ValueError(f"{name} is {got}; wanted a probability in [0, 1], or None")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; wanted a number above 0, 1 for none")
        if self.top_p == 0:
            raise ValueError("top_p is 0, which keeps no token; use temperature 0 for the likeliest token")


GREEDY = Sampling(0.0)


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens that are ``seen`` bool[... vocab] less likely in logits f[... vocab], in f32 at least."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.where(seen, torch.where(x < 0, x * penalty, x / penalty), x)


def filtered(logits: Tensor, how: Sampling) -> Tensor:
    """Divide logits f[... vocab] by the temperature and set those that are filtered out to -inf, in f32 at least.

    At least the likeliest token is left. Raises ValueError for temperature 0.
    """
    if not how.temperature:
        raise ValueError("temperature is 0, at which there are no probabilities; wanted a number above 0")
    x = logits.to(torch.promote_types(logits.dtype, torch.float32)) / how.temperature
    if how.top_k is not None and how.top_k < x.shape[-1]:
        x = x.masked_fill(x < x.topk(how.top_k, -1).values[..., -1:], -math.inf)
    if how.top_p is not None and how.top_p < 1:
        ascending, order = x.sort(-1)
        removed = ascending.softmax(-1).cumsum(-1) <= 1 - how.top_p
        removed = removed & (torch.arange(x.shape[-1], device=x.device) < x.shape[-1] - 1)
        x = x.masked_fill(torch.zeros_like(removed).scatter(-1, order, removed), -math.inf)
    if how.min_p is not None:
        p = x.softmax(-1)
        x = x.masked_fill((p < how.min_p * p.amax(-1, keepdim=True)), -math.inf)
    return x


def sample(logits: Tensor, how: Sampling, key: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
    """Choose tokens i64[...] from logits f[... vocab]; ``key`` is needed above temperature 0.

    ``key`` is i64[...], a key for each row, or i64[], from which each row draws a number of its own. Rows with equal
    keys and equal logits get equal tokens. ``seen`` bool[... vocab] marks the tokens of the text, needed for a penalty
    of repetition. Raises ValueError without a needed key or ``seen``.
    """
    if how.repetition_penalty != 1:
        if seen is None or seen.shape != logits.shape:
            got = None if seen is None else tuple(seen.shape)
            fault = f"repetition_penalty is {how.repetition_penalty}, and the tokens of the text are {got}"
            raise ValueError(f"{fault}; wanted bool{list(logits.shape)}")
        logits = penalised(logits, seen, how.repetition_penalty)
    if not how.temperature:
        return logits.argmax(-1)
    if key is None:
        raise ValueError(f"temperature is {how.temperature}, and there is no key; pass fquant.random.key(seed)")
    total = filtered(logits, how).softmax(-1).double().cumsum(-1)  # [... vocab]
    draw = random.uniform(key, tuple(logits.shape[:-1]), torch.float64)
    return (total <= (draw * total[..., -1])[..., None]).sum(-1).clamp(max=logits.shape[-1] - 1)
