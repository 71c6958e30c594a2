"""Statistics of the inputs of linear layers, collected as gradients.

    stats = collect(loss, params, batches, r"layers\\.\\d+\\.(q|k|v)")       # dict[path, Statistics]

A *probe* of zeros stands beside a weight, and ``linear`` adds nothing for it. In the backward it receives, in place of
a derivative, the sums over the rows of x: ``xᵀ · x``, ``|x|`` and their number. So a model needs no hook and no change.
Collecting works through ``jit``, recomputed blocks, and a mesh whose ranks sum gradients.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad

from .. import tree
from ..packed import Packed
from ..tree import expect, node


@node
class Statistics:
    """Sums over the rows x f[rows in] that a weight met: of xᵀ · x, of |x|, and of one."""

    second: Tensor  # f32[in, in]
    magnitude: Tensor  # f32[in]
    count: Tensor  # f32[]


@node
class Probed:
    """A weight [out in], and zeros that receive the statistics of its inputs."""

    weight: Any
    probe: Statistics


def probes(params: Any, pattern: str) -> dict[str, Statistics]:
    """Return zeros for each weight of ``params`` whose path matches the regex ``pattern``.

    Raises ValueError if no path matches, or for a weight that is no matrix.
    """
    found = dict[str, Statistics]()

    def visit(w: Any) -> Any:
        shape = tuple[int, ...](getattr(w, "shape", ()))
        expect(len(shape) == 2, f"got {type(w).__name__} {shape}; wanted a weight [out in]")
        like = w.codes if isinstance(w, Packed) else w
        zeros = lambda *sizes: torch.zeros(sizes, dtype=torch.float32, device=like.device)
        return Statistics(zeros(shape[1], shape[1]), zeros(shape[1]), zeros())

    probed = tree.map_at(pattern, visit, params)
    tree.map_with_path(
        lambda path, x: found.update({path: x} if isinstance(x, Statistics) else {}),
        probed,
        is_leaf=lambda x: isinstance(x, Statistics),
    )
    return found


def attach(params: Any, probes: dict[str, Statistics]) -> Any:
    """Return ``params`` with a :class:`Probed` at each path of ``probes``."""

    def visit(prefix: str, x: Any) -> Any:
        if prefix in probes:
            return Probed(x, probes[prefix])
        inside = lambda name, child: visit(f"{prefix}.{name}" if prefix else name, child)
        return x if isinstance(x, Tensor | Packed) else tree.map_children(inside, x)

    return visit("", params)


def collect(
    loss: Callable[[Any, Any], Tensor], params: Any, batches: Iterable[Any], pattern: str
) -> dict[str, Statistics]:
    """Return the statistics of the inputs of each weight that matches, summed over ``batches``.

    ``loss(params, batch)`` f[] is any scalar that depends on all these weights. Raises ValueError without batches, and
    for a weight that saw no input or one that is not finite.
    """
    zeros = probes(params, pattern)
    total, one = zeros, grad(lambda probes, params, batch: loss(attach(params, probes), batch))
    for batch in batches:
        total = tree.map(torch.add, total, one(zeros, params, batch))
    for path, stats in total.items():
        seen = bool(stats.count > 0)
        expect(seen, f"{path}: the batches gave it no input; wanted at least one batch of calibration data")
        finite = bool(stats.second.isfinite().all())
        expect(finite, f"{path}: an input was NaN or infinite; wanted finite calibration data")
    return total


def linear(x: Tensor, probe: Statistics) -> Tensor:
    """Return the zero f[] that is added to a product of x f[... in], and whose backward fills ``probe``."""
    return _Probe.apply(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), probe.second, probe.magnitude, probe.count)


class _Probe(torch.autograd.Function):
    """A zero whose gradients are the sums over the rows of x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, second: Tensor, magnitude: Tensor, count: Tensor) -> Tensor:
        return x.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x = ctx.saved_tensors[0].float()
        zero = torch.zeros_like(g, dtype=torch.float32)  # of g, so that a mapped cotangent gives mapped sums
        return None, x.mT @ x + zero, x.abs().sum(0) + zero, torch.full_like(zero, float(x.shape[0]))
