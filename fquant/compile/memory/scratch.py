"""Scratch memory: what ops of torch take while they run on the host, beside their arguments and results.

The plan holds results. Inside, some ops make copies, which nothing outside of torch can place:

* a convolution has its operands and results in oneDNN's layout, channels in blocks of ``_BLOCK``, but for a few;
* ``bmm`` copies an operand that BLAS cannot read, one matrix at a time (``mm`` has it copied in the graph);
* a product of bf16 on a machine without instructions for it has its result in float32 too;
* ``cholesky_solve`` copies the factor.

A test measures these bytes. Other ops that take some, such as ``sort`` and ``eigh``, count as none.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from ..graph import nbytes

__all__ = ["scratch"]

_aten = torch.ops.aten
_BLOCK = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
_HAS_ONEDNN = torch.backends.mkldnn.is_available()
IN_FLOAT32 = _HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported() and not torch.cpu._is_avx512_bf16_supported()
_FEW = 3  # channels, which oneDNN reads as they are


def scratch(node: Node) -> int:
    """Return the bytes that the op of a node takes while it runs, beside its arguments and results."""
    taken = _TAKEN.get(node.target)
    if taken is None:
        return 0
    return taken(*map_arg(node.args, lambda x: x.meta["val"]), out=node.meta["val"])


def _padded(t: Tensor) -> int:
    """Return the bytes of a copy of ``t`` in blocks of channels."""
    channels = max(1, t.shape[1])
    return nbytes(t) // channels * -(-channels // _BLOCK) * _BLOCK


def _copied(t: Tensor) -> int:
    return 0 if t.shape[1] <= _FEW else _padded(t)


def _is_read(t: Tensor) -> bool:
    """Return True if oneDNN reads ``t`` as it is."""
    return t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()


def _convolution(x: Tensor, *_: Any, out: Tensor) -> int:
    if _is_read(x):
        return 0
    made = _padded(out)
    return max(_copied(x) + made, made + nbytes(out)) - nbytes(out)


def _convolution_backward(g: Tensor, x: Tensor, *rest: Any, out: Any) -> int:
    if _is_read(x):
        return 0
    of_input, of_weight, _ = rest[-1]
    result = nbytes(x) if of_input else 0
    data = max(_padded(g), result) + _padded(x) if of_input else 0
    weight = result + _copied(x) + _padded(g) if of_weight else 0
    return max(data, weight) - result


def _product(*operands: Any, out: Tensor) -> int:
    return 4 * out.numel() if out.dtype is torch.bfloat16 and IN_FLOAT32 else 0


def _batched_product(x: Tensor, y: Tensor, out: Tensor) -> int:
    unread = [nbytes(t[0]) for t in (x, y) if 1 not in t.stride()[1:]]
    return sum(unread) + _product(out=out[0])


_TAKEN: dict[Any, Callable[..., int]] = {
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.mm.default: _product,
    _aten.addmm.default: _product,
    _aten.bmm.default: _batched_product,
    _aten.cholesky_solve.default: lambda y, factor, *_, out: nbytes(factor),
}
