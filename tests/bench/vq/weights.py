"""Rows of the benchmark for weights of learned vectors: to learn them, and products with them.

    learn2, learn3    AQ_2X8 and AQ_3X8 of a normal weight, beside faiss's residual quantiser of as many codes
    error2, error3    the mean squared error of its elements, of variance one
    one2, one3        a product of one row, beside decoding the whole weight and multiplying
    many2, many3      the same of MANY rows

faiss learns and searches the same sums of vectors from the same groups of eight elements, which are divided by the
root mean squares of their rows as ours are. Its beam has five candidates when it learns and when it searches.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fquant import AQ_2X8, AQ_3X8, dequantize, linear, quantize
from tests.bench import timing
from tests.bench.report import Row, at_most

FORMATS = {"2": AQ_2X8, "3": AQ_3X8}
ROWS = tuple(f"{kind}{n}" for kind in ("learn", "error", "one", "many") for n in FORMATS)
MANY = 512
FASTER = 1.0  # of decoding and multiplying


def rows(names: tuple[str, ...], out: int, width: int, repeats: int) -> list[Row]:
    """Measure the rows of ``names`` for weights [out width]."""
    w = torch.randn(out, width, generator=torch.Generator().manual_seed(0))
    found = list[Row]()
    for n, format in FORMATS.items():
        learners = {"fquant": lambda format=format: dequantize(quantize(w, format)), **_faiss(w, int(n))}
        if f"learn{n}" in names:
            calls = {who: lambda _, f=f: f() for who, f in learners.items()}
            calls["fquant"] = lambda _, format=format: quantize(w, format)
            found.append(Row(f"learn{n}", "ms", timing.medians(calls, repeats), []))
        if f"error{n}" in names:
            errors = {who: float((f() - w).double().square().mean()) for who, f in learners.items()}
            found.append(Row(f"error{n}", "", errors, []))
        for kind, m in (("one", 1), ("many", MANY)):
            if f"{kind}{n}" in names:
                found.append(_product(f"{kind}{n}", format, m, repeats))
    return found


def _product(name: str, format: Any, m: int, repeats: int) -> Row:
    """Measure products in bf16 with a weight [4096 4096], one learned sixteenth above the other."""
    p = quantize(torch.randn(256, 4096).bfloat16(), format)
    tall = {name: getattr(p, name).repeat(16, 1) for name in ("codes", "scale")}
    p = replace(p, **tall, shape=(4096, 4096))
    x = torch.randn(m, 4096).bfloat16()
    calls = {"fquant": lambda _: linear(x, p), "decode": lambda _: torch.nn.functional.linear(x, dequantize(p))}
    figures = timing.medians(calls, repeats)
    return Row(name, "ms", figures, [at_most("of decode", figures["fquant"] / figures["decode"], FASTER)])


def _faiss(w: Tensor, stages: int) -> dict[str, Callable[[], Tensor]]:
    try:
        import faiss
    except ImportError:
        return {}

    def theirs() -> Tensor:
        faiss.omp_set_num_threads(torch.get_num_threads())
        scale = w.square().mean(-1, keepdim=True).sqrt()
        x = (w / scale).reshape(-1, 8).numpy()
        them: Any = faiss.ResidualQuantizer(8, stages, 8)
        them.train(x)
        return torch.from_numpy(them.decode(them.compute_codes(x))).reshape(w.shape) * scale

    return {"faiss": theirs}
