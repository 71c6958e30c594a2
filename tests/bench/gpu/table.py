"""Times of kernels on a device beside bf16 products, bitsandbytes and torch's own, with the bounds that are wanted.

A time is the median of replays of a CUDA graph that calls a kernel for each of several weights in turn, divided by
their number. Together the weights exceed the L2 cache four times. So a launch costs as much as in a captured step.
Calls that cannot be captured, such as quantising, run in a loop. On the host, which stands in for tests, all do.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F

import fquant
from fquant import tree
from fquant.compile.roofline import Device, Work, work
from fquant.compile.trace import trace
from fquant.format import FORMATS, NF4, NF4_DQ, Format
from fquant.kernels import cuda_plans, packed_ops
from fquant.kernels.ops import attention, nll, norm, silu
from fquant.kernels.spec import Spec
from tests.bench import peers, timing

from .lines import Item, Result, alone, at_least, at_most, with_beside

AT_LEAST = {"dequantise": 0.85, "linear-1": 0.75}  # of what a copy moves
AT_MOST = {"linear-16": 0.5} | dict.fromkeys(
    (f"{name}-{rows}" for name in ("linear", "grad") for rows in (512, 2048, 4096)), 1.08
)  # of bf16
IGNORE = -100
SWEPT = 12  # candidates of a product, the best by estimate
COPY = 0.90  # of an H100's peak: what a copy reached (fquant/compile/roofline/devices.py)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the kernels that are timed."""

    out_dim: int = 8192
    """Rows of a weight."""
    in_dim: int = 8192
    """Columns of a weight."""
    rows: tuple[int, ...] = (1, 16, 512, 2048, 4096)
    """Rows of x."""
    formats: tuple[Literal["nf4", "nf4_dq", "fp4", "int8"], ...] = ("nf4_dq", "nf4", "int8")
    """Formats to time."""
    repeats: int = 15
    """Replays, of which the median is taken."""

    def check(self) -> None:
        """Raise ValueError for sizes that cannot be measured."""
        for name in ("out_dim", "in_dim"):
            if getattr(self, name) < 1 or getattr(self, name) % 128:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; wanted a multiple of 128")
        for name, numbers in (("repeats", [self.repeats]), ("rows", self.rows), ("formats", [len(self.formats)])):
            if min(numbers, default=0) < 1:
                raise ValueError(f"--{name} has {min(numbers, default=0)}; wanted at least 1")


class Weights:
    """Random weights in bf16 on a device, dense and packed; together they exceed its cache."""

    def __init__(self, shape: tuple[int, int], format: Format, device: torch.device) -> None:
        self.spec, self.packed_bytes = Spec(format, shape, torch.bfloat16), packed_bytes(shape, format)
        cached = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1
        self.number = timing.num_weights(self.packed_bytes, cached)
        self.dense = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(self.number)]
        self.nodes = [fquant.quantize(w, format) for w in self.dense]
        self.packed = [tree.leaves(node) for node in self.nodes]


def packed_bytes(shape: tuple[int, int], format: Format) -> int:
    """Return the bytes of a packed weight."""
    return tree.nbytes(fquant.quantize(torch.empty(shape, device="meta"), format))


def milliseconds(
    call: Callable[[int], object], number: int, repeats: int, device: torch.device, capture: bool = True
) -> float:
    """Return the median time of ``call(i)``, for i in turn below ``number``."""

    def turn() -> None:
        for i in range(number):
            call(i)

    turn()  # compiles, allocates, picks algorithms
    if device.type != "cuda":
        return median(_host_seconds(turn) for _ in range(repeats)) * 1e3 / number
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        turn()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    replay: Callable[[], object] = turn
    if capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            turn()
        replay = graph.replay
        replay()
    times = []
    with alone(device):
        for _ in range(repeats):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
    return median(times) / number


def _host_seconds(f: Callable[[], object]) -> float:
    began = time.perf_counter()
    f()
    return time.perf_counter() - began


@cache
def copied(repeats: int, device: torch.device) -> float:
    """Return the bytes that a copy on the device reads and writes in a millisecond."""
    size = 1 << (28 if device.type == "cuda" else 20)
    pairs = [(torch.randn(size, device=device), torch.empty(size, device=device)) for _ in range(2)]
    return 2 * pairs[0][0].nbytes / milliseconds(lambda i: pairs[i][1].copy_(pairs[i][0]), 2, repeats, device)


def items(sizes: Sizes, device: torch.device | None, card: Device) -> Iterator[Item]:
    """Yield the lines of packed weights by format, then those of the other kernels."""
    for name in sizes.formats:
        weights = cache(partial(Weights, (sizes.out_dim, sizes.in_dim), FORMATS[name], device or torch.device("cpu")))
        yield from of_weights(sizes, name, weights, device, card)
        weights.cache_clear()
    yield from of_rows(sizes, device, card)


def of_weights(
    sizes: Sizes, name: str, weights: Callable[[], Weights], device: torch.device | None, card: Device
) -> Iterator[Item]:
    """Yield the lines of one format."""
    format, shape = FORMATS[name], (sizes.out_dim, sizes.in_dim)
    held, dense = packed_bytes(shape, format), 2 * shape[0] * shape[1]
    bnb = _bitsandbytes(format)

    def measured(
        row: str, ours: Any, bf16: Any = None, peer: Any = None, moved: int = 0, capture: bool = True
    ) -> Result:
        assert device is not None
        w = weights()
        timed = partial(milliseconds, number=w.number, repeats=sizes.repeats, device=device)
        ms, beside = timed(partial(ours, w), capture=capture), dict[str, str]()
        if peer is not None:
            theirs = [bnb.pack(d) for d in w.dense] if bnb else []
            beside["bnb"] = f"{timed(partial(peer, theirs, w), capture=False):.4f} ms"
        if moved:
            share = moved / copied(sizes.repeats, device) / ms
            what = f"of a copy, {ms:.4f} ms"
            found = at_least(share, AT_LEAST[row], what) if row in AT_LEAST else Result(f"{share:.2f} {what}")
            return with_beside(found, **beside)
        dense_ms = timed(partial(bf16, w))
        what, beside = f"of bf16, {ms:.4f} ms", beside | {"bf16": f"{dense_ms:.4f} ms"}
        ratio = ms / dense_ms
        return with_beside(
            at_most(ratio, AT_MOST[row], what) if row in AT_MOST else Result(f"{ratio:.2f} {what}"), **beside
        )

    def item(row: str, parts: list[Work], *args: Any, **more: Any) -> Item:
        wanted = f"at least {AT_LEAST[row]}" if row in AT_LEAST else f"at most {AT_MOST[row]}" if row in AT_MOST else ""
        return Item(f"{row} {name}", wanted, lambda: measured(row, *args, **more), lambda: predicted(row, parts, card))

    both = held + dense
    yield item(
        "quantise", [Work("elementwise", moved=both)], lambda w, i: fquant.quantize(w.dense[i], format), None,
        bnb and (lambda theirs, w, i: bnb.pack(w.dense[i])), both, capture=False,
    )  # fmt: skip
    decode = bnb and bnb.dequantise
    yield item(
        "dequantise", [Work("decode", decoded=dense // 2, moved=both)],
        lambda w, i: packed_ops.decode(w.packed[i], w.spec, torch.bfloat16), None,
        decode and (lambda theirs, w, i: decode(theirs[i])), both,
    )  # fmt: skip
    for kind, m in [*(("linear", m) for m in sizes.rows), *(("grad", m) for m in sizes.rows if m >= 512)]:
        width = shape[1] if kind == "linear" else shape[0]
        x = cache(lambda m=m, width=width: torch.randn(m, width, device=device, dtype=torch.bfloat16))
        f = packed_ops.matmul if kind == "linear" else packed_ops.matmul_t
        parts = multiplied(m, shape, format, card, kind)
        yield item(
            f"{kind}-{m}", parts, lambda w, i, x=x, f=f: f(x(), w.packed[i], w.spec),
            (lambda w, i, x=x: x() @ w.dense[i].mT) if kind == "linear" else (lambda w, i, x=x: x() @ w.dense[i]),
            bnb and kind == "linear" and (lambda theirs, w, i, x=x: bnb.linear(x(), theirs[i])) or None,
            held if m == 1 else 0,
        )  # fmt: skip


def multiplied(rows: int, shape: tuple[int, int], format: Format, card: Device, kind: str) -> list[Work]:
    """Return the work of a product with a packed weight, or of its dual, as the plan has it on ``card``."""
    meta = lambda *size: torch.empty(size, dtype=torch.bfloat16, device="meta")
    spec, packed = Spec(format, shape, torch.bfloat16), tree.leaves(fquant.quantize(meta(*shape), format))
    op, width = (packed_ops.matmul, shape[1]) if kind == "linear" else (packed_ops.matmul_t, shape[0])
    call = lambda args: op(args[0], args[1], spec)
    captured = trace(call, (meta(rows, width), packed), device=torch.device(card.type))
    return [part for node in captured.module.graph.nodes for part in work(node, card)]


def predicted(row: str, parts: list[Work], card: Device) -> str:
    """Return the milliseconds of ``parts`` on ``card``, behind what is wanted of them: of a copy, or of bf16."""
    seconds = sum(part.seconds(card) for part in parts)
    ms = f"{1e3 * seconds:.4f} ms"
    if row in AT_LEAST:
        moved = sum(part.moved for part in parts)
        return f"{moved / seconds / (COPY * card.bandwidth):.2f} of a copy, {ms}"
    if (m := int(row.partition("-")[2] or 0)) == 0:
        return ms
    flops = sum(part.flops for part in parts)
    n = flops // (2 * m)
    dense = Work("product", flops, torch.bfloat16, moved=2 * n + 4 * m * math.isqrt(n))
    return f"{seconds / dense.seconds(card):.2f} of bf16, {ms}"


def of_rows(sizes: Sizes, device: torch.device | None, card: Device) -> Iterator[Item]:
    """Yield the lines of attention, norm, loss and silu beside torch's own functions."""
    d, t, bf16 = sizes.in_dim, max(sizes.rows), torch.bfloat16
    heads, size = max(1, d // 128), 128
    make = lambda *shape: torch.randn(shape, device=device, dtype=bf16)
    qkv = cache(lambda: [make(1, h, t, size) for h in (heads, max(1, heads // 4), max(1, heads // 4))])
    x, weight = cache(lambda: make(t, d)), cache(lambda: torch.ones(d, device=device))
    targets = cache(lambda: torch.arange(t, device=device) % d)
    gqa = lambda: F.scaled_dot_product_attention(*qkv(), is_causal=True, enable_gqa=True)
    y = cache(lambda: attention.attention(*qkv()))
    g = cache(lambda: torch.ones_like(y()[0]))
    flops, moved = 2 * heads * size * t * (t + 1), 2 * t * d

    def sdpa_backward(_: int) -> object:
        inputs = [t.detach().requires_grad_() for t in qkv()]
        out = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out, inputs, g())

    rows: list[tuple[str, Work, Any, Any, bool]] = [
        ("attention", Work("attention", flops, bf16), lambda i: attention.attention(*qkv()), lambda i: gqa(), True),
        (
            "attention backward (torch: and forward)", Work("attention", 5 * flops // 2, bf16),
            lambda i: attention.attention_backward(g(), *y(), *qkv()), sdpa_backward, False,
        ),
        ("norm", Work("norm", moved=2 * moved), lambda i: norm.rms_norm(x(), weight(), 1e-5),
         lambda i: F.rms_norm(x(), (d,), weight().to(bf16), 1e-5), True),
        ("loss", Work("loss", moved=moved), lambda i: nll.nll(x(), targets(), IGNORE),
         lambda i: F.cross_entropy(x(), targets(), reduction="none"), True),
        ("silu", Work("elementwise", moved=2 * moved), lambda i: silu.silu(x()), lambda i: F.silu(x()), True),
    ]  # fmt: skip

    def measured(ours: Any, theirs: Any, capture: bool) -> Result:
        assert device is not None
        first, second = (milliseconds(f, 1, sizes.repeats, device, capture) for f in (ours, theirs))
        return Result(f"{first:.4f} ms, {first / second:.2f} of torch", beside={"torch": f"{second:.4f} ms"})

    for name, each, ours, theirs, capture in rows:
        yield Item(
            name, "", partial(measured, ours, theirs, capture), lambda each=each: f"{1e3 * each.seconds(card):.4f} ms"
        )


def sweep(sizes: Sizes, device: torch.device | None) -> Iterator[Item]:
    """Yield a line for every tile of decoding, and for the best candidates of each product by their estimates."""
    from fquant.kernels import triton
    from fquant.kernels.triton import dequantize

    target = generation(device)
    for name in sizes.formats:
        weights = cache(partial(Weights, (sizes.out_dim, sizes.in_dim), FORMATS[name], device or torch.device("cpu")))

        def measured(call: Callable[[Weights], Callable[[int], object]], weights: Any = weights) -> Result:
            assert device is not None
            return Result(f"{milliseconds(call(weights()), weights().number, sizes.repeats, device):.4f} ms")

        def decoding(w: Weights, tile: int, warps: int) -> Callable[[int], object]:
            out = torch.empty(w.spec.shape, device=device, dtype=w.spec.dtype)
            views = [dequantize.rows_of(p, w.spec) for p in w.packed]
            return lambda i: dequantize.decode_into(views[i], out[None], tile, warps)

        def multiplying(w: Weights, m: int, plan: Any, across: bool) -> Callable[[int], object]:
            x = torch.randn(m, w.spec.shape[0 if across else 1], device=device, dtype=w.spec.dtype)
            f = triton.matmul_t if across else triton.matmul
            return lambda i: f(x, w.packed[i], w.spec, plan)

        for tile, warps in product((1024, 2048, 4096, 8192), (2, 4, 8)):
            call = partial(decoding, tile=tile, warps=warps)
            yield Item(f"dequantise {name}, tile {tile}, {warps} warps", measure=partial(measured, call))
        for m, across in product(sizes.rows, (False, True)):
            shape = (sizes.out_dim, sizes.in_dim) if across else (sizes.in_dim, sizes.out_dim)
            some = [*([] if across else cuda_plans.FEW_SWEPT), *cuda_plans.candidates(target), *cuda_plans.SLABS]
            guess = {plan: cuda_plans.estimate(plan, m, *shape, FORMATS[name].bits, target) for plan in some}
            for plan in sorted(guess, key=lambda plan: guess[plan])[:SWEPT]:
                yield Item(
                    f"{'grad' if across else 'linear'}-{m} {name}, {plan}",
                    measure=partial(measured, partial(multiplying, m=m, plan=plan, across=across)),
                    predict=lambda seconds=guess[plan]: f"{1e3 * seconds:.4f} ms",
                )


def generation(device: torch.device | None) -> int:
    """Return the generation of a device, that of an H100 without one."""
    from fquant.kernels.triton import codes

    return 90 if device is None or device.type != "cuda" else codes.generation(device)


@cache
def _peers() -> dict[str, peers.Contestant]:
    return peers.contestants()[0]


def _bitsandbytes(format: Format) -> Any:
    """Return bitsandbytes if it is installed and has the format."""
    if (found := _peers().get("bnb")) is None or format not in (NF4, NF4_DQ):
        return None
    import bitsandbytes.functional as F

    return found._replace(
        pack=partial(F.quantize_4bit, quant_type="nf4", compress_statistics=format == NF4_DQ, blocksize=64)
    )
