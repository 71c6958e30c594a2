"""Training of packed weights on a mesh, with the verbs of fquant/quantized_training/weights.py.

    params = shard.place(quantized, dims, rules, mesh, train=shard.Precision())     # integers in blocks along rows
    p = shard.local(params)

    of = lambda carriers, *rest: decoder.loss(weights.attach(p, carriers), *rest, cfg, comm)
    grads = shard.reduce(grad(of)(weights.carriers(p), tokens, targets), mesh, rules)
    updates, state = opt.update(grads, state, weights.dense(p))
    p = weights.apply_updates(p, updates, key, mesh, rules)

All trees here are local. A block with packed weights is a RowBundle (row_bundle.py), other blocks are FloatBundles, and
both are trained at once. The same key and updates give the same bits on any mesh, which are those of one process.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fquant import tree
from fquant.quantized_training import weights as of_one_process
from fquant.quantized_training.weights import is_packed
from fquant.tree import expect

from ..device_mesh import position
from ..rules import Rules, join
from . import row_bundle, row_layout
from .float_bundle import FloatBundle, is_bundle
from .row_bundle import RowBundle, is_row_bundle
from .row_layout import RowLayout


def carriers(x: Any) -> Any:
    """Return what a loss of the tree ``x`` is differentiated with respect to.

    That is a FloatBundle of zeros without memory, f32[size / ranks], for each RowBundle; all else is the tree itself.
    torch's ``jvp`` refuses to take tangents of such zeros; give it ``tree.map(torch.clone, carriers)``.
    """

    def one(b: RowBundle) -> FloatBundle:
        layout = row_bundle.dense_layout(b)
        zeros = b.bytes.new_zeros((), dtype=torch.float32)
        return FloatBundle(zeros.expand(layout.size // layout.ranks // 4), layout, b.precision)

    return tree.map(lambda b: one(b) if is_row_bundle(b) else b, x, is_leaf=is_row_bundle)


def attach(x: Any, carriers: Any) -> Any:
    """Return the tree ``x`` with the ``carriers`` in its RowBundles, and all else from ``carriers``.

    Raises ValueError for a tree of another structure than that of :func:`carriers`.
    """
    put = lambda b, c: RowBundle(b.bytes, c, b.layout, b.precision) if is_row_bundle(b) else c
    return _zip("carriers", put, x, carriers)


def dense(x: Any) -> Any:
    """Return the tree ``x`` with a FloatBundle of the values f32[size / ranks] for each RowBundle; no communication.

    So an optimiser has parameters in the form of gradients, for its state and for weight decay.
    """

    def one(b: RowBundle) -> FloatBundle:
        names = map(str, range(len(own := row_bundle.own(b))))
        mine = dict(zip(names, own, strict=True))
        mine |= of_one_process.dense({name: w for name, w in mine.items() if is_packed(w)})
        return FloatBundle(torch.cat([w.reshape(-1) for w in mine.values()]), row_bundle.dense_layout(b), b.precision)

    return tree.map(lambda b: one(b) if is_row_bundle(b) else b, x, is_leaf=is_row_bundle)


def apply_updates(x: Any, updates: Any, key: Tensor, mesh: DeviceMesh, rules: Rules) -> Any:
    """Return the tree ``x`` after ``updates``, a tree like :func:`dense`, are added in float32.

        rank 0  RowBundle(first rows), FloatBundle(updates of these)  ->  RowBundle(first rows)
        rank 1  RowBundle(next rows), FloatBundle(updates of these)   ->  RowBundle(next rows)

    Packed rows are rounded stochastically from ``key`` i64[], of which every rank passes the same. No communication.
    """
    rank, _ = position(mesh, rules.block or ())
    paths = iter(tree.paths(x, is_leaf=lambda y: is_row_bundle(y) or is_bundle(y)))
    return _zip("updates", lambda b, u: _updated(next(paths), b, u, key, rank), x, updates)


def _updated(path: str, b: Any, update: Any, key: Tensor, rank: int) -> Any:
    if not is_row_bundle(b):
        return tree.map(lambda p, u: (p + u).to(p.dtype), b, update)
    assert isinstance(update.layout, RowLayout)
    buffers = tree.unflatten(b.layout.structure, list(b.layout.buffers))
    names = [join(path, name) for name in tree.paths(buffers, is_leaf=is_packed)]
    mine = dict(zip(names, row_bundle.own(b), strict=True))
    updates = dict(zip(names, row_layout.split(update.values, update.layout), strict=True))
    packed = {name: w for name, w in mine.items() if is_packed(w)}
    first = {name: rank * w.shape[0] for name, w in packed.items()}
    new = of_one_process.apply_updates(packed, {name: updates[name] for name in packed}, key, first)
    rows = [new[name] if name in new else w + updates[name] for name, w in mine.items()]
    return RowBundle(row_layout.write(tree.leaves(rows), b.layout), None, b.layout, b.precision)


def _zip(what: str, f: Any, x: Any, other: Any) -> Any:
    """Return ``x`` with ``f(leaf, other's leaf)`` for each leaf, a bundle being one."""
    is_leaf = lambda y: is_row_bundle(y) or is_bundle(y)
    (mine, structure), (theirs, found) = tree.flatten(x, is_leaf=is_leaf), tree.flatten(other, is_leaf=is_leaf)
    fault = f"{what}: got a tree of another structure than that of the parameters; pass one from shard.weights"
    same = lambda a, b: is_bundle(b) == (is_row_bundle(a) or is_bundle(a)) and not is_row_bundle(b)
    expect(structure == found and all(map(same, mine, theirs)), fault)
    return tree.unflatten(structure, [f(*each) for each in zip(mine, theirs, strict=True)])
