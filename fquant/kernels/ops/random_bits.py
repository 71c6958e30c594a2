"""Counter-based random bits as three ops of a key, on which fquant/random.py is built.

    fold(key, data)                    i64[...] of two i64 that broadcast: a new key from a key and a number
    bits(key, shape)                   i64[*key *shape], words of 32 bits
    bernoulli(key, threshold, shape)   bool[*key *shape], True for words below the threshold

The reference defines the numbers. In plain torch a draw is some 130 operations on int64. As an op it is one node of a
trace, computed in registers, and makes only its result: a byte an element for a mask.

Devices without a kernel take the reference. All arguments and results are integers, which have no derivative. Under
vmap, a mapped key is a key with one more dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..dispatch import backend
from ..registry import define

SCHEMAS = {
    "fold": "(Tensor key, Tensor data) -> Tensor",
    "bits": "(Tensor key, SymInt[] shape) -> Tensor",
    "bernoulli": "(Tensor key, int threshold, SymInt[] shape) -> Tensor",
}


def fold(key: Tensor, data: Tensor) -> Tensor:
    """Return keys i64[...] from ``key`` and ``data``, i64 that broadcast; either may be a number on the CPU.

    Raises TypeError for another dtype, ValueError for different devices.
    """
    if key.device != data.device:  # as in torch, a number on the CPU goes with any device
        if data.is_cpu and data.ndim == 0:
            data = data.to(key.device)
        elif key.is_cpu and key.ndim == 0:
            key = key.to(data.device)
    return _OPS["fold"](key, data)


def bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Return words in [0, 2^32), i64[*key *shape]: for each key i64, those at the flat positions of ``shape``.

    Raises TypeError for another dtype.
    """
    return _OPS["bits"](key, shape)


def bernoulli(key: Tensor, threshold: int, shape: Sequence[int]) -> Tensor:
    """Return bool[*key *shape], True for the words of :func:`bits` below ``threshold``.

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
        """Move the mapped dim to the front, and add dims behind it for broadcasting."""
        return t if at is None else t.movedim(at, 0)[(slice(None), *[None] * (most + 1 - t.ndim))]

    return _OPS["fold"](*map(front, words, in_dims)), 0


def _draw_vmap(name: str, info: Any, in_dims: Any, key: Tensor, *rest: Any) -> tuple[Tensor, int]:
    return _OPS[name](key.movedim(in_dims[0], 0), *rest), 0


_VERBS = {
    "fold": (_fold, _fold_fake, _fold_vmap),
    "bits": (_bits, _bits_fake, partial(_draw_vmap, "bits")),
    "bernoulli": (_bernoulli, _bernoulli_fake, partial(_draw_vmap, "bernoulli")),
}
_OPS = {name: define(name, SCHEMAS[name], *functions) for name, functions in _VERBS.items()}
