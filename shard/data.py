"""The batch over ranks: the share of each rank, and sums over ranks. On one device all are the identity.

Every rank computes gradients of its share of the batch. They are summed, never averaged. A loss divides by the *global*
number of tokens, which is known beforehand (``psum`` of the counts). So shares may differ in size and in the number of
tokens that count. The sum over ranks is the gradient of one process on the whole batch. Sums are taken outside
autodiff, on one flat buffer for each dtype. Only those of trained blocks are taken inside, along the axis that splits
the blocks (trained/). Random draws use the numbers of rows in the whole batch (``rows``).
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fquant import tree
from fquant.compile import is_traced
from fquant.global_norm import root, sum_of_squares
from fquant.tree import expect

from .collectives import Group, collective
from .device_mesh import Axes, device_of, groups, position
from .roll_call import announce
from .rules import Rules
from .trained.float_bundle import is_bundle, length


def share(x: Any, mesh: DeviceMesh, rules: Rules) -> Any:
    """Return this rank's rows of every tensor [batch ...] in ``x``; shares differ by at most one row. No collective.

    rank 0  [a b c]  ->  [a b]
    rank 1  [a b c]  ->  [c]
    """
    index, parts = position(mesh, rules.batch)
    return tree.map(lambda t: t.tensor_split(parts)[index], x)


def max_local_rows(rows: int, mesh: DeviceMesh, rules: Rules) -> int:
    """Return the rows of the largest share of ``rows``, on any rank."""
    return -(-rows // position(mesh, rules.batch)[1])


def rows(n: int | Tensor, mesh: DeviceMesh, axes: Axes) -> tuple[Tensor, Tensor]:
    """Return the number of this rank's first row among the rows of all ranks along ``axes``, and their total: i64[].

        rank 0  n = 2  ->  0, 5
        rank 1  n = 3  ->  2, 5

    ``n`` is the number of rows here; of rows with a mask, the number that it keeps. Ranks are in the order of
    :func:`share`. One all-reduce; no derivative. If every rank knows the numbers of the others, use plain numbers
    instead.
    """
    index, parts = position(mesh, axes)
    here = torch.arange(parts, device=n.device if isinstance(n, Tensor) else device_of(mesh)) == index
    each = psum(torch.where(here, n, 0), mesh, axes)
    return each.narrow(0, 0, index).sum(), each.sum()


def psum(x: Any, mesh: DeviceMesh, axes: Axes) -> Any:
    """Return the sum of the tree ``x`` over the ranks along ``axes``, with one all-reduce for each dtype.

        rank 0  {"n": a}  ->  {"n": a + b}
        rank 1  {"n": b}  ->  {"n": a + b}

    Leaves are added by their paths, in any order of a dict's keys. Raises RuntimeError on every rank if ranks have
    other paths, dtypes or shapes. Raises TypeError, by path, for a leaf that is no tensor, and ValueError for two
    leaves of one path.

    Along ``axes``: partial in, replicated out. The cotangent is partial, so the backward is psum: each rank has a loss
    of its own, and the losses add up. Divide a loss that every rank computes whole by the number of ranks.
    """
    leaves, structure = tree.flatten(x)
    places, told = by_path(leaves, structure)
    sums = _summed(places, told, leaves, over := groups(mesh, axes))
    _announce_nothing(leaves, over)
    return tree.unflatten(structure, [sums[i] for i in range(len(leaves))])


def by_path(leaves: Sequence[Any], structure: tree.Structure) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the places of ``leaves`` by their paths, and what ranks must agree on: each path, dtype and shape.

    A leaf is a tensor or a bundle. There is nothing to agree on for a vector alone, which its collective describes.
    Raises TypeError, by path, for another leaf, and ValueError for two leaves of one path.
    """
    for i, t in enumerate(leaves):
        if not isinstance(t, Tensor) and not is_bundle(t):
            path = tree.paths(tree.unflatten(structure, range(len(leaves))))[i] or "the tree"
            raise TypeError(f"{path}: a sum over ranks of a {type(t).__name__}; wanted a tensor, or no leaf")
    return _by_path(structure, tuple((t.dtype, t.shape) if isinstance(t, Tensor) else t.layout for t in leaves))


@functools.lru_cache(maxsize=64)
def _by_path(structure: tree.Structure, kinds: tuple[Any, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    named, told = sorted(tree.items(tree.unflatten(structure, range(len(kinds))))), list[tuple[str, Any, Any]]()
    for (path, _), (other, _) in itertools.pairwise(named):
        expect(path != other, f"{path}: two leaves have this path, and ranks pair leaves by path; rename a key")
    for path, i in named:
        if isinstance(kinds[i], tuple):
            told.append((path or "(root)", *kinds[i]))
        else:
            told += [(f"{path}.{buffer.path}", buffer.dtype, buffer.shape) for buffer in kinds[i].buffers]
    is_vector = len(told) == 1 and not named[0][0] and len(told[0][2]) == 1
    text = (f"{path} {str(dtype).removeprefix('torch.')}{list(shape)}" for path, dtype, shape in told)
    return tuple(i for _, i in named), () if is_vector else tuple(text)


def _sum(t: Tensor, told: Sequence[str], over: Sequence[Group], has_dual: bool) -> Tensor:
    return functools.reduce(lambda t, group: collective(t, "all_reduce", group, told, has_dual), over, t)


def _summed(
    places: Sequence[int], told: Sequence[str], leaves: Sequence[Any], over: Sequence[Group], has_dual: bool = True
) -> dict[int, Tensor]:
    """Return the sums over ranks of the tensors at ``places``, with one all-reduce for each dtype and group."""
    out = dict[int, Tensor]()
    for dtype in dict.fromkeys(leaves[i].dtype for i in places):
        which = [i for i in places if leaves[i].dtype == dtype]
        flat = _sum(torch.cat([leaves[i].reshape(-1) for i in which]), told, over, has_dual)
        for i, part in zip(which, flat.split([leaves[i].numel() for i in which]), strict=True):
            out[i] = part.reshape(leaves[i].shape)
    return out


def _announce_nothing(leaves: Sequence[Any], over: Sequence[Group]) -> None:
    """Announce the sum of a tree without leaves, for which other ranks with leaves would wait."""
    for group in over if not leaves and not is_traced() else ():
        announce("a sum of no tensors", group)


def reduce(
    grads: Any, mesh: DeviceMesh, rules: Rules | None = None, cotangent: Literal["partial"] | None = None
) -> Any:
    """Return the gradients of the whole batch: the sum, over its axes, of those of every rank's share.

        dp 0, fsdp 0   FloatBundle(a), b  ->  FloatBundle(a + e), b + d + f + h        a, c, e, g have been summed over
        dp 0, fsdp 1   FloatBundle(c), d  ->  FloatBundle(c + g), b + d + f + h        fsdp by the reduce-scatters
        dp 1, fsdp 0   FloatBundle(e), f  ->  FloatBundle(a + e), b + d + f + h
        dp 1, fsdp 1   FloatBundle(g), h  ->  FloatBundle(c + g), b + d + f + h

    Leaves outside of bundles take one all-reduce for each dtype. Each FloatBundle takes one over the axes that do not
    split its block, and none on a mesh without such an axis.

    Along ``rules.batch``: partial in, replicated out. A backward through it, as of a step inside another loss, raises
    ValueError unless ``cotangent`` is "partial". Then each rank has an outer loss of its own, the losses add up, and
    reduce adds up the outer gradients too. Divide an outer loss that every rank computes whole by the number of ranks:

        step  = lambda p: p - lr * shard.reduce(grad(loss)(p, mine), mesh, cotangent="partial")
        outer = shard.reduce(grad(lambda p: held_out(step(p)) / mesh.size())(p), mesh)

    Raises TypeError, by path, for a leaf that is not a float. Raises ValueError for a bundle that was placed for other
    rules, and for another ``cotangent``.
    """
    rules = rules or Rules()
    expect(cotangent in ("partial", None), f"reduce: cotangent is {cotangent!r}; wanted 'partial' or None")
    leaves, structure = tree.flatten(grads, is_leaf=is_bundle)
    _check_held(leaves, mesh, rules)
    places, told = by_path(leaves, structure)
    if not all(leaf.is_floating_point() for leaf in tree.leaves(grads)):
        path, leaf = next((path, leaf) for path, leaf in tree.items(grads) if not leaf.is_floating_point())
        raise TypeError(f"{path}: a gradient of {leaf.dtype}; wanted floats")
    over, has_dual = groups(mesh, rules.batch), cotangent is not None
    sums = _summed([i for i in places if not is_bundle(leaves[i])], told, leaves, over, has_dual)
    _announce_nothing(leaves, over)
    rest = groups(mesh, tuple(axis for axis in rules.batch if axis != rules.block))
    bundles = {i: tree.map(lambda t: _sum(t, told, rest, has_dual), leaves[i]) for i in places if is_bundle(leaves[i])}
    return tree.unflatten(structure, [(sums | bundles)[i] for i in range(len(leaves))])


def global_norm(grads: Any, mesh: DeviceMesh, rules: Rules | None = None) -> Tensor:
    """Return the Euclidean norm f64[] of the whole gradient, of :func:`reduce`: that of ``optim.global_norm``.

        rank 0  FloatBundle(a), c  ->  sqrt(|a|² + |b|² + |c|²)
        rank 1  FloatBundle(b), c  ->  sqrt(|a|² + |b|² + |c|²)

    One all-reduce of a number, over the axis that splits blocks; none without bundles. No derivative is meant.
    """
    rules = rules or Rules()
    leaves = tree.leaves(grads, is_leaf=is_bundle)
    _check_held(leaves, mesh, rules)
    whole, parts = [t for t in leaves if not is_bundle(t)], [t for t in leaves if is_bundle(t)]
    total = sum_of_squares(whole) if whole or not parts else None
    if parts:
        shared = psum(sum_of_squares(tree.leaves(parts)), mesh, rules.block or ())
        total = shared if total is None else total + shared
    assert total is not None
    return root(total)


def _check_held(leaves: Sequence[Any], mesh: DeviceMesh, rules: Rules) -> None:
    """Raise ValueError for a bundle among ``leaves`` that was placed for other rules."""
    _, ranks = position(mesh, rules.block or ())
    for b in filter(is_bundle, leaves):
        held, size = b.values.shape[0], length(b.layout)
        if held * ranks != size:
            fault = f"a bundle holds {held} of {size} elements, and these rules split blocks over {ranks} ranks"
            raise ValueError(f"{fault}; pass the mesh and the rules that it was placed with")
