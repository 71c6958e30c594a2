"""Tests of fquant.func: torch.func's results, and errors that name the leaf."""

import pytest
import torch

from fquant import func, lora
from fquant.format import INT8, NF4_DQ
from fquant.packed import quantize
from fquant.packed_linear import linear
from fquant.tree import node, static


@node
class FuncPair:
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    kind: str = static(default="pair")


def make():
    generator = torch.Generator().manual_seed(0)
    base = {"q": quantize(torch.randn(8, 64, generator=generator), NF4_DQ)}
    adapters = {path: w for path, w in lora.init(base, "q", rank=2).items()}
    return adapters, base, torch.randn(3, 64, generator=generator)


def loss(adapters, base, x):
    return linear(x, lora.attach(base, adapters)["q"]).square().sum()


def with_aux(adapters, base, x):
    return loss(adapters, base, x), x.sum()


def equal(a, b):
    assert torch.utils._pytree.tree_structure(a) == torch.utils._pytree.tree_structure(b)
    leaves = torch.utils._pytree.tree_leaves
    assert leaves(a) and all(torch.equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


@pytest.mark.parametrize("argnums", [0, (0, 2), 2], ids=str)
@pytest.mark.parametrize("f, has_aux", [(loss, False), (with_aux, True)], ids=["", "aux"])
def test_otherwise_they_are_those_of_torch(f, has_aux, argnums):
    args = make()
    equal(func.grad(f, argnums, has_aux)(*args), torch.func.grad(f, argnums, has_aux)(*args))
    equal(func.grad_and_value(f, argnums, has_aux)(*args), torch.func.grad_and_value(f, argnums, has_aux)(*args))
    assert func.grad(loss).__name__ == "loss"


def test_vjp_and_jvp_are_those_of_torch():
    adapters, base, x = make()
    f = lambda adapters, x: loss(adapters, base, x)
    one, two = func.vjp(f, adapters, x), torch.func.vjp(f, adapters, x)
    equal(one[0], two[0])
    equal(one[1](torch.tensor(1.0)), two[1](torch.tensor(1.0)))
    equal(*(m.jvp(f, (adapters, x), (adapters, x)) for m in (func, torch.func)))
    g = lambda x: (f(adapters, x), x)
    equal(func.vjp(g, x, has_aux=True)[2], x)
    equal(*(m.jvp(g, (x,), (x,), has_aux=True) for m in (func, torch.func)))


def test_absent_fields_are_no_leaves():
    p = FuncPair(torch.ones(3))
    assert func.grad(lambda p: p.weight.square().sum())(p).bias is None


ADAPTERS, BASE, INPUT = make()
INT = quantize(torch.ones(2, 64), INT8)
FIX = r"wanted a float tensor; differentiate a tree of floats \(adapters from fquant.lora.init\) and pass quantised"
BAD = {  # what is differentiated, the message for argument 0
    "packed": (BASE["q"], rf"argument_0\.codes: got uint8, {FIX}"),
    "packed in a tree": (BASE, rf"argument_0\.q\.codes: got uint8, {FIX}"),
    "int8": ({"layers": [INT]}, r"argument_0\.layers\.0\.codes: got int8, wanted a float tensor"),
    "adapted": (lora.attach(BASE, ADAPTERS), r"argument_0\.q\.base\.codes: got uint8"),
    "both": ((ADAPTERS, BASE), r"argument_0\.1\.q\.codes: got uint8"),
    "tokens": (torch.tensor([1, 2]), r"^argument_0: got int64, wanted a float tensor"),
    "a mask": ({"mask": torch.ones(2).bool()}, r"argument_0\.mask: got bool, wanted"),
    "None": ({"bias": None}, r"argument_0\.bias: got NoneType, wanted a float tensor"),
    "None itself": (None, r"^argument_0: got NoneType, wanted a float tensor"),
    "a float": ({"lr": 0.1, "w": torch.ones(2)}, r"argument_0\.lr: got float, wanted a float tensor"),
    "an int": ([3], r"argument_0\.0: got int, wanted a float tensor"),
    "a field": (FuncPair(torch.ones(2), torch.arange(2)), r"argument_0\.bias: got int64, wanted a float tensor"),
}

CALLS = {
    "grad": lambda x: func.grad(lambda x: 1 / 0)(x),
    "grad_and_value": lambda x: func.grad_and_value(lambda x: 1 / 0)(x),
    "vjp": lambda x: func.vjp(lambda x: 1 / 0, x),
    "jvp": lambda x: func.jvp(lambda x: 1 / 0, (x,), (x,)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("x, message", BAD.values(), ids=BAD)
def test_what_cannot_be_differentiated_is_named(x, message, call):
    with pytest.raises(TypeError, match=message):
        call(x)


def test_every_differentiated_argument_is_checked_and_no_other():
    args = ADAPTERS, BASE, INPUT
    with pytest.raises(TypeError, match=r"argument_1\.q\.codes: got uint8"):
        func.grad(loss, (0, 1))(*args)
    with pytest.raises(TypeError, match=r"argument_1\.q\.codes: got uint8"):
        func.vjp(loss, *args)
    with pytest.raises(TypeError, match=r"argument_1\.q\.codes: got uint8"):
        func.jvp(loss, args, args)
    func.grad(loss, (0, 2))(*args)


def test_float_trees_of_every_dtype_pass():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        func.check({"w": torch.ones(2, dtype=dtype)})
    with pytest.raises(TypeError, match="^w: got int32, wanted a float tensor"):
        func.check({"w": torch.ones(2, dtype=torch.int32)})
