"""Updates of slots: a low-rank product of its own for each index of dim 0 of the inputs, of mixed rank.

    y[i] = s[i] · drop(x[i]) · a[i]ᵀ · b[i]ᵀ          x f[slots ... in]  ->  f[slots ... out]

Slots of one rank are a stack, and a stack is two batched products. So nothing is padded to the largest rank. The
product with the base has the rows of all slots, and decodes a packed weight once: ``packed_linear.linear`` adds it.
"""

import torch
from torch import Tensor

from .. import random
from .batched_product import batched_linear
from .nodes import LoraSlots, divisor


def updates(x: Tensor, slots: LoraSlots, key: Tensor | None = None) -> Tensor:
    """Return the updates f[slots ... out] of ``x`` f[slots ... in] in the adapters' dtype.

    ``key`` i64[slots] enables dropout. Alpha and dropout enter as doubles, as the static fields of a Lora do. Raises
    ValueError unless dim 0 of ``x`` is the slot, and TypeError for alpha or dropout that were cast.
    """
    sizes, (*lead, _) = [len(lora.a) for lora in slots.stacks], x.shape
    if len(lead) < 1 or lead[0] != sum(sizes):
        raise ValueError(f"linear got x {tuple(x.shape)} for {sum(sizes)} slots; dim 0 of x must be the slot")
    if any(t is not None and t.dtype is not torch.float64 for t in (slots.alpha, slots.dropout)):
        raise TypeError(f"slots: got alpha of {slots.alpha.dtype}, wanted float64; cast a and b alone, as step(dtype=)")
    if key is not None and slots.dropout is not None:
        x = random.dropout(x, slots.dropout, key)
    x, found = x.to(slots.stacks[0].a.dtype), []
    for lora, rows, alpha in zip(slots.stacks, x.split(sizes), slots.alpha.split(sizes), strict=True):
        rows = rows.reshape(len(rows), rows[:1].numel() // rows.shape[-1], rows.shape[-1])
        low = batched_linear(rows, lora.a)  # [n t rank]
        factor = (alpha / divisor(lora)).to(torch.promote_types(low.dtype, torch.float32))
        found.append(batched_linear((low * factor[:, None, None]).to(low.dtype), lora.b))
    return torch.cat([y.reshape(n, *lead[1:], y.shape[-1]) for n, y in zip(sizes, found, strict=True)])
