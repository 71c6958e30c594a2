"""The layout of the buffers of a packed array.

A kernel takes the buffers of a Packed, in the order of ``tree.leaves``, and a Spec, its static half.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..format import CODES, Format, num_blocks, num_bytes, read

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that can be quantised
SLOTS = 8  # the maximum number of buffers of a packed weight: codes, nested scales, an offset each


class Spec(NamedTuple):
    """The static half of a packed array: its format, and the shape and dtype of the array that was quantised."""

    format: Format
    shape: tuple[int, ...]
    dtype: torch.dtype


def spec_of(text: str, shape: Sequence[int], dtype: torch.dtype) -> Spec:
    """Return the Spec of the arguments of an op, in which a format is its text."""
    return Spec(read(text), tuple(shape), dtype)


class Leaf(NamedTuple):
    """The name, shape and dtype of a buffer; ``shape`` is without the dims of a stack."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@lru_cache(maxsize=4096)
def layout(spec: Spec, name: str = "") -> tuple[Leaf, ...]:
    """Return the buffers of ``spec``, with names that begin with ``name``: codes, scale(s), vectors, offset or zero."""
    format, shape, _ = spec
    if not format.flat:
        shape = *shape[:-1], num_bytes(format, shape[-1])
    elif format.bits != 8:
        shape = (num_bytes(format, math.prod(shape)),)
    leaves = (Leaf(f"{name}codes", shape, code_dtype(format)),)
    nested = scales(spec)
    if format.scale is None:
        leaves += (Leaf(f"{name}scale", nested.shape, torch.float32),)
    else:
        leaves += layout(nested, f"{name}scale.")
    if format.vectors is not None:
        leaves += (Leaf(f"{name}vectors", (CODES * format.vectors.stages * format.vectors.dim,), torch.float32),)
    if format.zero:
        leaves += (Leaf(f"{name}zero", nested.shape, torch.float32),)
    return leaves + ((Leaf(f"{name}offset", (), torch.float32),) if format.center else ())


def code_dtype(format: Format) -> torch.dtype:
    """Return the dtype of the codes."""
    return torch.int8 if format.table is None and format.vectors is None else torch.uint8


@lru_cache(maxsize=4096)
def scales(spec: Spec) -> Spec:
    """Return the Spec of the array of scales; its ``format`` has a meaning only if scales are packed themselves."""
    format, shape, _ = spec
    blocks = (num_blocks(format, math.prod(shape)),) if format.flat else (*shape[:-1], num_blocks(format, shape[-1]))
    return Spec(format.scale or format, blocks, torch.float32)


class Parts(NamedTuple):
    """The buffers of a packed array by name; the scale is one tensor, or the buffers of a packed one."""

    codes: Tensor
    scale: list[Tensor]
    offset: Tensor | None
    zero: Tensor | None


def split(spec: Spec, buffers: Sequence[Tensor]) -> Parts:
    """Return ``buffers``, of a format without learned vectors, by name."""
    codes, *rest = buffers
    offset = rest.pop() if spec.format.center else None
    zero = rest.pop() if spec.format.zero else None
    return Parts(codes, rest, offset, zero)


def stack(spec: Spec, buffers: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the dims of the stack whose arrays ``buffers`` are."""
    return tuple(buffers[0].shape[: buffers[0].ndim - len(layout(spec)[0].shape)])


def check(spec: Spec, buffers: Sequence[Tensor], outer: tuple[int, ...] | None = None) -> None:
    """Check ``buffers`` against the layout, and the dims of their stack against ``outer`` if given.
    Raises ValueError for another count, shape or device than the layout's, TypeError for another dtype.
    """
    if spec.dtype not in FLOATS:
        raise TypeError(f"{spec.format.name}: the dtype of the array is {spec.dtype}; wanted f32, bf16 or f16")
    leaves = layout(spec)
    if len(buffers) != len(leaves):
        wanted = ", ".join(leaf.name for leaf in leaves)
        raise ValueError(f"{spec.format.name}: got {len(buffers)} buffers; wanted {len(leaves)}: {wanted}")
    outer, device = stack(spec, buffers) if outer is None else outer, buffers[0].device
    for buffer, leaf in zip(buffers, leaves, strict=True):
        if buffer.dtype != leaf.dtype:
            raise TypeError(f"{spec.format.name}: {leaf.name} is {buffer.dtype}; wanted {leaf.dtype}")
        if buffer.shape != outer + leaf.shape:
            got, wanted = tuple(buffer.shape), outer + leaf.shape
            raise ValueError(f"{spec.format.name} {spec.shape}: {leaf.name} has shape {got}; wanted {wanted}")
        if buffer.device != device:
            raise ValueError(f"{spec.format.name}: {leaf.name} is on {buffer.device}, codes on {device}; move one")
