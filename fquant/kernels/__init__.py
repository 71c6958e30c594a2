"""Forward-only ops, and the table (op, device) -> backend that computes them.

    encode(rows, format)               f[... n] to codes and absmax
    decode(buffers, spec, out)         a packed array to f[*stack *shape] in dtype ``out``
    matmul(x, buffers, spec)           x · Wᵀ for W packed: f[*stack m in] to f[*stack m out]
    matmul_t(g, buffers, spec)         g · W, its transpose: f[*stack m out] to f[*stack m in]

``buffers`` are the leaves of a Packed, and ``spec`` is its static half (``spec.py``). These four ops are defined in
``packed_ops.py``, and each other one in a file of ``ops/``. ``registry.py`` registers them with torch under
``fquant::``. An op has a fake implementation and no autograd, so capture and compile see one node. One that is
asked for a derivative raises TypeError. Derivatives are autograd Functions that call the op (``packed_linear.py``).

``dispatch.py`` picks the backend by device. A function of a backend is the op of its name, on checked arguments. The
environment variable ``FQUANT_KERNELS=reference|cpu|triton`` forces one, and ``cpu:avx2`` one instruction set of it.

* ``cpu``: the C kernels of ``cpu/csrc``, for CPU tensors.
* ``triton``: for CUDA tensors.
* ``reference``: plain torch, which defines the results. It serves float64 and every other device. It also replaces a
  backend that is not available, with one warning.

Arrays of learned vectors have kernels in C. Elsewhere ``additive_codebooks.py`` decodes a tile at a time, which torch
multiplies.
"""

from .packed_ops import decode, encode, matmul, matmul_t

__all__ = ["decode", "encode", "matmul", "matmul_t"]
