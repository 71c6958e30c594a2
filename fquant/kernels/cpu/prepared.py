"""Calls of C that are described before: those of the nodes of a captured graph.

    settle()                                 # before a replay
    call = prepare(op, args, kwargs)         # tensors like those of the calls: shapes, strides and dtypes
    call(*args, **kwargs)                    # as the op of this name, to the bit

A decoded token runs some hundred kernels of a few microseconds each. Checking their arguments and describing them to C
takes longer than many of them. The tensors of a graph always have the layouts of its trace, so a node's description is
made once. A call then fills in addresses. Stacks, tensors with gaps, and formats that C does not decode are not
prepared; their calls take the usual way.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ...device import HOST
from ...format import read as read_format
from ..arguments import kinds_of
from ..dispatch import backend
from ..spec import Spec
from . import codec, elementwise, moments, ordered
from .library import DTYPES, MOST_DIM, Pointer, Settings, empty, load, settings

Call = Callable[..., Any]

_settings: Settings | None = None


def settle() -> None:
    """Read ``FQUANT_KERNELS`` and the number of threads, which hold for the calls that follow."""
    global _settings
    try:
        _settings = settings() if backend("cpu")[0] == "cpu" else None
    except (ValueError, RuntimeError):  # for any op of ours, which then raises it
        _settings = None


def is_settled() -> bool:
    """Return True if calls that were prepared may be made: if C computes, and not the reference."""
    return _settings is not None


def prepare(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    """Return what computes the op of this name, such as "fquant::matmul.out", with arguments of these layouts.

    It skips all checks, of which the trace has made those that matter. None if it is not prepared for them.
    """
    made = _PREPARED.get(op)
    return None if made is None else made(*args, **kwargs)


def _compute(function: Any, *args: Any) -> int:
    """Call a function of the library; return the bytes of room that it needs."""
    assert _settings is not None, "settle() comes before a replay"
    status = function(*_settings, *args)
    if status < 0:
        raise MemoryError(f"{function.__name__} could not allocate its scratch memory; free some")
    return status


def _is_plain(*tensors: Tensor) -> bool:
    """Return True for tensors on the CPU without gaps that C can read."""
    return all(t.device.type == "cpu" and t.is_contiguous() and t.numel() for t in tensors)


def _product(
    name: str, x: Tensor, buffers: Sequence[Tensor], text: str, shape: Sequence[int], dtype: torch.dtype, *,
    out0: Tensor,
) -> Call | None:  # fmt: skip
    spec, size = Spec(read_format(text), tuple(shape), dtype), buffers[0].numel()
    if x.ndim != 2 or x.dtype not in DTYPES or not _is_plain(x, out0, *buffers):
        return None
    if spec.format.vectors is not None and spec.format.vectors.dim > MOST_DIM:
        return None
    nowhere = codec.in_place(spec, size, *[0] * len(buffers))
    if nowhere is None or nowhere.width != spec.shape[1]:
        return None
    function, rows, code = getattr(load(), f"fquant_{name}"), len(x), DTYPES[x.dtype]

    @lru_cache(maxsize=8)
    def array(*addresses: int) -> Any:
        return ctypes.byref(codec.in_place(spec, size, *addresses))  # type: ignore[arg-type]

    def call(x: Tensor, buffers: Sequence[Tensor], *_: Any, out0: Tensor) -> None:
        w = array(*[b.data_ptr() for b in buffers])
        given = w, x.data_ptr(), rows, out0.data_ptr(), code
        if room := _compute(function, *given, None):
            scratch = torch.empty(room, dtype=torch.uint8, device="cpu")
            _compute(function, *given, scratch.data_ptr())

    return call


def _rms_norm(x: Tensor, weight: Tensor, eps: float, *, out0: Tensor, out1: Tensor) -> Call | None:
    if x.dtype not in DTYPES or weight.dtype is not x.dtype or not _is_plain(x, weight, out0, out1):
        return None
    function, described = load().fquant_rms_norm, (DTYPES[x.dtype], *x.shape, x.stride(0))

    def call(x: Tensor, weight: Tensor, eps: float, *, out0: Tensor, out1: Tensor) -> None:
        results = None, 0, out0.data_ptr(), out1.data_ptr()
        _compute(function, x.data_ptr(), *described, weight.data_ptr(), eps, *results)

    return call


def _cached_attention(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float | None = None, cap: float | None = None,
    sinks: Tensor | None = None, *, out0: Tensor,
) -> Call | None:  # fmt: skip
    if q.dtype not in DTYPES or not _is_plain(q, k, v, position, out0, *([] if sinks is None else [sinks])):
        return None
    (b, heads, e), (_, slots, kv, _) = q.shape, k.shape
    sizes = b, slots, kv, heads, e, e**-0.5 if scale is None else scale, cap or 0.0, DTYPES[q.dtype]
    function = load().fquant_cached_attention

    def call(
        q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: Any = None, cap: Any = None,
        sinks: Tensor | None = None, *, out0: Tensor,
    ) -> None:  # fmt: skip
        inputs = q.data_ptr(), k.data_ptr(), v.data_ptr(), position.data_ptr()
        _compute(function, *inputs, None if sinks is None else sinks.data_ptr(), out0.data_ptr(), *sizes)

    return call


def _dense_matmul(x: Tensor, w: Tensor, *, out0: Tensor) -> Call | None:
    if x.shape[1] % 64 or x.dtype not in DTYPES or not _is_plain(x, w, out0):
        return None
    function, sizes = load().fquant_dense_matmul, (len(x), *w.shape, DTYPES[x.dtype])

    def call(x: Tensor, w: Tensor, *, out0: Tensor) -> None:
        _compute(function, x.data_ptr(), w.data_ptr(), out0.data_ptr(), *sizes)

    return call


def _ordered_matmul(a: Tensor, b: Tensor, *, out0: Tensor) -> Call | None:
    on_host = all(t.device == HOST and t.numel() for t in (a, b, out0))
    if a.dtype not in DTYPES or not out0.is_contiguous() or not on_host:
        return None
    layouts = a.dtype, a.shape, a.stride(), b.shape, b.stride()

    def call(a: Tensor, b: Tensor, *, out0: Tensor) -> None:
        assert _settings is not None, "settle() comes before a replay"
        ordered.run(ordered.plan(_settings, *layouts), _settings, a, b, out0)

    return call


def _pointwise(read: Sequence[Tensor], write: Sequence[Tensor], text: str) -> Call | None:
    plan = elementwise.describe(text, kinds_of(read))
    if plan is None or plan.program is None or any(t.device.type != "cpu" for t in (*read, *write)):
        return None
    function, program = load().fquant_pointwise, ctypes.byref(plan.program)
    kind, shape, dtypes = Pointer * (len(read) + len(plan.new) + len(write)), plan.shape, plan.new

    def call(read: Sequence[Tensor], write: Sequence[Tensor], text: str) -> list[Tensor]:
        new = [empty(*shape, dtype=dtype) for dtype in dtypes]
        _compute(function, program, kind(*[t.data_ptr() for t in (*read, *new, *write)]))
        return new

    return call


def _update(name: str, *args: Any, **out: Tensor) -> Call | None:
    update, count = moments.describe(name, args), moments.count_tensors(args)
    grad, *others = args[:count]
    given = [t for t in (*others, args[-3], args[-1], *out.values()) if t is not None]
    plain = all(t.device == HOST and t.is_contiguous() for t in given) and grad.device == HOST and grad.numel()
    if update is None or not plain or not (update.rows or grad.is_contiguous()):
        return None
    function, names = load().fquant_update, [f"out{i}" for i in range(count - 2)]

    def call(*args: Any, **out: Tensor) -> None:
        moments.point(update, args[:count], args[-3], args[-1], [out[name] for name in names])
        _compute(function, ctypes.byref(update))

    return call


_PREPARED: dict[str, Callable[..., Call | None]] = {
    "fquant::matmul.out": partial(_product, "matmul"),
    "fquant::matmul_t.out": partial(_product, "matmul_t"),
    "fquant::rms_norm.out": _rms_norm,
    "fquant::cached_attention.out": _cached_attention,
    "fquant::dense_matmul.out": _dense_matmul,
    "fquant::ordered_matmul.out": _ordered_matmul,
    "fquant::pointwise": _pointwise,
    "fquant::adam_update.out": partial(_update, "adam_update"),
    "fquant::momentum_update.out": partial(_update, "momentum_update"),
}
