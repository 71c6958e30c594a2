"""The sum of squares of a gradient, also where it is beyond float32.

Squares are summed in float32, as torch's ``clip_grad_norm_`` does. An element above 1.8e19 makes that sum infinite, and
clipping by it would make the whole update zero. Then the sum is computed again, of scaled elements and in float64. One
op does so behind a look at the first sum, so ordinary gradients are read once and keep their bits. On a CUDA device,
which must not wait for the host, both sums are computed, and the second by few kernels for all leaves.

The op has no derivative. Those of the first sum are as before.

Large tensors are summed in rows of 4096 elements, and then the sums of rows. Torch alone would cut a tensor into as
many parts as there are threads, and a norm would differ with their number.
"""

from typing import Any

import torch
from torch import Tensor

from .tree import expect

ROW = 4096  # elements that are summed in one go; torch uses one thread below 32768
SCALE = 2.0**-70  # of elements: with squares of the largest and of those at 1e15 within float32


def sum_of_squares(leaves: list[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements, f64[], with the bits of the float32 sum if that is finite.

    Raises ValueError if there are no leaves, and TypeError for a leaf that is no tensor of real numbers.
    """
    expect(leaves, "global_norm: got a tree without leaves, wanted at least one tensor")
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.is_complex():
            kind = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"global_norm: got a leaf of {kind}, wanted tensors of real numbers; leave it out")
    near = torch.stack([_sum(leaf.float().square()) for leaf in leaves]).sum()
    far = _OP(near.detach(), [leaf.detach() for leaf in leaves])
    return torch.where(near.isfinite(), near.double(), far)


def _sum(t: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum of all elements, with the same bits on any number of threads."""
    flat = t.reshape(-1)
    while (n := len(flat)) > ROW:
        rows, rest = flat[: n - n % ROW].view(-1, ROW).sum(-1, dtype=dtype), flat[n - n % ROW :]
        flat = torch.cat([rows, rest.sum(dtype=dtype)[None]]) if n % ROW else rows
    return flat.sum(dtype=dtype)


def root(squares: Tensor) -> Tensor:
    """Return the norm f64[] of a sum of squares f64[]: float32's root, unless the sum is beyond float32."""
    near = squares.float()
    return torch.where(near.isinf(), squares.sqrt(), near.sqrt().double())


def _far(near: Tensor, leaves: list[Tensor]) -> Tensor:
    sums = [_sum((leaf.float() * SCALE).square_(), torch.float64) for leaf in leaves]
    return torch.stack(sums).sum() / SCALE**2


def _far_in_few_kernels(near: Tensor, leaves: list[Tensor]) -> Tensor:
    norms = torch._foreach_norm([leaf.float() for leaf in leaves], 2, dtype=torch.float64)
    return torch.stack(norms).square().sum()


def _far_if_needed(near: Tensor, leaves: list[Tensor]) -> Tensor:
    return near.double() if bool(near.isfinite()) else _far(near, leaves)


_LIBRARY = torch.library.Library("fquant", "FRAGMENT")
_LIBRARY.define("sum_of_squares(Tensor near, Tensor[] leaves) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_LIBRARY.impl("sum_of_squares", _far_if_needed, "CPU")
_LIBRARY.impl("sum_of_squares", _far_in_few_kernels, "CUDA")
torch.library.register_fake(
    "fquant::sum_of_squares", lambda near, leaves: near.new_empty((), dtype=torch.float64), lib=_LIBRARY
)


def _over_batch(info: Any, dims: Any, near: Tensor, leaves: list[Tensor]) -> tuple[Tensor, int]:
    each = [
        leaf.expand(info.batch_size, *leaf.shape) if at is None else leaf.movedim(at, 0)
        for leaf, at in zip(leaves, dims[1], strict=True)
    ]
    sums = [(leaf.float() * SCALE).square_().flatten(1).sum(-1, dtype=torch.float64) for leaf in each]
    return torch.stack(sums).sum(0) / SCALE**2, 0


torch.library.register_vmap("fquant::sum_of_squares", _over_batch, lib=_LIBRARY)
_OP = torch.ops.fquant.sum_of_squares.default
