"""register: an op of ``fquant::`` that computes values only, as torch wants to be told of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import constant, into


def register(name: str, schema: str, real: Any, fake: Any, vmap: Any, fix: str, *tags: torch.Tag) -> Callable[..., Any]:
    """The op ``name``, computed by ``real``; ``fake`` and ``vmap`` are as torch.library wants them.

    Who asks it for a derivative gets a TypeError that says ``fix``.
    """
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    _LIBRARY.impl(name, real, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, partial(constant, name, fix), "Autograd", with_keyset=True)
    into(_LIBRARY, name, schema, real)
    torch.library.register_fake(f"fquant::{name}", fake, lib=_LIBRARY)
    torch.library.register_vmap(f"fquant::{name}", vmap, lib=_LIBRARY)
    return getattr(torch.ops.fquant, name).default


_LIBRARY = torch.library.Library("fquant", "FRAGMENT")
