"""Bundle: the buffers of one block as one flat run of bytes.

A block's codes, scales and norms travel together in one uint8 buffer. Each begins at an offset aligned to 64 bytes, and
the whole is padded once, to divide by the number of ranks. One all-gather brings a block, and its buffers are *viewed*
out of the result, not copied. Every dtype travels bit for bit.

A bundle is a Loadable (see fquant.communication): a Comm opens it, and until then its static ``layout`` describes it.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fquant import tree
from fquant.communication import Loadable
from fquant.device import HOST, memory_of
from fquant.tree import node, static

ALIGN = 64


@dataclass(frozen=True)
class Buffer:
    """One tensor of a block: its path in the block, dtype and shape, and the offset of its first byte."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """The offset behind its last byte."""
        return self.offset + self.nbytes

    @property
    def width(self) -> int:
        """Bytes of one row, of which there are ``shape[0]``."""
        return self.nbytes // max(1, self.shape[0])


@dataclass(frozen=True)
class Layout:
    """The layout of a block in its bytes: its tree structure, its buffers, and the padded ``size``."""

    structure: tree.Structure
    buffers: tuple[Buffer, ...]
    size: int

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(buffer.nbytes for buffer in self.buffers)


@node
class Bundle(Loadable):
    """A block as bytes: u8[size] whole, u8[size / ranks] on each rank, or at rest a DTensor of these.

    Those of an ``offloaded`` block are in the host's memory, and are fetched to the device of the mesh.
    """

    bytes: Tensor
    layout: Layout = static()
    offloaded: bool = static(default=False)


tree.add_later_fields(Bundle, "offloaded")


def plan(block: Any, ranks: int, align: int = ALIGN) -> Layout:
    """Return the layout of ``block``, a tree of tensors or meta tensors, padded to divide by ``ranks``.

    Offsets, and the part of a rank, are multiples of ``align`` bytes.
    """
    buffers, offset = [], 0
    for path, t in tree.items(block):
        buffers.append(Buffer(path, t.dtype, tuple(t.shape), offset))
        offset += round_up(buffers[-1].nbytes, align)
    return Layout(tree.structure(block), tuple(buffers), round_up(offset, align * ranks))


def write(block: Any, layout: Layout, device: torch.device = HOST) -> Tensor:
    """Return the bytes u8[size] of ``block``, whose tensors may be on other devices; padding is zero.

    A tensor of another dtype than that of its buffer is cast.
    """
    out = torch.zeros(layout.size, dtype=torch.uint8, device=device)
    for buffer, t in zip(layout.buffers, tree.leaves(block), strict=True):
        out[buffer.offset : buffer.end] = raw(t.to(buffer.dtype))
    return out


def read(whole: Tensor, layout: Layout) -> Any:
    """Return the block with the bytes ``whole`` u8[... size], as views of them."""
    parts = [view(whole.narrow(-1, buffer.offset, buffer.nbytes), buffer) for buffer in layout.buffers]
    return tree.unflatten(layout.structure, parts)


def view(part: Tensor, buffer: Buffer) -> Tensor:
    """Return the tensor [... shape] of ``buffer``, a view of its bytes ``part`` u8[... nbytes]."""
    if part.numel() and part.stride(-1) != 1:  # vmapped bundles arrive interleaved, and bytes apart cannot be viewed
        part = part.contiguous()
    return part.view(buffer.dtype).reshape((*part.shape[:-1], *buffer.shape))


def raw(t: Tensor) -> Tensor:
    """Return the bytes u8[nbytes] of a tensor."""
    return memory_of(t.detach().contiguous())


def round_up(n: int, to: int) -> int:
    """Return the first multiple of ``to`` that is at least ``n``."""
    return -(-n // to) * to
