"""Bundle: the buffers of one block as one flat run of bytes.

A block's parameters are many buffers of several dtypes: codes, scales, norms. They travel together, so they lie
together: in one uint8 buffer, each at an offset aligned to 64 bytes, the whole padded once so that it divides by the
ranks. One all-gather then brings a block, and its buffers are *viewed* out of the result, not copied. Any dtype travels
as it is, bit for bit; any number of ranks will do, more than there are rows included; nothing else has to divide.

A bundle is closed (see fquant.communication): what is inside is known from its static ``layout``, and used after ``open``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fquant import tree
from fquant.communication import Loadable
from fquant.tree import node, static

ALIGN = 64


@dataclass(frozen=True)
class Buffer:
    """One tensor of a block: its path in the block, what it is, and where in the bytes it begins."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def width(self) -> int:
        """Bytes of a row, of one of ``shape[0]``."""
        return self.nbytes // max(1, self.shape[0])


@dataclass(frozen=True)
class Layout:
    """How a block lies in its bytes: its structure, its buffers, and the padded ``size`` of the whole."""

    structure: tree.Structure
    buffers: tuple[Buffer, ...]
    size: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(buffer.nbytes for buffer in self.buffers)


@node
class Bundle(Loadable):
    """A block as bytes: u8[size] whole, u8[size / ranks] on each rank, or at rest a DTensor of these."""

    bytes: Tensor
    layout: Layout = static()


def plan(block: Any, ranks: int) -> Layout:
    """The layout of ``block``, whose leaves are tensors (meta ones will do), padded to divide by ``ranks``."""
    buffers, offset = [], 0
    for path, t in tree.items(block):
        buffers.append(Buffer(path, t.dtype, tuple(t.shape), offset))
        offset += _align(buffers[-1].nbytes, ALIGN)
    return Layout(tree.structure(block), tuple(buffers), _align(offset, ALIGN * ranks))


def write(block: Any, layout: Layout) -> Tensor:
    """The bytes u8[size] of ``block``; padding is zero."""
    out = torch.zeros(layout.size, dtype=torch.uint8, device="cpu")
    for buffer, t in zip(layout.buffers, tree.leaves(block), strict=True):
        out[buffer.offset : buffer.offset + buffer.nbytes] = raw(t)
    return out


def read(whole: Tensor, layout: Layout) -> Any:
    """The block whose bytes ``whole`` u8[... size] are, as views of them."""
    parts = [view(whole.narrow(-1, buffer.offset, buffer.nbytes), buffer) for buffer in layout.buffers]
    return tree.unflatten(layout.structure, parts)


def view(part: Tensor, buffer: Buffer) -> Tensor:
    """The tensor that ``buffer`` describes, [... shape], whose bytes ``part`` u8[... nbytes] are."""
    if part.numel() and part.stride(-1) != 1:  # vmapped bundles arrive interleaved, and bytes apart cannot be viewed
        part = part.contiguous()
    return part.view(buffer.dtype).reshape((*part.shape[:-1], *buffer.shape))


def raw(t: Tensor) -> Tensor:
    """The bytes of a tensor, u8[nbytes]."""
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def _align(n: int, to: int) -> int:
    return -(-n // to) * to
