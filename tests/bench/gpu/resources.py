"""What the kernels take of a multiprocessor, compiled ahead of time for a card that need not be there.

Each line is a kernel that a call launches at a model's shapes: registers of a thread, warps, and shared memory of a
block. Wanted are no spills and no local memory. Triton is needed, and no device.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from fquant.compile.roofline import Device
from fquant.format import FORMATS
from fquant.kernels.spec import Spec, layout

from . import integers
from .lines import Item, Result

TARGETS = {"b200": 100, "rtx5090": 120, "h200": 90, "h100": 90, "a100-80": 80, "a100-40": 80}
NO_TRITON = "not compiled: triton is not installed"
BF16 = torch.bfloat16
Calls = dict[str, Callable[[], object]]


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return a tensor without memory, whose pointer counts as aligned."""
    return torch.empty(shape, dtype=dtype, device="meta")


def calls(out_dim: int, in_dim: int, rows: tuple[int, ...]) -> Calls:
    """Return the calls by name: decoding, products with their duals, attention with its backward, and integers."""
    from fquant.kernels import triton

    found: Calls = {}
    for name in ("nf4_dq", "int8"):
        spec = Spec(FORMATS[name], (out_dim, in_dim), BF16)
        buffers = [meta(*shape, dtype=dtype) for _, shape, dtype in layout(spec)]
        found[f"dequantise {name}"] = partial(triton.decode, buffers, spec, BF16)
        for m in rows:
            found[f"linear-{m} {name}"] = partial(triton.matmul, meta(m, in_dim), buffers, spec)
            found[f"grad-{m} {name}"] = partial(triton.matmul_t, meta(m, out_dim), buffers, spec)
    t = max(rows)
    q, k, lse = meta(1, 32, t, 128), meta(1, 8, t, 128), meta(1, 32, t, dtype=torch.float32)
    found["attention"] = partial(triton.attention, q, k, k)
    found["attention backward"] = partial(triton.attention_backward, q, q, lse, q, k, k)
    return found | integers.calls(out_dim, in_dim, rows)


def items(card: Device, out_dim: int, in_dim: int, rows: tuple[int, ...]) -> Iterator[Item]:
    """Yield a line for each call: the kernels that it compiles, and what they take."""
    if find_spec("triton") is None:
        yield Item("kernels", "no spills", lambda: Result(NO_TRITON), needs_device=False)
        return
    target = TARGETS.get(card.name)
    for name, call in calls(out_dim, in_dim, rows).items():
        yield Item(name, "no spills, no local memory", partial(compiled, call, target, card), needs_device=False)


def compiled(call: Callable[[], object], target: int | None, card: Device) -> Result:
    """Compile what ``call`` would launch for ``target``, and return the resources of each kernel."""
    from tests.helpers.kernels import ahead_of_time

    if target not in ahead_of_time.TARGETS:
        return Result(f"not compiled: {card.name} is none of sm_{', sm_'.join(map(str, ahead_of_time.TARGETS))}")
    with ahead_of_time.compiled_for(target) as reports:
        call()
    if not reports:
        return Result("a product of torch's own", None)
    met = not any(r.spills or r.stack or r.shared > ahead_of_time.SHARED[target] for r in reports)
    return Result("; ".join(dict.fromkeys(map(text, reports))), met)


def text(report: Any) -> str:
    """Return the resources of a kernel in words."""
    taken = f"{report.name} sm_{report.target}: {report.registers} registers x {report.warps} warps"
    spilled = f", {report.spills} bytes spilled" if report.spills else ""
    return f"{taken}, {report.shared / 1024:.0f} KiB shared{spilled}"
