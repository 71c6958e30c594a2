"""Products of groups of rows, each with a matrix of its own: the experts of a mixture.

Rows of x f[rows in] are sorted by group, and ``counts`` i64[groups] says how many of them each group has. The loop over
counts, which are data, is inside an op, so that a captured graph has static shapes. The four ops are

    packed(x, counts, buffers, spec)       x_e · W_eᵀ for a packed stack of weights, or x_e · W_e if transposed
    dense(x, counts, w)                    the same for w f[groups out in]
    outer(a, b, counts)                    a_eᵀ · b_e, f[groups n k], zeros for an empty group

A packed stack is either a stack of packed matrices, whose spec has the shape [out in], or one packed array of three
dims. It is never decoded as a whole: the product of a group is that of ``packed_ops`` with the buffers of its matrix.

On CUDA in bf16 and f16, kernels read the counts, and the host does not wait for them (``triton/grouped.py``). Counts
that do not add up are then an assertion of the device, which stops the program. In what these kernels do not cover, the
host reads the counts, and a CUDA graph cannot record that (``registry.WAITS``).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..format import Format
from . import packed_ops
from .arguments import check_beside, check_floats, check_out
from .dispatch import backend, backend_name
from .ops.ordered_matmul import LEAST_IN_ORDER, ordered_matmul, with_least_rows
from .registry import register
from .spec import Spec, check, scales, spec_of


def packed(x: Tensor, counts: Tensor, buffers: Sequence[Tensor], spec: Spec, transposed: bool = False) -> Tensor:
    """Return ``x_e · W_eᵀ`` f[rows out] in x's dtype, or ``x_e · W_e`` f[rows in] if transposed, group by group.

    Raises ValueError for counts that do not add up to the rows, and the errors of ``packed_ops.matmul``. Raises
    ValueError for a flat format in three dims, whose blocks straddle matrices.
    """
    return _PACKED[transposed](x, counts, buffers, spec.format.text, spec.shape, spec.dtype)


def dense(x: Tensor, counts: Tensor, w: Tensor, transposed: bool = False) -> Tensor:
    """Return ``x_e · w_eᵀ`` f[rows out], or ``x_e · w_e`` f[rows in] if transposed, for w f[groups out in].

    ``w`` is in x's dtype. Raises ValueError for other shapes, or counts that do not add up to the rows; TypeError for
    other dtypes.
    """
    return _DENSE(x, counts, w, transposed)


def outer(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """Return ``a_eᵀ · b_e`` f[groups n k] for a f[rows n] and b f[rows k] in a's dtype.

    Raises what :func:`dense` does.
    """
    return _OUTER(a, b, counts)


def num_groups(buffers: Sequence[Tensor], spec: Spec) -> int:
    """Return the number of matrices of a packed stack."""
    return buffers[0].shape[0] if len(spec.shape) == 2 else spec.shape[0]


def member(buffers: Sequence[Tensor], spec: Spec, e: int) -> tuple[list[Tensor], Spec]:
    """Return the buffers and the Spec of matrix ``e`` of a packed stack.

    Scales that are packed over the whole array of three dims are decoded, those of the matrix alone if they can be.
    """
    if len(spec.shape) == 2:
        return [b[e] for b in buffers], spec
    format, (_, *shape), dtype = spec
    codes, *rest = buffers
    shared = [rest.pop()] if format.center or format.vectors is not None else []
    zero = [rest.pop()[e]] if format.zero else []
    own = rest[0][e] if format.scale is None else _scales_of(rest, scales(spec), format.scale, e)
    return [codes[e], own, *zero, *shared], Spec(format.plain, tuple(shape), dtype)


def _scales_of(buffers: Sequence[Tensor], spec: Spec, format: Format, e: int) -> Tensor:
    """Decode the scales f32[out blocks] of matrix ``e`` from the packed array of those of all."""
    _, out, blocks = spec.shape
    if not (format.flat and format.bits == 8 and format.scale is None and format.block and format.vectors is None):
        return packed_ops.decode(buffers, spec, torch.float32)[e]
    codes, absmax, *offset = buffers
    start, stop = e * out * blocks, (e + 1) * out * blocks
    first = start // format.block * format.block  # decode from the beginning of a block
    part = [codes.reshape(-1)[first:stop], absmax[first // format.block : -(-stop // format.block)], *offset]
    return packed_ops.decode(part, Spec(format, (stop - first,), torch.float32), torch.float32)[start - first :].view(
        out, blocks
    )


def _each(op: str, counts: Tensor, rows: int, one: Callable[[int, slice], Any]) -> None:
    """Call ``one(e, rows of e)`` for every group that has rows; raise ValueError for counts of other rows."""
    sizes = counts.tolist()
    if min(sizes, default=0) < 0 or sum(sizes) != rows:
        got = f"counts of {sum(sizes)} rows, the least {min(sizes, default=0)},"
        raise ValueError(f"{op} got {got} for {rows} rows; wanted counts from 0 that add up to them")
    start = 0
    for e, size in enumerate(sizes):
        if size:
            one(e, slice(start, start + size))
        start += size


def _checked(op: str, x: Tensor, counts: Tensor, groups: int, inner: int, what: str) -> None:
    check_floats(op, x)
    if x.ndim != 2 or x.shape[1] != inner:
        raise ValueError(f"{op} got x {tuple(x.shape)} and {what}; wanted x [rows {inner}]")
    check_beside(op, "x", x, counts=(counts, (groups,), torch.int64))


def _check_packed(
    op: str, x: Tensor, counts: Tensor, buffers: list[Tensor], text: str, shape: Sequence[int], dtype: torch.dtype,
    in_order: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    spec = spec_of(text, shape, dtype)
    what = f"packed weights {spec.shape}"
    if len(shape) not in (2, 3):
        raise ValueError(f"{op} got {what}; wanted a stack of [out in], or [groups out in]")
    if len(shape) == 3 and spec.format.flat:
        fix = "quantise each matrix, and stack them with tree.map(lambda *t: torch.stack(t), *packed)"
        raise ValueError(f"{op} got {what} in {spec.format.name}, whose blocks straddle matrices; {fix}")
    groups = num_groups(buffers, spec)
    check(spec, buffers, (groups,) if len(shape) == 2 else ())
    _checked(op, x, counts, groups, shape[-2 if op.endswith("_t") else -1], what)
    if x.device != buffers[0].device:
        raise ValueError(f"{op} got x on {x.device} and a weight on {buffers[0].device}; move one")
    return x, counts, buffers, spec, in_order


def _waits(x: Tensor, buffers: Sequence[Tensor] = (), spec: Spec | None = None) -> str | None:
    """Return why the host reads the counts in a product of x, with a packed stack if given; None if a kernel does."""
    if backend_name(x.device.type) != "triton":
        return "reads the counts of rows on the host without Triton; pip install triton"
    from .triton.grouped import declines

    reason = declines(x, buffers, spec)
    return reason and f"reads the counts of rows on the host, because {reason}"


def _on_device(op: str, x: Tensor, counts: Tensor, *args: Any) -> Tensor:
    """Call Triton's kernel ``op``, which reads the counts itself."""
    right = (counts.min() >= 0) & (counts.sum() == x.shape[0]) if counts.numel() else counts.sum() == x.shape[0]
    torch._assert_async(right, f"{op} got counts for other rows; wanted counts from 0 that add up to {x.shape[0]}")
    return getattr(backend(x.device.type)[1], op)(*args)


def _packed(
    name: str, x: Tensor, counts: Tensor, buffers: list[Tensor], spec: Spec, in_order: bool = False,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    across = name == "matmul_t"
    if out is None and not _waits(x, buffers, spec):
        return _on_device("grouped_matmul", x, counts, x, counts, buffers, spec, across)
    y = _result(out, x, x.shape[0], spec.shape[-1 if across else -2])

    def one(e: int, rows: slice) -> None:
        if in_order and rows.stop - rows.start < LEAST_IN_ORDER:
            few = with_least_rows(x[rows])
            y[rows] = packed_ops.product(name, few, *member(buffers, spec, e))[: rows.stop - rows.start]
        else:
            packed_ops.product_into(name, x[rows], *member(buffers, spec, e), y[rows])

    _each(f"grouped_{name}", counts, x.shape[0], one)
    return y


def _check_dense(op: str, x: Tensor, counts: Tensor, w: Tensor, transposed: bool, in_order: bool = False) -> None:
    if w.ndim != 3:
        raise ValueError(f"{op} got weights {tuple(w.shape)}; wanted [groups out in]")
    _checked(op, x, counts, w.shape[0], w.shape[1 if transposed else 2], f"weights {tuple(w.shape)}")
    check_beside(op, "x", x, w=(w, tuple(w.shape), x.dtype))


def _dense(
    x: Tensor, counts: Tensor, w: Tensor, transposed: bool, in_order: bool = False, out: Tensor | None = None
) -> Tensor:
    if out is None and not _waits(x):
        return _on_device("grouped_mm", x, counts, x, counts, w, transposed)
    y = _result(out, x, x.shape[0], w.shape[2 if transposed else 1])

    def one(e: int, rows: slice) -> None:
        matrix = w[e] if transposed else w[e].mT
        if in_order:
            y[rows] = ordered_matmul(x[rows], matrix)
        else:
            torch.mm(x[rows], matrix, out=y[rows])

    _each("grouped_mm", counts, x.shape[0], one)
    return y


def _check_outer(op: str, a: Tensor, b: Tensor, counts: Tensor) -> None:
    if counts.ndim != 1 or b.ndim != 2:
        raise ValueError(f"{op} got counts {tuple(counts.shape)} and b {tuple(b.shape)}; wanted [groups] and [rows k]")
    _checked(op, a, counts, counts.shape[0], a.shape[-1], f"b {tuple(b.shape)}")
    check_beside(op, "a", a, b=(b, (a.shape[0], b.shape[1]), a.dtype))


def _outer(a: Tensor, b: Tensor, counts: Tensor, out: Tensor | None = None) -> Tensor:
    if out is None and not _waits(a):
        return _on_device("grouped_outer", a, counts, a, b, counts)
    y = _result(out, a, counts.shape[0], a.shape[1], b.shape[1])
    sizes = counts.tolist()
    for e in (e for e, size in enumerate(sizes) if not size):
        y[e].zero_()
    _each("grouped_outer", counts, a.shape[0], lambda e, rows: torch.mm(a[rows].mT, b[rows], out=y[e]))
    return y


def _result(out: Tensor | None, like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape) if out is None else check_out(out, shape, like.dtype)


_FIX = "it computes values only: differentiate fquant.grouped_linear, which has derivatives"
_BUFFERS = "Tensor[] buffers, str format, int[] shape, ScalarType dtype"
_ORDER = "bool in_order=False"  # whether the bits of a row may not depend on others (batch_invariant.py)
_PACKED = [
    register(
        f"grouped_{name}(Tensor x, Tensor counts, {_BUFFERS}, {_ORDER}) -> Tensor", _check_packed,
        lambda x, counts, buffers, spec, in_order, at=at: x.new_empty(x.shape[0], spec.shape[at]),
        None, _FIX, real=partial(_packed, name), waits=lambda x, counts, buffers, spec, _: _waits(x, buffers, spec),
    )
    for name, at in (("matmul", -2), ("matmul_t", -1))
]  # fmt: skip
_DENSE = register(
    f"grouped_mm(Tensor x, Tensor counts, Tensor w, bool transposed, {_ORDER}) -> Tensor", _check_dense,
    lambda x, counts, w, transposed, *_: x.new_empty(x.shape[0], w.shape[2 if transposed else 1]), None, _FIX,
    real=_dense, waits=lambda x, *_: _waits(x),
)  # fmt: skip
_OUTER = register(
    "grouped_outer(Tensor a, Tensor b, Tensor counts) -> Tensor", _check_outer,
    lambda a, b, counts: a.new_empty(counts.shape[0], a.shape[1], b.shape[1]), None, _FIX,
    real=_outer, waits=lambda a, *_: _waits(a),
)  # fmt: skip
# torch's counter gives shapes for tensors; each row meets one matrix
register_flop_formula([torch.ops.fquant.grouped_matmul, torch.ops.fquant.grouped_matmul_t])(
    lambda x, counts, buffers, format, shape, *_, **__: 2 * x[0] * shape[-1] * shape[-2]
)
register_flop_formula(torch.ops.fquant.grouped_mm)(lambda x, counts, w, *_, **__: 2 * x[0] * w[1] * w[2])
register_flop_formula(torch.ops.fquant.grouped_outer)(lambda a, b, counts, *_, **__: 2 * a[0] * a[1] * b[1])
