"""Counter-based random bits as three ops of a key, on which fquant/random.py is built.

    fold(key, data)                    i64[...] of two i64 that broadcast: a new key from a key and a number
    bits(key, shape)                   i64[*key *shape], words of 32 bits
    bernoulli(key, threshold, shape)   bool[*key *shape], True for words below the threshold

The reference defines the numbers. In plain torch a draw is some 130 operations on int64. As an op it is one node of a
trace, and makes only its result: a byte an element for a mask. All arguments and results are integers, which have no
derivative. Under vmap, a mapped key is a key with one more dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..registry import register


def fold(key: Tensor, data: Tensor) -> Tensor:
    """Return keys i64[...] from ``key`` and ``data``, i64 that broadcast; either may be a number on the CPU.
    Raises TypeError for another dtype, ValueError for different devices.
    """
    if key.device != data.device:  # as in torch, a number on the CPU goes with any device
        if data.is_cpu and data.ndim == 0:
            data = data.to(key.device)
        elif key.is_cpu and key.ndim == 0:
            key = key.to(data.device)
    return _FOLD(key, data)


def bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Return words in [0, 2^32), i64[*key *shape]: for each key i64, those at the flat positions of ``shape``.
    Raises TypeError for another dtype.
    """
    return _BITS(key, shape)


def bernoulli(key: Tensor, threshold: int, shape: Sequence[int]) -> Tensor:
    """Return bool[*key *shape], True for the words of :func:`bits` below ``threshold``.
    Raises TypeError for another dtype, ValueError for a threshold outside of [0, 2^32].
    """
    return _BERNOULLI(key, threshold, shape)


def _check(op: str, *words: Tensor) -> None:
    for t in words:
        if t.dtype is not torch.int64:
            raise TypeError(f"{op} got {t.dtype} {tuple(t.shape)}; wanted int64")
    if words[0].device != words[-1].device:
        raise ValueError(f"{op} got a key on {words[0].device} and data on {words[-1].device}; move one")


def _check_bernoulli(op: str, key: Tensor, threshold: int, shape: Sequence[int]) -> None:
    _check(op, key)
    if not 0 <= threshold <= 2**32:
        raise ValueError(f"bernoulli got a threshold of {threshold}; wanted one in [0, 2^32]")


def _fold_vmap(op: Any, info: Any, in_dims: Any, *words: Tensor) -> tuple[Tensor, int]:
    most = max(t.ndim - (at is not None) for t, at in zip(words, in_dims, strict=True))

    def front(t: Tensor, at: int | None) -> Tensor:
        """Move the mapped dim to the front, and add dims behind it for broadcasting."""
        return t if at is None else t.movedim(at, 0)[(slice(None), *[None] * (most + 1 - t.ndim))]

    return op(*map(front, words, in_dims)), 0


def _draw_vmap(op: Any, info: Any, in_dims: Any, key: Tensor, *rest: Any) -> tuple[Tensor, int]:
    return op(key.movedim(in_dims[0], 0), *rest), 0


_drawn = lambda dtype: lambda key, *arguments: key.new_empty((*key.shape, *arguments[-1]), dtype=dtype)
_folded = lambda key, data: key.new_empty(torch.broadcast_shapes(key.shape, data.shape))
_FOLD = register(fold, _check, _folded, _fold_vmap)
_BITS = register(bits, lambda op, key, shape: _check(op, key), _drawn(torch.int64), _draw_vmap)
_BERNOULLI = register(bernoulli, _check_bernoulli, _drawn(torch.bool), _draw_vmap)
