"""Random words as three ops of a key, on which fquant/random.py is built.

    fold(key, data)                    i64[...] of two i64 that broadcast: a key from a key and what it is folded with
    bits(key, shape)                   i64[*key *shape], words of 32 bits
    bernoulli(key, threshold, shape)   bool[*key *shape], the same words below the threshold

What the numbers are is defined by ``reference.py``. In plain torch a draw is some 130 operations on int64; as an op it
is one node of a trace, computed in registers, and makes nothing beside its result: a byte an element for a mask.

The ops are registered beside the others of ``fquant::`` and computed by the same table of backends, on devices that it
does not name by the reference. All they take and give are integers, through which no transform has a derivative; a
mapped key is a key with one more dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch import backend

SCHEMAS = {
    "fold": "(Tensor key, Tensor data) -> Tensor",
    "bits": "(Tensor key, SymInt[] shape) -> Tensor",
    "bernoulli": "(Tensor key, int threshold, SymInt[] shape) -> Tensor",
}


def fold(key: Tensor, data: Tensor) -> Tensor:
    """Keys i64[...] from ``key`` and ``data``, i64 that broadcast; either may be a number on the CPU.

    Raises TypeError for another dtype, ValueError for different devices.
    """
    if key.device != data.device:  # as torch lets numbers join what is elsewhere
        if data.is_cpu and data.ndim == 0:
            data = data.to(key.device)
        elif key.is_cpu and key.ndim == 0:
            key = key.to(data.device)
    return _OPS["fold"](key, data)


def bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Words in [0, 2^32), i64[*key *shape]: of every key i64, those at the flat positions of ``shape``.

    Raises TypeError for another dtype.
    """
    return _OPS["bits"](key, shape)


def bernoulli(key: Tensor, threshold: int, shape: Sequence[int]) -> Tensor:
    """Whether the words of :func:`bits` are below ``threshold``, bool[*key *shape].

    Raises TypeError for another dtype, ValueError for a threshold outside of [0, 2^32].
    """
    return _OPS["bernoulli"](key, threshold, shape)


def _fold(key: Tensor, data: Tensor) -> Tensor:
    _check_fold(key, data)
    return backend(key.device.type)[1].fold(key, data)


def _fold_fake(key: Tensor, data: Tensor) -> Tensor:
    _check_fold(key, data)
    return key.new_empty(torch.broadcast_shapes(key.shape, data.shape))


def _bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    _check("bits", key)
    return backend(key.device.type)[1].bits(key, shape)


def _bits_fake(key: Tensor, shape: Sequence[int]) -> Tensor:
    _check("bits", key)
    return key.new_empty((*key.shape, *shape))


def _bernoulli(key: Tensor, threshold: int, shape: Sequence[int]) -> Tensor:
    _check_bernoulli(key, threshold)
    return backend(key.device.type)[1].bernoulli(key, threshold, shape)


def _bernoulli_fake(key: Tensor, threshold: int, shape: Sequence[int]) -> Tensor:
    _check_bernoulli(key, threshold)
    return key.new_empty((*key.shape, *shape), dtype=torch.bool)


def _check(name: str, *words: Tensor) -> None:
    for t in words:
        if t.dtype is not torch.int64:
            raise TypeError(f"{name} got {t.dtype} {tuple(t.shape)}; wanted int64")


def _check_fold(key: Tensor, data: Tensor) -> None:
    _check("fold", key, data)
    if key.device != data.device:
        raise ValueError(f"fold got a key on {key.device} and data on {data.device}; move one")


def _check_bernoulli(key: Tensor, threshold: int) -> None:
    _check("bernoulli", key)
    if not 0 <= threshold <= 2**32:
        raise ValueError(f"bernoulli got a threshold of {threshold}; wanted one in [0, 2^32]")


def _fold_vmap(info: Any, in_dims: Any, *words: Tensor) -> tuple[Tensor, int]:
    most = max(t.ndim - (at is not None) for t, at in zip(words, in_dims, strict=True))

    def front(t: Tensor, at: int | None) -> Tensor:
        """What is mapped in front, and behind it dims enough to broadcast."""
        return t if at is None else t.movedim(at, 0)[(slice(None), *[None] * (most + 1 - t.ndim))]

    return _OPS["fold"](*map(front, words, in_dims)), 0


def _draw_vmap(name: str, info: Any, in_dims: Any, key: Tensor, *rest: Any) -> tuple[Tensor, int]:
    return _OPS[name](key.movedim(in_dims[0], 0), *rest), 0


def _register() -> dict[str, Callable[..., Any]]:
    draws = {name: partial(_draw_vmap, name) for name in ("bits", "bernoulli")}
    for name, real, fake, vmap in (
        ("fold", _fold, _fold_fake, _fold_vmap),
        ("bits", _bits, _bits_fake, draws["bits"]),
        ("bernoulli", _bernoulli, _bernoulli_fake, draws["bernoulli"]),
    ):
        _LIBRARY.define(name + SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fquant::{name}", fake, lib=_LIBRARY)
        torch.library.register_vmap(f"fquant::{name}", vmap, lib=_LIBRARY)
    return {name: getattr(torch.ops.fquant, name).default for name in SCHEMAS}


_LIBRARY = torch.library.Library("fquant", "FRAGMENT")
_OPS = _register()
