"""exact: products in the dtype of their factors, where autocast would make them in bfloat16.

A code is the nearest of many, so a product that is a thousandth off is another code, and what a loss is made of may be
nothing but such thousandths. So whatever multiplies matrices here does it in

    with exact(x):
        inner = x @ codes.mT

which turns autocast off, forwards and where a tile is made again for a backward. Derivatives that are taken within
autocast are made as it makes them; as torch advises, take them outside.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def exact(x: Tensor) -> AbstractContextManager[Any]:
    """Without autocast on the device of ``x``."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)
