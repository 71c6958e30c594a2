"""Merging: adapters become a part of the weights, dense or packed.

A 4-bit format rounds an update that is small beside the weight's absmax mostly away. So ``merge`` returns dense
weights, and ``merge_packed``, which quantises again, measures the loss of every update beside its result.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..adapted import dora
from ..adapted.merge_aware import add_update
from ..adapted.nodes import Scaled
from ..communication import AfterLoad
from ..format import Format
from ..packed import Packed, dequantize, quantize
from ..packed_linear import Adapted, scaling
from ..tree import expect
from .adapters import Adapters, attach


def merge(base: Any, adapters: Adapters, dtype: torch.dtype | None = None) -> Any:
    """Replace every adapted weight of ``base`` by the dense sum of the weight and its update; keep the others.

    A sum is rounded once, to ``dtype`` (the base weight's own if None). Merge into 16 or 32 bits: quantising the sum
    again mostly rounds a small update away (see :func:`merge_packed`). Weights may be tables of an embedding, or dense
    stacks [*stack out in] with adapters of the same stack.
    """
    return _replace_adapted(attach(base, adapters), lambda _, x: _sum(x, dtype), "")


def merge_packed(base: Any, adapters: Adapters, format: Format | None = None) -> tuple[Any, dict[str, float]]:
    """Merge, and quantise each sum to the format of its weight, or to ``format``; return the tree and the losses.

    The loss of a path is ``‖achieved - wanted‖ / ‖wanted‖`` in the Frobenius norm: ``wanted`` is the update, and
    ``achieved`` the change of the dequantised weight. 0 is a perfect merge, 1 as bad as none; an update of zero has the
    loss 0 if the weight did not change, else infinity. A dense weight without ``format`` stays dense in its dtype.
    """
    losses: dict[str, float] = {}

    def pack(path: str, x: Adapted) -> Any:
        start, total = _dense(x.base), _sum(x, torch.float32)
        kept = x.base if isinstance(x.base, Packed | Tensor) else start
        into = format or (kept.format if isinstance(kept, Packed) else None)
        out = total.to(kept.dtype) if into is None else pack_like(kept, total.to(kept.dtype), into)
        wanted = total - start
        error = float(((_dense(out) - start) - wanted).norm())
        size = float(wanted.norm())
        losses[path] = error / size if size else (float("inf") if error else 0.0)
        return out

    return _replace_adapted(attach(base, adapters), pack, ""), losses


def pack_like(like: Any, w: Tensor, format: Format) -> Packed:
    """Quantise ``w`` [*stack out in]; if ``like`` is a stack of packed weights, each member by itself."""
    if isinstance(like, Packed) and w.ndim > len(like.shape):
        return tree.map(lambda *t: torch.stack(t), *[pack_like(like, member, format) for member in w])
    return quantize(w, format)


def replace_weights(base: Any, weights: Mapping[str, Tensor]) -> Any:
    """Replace the leaf at each path of ``weights`` by its tensor, in the dtype of the leaf; keep the others.

    A packed leaf becomes dense. The tensors are whole weights and biases that a PEFT adapter stores
    (``modules_to_save``, ``bias``). Raises ValueError for a path that ``base`` lacks, and for another shape.
    """
    left = set(weights)

    def leaf(path: str, x: Any) -> Any:
        if path not in weights:
            return x
        left.discard(path)
        new = weights[path]
        expect(isinstance(x, Tensor | Packed), f"got a {type(x).__name__}, wanted a weight; read or load it first")
        got = f"got the shape {tuple(new.shape)}, wanted {tuple(x.shape)}"
        expect(tuple(new.shape) == tuple(x.shape), f"{got}; resize the base if its vocabulary has grown")
        return new.to(x.dtype)

    out = tree.map_with_path(leaf, base, is_leaf=lambda x: isinstance(x, Packed))
    if left:
        raise ValueError(f"{min(left):.80}: got a weight of that path, wanted one of the base; check the map of names")
    return out


def _replace_adapted(x: Any, f: Any, path: str) -> Any:
    if isinstance(x, AfterLoad):
        raise ValueError("merge got adapters of a subtree that is not loaded; load it first (shard.collect)")
    if isinstance(x, Adapted):
        with tree.at(path):
            return f(path, x)
    if isinstance(x, Scaled):
        raise ValueError(f"{path}: merge got IA3, which is not implemented; its factors scale biases too, attach it")
    return tree.map_children(lambda name, child: _replace_adapted(child, f, f"{path}.{name}" if path else name), x)


def _sum(x: Adapted, dtype: torch.dtype | None) -> Tensor:
    root, nodes = dora.unwound(x, merge_aware=True)
    w = total = dequantize(root) if isinstance(root, Packed) else root
    for lora in (node.lora for node in nodes):
        update = lora.a, lora.b, scaling(lora)
        before, total = total, add_update(total, *update)
        if lora.magnitude is not None:
            alone = total if before is w else add_update(w, *update)
            total = total * dora.gain(lora.magnitude, torch.linalg.vector_norm(alone, dim=-1)).float()[..., None]
    return total.to(dtype or w.dtype)


def _dense(x: Any) -> Tensor:
    if isinstance(x, Adapted):
        return _sum(x, torch.float32)
    return dequantize(x, torch.float32) if isinstance(x, Packed) else x.float()
