"""Operands of products with packed weights, and the check of both products of a backend against float64."""

import torch

from fquant.kernels import dispatch, reference
from fquant.kernels.spec import Spec
from tests.helpers.formats import draw
from tests.helpers.kernels.rounding import assert_product

rng = torch.Generator().manual_seed


def operands(device, format, shape, dtype, of, rows, stack=(), seed=0):
    """Return buffers and spec of a weight, its values, x [*stack rows in] and g [*stack rows out] in dtype ``of``."""
    spec = Spec(format, shape, dtype)
    buffers = draw(spec, stack, seed)
    w = reference.decode(buffers, spec, of).to(device)
    x, g = (torch.randn(*stack, rows, n, generator=rng(seed)).to(device, of) for n in reversed(shape))
    return [b.to(device) for b in buffers], spec, w, x, g


def assert_products(device, format, shape, dtype, of, rows, stack=(), seed=0, plan=None):
    """Check ``x · Wᵀ`` and ``g · W`` by the backend of ``device``; a plan for few rows is that of the first alone."""
    module = dispatch.backend(device.type)[1]
    buffers, spec, w, x, g = operands(device, format, shape, dtype, of, rows, stack, seed)
    note = (format, shape, dtype, of, rows, stack, plan)
    assert_product(module.matmul(x, buffers, spec, plan), x, w.mT, note)
    of_both = None if hasattr(plan, "parts") else plan
    assert_product(module.matmul_t(g, buffers, spec, of_both), g, w, note)
