"""Text from a decoder: prefill, decode, and the loop over both. Parameters and caches in, logits and caches out.

    logits, cache = prefill(params, tokens, lengths, cfg, longest=512)    # tokens [b t], right-padded
    logits, cache = decode(params, token, cache, cfg)                     # token [b]

    for tokens in stream(params, prompts, cfg, max_new_tokens=200, stop=(2,)):    # a token of each row, as it comes
        ...
    texts = generate(params, prompts, cfg, max_new_tokens=200, stop=(2,), how=Sampling(0.7), key=random.key(0))

Both run the layers of ``models.decoder``; they differ from training in the attention, which reads and writes a
``kv_cache.Cache``. Weights stay packed, and may be sharded (``comm``). :func:`step` is a decode and the choice
of a token, captured once for all steps, with the memory of the cache donated.

*Several adapters in one batch.* ``adapters`` have one more dim in front, that of the rows (``adapter_rows.py``).
Rows are then mapped over by vmap, under which a packed weight is shared and multiplied once.

*Lengths.* Scalings of the rotary embedding that depend on the length (``models.rope``) see the longest row of the
batch at each step. Keys stay as they were rotated. Where longrope changes its divisors, all tokens are computed again.
Both are what transformers' ``generate`` does.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fquant import bind, jit, lora, random, tree
from fquant.communication import LOCAL, Comm

from .. import decoder
from ..attention import attention
from ..config import Config
from . import kv_cache
from .adapter_rows import Adapters
from .kv_cache import Cache
from .sampling import GREEDY, Sampling, sample

Dtype = torch.dtype | None
LEAST_SLOTS = 64  # of a cache, which are powers of two, so that few traces serve all lengths


def prefill(
    params: decoder.Params, tokens: Tensor, lengths: Tensor, cfg: Config, comm: Comm = LOCAL,
    adapters: Adapters | None = None, longest: int | None = None, dtype: Dtype = None, with_seen: bool = False,
) -> tuple[Tensor, Cache]:  # fmt: skip
    """Compute the logits f[b vocab] behind each prompt, and the cache of all prompts for ``longest`` tokens a row.

    Tokens are i64[b t], padded on the right to t; ``lengths`` i64[b] count those of each row, at least 1. ``longest``
    is t by default. ``adapters`` are those of each row (``adapter_rows.rows``). ``with_seen`` asks for the tokens of
    each row in the cache, which a penalty of repetition needs. Raises the errors of ``decoder.forward``, and ValueError
    for shapes that do not fit or ``longest`` below t.
    """
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
        got = f"tokens {tuple(tokens.shape)} and lengths {tuple(lengths.shape)}"
        raise ValueError(f"prefill: {got}; wanted [b t] and [b]")
    longest = tokens.shape[1] if longest is None else longest
    if not tokens.shape[1] <= longest <= cfg.longest:
        wanted = f"wanted from {tokens.shape[1]}, the tokens that there are, to max_positions = {cfg.longest}"
        raise ValueError(f"prefill: longest is {longest}; {wanted}")
    if adapters is not None:
        one = partial(prefill, cfg=cfg, comm=comm, longest=longest, dtype=dtype, with_seen=with_seen)
        return _by_row(lambda own, *row: one(lora.attach(params, own), *row))(adapters, tokens, lengths)
    decoder.check(params, tokens, cfg, tokens.shape[-1])
    # Positions of padding stop at the longest row, because some scalings depend on the largest position.
    positions = torch.minimum(torch.arange(tokens.shape[1], device=tokens.device), lengths.amax() - 1)
    nothing = [()] * cfg.num_layers
    x, kept = decoder.layers(params, tokens, positions, nothing, _attend_sequence, cfg, comm, dtype)
    last = x.take_along_dim((lengths - 1)[:, None, None], 1)[:, 0]  # [b d]
    keys, values = zip(*kept, strict=True)
    seen = kv_cache.tokens_of(tokens, lengths, cfg.vocab if with_seen else 0)
    return decoder.logits(last, params, cfg, comm), kv_cache.from_sequence(keys, values, lengths, cfg, longest, seen)


def decode(
    params: decoder.Params, token: Tensor, cache: Cache, cfg: Config, comm: Comm = LOCAL,
    adapters: Adapters | None = None, dtype: Dtype = None,
) -> tuple[Tensor, Cache]:  # fmt: skip
    """Compute the logits f[b vocab] behind one more token i64[b] of each row, and the cache with it.

    Raises what :func:`prefill` does, and IndexError if the cache is full.
    """
    if token.shape != cache.lengths.shape or len(cache.keys) != cfg.num_layers:
        got = f"token {tuple(token.shape)} and a cache of {len(cache.keys)} layers, {len(cache.lengths)} rows"
        raise ValueError(f"decode: {got}; wanted one token for each row, and {cfg.num_layers} layers")
    if adapters is not None:
        one = partial(decode, cfg=cfg, comm=comm, dtype=dtype)
        return _by_row(lambda own, *row: one(lora.attach(params, own), *row))(adapters, token, cache)
    tokens, position = token[:, None], cache.lengths
    decoder.check(params, tokens, cfg, tokens.shape[-1])
    held = [(*pair, position) for pair in zip(cache.keys, cache.values, strict=True)]
    x, kept = decoder.layers(params, tokens, position[:, None], held, _attend_cache, cfg, comm, dtype)
    keys, values = (list(each) for each in zip(*kept, strict=True))
    seen = cache.seen.scatter(1, tokens, True) if cache.seen.shape[1] else cache.seen
    return decoder.logits(x[:, 0], params, cfg, comm), Cache(keys, values, position + 1, seen)


def _by_row(f: Callable[..., Any]) -> Callable[..., Any]:
    """Map ``f`` over rows, each of which it sees as a batch of one; the first argument has no batch."""

    def one(own: Adapters, *batched: Any) -> Any:
        return tree.map(lambda t: t[0], f(own, *tree.map(lambda t: t[None], batched)))

    return vmap(one)


def _attend_sequence(q: Tensor, k: Tensor, v: Tensor, held: Any, window: Any, sinks: Any, cfg: Config) -> Any:
    return attention(q, k, v, None, window, cfg.attention_scale, cfg.attention_cap, sinks=sinks), (k, v)


def _attend_cache(q: Tensor, k: Tensor, v: Tensor, held: Any, window: Any, sinks: Any, cfg: Config) -> Any:
    keys, values, position = held
    keys, values = (kv_cache.write(x, new, position, window) for x, new in ((keys, k), (values, v)))
    y = kv_cache.attend(q, keys, values, position, cfg.attention_scale, cfg.attention_cap, sinks)
    return y, (keys, values)


def step(
    params: decoder.Params, token: Tensor, cache: Cache, key: Tensor | None, cfg: Config, how: Sampling = GREEDY,
    comm: Comm = LOCAL, adapters: Adapters | None = None, dtype: Dtype = None,
) -> tuple[Tensor, Cache]:  # fmt: skip
    """Decode, and choose the next token i64[b]: a token and a cache in, a token and a cache out.

    ``key`` is i64[b], a key for each row, or i64[]: then row i has the key ``random.fold(key, i)``. A row's key is
    folded with the position, so a draw depends on the key of its row and on the place in the text.
    """
    logits, cache = decode(params, token, cache, cfg, comm, adapters, dtype)
    return _choose(logits, cache, key, how), cache


NONE = -1  # the token of logits that are not finite
captured_step = jit(step, donate=("cache",), max_traces=64)


def _choose(logits: Tensor, cache: Cache, key: Tensor | None, how: Sampling) -> Tensor:
    if key is not None:
        keys = key if key.ndim else random.fold(key, torch.arange(len(logits), device=key.device))  # [b]
        key = random.fold(keys, cache.lengths)
    token = sample(logits, how, key, cache.seen if cache.seen.shape[1] else None)
    return torch.where(logits.amax(-1).isfinite(), token, NONE)  # a NaN is the largest


def stream(
    params: decoder.Params, prompts: Sequence[Sequence[int]], cfg: Config, *, max_new_tokens: int,
    stop: Sequence[int] = (), how: Sampling = GREEDY, key: Tensor | None = None, comm: Comm = LOCAL,
    adapters: Adapters | None = None, dtype: Dtype = None, step: Callable[..., tuple[Tensor, Cache]] = captured_step,
    agreed: Callable[[bool], bool] = bool,
) -> Iterator[list[int | None]]:  # fmt: skip
    """Yield the next token of each prompt, at most ``max_new_tokens`` times; None for rows that have stopped.

    A row stops after a token of ``stop``, which is yielded. ``key`` is a key for each row, or one key, from which rows
    get keys as in :func:`step`: samples of one prompt differ. The same key of a row gives the same text in any batch,
    up to the rounding of the products of a batch. ``step`` is :func:`step`, captured by default. ``agreed(all rows
    here have stopped)`` is true when all ranks have stopped; ranks with the same prompts need no other than ``bool``.
    Without prompts nothing is yielded. Raises ValueError for an empty prompt, or more tokens than positions, before
    anything is computed. Raises ValueError for logits that are not finite.
    """
    check_request(prompts, cfg, max_new_tokens)
    if not prompts:
        return
    widest = max(map(len, prompts))
    longest = min(_power_of_two(widest + max_new_tokens), cfg.longest)
    texts = [list(prompt) for prompt in prompts]
    device = _device(params)
    key = None if key is None else key.to(device)
    with_seen = how.repetition_penalty != 1
    options = {"cfg": cfg, "comm": comm, "adapters": adapters, "dtype": dtype}
    start = partial(prefill, **options, longest=int(longest), with_seen=with_seen)
    logits, cache = start(params, *_padded(texts, device))
    token = _choose(logits, cache, key, how)
    advance = bind(step, params=params, key=key, how=how, **options)
    live = [True] * len(texts)
    for made in range(1, max_new_tokens + 1):
        found = token.tolist()
        if NONE in found:
            fault = f"prompt {found.index(NONE)}: logits are not finite at token {made}"
            raise ValueError(f"{fault}; wanted finite weights, or another dtype of the computation")
        yield [each if alive else None for each, alive in zip(found, live, strict=True)]
        for text, each in zip(texts, found, strict=True):
            text.append(each)
        live = [alive and each not in stop for each, alive in zip(found, live, strict=True)]
        if made == max_new_tokens or agreed(not any(live)):
            return
        if _divisors_change(cfg, widest + made):
            logits, cache = start(params, *_padded(texts, device))
            token = _choose(logits, cache, key, how)
        else:
            token, cache = advance(token=token, cache=cache)


def generate(params: decoder.Params, prompts: Sequence[Sequence[int]], cfg: Config, **options: Any) -> list[list[int]]:
    """Return the tokens behind each prompt, a token of ``stop`` included; options and errors are :func:`stream`'s."""
    out: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(params, prompts, cfg, **options):
        for text, token in zip(out, tokens, strict=True):
            if token is not None:
                text.append(token)
    return out


def check_request(prompts: Sequence[Sequence[int]], cfg: Config, max_new_tokens: int) -> None:
    """Raise the errors of :func:`stream` for prompts that it would refuse."""
    if not all(prompts):
        raise ValueError(f"prompts: {len(prompts)}, and lengths from {min(map(len, prompts))}; wanted text")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; wanted at least 1")
    if (total := max(map(len, prompts), default=0) + max_new_tokens) > cfg.longest:
        fix = "shorten the prompt or max_new_tokens"
        raise ValueError(
            f"prompts: {total} tokens with the new ones, want at most max_positions = {cfg.longest}; {fix}"
        )


def _padded(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens i64[b t], padded on the right with 0, and their lengths i64[b]."""
    width = max(map(len, texts))
    tokens = torch.tensor([[*text, *[0] * (width - len(text))] for text in texts], dtype=torch.int64, device=device)
    return tokens, torch.tensor([len(text) for text in texts], dtype=torch.int64, device=device)


def _divisors_change(cfg: Config, tokens: int) -> bool:
    """Return True if the longest row, now of ``tokens``, is the first beyond the short divisors of longrope."""
    scaling = cfg.rope_scaling
    if scaling is None or scaling.kind != "longrope":
        return False
    return tokens == (scaling.original_max_position or cfg.max_positions) + 1


def _power_of_two(n: int) -> int:
    return max(LEAST_SLOTS, 1 << (n - 1).bit_length())


def _device(params: decoder.Params) -> torch.device:
    return next(leaf.device for leaf in tree.leaves(params.embed) if isinstance(leaf, Tensor))
