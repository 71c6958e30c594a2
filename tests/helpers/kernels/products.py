"""Operands of products with packed weights, and the check of both products of a backend against float64."""

import torch

from fquant.kernels import dispatch, reference
from fquant.kernels.spec import Spec
from tests.helpers.formats import draw
from tests.helpers.kernels.rounding import assert_product

rng = torch.Generator().manual_seed


def operands(format, shape, dtype, of, rows, stack=(), seed=0):
    """Return buffers and spec of a weight, its values, x [*stack rows in] and g [*stack rows out] in dtype ``of``."""
    spec = Spec(format, shape, dtype)
    buffers = draw(spec, stack, seed)
    x, g = (torch.randn(*stack, rows, n, generator=rng(seed)).to(of) for n in reversed(shape))
    return buffers, spec, reference.decode(buffers, spec, of), x, g


def assert_products(format, shape, dtype, of, rows, stack=(), seed=0, plan=None):
    """Check ``x · Wᵀ`` and ``g · W`` by the backend for CPU tensors; a plan for few rows is that of the first alone."""
    module = dispatch.backend("cpu")[1]
    buffers, spec, w, x, g = operands(format, shape, dtype, of, rows, stack, seed)
    note = (format, shape, dtype, of, rows, stack, plan)
    assert_product(module.matmul(x, buffers, spec, plan), x, w.mT, note)
    of_both = None if hasattr(plan, "parts") else plan
    assert_product(module.matmul_t(g, buffers, spec, of_both), g, w, note)
