"""Scales of whole tensors on the wire: agreed on by all ranks once a step, in one small collective.

    scales = shard.wire_scales(params, mesh, rules)                       # outside of the loss, and not differentiated
    grads  = grad(lambda p, *rest: loss(shard.scaled(p, scales), *rest))(params, tokens, comm)

FP8 needs the largest magnitude of each tensor, and TERNARY the mean one (shard/transport/wire.py). A rank has a part of
a tensor, so these are combined over ranks: of all tensors at once, before the first gather.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fquant import tree
from fquant.communication import Loadable
from fquant.tree import node

from ..collectives import collective
from ..device_mesh import position
from ..rules import Rules
from ..transport import wire
from .float_bundle import FloatBundle, in_order, is_bundle, message


@node
class Scaled(Loadable):
    """A bundle beside the scales f32[matrices] with which its matrices are quantised on the wire."""

    bundle: FloatBundle
    scales: Tensor


def wire_scales(x: Any, mesh: DeviceMesh, rules: Rules) -> list[Tensor]:
    """Return the scales f32[matrices] of each bundle of the tree ``x`` whose wire format needs them, in order.

    Call it once a step, outside of the loss, and pass the result to :func:`scaled`. One all-gather of maxima, or one
    all-reduce of sums, for all tensors together; none if no bundle needs scales. No derivative.
    """
    named = {path: b for path, b in tree.items(x, is_leaf=is_bundle) if is_bundle(b) and needs_scales(b)}
    if not named:
        return []
    bundles = list(named.values())
    rank, ranks = position(mesh, rules.block or ())
    messages = [message(b.layout, b.precision, rank, ranks) for b in bundles]
    each = [wire.magnitudes(b.values.detach(), it) for b, it in zip(bundles, messages, strict=True)]
    found = torch.cat(each)
    if ranks > 1 and rules.block is not None:
        group = mesh.get_group(rules.block)
        is_max = messages[0].wire.statistic == "max"
        gathered = lambda t: collective(t[None], "all_gather", group, [*named]).amax(0)
        found = gathered(found) if is_max else collective(found, "all_reduce", group, [*named])
    parts = found.split([t.shape[0] for t in each])
    numbers = ([math.prod(b.shape) for b in in_order(x.layout) if len(b.shape) > 1] for x in bundles)
    return [wire.scales_of(*each) for each in zip(parts, messages, numbers, strict=True)]


def scaled(x: Any, scales: list[Tensor]) -> Any:
    """Return the tree ``x`` with each bundle that needs scales beside its own, of :func:`wire_scales`."""
    left = iter(scales)
    put = lambda b: Scaled(b, next(left)) if is_bundle(b) and needs_scales(b) else b
    return tree.map(put, x, is_leaf=is_bundle)


def needs_scales(x: FloatBundle) -> bool:
    """Return True if a bundle is sent with scales of whole tensors."""
    return x.precision.wire is not None and x.precision.wire.statistic is not None
