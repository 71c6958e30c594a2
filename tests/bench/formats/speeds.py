"""The speed of computing and training in formats, beside dense bf16 weights, bitsandbytes and torchao.

    dynamic           x · Wᵀ of int8 and int4 weights, x quantised as it arrives
    mixed-int8        x · Wᵀ and both gradients with int8 operands (int8 mixed precision), beside three bf16 products
    one row           of 4-bit weights: as they are, and as integers (x quantised, NF4 with levels of 1/127)
    training step     gradients of all weights of a small Llama by ``jit``, with int8 operands and without, in float32
                      and in bf16, which is slow on machines without instructions for it

The floor of one row is a call that reads the bytes of the packed weight once. bf16 is torch's own product. torchao's
linear of int8 weights and activations and its function of int8 mixed precision run on CPUs with ``torch._int_mm``.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import bitsandbytes as bnb
import torch
from torch import Tensor
from torch.func import grad

import fquant
from fquant import jit, linear, quantize, tree
from fquant.format import INT4, INT8, INT8_ROW, NF4, NF4_INT8, Format
from fquant.quantized_training import INT8_MIXED, Trainable, attach
from models import decoder
from models.config import Config
from tests.bench import timing
from tests.bench.report import Row, at_most

Table = tuple[list[str], list[Row]]
CFG = Config(
    vocab=2048, dim=1024, num_layers=2, num_heads=16, num_kv_heads=16, head_dim=64, hidden=2816, max_positions=512
)
MOST_WEIGHTS = 16  # that are read in turn; the floor reads as many
PROJECTIONS = r"layers\.\d+\.(q|k|v|o|gate|up|down)"


def measure(rows: int, width: int, repeats: int, cfg: Config = CFG) -> Iterator[Table]:
    """Yield the tables, each its columns and its rows; ``cfg`` is the model of the training step."""
    draw = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    x, w, g = draw(rows, width), draw(width, width), draw(rows, width)
    yield _products(x, w, g, repeats)
    yield _one_row(x[:1].clone(), w, repeats)
    yield _step(rows, repeats, cfg)


def _table(name: str, found: dict[str, float], bounds: list[tuple[str, float]]) -> Row:
    ours = next(iter(found.values()))
    return Row(name, "ms", found, [at_most(f"of {other}", ours / found[other], most) for other, most in bounds])


def _products(x: Tensor, w: Tensor, g: Tensor, repeats: int) -> Table:
    columns = ["fquant int8", "fquant bf16", "bf16", "torchao"]

    def dynamic(format: Format) -> dict[str, Callable[[int], Any]]:
        p = quantize(w, format)
        return {
            "fquant int8": lambda i: linear(x, p, act=INT8_ROW), "fquant bf16": lambda i: linear(x, p),
            "bf16": lambda i: x @ w.mT,
        }  # fmt: skip

    int8, int4, theirs = dynamic(INT8), dynamic(INT4), _torchao_linear(w)
    if theirs is not None:
        int8["torchao"] = lambda i: theirs(x)

    def mixed(x: Tensor, w: Tensor, g: Tensor) -> Any:
        return grad(lambda x, w: (linear(x, Trainable(w, INT8_MIXED)) * g).sum(), (0, 1))(x, w)

    backward: dict[str, Callable[[int], Any]] = {
        "fquant int8": lambda i: mixed(x, w, g), "bf16": lambda i: (x @ w.mT, g @ w, g.mT @ x),
        "torchao": lambda i: _torchao_mixed(x, w, g),
    }  # fmt: skip
    bounds = [("bf16", 1 / 1.5)]
    shape = f"{x.shape[0]} x {w.shape[0]} x {w.shape[1]}"
    forward = [
        _table(f"dynamic {name} {shape}", timing.medians(calls, repeats), bounds)
        for name, calls in {"int8": int8, "int4": int4}.items()
    ]
    products = _table(f"mixed-int8 {shape}", timing.medians(backward, max(1, repeats // 2)), bounds)
    return columns, [*forward, products]


def _one_row(x: Tensor, w: Tensor, repeats: int) -> Table:
    number = min(MOST_WEIGHTS, timing.num_weights(w.numel() // 2, timing.last_level_cache()))
    packed = {f.name: [quantize(w, f) for _ in range(number)] for f in (INT4, NF4)}
    packed["nf4_int8"] = [replace(p, format=NF4_INT8) for p in packed["nf4"]]
    codes = [bnb.functional.quantize_4bit(w, quant_type="nf4") for _ in range(number)]
    calls: dict[str, Callable[[int], Any]] = {
        "int4": lambda i: linear(x, packed["int4"][i % number]),
        "nf4": lambda i: linear(x, packed["nf4"][i % number]),
        "int4 as int8": lambda i: linear(x, packed["int4"][i % number], act=INT8_ROW),
        "nf4 as int8": lambda i: linear(x, packed["nf4_int8"][i % number], act=INT8_ROW),
        "bnb": lambda i: bnb.matmul_4bit(x, codes[i % number][0].t(), codes[i % number][1]),
    }
    reads = timing.reads(tree.nbytes(packed["int4"][0]), number)
    found = timing.medians(calls | reads, max(20, repeats))
    found["read"] = min(found.pop(name) for name in reads)
    row = _table("one row", found, [("read", 1.1), ("nf4", 1.0)])
    plain, integer = linear(x, packed["nf4"][0]), linear(x, packed["nf4_int8"][0], act=INT8_ROW)
    error = 100 * float((integer.float() - plain.float()).norm() / plain.float().norm())
    return list(found), [row, Row("error of nf4 as int8 beside nf4", "%", {"nf4 as int8": error}, [])]


def _step(rows: int, repeats: int, cfg: Config) -> Table:
    params = decoder.init(cfg, fquant.random.key(0))
    tokens = torch.randint(cfg.vocab, (1, rows + 1), generator=torch.Generator().manual_seed(0))

    def loss(params: Any, tokens: Tensor, on: bool) -> Tensor:
        params = attach(params, PROJECTIONS, INT8_MIXED) if on else params
        return decoder.loss(params, tokens[:, :-1], tokens[:, 1:], cfg)

    def step(on: bool) -> Callable[[Any, Tensor], Any]:
        return jit(lambda params, tokens: grad(loss)(params, tokens, on))

    calls: dict[str, Callable[[int], Any]] = {}
    half = tree.map(lambda t: t.bfloat16(), params)
    contestants = {
        "int8": (True, params), "float32": (False, params), "int8 in bf16": (True, half), "bf16": (False, half),
    }  # fmt: skip
    for name, (on, of) in contestants.items():
        calls[name] = partial(lambda f, of, i: f(of, tokens), step(on), of)
    found = timing.medians(calls, repeats)
    row = _table("training step", found, [("bf16", 1 / 1.25), ("float32", 1 / 1.25)])
    row.wanted.append(at_most("in bf16, of bf16", found["int8 in bf16"] / found["bf16"], 1 / 1.25))
    return list(found), [row]


def _torchao_linear(w: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return torchao's linear of int8 weights and activations; None if it does not run here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torchao").setLevel(logging.ERROR)
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
        layer.weight = torch.nn.Parameter(w, requires_grad=False)
        try:
            quantize_(layer, Int8DynamicActivationInt8WeightConfig())
            layer(w[:2])
        except (RuntimeError, NotImplementedError, AssertionError):
            return None
    return layer


def _torchao_mixed(x: Tensor, w: Tensor, g: Tensor) -> Any:
    from torchao.prototype.quantized_training.int8_mixed_precision import (
        Int8MixedPrecisionTrainingConfig as Options,
    )
    from torchao.prototype.quantized_training.int8_mixed_precision import (
        _Int8MixedPrecisionTrainingLinearFunction as Function,
    )

    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    return torch.autograd.grad(Function.apply(x, w, None, Options(module_swap=True)), (x, w), g)
