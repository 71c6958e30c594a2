"""The loop over leaves that every optimiser makes, and the transfers of moments that it overlaps.

``map_leaves`` computes each leaf by itself. ``update_leaves`` does so for a step whose moments are in another memory
than the parameters (``communication.Memory``), such as pinned memory of the host:

    fetch a      |  fetch b      |  fetch c      |  wait b'
    wait a       |  wait b       |  wait a', c   |  wait c'
    compute a'   |  compute b'   |  compute c'   |
    store a'     |  store b'     |  store c'     |

The moments of a leaf travel while those of the leaf before it are updated, and new ones travel back while the next leaf
is. So the device holds the moments of three leaves at most, and a link in both directions has work throughout. A wait
of a store comes behind the next leaf, because a device that waited at once would be idle.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .. import random, tree
from ..communication import Memory, Wait
from ..tree import at

Leaf = Callable[..., tuple[Any, ...]]


def map_leaves(count: int, f: Leaf, params: Any, *others: Any) -> list[Any]:
    """Return ``count`` trees like ``params`` from the tuples ``f(p, *others)`` of each leaf, with the path in errors.

    ``others`` have a leaf or a Packed where ``params`` has a leaf. Raises ValueError if one has another structure.
    """
    structure, args = _leaves(params, others)
    results = []
    for path, each in args:
        with at(path):
            results.append(f(*each))
    return _trees(count, structure, results)


def update_leaves(f: Leaf, memory: Memory, params: Any, grads: Any, key: Tensor | None, *moments: Any) -> list[Any]:
    """Return the trees of ``f(p, g, key, *moments) -> (p or change, *moments)`` of all leaves.

    Moments stay in ``memory``, and ``key`` i64[] is folded with the path of each leaf. Raises as :func:`map_leaves`.
    """
    structure, leaves = _leaves(params, (grads, *moments))
    results: list[list[Any]] = []
    stored: list[Callable[[], list[Any]]] = []

    def fetched(i: int) -> Callable[[], list[Any]]:
        path, (p, _, *old) = leaves[i]
        with at(path):
            return _on_arrival(old, [memory.fetch(t, p) for t in tree.leaves(old)])

    coming = fetched(0) if leaves else None
    for i, (path, (p, g, *old)) in enumerate(leaves):
        here, coming = coming, fetched(i + 1) if i + 1 < len(leaves) else None
        assert here is not None
        with at(path):
            new, *made = f(p, g, None if key is None else random.fold(key, path), *here())
            results.append([new])
            if stored:
                results[-2] += stored.pop()()
            pairs = zip(tree.leaves(old), tree.leaves(made), strict=True)
            stored.append(_on_arrival(made, [memory.store(*pair) for pair in pairs]))
    if stored:
        results[-1] += stored.pop()()
    return _trees(1 + len(moments), structure, results)


def _on_arrival(like: list[Any], waits: Sequence[Wait]) -> Callable[[], list[Any]]:
    """Return a function that waits for tensors, and returns them in trees like those of ``like``."""
    structure = tree.structure(like)
    return lambda: tree.unflatten(structure, [wait() for wait in waits])


def _leaves(params: Any, others: Sequence[Any]) -> tuple[tree.Structure, list[tuple[str, tuple[Any, ...]]]]:
    """Return the structure of ``params``, and for each leaf its path, itself and its counterparts in ``others``."""
    leaves, structure = tree.flatten(params)
    try:
        rest = [structure.flatten_up_to(other) for other in others]
    except ValueError as error:
        raise ValueError(f"the state is not that of these parameters: {error}; use init(params)") from None
    return structure, list(zip(tree.paths(params), zip(leaves, *rest, strict=True), strict=True))


def _trees(count: int, structure: tree.Structure, results: Sequence[Sequence[Any]]) -> list[Any]:
    return [tree.unflatten(structure, [result[i] for result in results]) for i in range(count)]
