"""Results of padded arguments: the dims that grow with a size, and the comparison with results without padding."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ... import tree
from .. import graph
from ..trace import Captured


def same_up_to_rounding(got: Any, wanted: Any) -> None:
    """Raise ValueError, naming the leaf, unless two trees of tensors are equal up to the rounding of their floats.

    Integers and booleans are equal. The norm of a difference of floats is at most ``sqrt(eps)`` of that of ``wanted``,
    and infinite values and NaN are in the same places.
    """
    for (path, x), y in zip(tree.items(got), tree.leaves(wanted), strict=True):
        if not isinstance(x, Tensor) or torch.equal(x, y):
            continue
        if not (x.is_floating_point() or x.is_complex()):
            raise ValueError(f"{_called(path)} differs in {int((x != y).sum())} of {x.numel()} elements, wanted none")
        bound = math.sqrt(torch.finfo(x.dtype).eps)
        x, y = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (x, y))
        finite = x.isfinite() & y.isfinite()
        if not bool((finite | (x == y) | (x.isnan() & y.isnan())).all()):
            raise ValueError(f"{_called(path)} is infinite or NaN in other places")
        error, norm = (float(torch.where(finite, t, 0).norm()) for t in (x - y, y))
        if not error <= bound * norm:
            share = error / norm if norm else math.inf
            raise ValueError(f"{_called(path)} differs by {share:.2g} of its norm, wanted at most {bound:.2g}")


def growing(got: Any, smaller: Captured, padding: int) -> list[tuple[int, int]]:
    """Return leaf and dim of all of the result ``got`` that are larger by ``padding`` than in the trace ``smaller``.

    Raises ValueError for other differences of structure and shapes, and for other Python values.
    """
    if tree.structure(got) != tree.structure(smaller.build(smaller.leaves)):
        raise ValueError("the structure of the result is another one without padding")
    shapes = iter([t.shape for node in graph.outputs(smaller.module.graph) for t in graph.tensors(node)])
    found = []
    for i, ((path, x), alone) in enumerate(zip(tree.items(got), smaller.leaves, strict=True)):
        if not isinstance(x, Tensor):
            if x != alone:
                raise ValueError(f"{_called(path)} is {x!r}, and {alone!r} without padding; compute it outside")
            continue
        shape = next(shapes)
        if {n - m for n, m in zip(x.shape, shape, strict=False)} - {0, padding} or x.dim() != len(shape):
            text = f"{_called(path)} has the shape {list(x.shape)}, and {list(shape)} without padding"
            raise ValueError(f"{text}; wanted dims that grow with the size, one for one, or not at all")
        found += [(i, dim) for dim, (n, m) in enumerate(zip(x.shape, shape, strict=True)) if n != m]
    return found


def cut(result: Any, grows: Iterable[tuple[int, int]], padding: int) -> Any:
    """Return ``result`` with ``padding`` elements fewer at the end of the leaves and dims of ``grows``."""
    leaves, structure = tree.flatten(result)
    for i, dim in grows:
        leaves[i] = leaves[i].narrow(dim, 0, max(0, leaves[i].shape[dim] - padding)).contiguous()
    return tree.unflatten(structure, leaves)


def _called(path: str) -> str:
    return f"result {path}" if path else "the result"
