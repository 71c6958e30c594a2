"""Products of groups of rows in Triton, whose counts the device alone reads: nothing waits, and graphs record them.

Products with packed and with dense stacks are those of mixed_gemm.py, whose programs find their group. A tile of rows
is chosen by the mean rows of a group, because their numbers are not known. In an outer product a program has a tile of
one group's result, and reduces over the rows of the group.

x is bf16 or f16, and sums are float32. :func:`declines` says what has no kernel.
"""

# pyright: reportInvalidTypeForm=false
from collections.abc import Sequence

from torch import Tensor

from ...format import num_bytes
from ..arguments import dense_rows
from ..cuda_plans import TENSOR_CORES, Fused, grouped_plan, in_words, straddles
from ..spec import Spec
from .codes import EXACT, Rows, constants, dot, generation, narrow, on, tensors, tl, triton
from .dequantize import rows_of
from .mixed_gemm import _multiply, of_tiles

TILE = 64  # rows and columns of an outer product that a program computes
STEP = 32  # rows of x that it takes at a time


def declines(x: Tensor, buffers: Sequence[Tensor] = (), spec: Spec | None = None) -> str | None:
    """Return why a product of x, with a packed stack if given, has no kernel, or None. It needs no values."""
    if x.dtype not in TENSOR_CORES:
        return f"x is {str(x.dtype).removeprefix('torch.')}; use bfloat16 or float16"
    if spec is None:
        return None
    if spec.format.vectors is not None:
        return f"{spec.format.name} has learned vectors"
    if straddles(spec):
        return f"blocks of {spec.format.name} straddle rows of {spec.shape[-1]}"
    size, t = num_bytes(spec.format, spec.shape[-1]), buffers[0]
    if not in_words(spec) or any(n % 4 for n in (t.storage_offset(), *t.stride()[:-1])) and t.stride(-1) == 1:
        return f"packed rows of {size} bytes are not whole 32-bit words"
    return None


def grouped_matmul(
    x: Tensor, counts: Tensor, buffers: Sequence[Tensor], spec: Spec, across: bool, plan: Fused | None = None
) -> Tensor:
    """Return the product of each group with its packed matrix, ``x_e · W_e`` if across.

    The caller guarantees that nothing is declined, that counts are from 0, and that they add up to the rows of x.
    """
    groups, stacked = counts.shape[0], len(spec.shape) == 2
    out, width = spec.shape[-2:]
    y = x.new_empty(x.shape[0], width if across else out)
    if not y.numel() or not x.numel():
        return y.zero_()
    w = rows_of(buffers, spec)
    if not w.in_words:  # memory of torch's allocators is aligned, other may not be
        raise ValueError(f"a grouped product got codes at address {buffers[0].data_ptr()}; clone them to align it to 4")
    apart = 0
    if not stacked:  # one array of all groups: a stack whose scales are numbered through
        cut = lambda t: None if t is None else t.unflatten(1, (groups, out))[0]
        codes, scale = w.codes.unflatten(1, (groups, out))[0], w.scale.unflatten(1, (groups, out))[0]
        w, apart = w._replace(codes=codes, scale=scale, zero=cut(w.zero)), out * w.pitch
    given = *tensors(w), dense_rows(x), y, counts, groups, apart
    _launch(given, w, x, y, (out, w.codes.shape[2], w.scale.shape[2]), groups, across, plan)
    return y


def grouped_mm(x: Tensor, counts: Tensor, w: Tensor, across: bool) -> Tensor:
    """Return the product of each group with its matrix of w f[groups out in]."""
    out, width = w.shape[1:]
    y = x.new_empty(x.shape[0], width if across else out)
    if not y.numel() or not x.numel():
        return y.zero_()
    w = dense_rows(w)
    given = w, *(None,) * 7, *w.stride()[:2], *(0,) * 7, dense_rows(x), y, counts, len(w), 0
    _launch(given, None, x, y, (out, width, 0), len(w), across, None)
    return y


def _launch(
    given: tuple, w: Rows | None, x: Tensor, y: Tensor, sizes: tuple, groups: int, across: bool, plan: Fused | None
) -> None:
    (m, depth), width = x.shape, y.shape[1]
    plan = plan or grouped_plan(triton.cdiv(m, groups), generation(x.device))
    steps, slots = triton.cdiv(depth, plan.depth), triton.next_power_of_2(groups)
    grid = (triton.cdiv(m, plan.rows) + groups) * triton.cdiv(width, plan.columns), 1, 1
    numbers = m, *sizes, width, depth, 0, dense_rows(x).stride(0), steps, 0
    even = depth % plan.depth == 0, width % plan.columns == 0
    constant = (0, 0, 0, 0, tl.float32) if w is None else constants(w)
    ptx = None if w is None else of_tiles(w, x, all(even))
    with on(x):
        _multiply[grid](
            *given, *numbers, *constant, *plan[:3], across, *even, slots, ptx, num_warps=plan.warps,
            num_stages=plan.stages, **EXACT,
        )  # fmt: skip


def grouped_outer(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """Return ``a_eᵀ · b_e`` of each group, zeros of an empty one."""
    groups, n, k = counts.shape[0], a.shape[1], b.shape[1]
    y = a.new_empty(groups, n, k)
    if y.numel():
        a, b = dense_rows(a), dense_rows(b)
        grid = triton.cdiv(n, TILE), triton.cdiv(k, TILE), groups
        sizes = groups, n, k, a.stride(0), b.stride(0), triton.next_power_of_2(groups), TILE, STEP
        with on(a):
            _outer[grid](a, b, counts, y, *sizes, num_warps=4, num_stages=3, **EXACT)
    return y


@triton.jit
def _outer(
    a, b, counts, y, groups, n, k, a_row, b_row, SLOTS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Compute a tile of y [groups n k] from the rows of group program_id(2) of a [rows n] and b [rows k]."""
    group, slot = tl.program_id(2), tl.arange(0, SLOTS)
    sizes = tl.load(counts + slot, mask=slot < groups, other=0).to(tl.int32)
    start = tl.sum(tl.where(slot < group, sizes, 0), 0)
    stop = start + tl.sum(tl.where(slot == group, sizes, 0), 0)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)
    acc = tl.zeros([TILE, TILE], tl.float32)
    for r in range(start, stop, STEP):
        row = (r + tl.arange(0, STEP))[:, None]
        left = tl.load(a + row.to(tl.int64) * a_row + i[None, :], mask=(row < stop) & (i < n)[None, :], other=0.0)
        right = tl.load(b + row.to(tl.int64) * b_row + j[None, :], mask=(row < stop) & (j < k)[None, :], other=0.0)
        acc = dot(tl.trans(left), right, acc)
    at = y + (group.to(tl.int64) * n + i[:, None]) * k + j[None, :]
    tl.store(at, narrow(acc, y.dtype.element_ty), mask=(i < n)[:, None] & (j < k)[None, :])
