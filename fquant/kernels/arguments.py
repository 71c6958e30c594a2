"""Checks of arguments and results, and products with tiles of a weight, for all backends."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .spec import FLOATS

COMPUTED = (*FLOATS, torch.float64)  # dtypes that kernels compute with; float64 by the reference
Kinds = tuple[tuple[torch.dtype, torch.Size, tuple[int, ...]], ...]


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a kernel sums elements of ``x``: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def widened(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype of its sums."""
    return x.to(sum_dtype(x))


def dense_rows(x: Tensor) -> Tensor:
    """Return ``x`` with its last dim contiguous; rows may have gaps between them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def kinds_of(tensors: Sequence[Tensor]) -> Kinds:
    """Return the dtype, the shape and the strides of each tensor."""
    return tuple((t.dtype, t.shape, t.stride()) for t in tensors)


def merged(shape: Sequence[int], reads: Kinds) -> list[tuple[int, ...]]:
    """Return ``shape``, and the strides of each of ``reads`` broadcast to it, with fewer dims.

    Adjacent dims that are one dim in all memories are merged, and dims of size 1 are removed.
    """
    broadcast = [torch.empty_strided(*own, dtype=dtype, device="meta").expand(shape) for dtype, *own in reads]
    dims = list[tuple[int, ...]]()  # the size, and the stride of each tensor
    for size, *own in zip(shape, *(t.stride() for t in broadcast), strict=True):
        if size == 1:
            continue
        if dims and list(dims[-1][1:]) == [size * stride for stride in own]:
            size *= dims.pop()[0]
        dims.append((size, *own))
    return list(zip(*(dims or [(1,) * (1 + len(reads))]), strict=True))


def check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return ``out`` if a result of ``shape`` and ``dtype`` can be written there; raise ValueError otherwise."""
    if out.shape != shape or out.dtype is not dtype or not out.is_contiguous():
        got = f"{out.dtype} {tuple(out.shape)} of strides {out.stride()}"
        raise ValueError(f"a result was to go into {got}; wanted contiguous {dtype} {shape}")
    return out


def check_floats(op: str, x: Tensor, name: str = "x") -> None:
    """Raise TypeError if kernels do not compute with the dtype of the argument ``name``."""
    if x.dtype not in COMPUTED:
        raise TypeError(f"{op} got {name} {x.dtype} {tuple(x.shape)}; wanted f32, bf16, f16 or f64")


def check_beside(
    op: str, name: str, x: Tensor, /, **others: tuple[Tensor | None, tuple[int, ...], torch.dtype]
) -> None:
    """Check arguments (tensor or None, shape, dtype) beside ``x``, called ``name``, on whose device they have to be.
    Raises TypeError for another dtype, ValueError for another shape or device.
    """
    for other, (t, shape, dtype) in others.items():
        if t is None:
            continue
        if t.dtype is not dtype:
            raise TypeError(f"{op} got {other} {t.dtype} beside {name} {x.dtype}; wanted {dtype}")
        if t.shape != shape:
            got = f"{other} {tuple(t.shape)} and {name} {tuple(x.shape)}"
            raise ValueError(f"{op} got {got}; wanted {other} {tuple(shape)}")
        if t.device != x.device:
            raise ValueError(f"{op} got {name} on {x.device} and {other} on {t.device}; move one")


def multiply_tiles(x: Tensor, tiles: Iterable[tuple[int, int, Tensor]], y: Tensor, by_columns: bool) -> None:
    """Write ``x · Wᵀ`` to ``y``, or ``x · W`` if by columns, for ``tiles`` (start, stop, these rows of W)."""
    if not by_columns:
        for start, stop, tile in tiles:
            torch.mm(x, tile.mT, out=y[:, start:stop])
        return
    wide = sum_dtype(x)
    total = torch.zeros_like(y, dtype=wide)
    for start, stop, tile in tiles:
        total.addmm_(x[:, start:stop].to(wide), tile.to(wide))
    y.copy_(total)
