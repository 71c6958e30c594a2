"""Scan: one block over many layers, as ``jax.lax.scan`` in its carry form.

    def block(x, layer, cos, sin):                       # a pure function of trees
        ...
        return x, kept                                   # the carry for the next layer, and what this layer leaves

    x, kept = scan(block, x, layers, cos, sin)           # layers stacked along dim 0, or a list of them

Uncaptured it is the loop over layers, and differentiates as that does. In a capture (:func:`fquant.jit`) the block is
traced once for each kind of layer, and once more for its backward. The trace repeats these nodes for all other layers
(``compile/tracing/repeated.py``). The graph is that of the loop, and so are its bits, its passes and its memory.

*Stacked or listed.* ``stack_layers`` makes one tree of equal layers, whose tensors have the layers in dim 0. Buffers of
a Packed are stacked as other tensors are. Its gradient and its optimiser state are one tensor a leaf, so that an update
is traced once as well. A list is scanned as it is, without a copy. Use it for the layers of a checkpoint, for bundles
of a mesh, and for layers that differ in kind.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import tree
from .compile.tracing.repeated import repeated
from .tree import expect


def scan(block: Callable[..., Any], carry: Any, layers: Any, *shared: Any) -> tuple[Any, Any]:
    """Call ``carry, out = block(carry, layer, *shared)`` for each layer; return the last carry and all ``out``.

    ``layers`` is a list of trees, or one other tree whose tensors are [num_layers ...]. ``out`` are then a list, or one
    tree with tensors [num_layers ...]. ``shared`` are the same for all layers. ``block`` must be pure, and get every
    tensor that is differentiated as an argument; ``remat(block)`` recomputes each layer in the backward. Gradients of a
    tensor that a block uses several times are added within the layer first.

    Raises ValueError, with the path, for tensors of unequal numbers of layers, and for a carry that changes in
    structure, shape or dtype. Raises TypeError for a leaf of stacked layers that is no tensor. Raises TypeError for a
    block that does not return a pair. A capture with gradients raises it for a tensor that the block reads and is not
    given; the uncaptured loop differentiates that as well.
    """
    each, call = layers if isinstance(layers, list) else unstack_layers(layers), repeated(block)
    outs: list[Any] = []  # not list[Any](), which Dynamo cannot trace
    for i, layer in enumerate(each):
        result = call(carry, layer, *shared)
        if not isinstance(result, tuple) or len(result) != 2:
            fix = "return the carry and what the layer leaves, such as (x, ())"
            kind = "Tensor" if isinstance(result, Tensor) else type(result).__name__
            raise TypeError(f"scan: the block returned a {kind}, wanted a pair; {fix}")
        _check_carry(i, result[0], carry)
        carry, out = result
        outs.append(out)
    return carry, outs if isinstance(layers, list) else _stack("the out of layer", outs)


def stack_layers(layers: Sequence[Any]) -> Any:
    """Stack trees of one structure along a new dim 0 of their tensors; other leaves must be equal.

    Raises ValueError, with the path, for another structure, shape or dtype than the first's.
    """
    expect(len(layers) > 0, "stack_layers got no layers; wanted at least one")
    return _stack("layer", layers)


def unstack_layers(stacked: Any) -> list[Any]:
    """Return the layers of a tree whose tensors are [num_layers ...], as views; see :func:`scan` for errors."""
    named, structure = tree.items(stacked), tree.structure(stacked)
    expect(named, "layers has no tensors, which would tell their number; pass a list of layers")
    count, first = None, ""
    for path, t in named:
        with tree.at(f"layers.{path}" if path else "layers"):
            fix = "pass what all layers share behind the layers"
            expect(
                isinstance(t, Tensor), f"got a {type(t).__name__}, wanted a tensor [num_layers ...]; {fix}", TypeError
            )
            expect(t.ndim, f"got shape (), wanted [num_layers ...]; {fix}")
            if count is None:
                count, first = len(t), path
            expect(len(t) == count, f"got {len(t)} layers in dim 0, wanted {count} as of {first}; stack equal layers")
    expect(count, "layers: got 0 layers in dim 0, wanted at least one")
    return [tree.unflatten(structure, leaves) for leaves in zip(*(t.unbind() for _, t in named), strict=True)]


def _stack(what: str, layers: Sequence[Any]) -> Any:
    first = tree.items(layers[0])
    for i, layer in enumerate(layers[1:], 1):
        _check_same(f"{what} {i}", layer, layers[0], f"that of {what} 0")
    columns = zip(first, zip(*map(tree.leaves, layers), strict=True), strict=True)
    leaves = [torch.stack(column) if isinstance(leaf, Tensor) else leaf for (_, leaf), column in columns]
    return tree.unflatten(tree.structure(layers[0]), leaves)


def _check_carry(i: int, got: Any, wanted: Any) -> None:
    _check_same(f"the carry from layer {i}", got, wanted, "that of the carry it was given")


def _check_same(what: str, got: Any, wanted: Any, whose: str) -> None:
    """Raise ValueError unless two trees have one structure, and leaves of one shape and dtype, or equal others."""
    if tree.structure(got) != tree.structure(wanted):
        paths = {*tree.paths(got)} ^ {*tree.paths(wanted)}
        where = f"paths that only one has are {', '.join(sorted(paths)[:4])}" if paths else "their static fields differ"
        raise ValueError(f"{what}: got a structure unlike {whose}; {where}; keep every structure equal")
    for (path, one), other in zip(tree.items(got), tree.leaves(wanted), strict=True):
        ours, theirs = _described(one), _described(other)
        if ours != theirs:
            raise ValueError(f"{what}: {path or 'it'}: got {ours}, wanted {theirs} as {whose}; cast or reshape it")


def _described(x: Any) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if isinstance(x, Tensor) else repr(x)
