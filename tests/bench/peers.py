"""The contestants of the 4-bit comparison: how each library stores a weight, and multiplies by it.

    found, missing = contestants()                     # name -> Contestant; name -> why it cannot take part
    weights = Weights(found, (out, width), number=16)  # the same values for all contestants
    found["bnb"].linear(x, weights.packed("bnb")[0])

* fquant: NF4 with double quantisation, like the peers.
* bf16: a dense weight.
* bnb: bitsandbytes as in training.
* bnb eval: its Linear4bit in eval mode, which repacks the weight for AVX512-BF16 on its first call. From then on it has
  no gradients. It multiplies with the kernel that it ships, or with that of the package ``kernels`` if installed. Both
  round scales and inputs to bfloat16: an output is up to 1.6e-2 of their standard deviation off the product with the
  layer's own dequantised weight (3e-3 in norm, 4096 inputs). So curves of such a layer are no oracle for ours.
* torchao: its NF4Tensor. Its table is rounded to four digits, so its values differ slightly.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fquant


class Contestant(NamedTuple):
    """The functions of one library; ``dequantise`` is None without codes to decode."""

    pack: Callable[[Tensor], Any]  # w bf16[out in] to what the others take
    linear: Callable[[Tensor, Any], Tensor]  # x bf16[m in] to bf16[m out]
    dequantise: Callable[[Any], Tensor] | None = None
    trains: bool = True


class Weights:
    """``number`` random weights in the form of each contestant, packed at their first use."""

    def __init__(self, contestants: dict[str, Contestant], shape: tuple[int, int], number: int) -> None:
        self.contestants, self.shape, self.number = contestants, shape, number
        self.generator = torch.Generator().manual_seed(0)
        self.dense = [0.02 * self.normal(*shape) for _ in range(number)]
        self.packed = cache(lambda name: [contestants[name].pack(w) for w in self.dense])

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Draw the generator's next normally distributed values."""
        return torch.randn(shape, generator=self.generator).to(dtype)


def contestants() -> tuple[dict[str, Contestant], dict[str, str]]:
    """Return the contestants, and the reasons why others are missing."""
    found = {
        "fquant": Contestant(lambda w: fquant.quantize(w, fquant.NF4_DQ), fquant.linear, fquant.dequantize),
        "bf16": Contestant(lambda w: w, lambda x, w: x @ w.mT),
    }
    missing: dict[str, str] = {}
    for peer, names in ((_bitsandbytes, ("bnb", "bnb eval")), (_torchao, ("torchao",))):
        try:
            with warnings.catch_warnings(action="ignore"), quiet():
                entered = peer()
        except ImportError as error:
            missing |= dict.fromkeys(names, str(error))
        else:
            found |= entered
            missing |= {name: "it repacks for AVX512-BF16 only" for name in names if name not in entered}
    return found, missing


def versions(contestants: dict[str, Contestant]) -> dict[str, str]:
    """Return the releases of torch and of the libraries that take part."""
    names = {"torch": "bf16", "bitsandbytes": "bnb", "torchao": "torchao"}
    return {name: version(name) for name, who in names.items() if who in contestants}


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress log lines: importing a peer logs every optional part that is missing."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _bitsandbytes() -> dict[str, Contestant]:
    import bitsandbytes as bnb
    import bitsandbytes.functional as F

    def repacked(w: Tensor) -> Any:
        layer = bnb.nn.Linear4bit(*w.T.shape, bias=False, compute_dtype=w.dtype, quant_type="nf4")
        layer.load_state_dict({"weight": w}, strict=False)
        layer = layer.to("cpu").eval()
        with torch.no_grad():
            layer(w[:1])  # repacks
        return layer

    found = {
        "bnb": Contestant(
            lambda w: F.quantize_4bit(w, quant_type="nf4", compress_statistics=True, blocksize=64),
            lambda x, p: bnb.matmul_4bit(x, p[0].t(), quant_state=p[1]),
            lambda p: F.dequantize_4bit(*p),
        )
    }
    if F.has_avx512bf16():
        found["bnb eval"] = Contestant(repacked, lambda x, layer: layer(x), trains=False)
    return found


def _torchao() -> dict[str, Contestant]:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

    return {"torchao": Contestant(lambda w: to_nf4(w, 64, 256), linear_nf4, lambda p: p.get_original_weight())}
