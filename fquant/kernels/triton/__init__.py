# ruff: noqa: F401  (a face)
"""The backend for CUDA tensors: kernels in Triton.

Triton's interpreter runs them on CPU tensors, thousands of times slower, so their arithmetic is tested anywhere. Set
``TRITON_INTERPRET=1`` before anything imports triton.
"""

import torch

try:
    from .attention import attention
    from .attention_backward import attention_backward
    from .codes import INTERPRETED
    from .decoding import cached_attention
    from .dequantize import decode
    from .elementwise import pointwise, root, silu, silu_derivative, turn
    from .gemm import matmul, matmul_t
    from .grouped import grouped_matmul, grouped_mm, grouped_outer
    from .integers import integer_matmul, integer_mm
    from .moments import adam_update, momentum_update
    from .quantize import encode
    from .random_bits import bernoulli, bits, fold
    from .rows import nll, nll_backward, rms_norm, rms_norm_backward
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "triton":
        raise
    raise ImportError(
        "triton is not installed; pip install triton, or a CUDA build of torch, which brings it"
    ) from error

DEVICES = ("cuda", "cpu") if INTERPRETED.value else ("cuda",)


def load() -> None:
    """Raise ImportError if Triton has no device to run on."""
    if not (INTERPRETED.value or torch.cuda.is_available()):
        raise ImportError("Triton needs a CUDA device and a CUDA build of torch, and one of them is not there")
