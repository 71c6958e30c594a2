"""Random bits of Threefry-2x32-20 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A counter gives two words: elements 2j and 2j + 1 are the words of counter j. They are int64 tensors, because torch has
no arithmetic for uint32.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Word = Tensor | int
MASK = 0xFFFFFFFF
PARITY = 0x1BD11BDA
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
FOLDED = 0x243F6A8885A308D3  # added to keys that are folded, or a folded key would be two drawn words


def fold(key: Tensor, data: Tensor) -> Tensor:
    high, low = threefry(_halves(key ^ FOLDED), _halves(data))
    return ((high << 32) | low).contiguous()  # type: ignore[union-attr]


def bits(key: Tensor, shape: Sequence[int]) -> Tensor:
    n = math.prod(shape)
    counter = torch.arange((n + 1) // 2, device=key.device)
    pairs = torch.stack(threefry(_halves(key[..., None]), _halves(counter)), -1)  # type: ignore[arg-type]
    return pairs.flatten(-2)[..., :n].reshape((*key.shape, *shape)).contiguous()


def bernoulli(key: Tensor, threshold: int, shape: Sequence[int]) -> Tensor:
    return bits(key, shape) < threshold


def threefry(key: tuple[Word, Word], counter: tuple[Word, Word]) -> tuple[Word, Word]:
    """Return two words from a key and a counter of two words each: int64 tensors or integers in [0, 2^32)."""
    k0, k1 = key
    keys = (k0, k1, k0 ^ k1 ^ PARITY)
    x0, x1 = counter[0] + k0, (counter[1] + k1) & MASK
    for four in range(5):
        for r in ROTATIONS[four % 2]:
            x0 = x0 + x1  # at most 26 sums of 32-bit words: masked once, at the end
            x1 = (((x1 << r) | (x1 >> (32 - r))) ^ x0) & MASK
        x0 = x0 + keys[(four + 1) % 3]
        x1 = (x1 + keys[(four + 2) % 3] + (four + 1)) & MASK
    return x0 & MASK, x1


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper 32 bits."""
    return x & MASK, (x >> 32) & MASK
