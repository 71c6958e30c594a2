"""Decomposition: the bits of the op, for infinite and missing values, any dims and layouts; memory as predicted."""

import math

import pytest
import torch
from torch.func import grad, vmap

from fquant import cost, jit
from tests.helpers.arrays import randn

SPECIAL = randn(6, 5)
SPECIAL[0], SPECIAL[1, 2], SPECIAL[2, 1], SPECIAL[3, 0] = -math.inf, math.inf, math.nan, -math.inf


def same_bits(a, b):
    kind = torch.int16 if a.element_size() == 2 else torch.int32 if a.element_size() == 4 else torch.int64
    return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a.view(kind), b.view(kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dim, keepdim", [(0, False), (-1, True), ((0, 1), False), ((0, 1), True), (1, False)])
@pytest.mark.parametrize(
    "x", [randn(6, 5) * 9, randn(5, 6).mT, randn(33, 70), SPECIAL], ids=["", "t", "large", "special"]
)
def test_bits_are_those_of_the_op(x, dim, keepdim, dtype):
    f = lambda x: torch.logsumexp(x, dim, keepdim)
    captured, x = jit(f), x.to(dtype)
    for _ in range(3):
        assert same_bits(captured(x), f(x))
    (trace,) = captured.traced.values()
    assert not trace.module.graph.find_nodes(op="call_function", target=torch.ops.aten.logsumexp.default)


@pytest.mark.parametrize(
    "x", [torch.zeros(0, 3), torch.zeros(3, 0), torch.ones(3, 2, dtype=torch.int64), torch.ones(())], ids=str
)
def test_what_has_no_values_and_no_fractions(x):
    f = lambda x: torch.logsumexp(x, 0)
    for _ in range(2):
        assert torch.equal(jit(f)(x), f(x))


def test_gradients_and_maps():
    f = lambda x: torch.logsumexp(x * x, -1).sum()
    for g in (grad(f), vmap(grad(f)), vmap(f)):
        assert torch.equal(jit(g)(randn(6, 5)), g(randn(6, 5)))


def test_memory_is_predicted():
    """The exponentials are part of the price: the bytes of x, beside x and results of a row each."""
    x = torch.empty(512, 512, device="meta")
    price = cost(lambda x: torch.logsumexp(x, 0), x)
    assert 4 * 512 * 512 <= price.peak - price.arguments <= 1.02 * 4 * 512 * 512


# --- operands of products ---------------------------------------------------------------------------------------------

OPERANDS = {  # of [70 50] from an array by its dtype, and whether torch's product copies it
    "rows": (lambda of: of(70, 50), False),
    "columns": (lambda of: of(50, 70).mT, False),
    "rows apart": (lambda of: of(70, 64)[:, 7:57], False),
    "columns apart": (lambda of: of(64, 70)[7:57].mT, False),
    "one row for all": (lambda of: of(50).expand(70, 50), True),
    "one column for all": (lambda of: of(70, 1).expand(70, 50), True),
    "one number": (lambda of: of(1, 1).expand(70, 50), True),
    "every second column": (lambda of: of(70, 100)[:, ::2], True),
    "overlapping rows": (lambda of: of(119).as_strided((70, 50), (1, 1)), True),
}
PRODUCTS = {
    "mm": lambda a, b: a @ b,
    "mm of columns": lambda a, b: b.mT @ a.mT,
    "addmm": lambda a, b: torch.addmm(b.sum(0), a, b),
    "gradient": lambda a, b: grad(lambda b: (a @ b).sin().sum())(b),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("operand", OPERANDS)
def test_an_operand_that_blas_cannot_read_is_copied_in_the_graph(operand, product, dtype):
    of = lambda *shape: randn(*shape).to(dtype)
    (make, copied), f, b = OPERANDS[operand], PRODUCTS[product], of(50, 30)
    a = make(of)
    captured = jit(f)
    for _ in range(3):
        assert same_bits(captured(a, b), f(a, b))
    (trace,) = captured.traced.values()
    clones = trace.module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert bool(clones) == (copied and dtype != torch.bfloat16)


def test_the_copy_of_an_operand_is_predicted():
    """A product with rows that are all the same: its copy is as large as what it stands for."""
    row, b = torch.empty(512, device="meta"), torch.empty(512, 8, device="meta")
    price = cost(lambda row, b: row.expand(512, 512) @ b, row, b)
    assert 4 * 512 * 512 <= price.peak - price.arguments <= 1.1 * 4 * 512 * 512


# --- gradients of gelu ------------------------------------------------------------------------------------------------

GRADIENTS = {  # of [4 6 5] from an array by its dtype, and whether oneDNN copies it
    "as x": (lambda of: of(4, 6, 5), False),
    "columns": (lambda of: of(4, 5, 6).mT, True),
    "permuted": (lambda of: of(5, 4, 6).permute(1, 2, 0), True),
    "rows apart": (lambda of: of(4, 6, 9)[..., 2:7], False),
    "one for all": (lambda of: of(1, 6, 1).expand(4, 6, 5), False),
}


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_gradient_of_gelu_is_computed_in_the_layout_of_its_x(gradient, dtype, approximate):
    of = lambda *shape: randn(*shape, seed=len(shape)).to(dtype)
    f = lambda g, x: torch.ops.aten.gelu_backward(g, x, approximate=approximate)
    (make, copied), captured, x = GRADIENTS[gradient], jit(f), of(4, 6, 5)
    g = make(of)
    for _ in range(3):
        assert same_bits(captured(g, x), f(g, x))
    (trace,) = captured.traced.values()
    (node,) = trace.module.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu_backward.default)
    moved = copied and dtype == torch.float32 and approximate == "none"
    assert (node.args[0].meta["val"].stride() == x.stride()) == (gradient == "as x" or moved)


def test_a_gradient_of_gelu_that_is_its_x():
    f, x = lambda x: torch.ops.aten.gelu_backward(x, x), randn(4, 6)
    assert same_bits(jit(f)(x), f(x))
