"""The arithmetic of packed arrays as four forward-only ops, and the table of who computes them where.

    encode(rows, format)               f[... n] to codes and absmax
    decode(buffers, spec, out)         a packed array to f[*stack *shape] in dtype ``out``
    matmul(x, buffers, spec)           x · Wᵀ for W packed: f[*stack m in] to f[*stack m out]
    matmul_t(g, buffers, spec)         g · W, its dual:     f[*stack m out] to f[*stack m in]

``buffers`` are the leaves of a Packed and ``spec`` is the rest of it (``spec.py``). Each op is registered with torch
under ``fquant::``, with a fake implementation and without autograd, so that capture and compile see one node and the
derivatives are written once, in ``fquant/packed_linear.py``; an op that is asked for a derivative itself says so.

Who computes is a table, device -> backend: ``cpu`` (csrc/kernels.c, all there is in C) for CPU tensors, ``triton`` for CUDA
tensors, and ``reference`` (plain torch, the definition of right) on any other device, or where a backend cannot be
had, which is said once. The environment variable ``FQUANT_KERNELS=reference|cpu|triton`` forces one, and
``cpu:avx2`` one instruction set of it. The ops of random words, in ``threefry.py``, those of a loss of logits, in
``nll.py``, of norms, in ``norm.py``, of attention, in ``attention.py``, of silu, in ``silu.py``, and the programs of
captured graphs, in ``pointwise.py``, to which ``turn.py`` belongs, go by the same table. The op of the nearest of
many rows, in ``nearest.py``, is torch's matrix product in tiles on every device; so are products with arrays of
learned vectors, in ``vectors.py``.
"""

from .packed_ops import decode, encode, matmul, matmul_t

__all__ = ["decode", "encode", "matmul", "matmul_t"]
