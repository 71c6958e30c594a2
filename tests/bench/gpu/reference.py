"""Check the kernels of a device against the reference on the CPU, on seeded random numbers.

    with exact(), poisoned():
        check_formats("cuda", seed=1)      # the number of comparisons by kind; AssertionError for a wrong result

Codes, decoded values and random draws must equal the reference in every bit. Other results have tolerances:

* products: twice the bound of tests/helpers/kernels/rounding.py, because tensor cores truncate sums that others round;
* losses and norms: twice the bounds of tests/helpers/kernels/losses.py and norms.py, because a GPU's exponential rounds
  once more; they may also lose denormals.

Output memory is full of NaN, or of the largest integer, before a kernel writes to it. The cases are few, so that all
kernel variants compile within a minute or two. They differ between formats, so that every kind meets several.
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, product

import torch
from torch import Tensor

import fquant
from fquant import tree
from fquant.format import BLOCKS, INT8, NF4, NF4_DQ, Format
from fquant.kernels import reference, triton
from fquant.kernels.cuda_plans import CANDIDATES, Plan
from fquant.kernels.spec import Spec, scales
from tests.helpers.formats import CODECS, DTYPES, KINDS, alike, draw
from tests.helpers.kernels import losses, norms
from tests.helpers.kernels.integers import ACTS, WEIGHTS, inputs
from tests.helpers.kernels.rounding import bound

BIG = (32768 + 64, 65536)  # more than 2^31 elements
MANY = 2**33 + 65  # words, of more than 2^32 counters
ROWS = (32768 + 9, 65536)  # logits, or what is normed, more than 2^31
INTEGERS = ((1, 50, 301), (70, 40, 4416), (300, 200, 2049))  # rows of x, and the shape of the weight
BF16 = torch.bfloat16


@contextmanager
def exact() -> Iterator[None]:
    """Compute torch's own products inside the block in full precision."""
    settings = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(settings, name) for name in names}
    try:
        for name in names:
            setattr(settings, name, False)
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)


def check_formats(device: str, seed: int, formats: Sequence[Format] = KINDS) -> Counter[str]:
    """Check every format, for rows of whole blocks and others, from and to dtypes that differ between formats."""
    counts: Counter[str] = Counter()
    random = torch.Generator().manual_seed(seed)
    kinds = zip(product(formats, [(40, 2304), (9, 4129)]), cycle(DTYPES[:3]), cycle(DTYPES))
    for (format, shape), dtype, to in kinds:
        note = (format.name, format.block, shape, dtype, to, seed)
        if format in CODECS:
            w = (torch.randn(shape, generator=random) * torch.randn(shape[1], generator=random).exp()).to(dtype)
            got = triton.encode(w.to(device), format)
            for part, wanted in zip(got, reference.encode(w, format), strict=True):
                _equal(part, wanted, "encode", *note)
            counts["encodings"] += 1
        spec = Spec(format, shape, dtype)
        buffers = draw(spec, seed=seed, special=True)
        got = triton.decode([b.to(device) for b in buffers], spec, to)
        _equal(got, reference.decode(buffers, spec, to), "decode", *note)
        counts["decodings"] += 1
        _product(device, seed, spec, BF16, 5)
        counts["products"] += 2
    return counts


def check_products(device: str, seed: int, formats: Sequence[Format] = (NF4, NF4_DQ, INT8)) -> Counter[str]:
    """Check products for numbers of rows, dtypes of x, block sizes, and every candidate plan."""
    cases = [(format, of, rows, None) for format, of, rows in product(formats, DTYPES, (1, 3, 16, 17, 40, 200))]
    cases += [(replace(format, block=block), BF16, 2, None) for format in formats if format.block for block in BLOCKS]
    cases += [(formats[0], BF16, 40, plan) for plan in CANDIDATES]
    for format, of, rows, plan in cases:
        _product(device, seed, Spec(format, (200, 4104), BF16), of, rows, plan)
    return Counter(products=2 * len(cases))


def check_integers(
    device: str, seed: int, formats: Sequence[Format] = WEIGHTS, shapes: Sequence[tuple[int, int, int]] = INTEGERS
) -> Counter[str]:
    """Check products of integers of every format with activations of each, and of two dense operands; all bits."""
    counts: Counter[str] = Counter()
    for format, act in product(formats, ACTS):
        for of, (m, out, width) in zip(DTYPES[:3], shapes, strict=True):
            x, w, spec = inputs(format, m, out, width, of)
            wanted = reference.integer_matmul(x, tree.leaves(w), spec, act)
            got = triton.integer_matmul(x.to(device), [b.to(device) for b in tree.leaves(w)], spec, act)
            _equal(got, wanted, "integer_matmul", format.name, act.name, of, m, out, width)
            counts["products of integers"] += 1
    for (a, b), of in zip(product(ACTS, ACTS), cycle(DTYPES[:3])):
        random = torch.Generator().manual_seed(seed)
        x, w = (torch.randn(n, shapes[-1][2], generator=random).to(of) for n in shapes[-1][:2])
        got = triton.integer_mm(x.to(device), w.to(device), a, b)
        _equal(got, reference.integer_mm(x, w, a, b), "integer_mm", a.name, b.name, of, seed)
        counts["products of integers"] += 1
    return counts


def check_draws(device: str, seed: int, size: int = MANY) -> Counter[str]:
    """Check folded keys, words and masks, and the last elements of a mask of ``size``."""
    random = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(2**63), 2**63 - 1, (40,), generator=random)
    folded = reference.fold(keys[:, None], keys[:5])
    _equal(triton.fold(keys[:, None].to(device), keys[:5].to(device)), folded, "fold", seed)
    for count, shape in ((40, (7,)), (3, (5, 1025)), (1, (1 << 14,))):
        words, there = reference.bits(keys[:count], shape), keys[:count].to(device)
        _equal(triton.bits(there, shape), words, "bits", count, shape, seed)
        for threshold in (0, 1, 1 << 31, 1 << 32):
            got = triton.bernoulli(there, threshold, shape)
            _equal(got, words < threshold, "bernoulli", threshold, count, shape, seed)
    one = int(keys[0])
    mask, last = triton.bernoulli(keys[0].to(device), 1 << 31, (size,))[-9:], range(size - 9, size)
    words = [reference.threefry(_halves(one), _halves(i // 2))[i % 2] for i in last]
    _equal(mask, torch.tensor(words) < 1 << 31, "bernoulli", size, seed)
    return Counter(draws=17)


def check_losses(device: str, seed: int, shape: tuple[int, int] = ROWS) -> Counter[str]:
    """Check losses for rows of all kinds and widths, with a factor and without, and the ends of ``shape``."""
    cases = [losses.drawn(c, v, seed=seed) for c, v in ((3, 1), (70, 19), (5, 4096), (9, 32_001))]
    special = torch.stack(list(losses.ROWS.values()))
    cases += [(special, torch.full((len(special),), at)) for at in (0, 4095, losses.IGNORE)]
    for i, ((logits, targets), dtype) in enumerate(product(cases, DTYPES[:3])):
        factor = torch.linspace(-2, 2, len(targets)) if i % 2 else None
        _loss(device, logits.to(dtype), targets, factor, "a loss of", i, tuple(logits.shape), dtype, seed)
    random = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(shape, generator=random, device=device, dtype=BF16)
    targets = torch.arange(shape[0], device=device) % shape[1]
    value, slope = triton.nll_backward(logits, targets, losses.IGNORE, None)
    for end in (slice(0, 3), slice(shape[0] - 3, shape[0])):
        part = logits[end].cpu(), targets[end].cpu()
        _near((value[end], slope[end]), *part, None, "the ends of a loss", shape, end, seed)
    return Counter(losses=3 * len(cases) + 2)


def check_norms(device: str, seed: int, shape: tuple[int, int] = ROWS) -> Counter[str]:
    """Check norms for rows of all kinds and widths, and the ends of ``shape``."""
    shapes = ((3, 1), (70, 19), (300, 64), (5, 4096), (9, 4097), (2, 32_001))
    cases = [norms.drawn(n, d, seed=seed) for n, d in shapes]
    special = torch.stack(list(losses.ROWS.values()))
    cases.append((torch.ones_like(special), special, torch.linspace(-2, 2, special.shape[1])))
    for i, ((g, x, weight), dtype) in enumerate(product(cases, DTYPES[:3])):
        note = ("of", i, tuple(x.shape), dtype, seed)
        rows = [g.to(dtype), x.to(dtype)]
        y, scale = triton.rms_norm(rows[1].to(device), weight.to(device), 1e-5)
        dx = triton.rms_norm_backward(rows[0].to(device), rows[1].to(device), weight.to(device), scale)
        _normed(y, scale, dx, *rows, weight, *note)
    random = torch.Generator(device).manual_seed(seed)
    g, x = (torch.randn(shape, generator=random, device=device, dtype=BF16) for _ in range(2))
    weight = torch.linspace(-2, 2, shape[1], device=device)
    y, scale = triton.rms_norm(x, weight, 1e-5)
    dx = triton.rms_norm_backward(g, x, weight, scale)
    for end in (slice(0, 3), slice(shape[0] - 3, shape[0])):
        rows = [g[end].cpu(), x[end].cpu()]
        _normed(y[end], scale[end], dx[end], *rows, weight.cpu(), "at the ends of", shape, end, seed)
    return Counter(norms=3 * len(cases) + 2)


def check_big(device: str, seed: int, shape: tuple[int, int]) -> Counter[str]:
    """Check a weight of many elements at its first and last rows and columns."""
    random = torch.Generator(device).manual_seed(seed)
    out, width = shape
    w = torch.randn(shape, generator=random, device=device, dtype=BF16)
    x, g = (torch.randn(2, n, generator=random, device=device, dtype=BF16) for n in (width, out))
    codes, absmax = triton.encode(w, NF4)
    ends = [slice(0, 32), slice(out - 32, out)]
    for end in ends:
        for part, wanted in zip((codes, absmax), reference.encode(w[end].cpu(), NF4), strict=True):
            _equal(part[end], wanted, "encode", shape, end, seed)
    del w
    assert NF4_DQ.scale is not None
    nested = tree.leaves(fquant.quantize(absmax, NF4_DQ.scale))
    for format, buffers in ((NF4, [codes, absmax]), (NF4_DQ, [codes, *nested])):
        spec, note = Spec(format, shape, BF16), (format.name, shape, seed)
        absmax = absmax if format is NF4 else reference.decode(nested, scales(spec), torch.float32)
        values, y = triton.decode(buffers, spec, BF16), triton.matmul(x, buffers, spec)
        for end in ends:
            part = Spec(NF4, (32, width), BF16)
            wanted = reference.decode([codes[end].cpu(), absmax[end].cpu()], part, BF16)
            _equal(values[end], wanted, "decode", *note, end)
            _close(y[:, end], x, wanted.mT, "matmul", *note, end)
        gx = triton.matmul_t(g, buffers, spec)
        for end in (slice(0, 32), slice(width - 32, width)):
            _close(gx[:, end], g, values[:, end], "matmul_t", *note, end)
    return Counter(encodings=1, decodings=2, products=4)


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill new tensors inside the block with NaN, or with the largest integer."""
    with warnings.catch_warnings(action="ignore"):
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            assert torch.empty(1).isnan().all() and (torch.empty(1, dtype=torch.uint8) == 255).all()
            yield
        finally:
            torch.use_deterministic_algorithms(False)


def _product(device: str, seed: int, spec: Spec, of: torch.dtype, rows: int, plan: Plan | None = None) -> None:
    """Check both products with a weight of ``spec``."""
    random, buffers = torch.Generator().manual_seed(seed), draw(spec, seed=seed)
    x, g = (torch.randn(rows, n, generator=random).to(of) for n in reversed(spec.shape))
    there, w = [b.to(device) for b in buffers], reference.decode(buffers, spec, of)
    note = (spec.format.name, spec.format.block, spec.shape, spec.dtype, of, rows, plan, seed)
    _close(triton.matmul(x.to(device), there, spec, plan), x, w.mT, "matmul", *note)
    _close(triton.matmul_t(g.to(device), there, spec), g, w, "matmul_t", *note)


def _loss(device: str, logits: Tensor, targets: Tensor, factor: Tensor | None, *note: object) -> None:
    there = logits.to(device), targets.to(device)
    got = triton.nll_backward(*there, losses.IGNORE, None if factor is None else factor.to(device))
    _near(got, logits, targets, factor, *note)
    _equal(triton.nll(*there, losses.IGNORE), got[0].cpu(), *note, "without its slope")


def _near(got: tuple[Tensor, Tensor], logits: Tensor, targets: Tensor, factor: Tensor | None, *note: object) -> None:
    value, slope, bound, slope_bound = losses.exact(logits, targets, losses.IGNORE, factor)
    losses.assert_near(got[0].cpu(), value, 2 * bound + losses.EPS * 2 * value.abs(), *note)
    losses.assert_near(got[1].cpu(), slope, 2 * slope_bound + 2.0**-126, *note, "its slope")


def _normed(y: Tensor, scale: Tensor, dx: Tensor, g: Tensor, x: Tensor, weight: Tensor, *note: object) -> None:
    scale = scale.cpu()
    norms.assert_scale(scale, x, 1e-5, 2, *note)
    _equal(y, norms.normed(x, weight, scale), "a norm", *note)
    norms.assert_backward(dx.cpu(), g, x, weight, scale, 2, *note)


def _halves(x: int) -> tuple[int, int]:
    return x & reference.MASK, x >> 32 & reference.MASK


def _equal(got: Tensor, wanted: Tensor, *note: object) -> None:
    if not alike(got.cpu(), wanted):
        raise AssertionError(f"{' '.join(map(str, note))}: differs from the reference")


def _close(got: Tensor, x: Tensor, w: Tensor, *note: object) -> None:
    x, w = x.cpu(), w.cpu()
    error, allowed = (got.cpu().double() - x.double() @ w.double()).abs(), 2 * bound(x, w)
    if not bool((error <= allowed).all()):
        most = float((error / allowed).nan_to_num(torch.inf).max())
        raise AssertionError(f"{' '.join(map(str, note))}: error is {most:.3g} times the bound")
