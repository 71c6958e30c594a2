"""The kernels for CUDA, ``triton_encode`` and the others that are called so; whether they can run.

They run in Triton's interpreter, too, on tensors on the CPU and without a GPU, thousands of times slower: with
``TRITON_INTERPRET=1`` in the environment before anything imports triton. So their arithmetic is tested anywhere.
"""

from __future__ import annotations

import torch

try:
    # Programs and silu are better written by Inductor, and attention by nobody yet.
    from ..reference import attention, attention_backward, pointwise, silu, silu_derivative
    from .dequantize import INTERPRETED, decode
    from .gemm import matmul, matmul_t
    from .losses import nll, nll_backward
    from .norms import rms_norm, rms_norm_backward
    from .quantize import encode
    from .random_bits import bernoulli, bits, fold
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "triton":
        raise
    raise ImportError(
        "triton is not installed; pip install triton, or a CUDA build of torch, which brings it"
    ) from error

__all__ = [
    "DEVICES", "attention", "attention_backward", "bernoulli", "bits", "decode", "encode", "fold", "load", "matmul",
    "matmul_t", "nll", "nll_backward", "pointwise", "rms_norm", "rms_norm_backward", "silu", "silu_derivative",
]  # fmt: skip

DEVICES = ("cuda", "cpu") if INTERPRETED.value else ("cuda",)


def load() -> None:
    """Raise ImportError where Triton has nothing to run on."""
    if INTERPRETED.value:
        return
    if not torch.cuda.is_available():
        raise ImportError("Triton needs a CUDA device and a CUDA build of torch, and one of them is not there")
