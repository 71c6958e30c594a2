"""Times of products of integers on a device, beside torch's bf16 product and the product of decoded values.

A product includes the rounding of the rows of x, as ``linear(x, w, act=INT8_ROW)`` does. Two dense operands are those
of a layer that is trained in int8, in its three orientations.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fquant.compile.roofline import Device
from fquant.format import INT2, INT3, INT4, INT8_ROW, INT8_ROW_ZERO, Format
from fquant.kernels import integer_ops, integer_plans, packed_ops
from fquant.kernels.cuda_plans import Card

from .lines import Item, Result
from .table import Sizes, Weights, milliseconds

FORMATS: dict[str, tuple[Format, Format]] = {  # of the weight and of x
    "int8_row": (INT8_ROW, INT8_ROW), "int4": (INT4, INT8_ROW), "int4 x int8_row_zero": (INT4, INT8_ROW_ZERO),
    "int3": (INT3, INT8_ROW), "int2": (INT2, INT8_ROW),
}  # fmt: skip


def items(sizes: Sizes, device: torch.device | None, card: Device) -> Iterator[Item]:
    """Yield a line for each format and number of rows, then those of dense operands."""
    shape = (sizes.out_dim, sizes.in_dim)
    for name, (format, act) in FORMATS.items():
        weights = cache(partial(Weights, shape, format, device or torch.device("cpu")))
        for m in sizes.rows:
            yield Item(
                f"integers-{m} {name}", "", partial(_packed, sizes, weights, act, m, device),
                partial(_predicted, card, m, shape, format.bits, format.block, False),
            )  # fmt: skip
        weights.cache_clear()
    for name, (m, n, k) in orientations(sizes).items():
        yield Item(
            f"int8 training, {name}", "", partial(_dense, sizes, name, device),
            partial(_predicted, card, m, (n, k), 8, None, True),
        )  # fmt: skip


def orientations(sizes: Sizes) -> dict[str, tuple[int, int, int]]:
    """Return m, n and k of the product and of its gradients."""
    rows, out, width = max(sizes.rows), sizes.out_dim, sizes.in_dim
    return {"output": (rows, out, width), "grad of x": (rows, width, out), "grad of w": (out, width, rows)}


def operands(name: str, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the operands of a product of :func:`orientations`."""
    return {"output": (x, w), "grad of x": (g, w.mT), "grad of w": (g.mT, x.mT)}[name]


def sweep(sizes: Sizes, device: torch.device | None, generation: int) -> Iterator[Item]:
    """Yield a line for every candidate plan of each product."""
    from fquant.kernels import triton

    shape = (sizes.out_dim, sizes.in_dim)
    for name, (format, act) in FORMATS.items():
        weights = cache(partial(Weights, shape, format, device or torch.device("cpu")))

        def measured(m: int, plan: Any, weights: Any = weights, act: Format = act) -> Result:
            assert device is not None
            w, x = weights(), torch.randn(m, shape[1], device=device, dtype=torch.bfloat16)
            call = lambda i: triton.integer_matmul(x, w.packed[i], w.spec, act, plan)
            return Result(f"{milliseconds(call, w.number, sizes.repeats, device):.4f} ms")

        for m in sizes.rows:
            for plan in integer_plans.candidates(format.block, generation):
                seconds = integer_plans.estimate(plan, m, *shape[::-1], format.bits, format.block, generation)
                yield Item(
                    f"integers-{m} {name}, {plan}", measure=partial(measured, m, plan),
                    predict=lambda seconds=seconds: f"{1e3 * seconds:.4f} ms",
                )  # fmt: skip
        weights.cache_clear()


def calls(out_dim: int, in_dim: int, rows: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    """Return the calls whose kernels ``resources`` compiles."""
    from fquant.kernels import triton
    from fquant.kernels.spec import Spec, layout

    found, meta = dict[str, Callable[[], object]](), partial(torch.empty, device="meta")
    for name, (format, act) in FORMATS.items():
        spec = Spec(format, (out_dim, in_dim), torch.bfloat16)
        buffers = [meta(shape, dtype=dtype) for _, shape, dtype in layout(spec)]
        for m in rows:
            x = meta((m, in_dim), dtype=torch.bfloat16)
            found[f"integers-{m} {name}"] = partial(triton.integer_matmul, x, buffers, spec, act)
    x, w = (meta((n, in_dim), dtype=torch.bfloat16) for n in (max(rows), out_dim))
    found["int8 training, output"] = partial(triton.integer_mm, x, w, INT8_ROW, INT8_ROW)
    return found


def _packed(
    sizes: Sizes, weights: Callable[[], Weights], act: Format, m: int, device: torch.device | None
) -> Result:  # fmt: skip
    assert device is not None
    w, x = weights(), torch.randn(m, sizes.in_dim, device=device, dtype=torch.bfloat16)
    timed = partial(milliseconds, number=w.number, repeats=sizes.repeats, device=device)
    ms = timed(lambda i: integer_ops.integer_matmul(x, w.packed[i], w.spec, act))
    decoded = timed(lambda i: packed_ops.matmul(x, w.packed[i], w.spec))
    return _beside(ms, timed(lambda i: x @ w.dense[i].mT), decoded=f"{decoded:.4f} ms")


def _dense(sizes: Sizes, name: str, device: torch.device | None) -> Result:
    assert device is not None
    rows, out, width = orientations(sizes)["output"]
    make = lambda *shape: torch.randn(shape, device=device, dtype=torch.bfloat16)
    a, b = operands(name, make(rows, width), make(out, width), make(rows, out))
    ms, bf16 = (
        milliseconds(f, 1, sizes.repeats, device)
        for f in (lambda i: integer_ops.integer_mm(a, b, INT8_ROW, INT8_ROW), lambda i: a @ b.mT)
    )
    return _beside(ms, bf16)


def _beside(ms: float, bf16: float, **others: str) -> Result:
    return Result(f"{ms / bf16:.2f} of bf16, {ms:.4f} ms", None, {"bf16": f"{bf16:.4f} ms", **others})


def _predicted(card: Device, m: int, shape: tuple[int, int], bits: int, block: int | None, dense: bool) -> str:
    """Return the estimate of the plan that is taken on ``card``."""
    if (chip := card.chip) is None:
        return ""
    figures = Card(
        chip.processors, chip.clock, card.flops / (chip.processors * chip.clock), card.bandwidth * card.share.memory
    )
    args = m, shape[1], shape[0], bits, block, chip.generation, dense
    return f"{1e3 * integer_plans.estimate(integer_plans.plan_for(*args), *args, figures):.4f} ms"
