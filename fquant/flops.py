"""FLOPs of a node of a captured graph, by torch's own formulas, and by formulas for what torch does not count.

A multiply-add is two. Elementwise work is bytes, not FLOPs. torch counts the fused attention of GPUs and not the one of
CPUs; it is counted as it is computed, of causal attention half. Ops of ours register themselves (fquant.kernels).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry, register_flop_formula


def flops(node: Node) -> int:
    """FLOPs of a node; of what has no formula, elementwise work say, 0."""
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    value = lambda x: x.meta["val"] if isinstance(x, Node) else x
    args, kwargs = map_arg((node.args, node.kwargs), value)
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _attention(q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, *_: Any, **__: Any) -> int:
    """Two products of q ``[b h t e]`` and k, v ``[b k s e]``."""
    return 2 * _product(q, k, causal)


def _attention_backward(g: Any, q: Any, k: Any, v: Any, y: Any, lse: Any, p: float, causal: bool, **_: Any) -> int:
    """Five: the scores again, the gradients of weights and values, and of these scores to q and to k."""
    return 5 * _product(q, k, causal)


def _product(q: Any, k: Any, causal: bool) -> int:
    b, h, t, e = q
    return 2 * b * h * e * (t * (t + 1) // 2 if causal else t * k[2])


_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
for _op, _formula in _FORMULAS.items():
    if _op not in flop_registry:  # a torch that counts them counts them
        register_flop_formula(_op)(_formula)
