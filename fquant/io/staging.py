"""Bytes of a file on a device, which come through two pinned buffers of the host.

    host           file -> tensor
    CUDA device    file -> buffer 0 -> tensor
                           file -> buffer 1 -> tensor        the next piece, while the device copies

A device copies pinned memory by itself, at the speed of its link. It gets pageable memory through a pinned buffer of
the driver, while the processor waits. So each piece is read straight to a pinned buffer. The tensor is never on the
host as a whole, and loading a model takes no more of the host's memory than the two buffers. What is read can be hashed
on the way (fquant/io/files/digests.py): tensors of the host by threads during the reads that follow, and buffers before
they are read to again.
"""

from collections.abc import Callable, Sequence
from typing import IO, Protocol

import torch
from torch import Tensor

from ..device import HOST

PIECE = 32 << 20  # bytes of a buffer
HASHED = 8 << 20  # bytes of one read of a tensor of the host that is hashed

Wait = Callable[[], object]  # returns once all that the device was given to do before is done


class Hash(Protocol):
    """A hash of bytes that come in order; ``data`` must stay as they are until ``wait`` returns."""

    def add(self, data: memoryview) -> None: ...

    def wait(self) -> None: ...


def fill(out: Tensor, file: IO[bytes], hashed: Hash | None = None) -> int:
    """Read from ``file`` the bytes of the contiguous tensor ``out``; return how many the file lacks.

    ``hashed`` gets the bytes. It has those of a tensor of the host to ``wait`` for. Copies to a device are on its
    current stream, so that what is computed there later sees them.
    """
    whole = out.view(-1).view(torch.uint8)
    if out.device == HOST:
        left = len(whole)
        for part in whole.split(HASHED if hashed else max(1, left)):
            if lacking := _read(part, file):
                return left - len(part) + lacking
            left -= len(part)
            if hashed:
                hashed.add(part.numpy().data)
        return 0
    size = min(PIECE, len(whole))
    buffers = [torch.empty(size, dtype=torch.uint8, device=HOST, pin_memory=True) for _ in range(2)]
    recorded = lambda: torch.cuda.current_stream(out.device).record_event().synchronize
    return through(buffers, whole, file, recorded, hashed)


def through(
    buffers: Sequence[Tensor], out: Tensor, file: IO[bytes], recorded: Callable[[], Wait], hashed: Hash | None = None
) -> int:
    """Read from ``file`` the bytes ``out`` u8[n] through ``buffers`` u8[size] in turn; return how many it lacks.

    ``recorded()`` follows each copy, and returns a function that waits for it: a buffer is read to after that.
    """
    waits: list[Wait] = [lambda: None for _ in buffers]
    left = len(out)
    for i, piece in enumerate(out.split(max(1, len(buffers[0])))):
        turn = i % len(buffers)
        waits[turn]()
        part = buffers[turn].narrow(0, 0, len(piece))
        if lacking := _read(part, file):
            return left - len(piece) + lacking
        piece.copy_(part, non_blocking=True)
        waits[turn] = recorded()
        if hashed:  # while the device copies
            hashed.add(part.numpy().data)
            hashed.wait()
        left -= len(piece)
    return left


def _read(out: Tensor, file: IO[bytes]) -> int:
    """Read from ``file`` the bytes ``out`` u8[n] of the host; return how many it lacks."""
    left = out.numpy().data
    while left and (count := file.readinto(left)):  # type: ignore[attr-defined]
        left = left[count:]
    return len(left)
