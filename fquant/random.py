"""Random numbers as a function of (key, position): no generator, no state.

    k = fold(key(seed), "dropout")        # a new key from a name, a step, a layer, a position ...
    k = fold(k, step)
    x = dropout(x, 0.1, k)

A *key* is an int64 tensor of any shape, 64 bits of seed an element. :func:`bits` runs the counter-based generator
Threefry-2x32-20 (Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) on
(key, position). So a value depends neither on the order of calls, nor on the world size, nor on a recomputation.
The shape of a key leads the shape of the numbers, as ``vmap`` over keys [] and shapes [t d] does:

    key [b]  +  shape [b t d]  ->  stream of key[i], counter = flat position inside [t d]

Words are int64 tensors because torch has no arithmetic for uint32. Integers and uniforms are the same on every device;
normals differ by the rounding of its log and cos.
"""

import math
from numbers import Real

import torch
from einops import rearrange
from torch import Tensor

from .device import is_integer
from .kernels.ops import random_bits
from .tree import expect


def key(seed: int | Tensor) -> Tensor:
    """Return the key int64 [] of an integer seed, on torch's default device; return a key as it is."""
    if isinstance(seed, Tensor):
        _check_key(seed)
        return seed
    return torch.tensor(_int64("seed", seed, "an int"), dtype=torch.int64)


def fold(key: Tensor, data: int | str | Tensor) -> Tensor:
    """Return a new key from ``key`` and a number, a name, or an int64 tensor that broadcasts with the key.

    Keys folded with different data are independent of each other, and of the numbers drawn from ``key`` itself.
    """
    _check_key(key)
    if isinstance(data, Tensor):
        if data.dtype is not torch.int64:
            raise TypeError(f"data: got {data.dtype}, wanted int64; use data.long()")
        return random_bits.fold(key, data)
    number = _hash(data) if isinstance(data, str) else _int64("data", data, "an int, a str or an int64 tensor")
    return random_bits.fold(key, torch.full((), number, dtype=torch.int64, device=key.device))


def bits(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Draw uniform 32-bit words, int64 of ``shape`` in [0, 2^32); the key's shape must lead ``shape``."""
    return random_bits.bits(key, _drawn(key, shape))


def uniform(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw uniforms in [0, 1), on the grid of ``dtype`` just below one: 24 bits for float32, 8 for bfloat16."""
    _check_dtype(dtype)
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    if digits <= 32:
        return (bits(key, shape) >> (32 - digits)).to(dtype) * 2.0**-digits
    high, low = bits(key, (*shape, 2)).unbind(-1)
    return ((high << (digits - 32)) | (low >> (64 - digits))).to(dtype) * 2.0**-digits


def normal(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw standard normals by Box and Muller in at least float32; none exceeds 6.7, because words have 32 bits."""
    _check_dtype(dtype)
    size = math.prod(_drawn(key, shape))
    words = rearrange(random_bits.bits(key, (size + size % 2,)), "... (pair two) -> two ... pair", two=2)
    first, second = words.to(torch.promote_types(dtype, torch.float32)).unbind()
    radius = torch.sqrt(-2.0 * torch.log((first + 1) * 2.0**-32))  # never log(0)
    angle = second * (math.tau * 2.0**-32)
    both = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)])  # [2 ... pair]
    flat = rearrange(both, "two ... pair -> ... (pair two)")[..., :size]
    return flat.reshape(shape).to(dtype)


def kaiming_uniform(key: Tensor, shape: tuple[int, ...], fan_in: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw uniforms in [-1, 1) / sqrt(fan_in): torch's ``kaiming_uniform_(a=sqrt(5))``, as nn.Linear and LoRA do."""
    _check_count("fan_in", fan_in, 1)
    return (2 * uniform(key, shape, dtype) - 1) * fan_in**-0.5


def bernoulli(key: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
    """Draw bools of ``shape``, True with probability ``p`` in [0, 1], to 32 bits."""
    if not isinstance(p, Real):
        raise TypeError(f"p: got {p!r}, wanted a probability in [0, 1]")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p: got {p}, wanted a probability in [0, 1]")
    return random_bits.bernoulli(key, round(p * 2**32), _drawn(key, shape))


def dropout(x: Tensor, p: float | Tensor, key: Tensor) -> Tensor:
    """Zero elements of x with probability ``p`` in [0, 1), scale others by 1 / (1 - p); the key's shape leads x's.

    ``p`` may be f64 of the key's shape, a probability for each key; its values are not checked. It has the bits of
    numbers, and takes 8 bytes an element meanwhile.
    """
    if isinstance(p, Tensor):
        _check_key(key)
        if p.dtype is not torch.float64 or p.shape != key.shape:
            raise ValueError(f"p: got {p.dtype} {tuple(p.shape)}, wanted float64 {tuple(key.shape)}, one for each key")
        p = p.reshape(*p.shape, *[1] * (x.ndim - p.ndim))
        scale = (1.0 / (1.0 - p)).to(torch.promote_types(x.dtype, torch.float32))
        is_kept = bits(key, x.shape) < ((1.0 - p) * 2**32).round().long()
        return torch.where(is_kept, (x * scale).to(x.dtype), 0.0)
    if not isinstance(p, float) and not isinstance(p, Real):  # the first is true in torch.compile
        raise TypeError(f"p: got {p!r}, wanted a probability in [0, 1)")
    if not 0.0 <= p < 1.0:
        raise ValueError(f"p: got {p}, wanted a probability in [0, 1)")
    if p == 0.0:
        return x
    return torch.where(bernoulli(key, 1.0 - p, x.shape), x * (1.0 / (1.0 - p)), 0.0)


def permutation(key: Tensor, n: int) -> Tensor:
    """Draw a random order of 0 ... n - 1, int64 [*key n]."""
    _check_key(key)
    _check_count("n", n, 0)
    high, low = bits(key, (*key.shape, n, 2)).unbind(-1)  # 63 bits, so that ties do not occur
    return torch.argsort(((high >> 1) << 32) | low, dim=-1)


def _hash(name: str) -> int:
    """Return the signed FNV-1a hash of 64 bits, plain arithmetic that torch.compile traces."""
    out = 0xCBF29CE484222325
    raw = name.encode()
    for i in range(len(raw)):  # an index, because torch.compile before 2.13 cannot iterate over bytes
        out = (out ^ raw[i]) * 0x100000001B3 % 2**64
    return out - 2**64 if out >= 2**63 else out


def _drawn(key: Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that each key draws."""
    _check_key(key)
    # Statements rather than expect(), because torch.compile cannot print numbers that it does not know.
    if not isinstance(shape, tuple | list) or not all(map(is_integer, shape)):
        raise TypeError(f"shape: got {shape!r}, wanted a tuple of ints, such as (2, 3)")
    if any(n < 0 for n in shape):
        raise ValueError(f"shape: got {tuple(shape)}, wanted sizes of at least 0")
    if key.shape != tuple(shape)[: key.ndim]:
        raise ValueError(f"key: shape {tuple(key.shape)} does not lead {tuple(shape)}; use fold to give it that shape")
    return tuple(shape)[key.ndim :]


def _check_key(key: Tensor) -> None:
    if not isinstance(key, Tensor) or key.dtype is not torch.int64:
        got = key.dtype if isinstance(key, Tensor) else type(key).__name__
        raise TypeError(f"key: got {got}, wanted an int64 tensor; use fquant.random.key(seed)")


def _check_dtype(dtype: torch.dtype) -> None:
    is_float = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
    expect(is_float, f"dtype: got {dtype!r}, wanted a float dtype of 16 bits or more, such as torch.float32", TypeError)


def _check_count(name: str, n: int, least: int) -> None:
    expect(is_integer(n), f"{name}: got {n!r}, wanted an int", TypeError)
    expect(n >= least, f"{name}: got {n}, wanted at least {least}")


def _int64(name: str, x: int, wanted: str) -> int:
    if not is_integer(x):
        raise TypeError(f"{name}: got {type(x).__name__}, wanted {wanted}")
    if not -(2**63) <= x < 2**63:
        raise ValueError(f"{name}: got {x}, wanted an integer of 64 bits with a sign")
    return int(x)
