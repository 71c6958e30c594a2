"""Errors of tracing name cause and place, and leave torch's dispatcher as it was."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from fquant import NF4_DQ, cost, jit, linear, optim, quantize
from tests.helpers.arrays import named
from tests.helpers.qlora_step import X

TABLE = torch.ones(3)
WEIGHT = quantize(torch.ones(4, 64), NF4_DQ)


def closes_over_a_global(x):
    return x * TABLE


def closes_over_a_node(x):
    return linear(x.repeat(1, 22)[:, :64], WEIGHT)


def closes_over_a_module():
    f = torch.nn.Linear(3, 2)
    return lambda x: f(x) * 2


def closes_over_a_local():
    hidden = {"w": torch.ones(3)}
    return lambda x: x * hidden["w"]


class Holder:
    """An object with a tensor of the same name as a global."""

    def __init__(self):
        self.TABLE = torch.ones(3, 3)

    def __call__(self, x):
        return (x @ self.TABLE).sin().sum()


def branches(x):
    return x if x.sum() > 0 else -x


def asks(x):
    return x * x.sum().item()


def selects(x):
    return x[x > 0]


def covariance(x):
    return x.cov() @ x


def hot(x):
    return torch.nn.functional.one_hot(x.long())


def pairs(x):
    return torch.combinations(x[0])


INSTEAD = {  # functions of torch that ask for a value themselves, and what errors say to write
    "cov": (torch.cov, lambda x: (d := x - x.mean(1, keepdim=True)) @ d.mT / (x.shape[1] - 1)),
    "corrcoef": (
        torch.corrcoef,
        lambda x: (d := torch.nn.functional.normalize(x - x.mean(1, keepdim=True))) @ d.mT,
    ),
    "one_hot": (hot, lambda x: (x[..., None] == torch.arange(6)).long()),
}


@named("function", INSTEAD)
def test_what_errors_say_to_write_instead_is_the_same(function):
    f, instead = INSTEAD[function]
    x = X + X.flip(0) ** 2 if f is not hot else X
    torch.testing.assert_close(jit(instead)(x), f(x))


def draws(x):
    return x + torch.rand(3, generator=torch.Generator().manual_seed(0))


def dispatcher():
    """Return the dispatch keys that torch includes and excludes."""
    return str((torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()))


def transformed(transform):
    """Return a transform of a function that closes over a tensor, the most common mistake."""
    table = torch.ones(3, 3)
    return transform(lambda x: (x @ table).sin().sum())


def held(transform):
    """Return a transform of an object with a tensor."""
    return transform(Holder())


ONE, RATE = torch.ones(()), torch.full((), 0.1)


@dataclass
class Options:
    init: object
    rate: object


class Nested:
    """An object with tensors as attributes, of its class and of itself, and in a container."""

    table = torch.ones(3)

    def __init__(self):
        self.init, self.rate, self.held = ONE, RATE, {"a": [torch.ones(3), (torch.zeros(3), RATE)]}

    def by_attribute(self, x):
        return x * self.rate

    def by_class(self, x):
        return x * self.table

    def by_container(self, x):
        return x + self.held["a"][1][0]


def by_default(x, init=ONE, rate=RATE):
    return x * rate


def by_key(x, key="rate"):
    return x * META[key]


def by_function(x):
    def inner(y):
        return y * META["rate"]

    return inner(x.sin())


def by_lines(x):
    return (
        x.sin() * META["rate"]  # behind a line that reads no tensor but x
        + META["init"]
    )


def in_a_library(x):
    optimizer = optim.sgd(RATE)
    return optimizer.update({"x": x}, optimizer.init({"x": x}), {"x": x})[0]


META, OBJECT, RECORD = {"init": ONE, "rate": RATE}, Nested(), Options(ONE, RATE)
LIST, SAME, MODULE = [torch.ones(3), [{"x": torch.ones(3)}]], {"x": ONE, "y": ONE}, torch.nn.Linear(3, 3)
FIRST = SECOND = torch.ones(3)
NAMES = {  # functions that read one of several tensors, and the name of that
    "a dict": (lambda x: x * META["rate"], "META.rate"),
    "a dict by a variable": (by_key, "META.rate"),
    "a dict by a loop": (lambda x: [x * each for each in META.values()], "each"),
    "a list": (lambda x: x * LIST[1][0]["x"], "LIST.1.0.x"),
    "a namespace": ((lambda held: lambda x: x * held.rate)(SimpleNamespace(**META)), "held.rate"),
    "a dataclass": (lambda x: x * RECORD.rate, "RECORD.rate"),
    "an attribute": (OBJECT.by_attribute, "self.rate"),
    "an attribute of a class": (OBJECT.by_class, "self.table"),
    "a container in an object": (OBJECT.by_container, "self.held.a.1.0"),
    "a module": (lambda x: torch.nn.functional.linear(x, MODULE.weight), "MODULE.weight"),
    "a module's bias": (lambda x: x + MODULE.bias, "MODULE.bias"),
    "a default": (by_default, "rate"),
    "a partial": (partial(lambda rate, x: x * rate, RATE), "rate"),
    "a global": (lambda x: x * SECOND, "SECOND"),
    "another name of it": (lambda x: x * FIRST, "FIRST"),
    "a key of two": (lambda x: x * SAME["y"], "SAME.y"),
    "another key of it": (lambda x: x * SAME["x"], "SAME.x"),
    "a local": ((lambda: (lambda a, b: lambda x: torch.where(x > 0, x, b) + a)(ONE, RATE))(), "b"),
    "a keyword": (lambda x: torch.add(x, other=META["rate"]), "META.rate"),
    "a list of tensors": (lambda x: torch.stack([x[0, 0], META["rate"]]), "META.rate"),
    "an index": (lambda x: x[:, LIST[0].long()], "LIST.0"),
    "in place": (lambda x: x.clone().mul_(META["rate"]), "META.rate"),
    "a nested function": (by_function, "META.rate"),
    "two lines": (by_lines, "META.rate"),
    "a product of ours": (lambda x: linear(x, MODULE.weight), "MODULE.weight"),
    "an optimiser": (in_a_library, "optimizer.update.run.rate.lr"),  # and not RATE, which the expression does not read
    "grad": (grad(lambda x: (x * META["rate"]).sum()), "META.rate"),
    "vmap": (vmap(lambda x: x * META["rate"]), "META.rate"),
    "hessian": (hessian(lambda x: (x.sin() * META["rate"]).sum()), "META.rate"),
}


@named("case", NAMES)
def test_the_tensor_that_is_read_is_named(case):
    f, name = NAMES[case]
    with pytest.raises(TypeError, match=rf"{USES} {name} float32\[[\d, ]*\] in \S+ {HERE}; pass it"):
        jit(f)(X)


HERE = r"\(.*test_errors.py:\d+\)"
TRANSFORMS = {
    "within grad": grad,
    "within vmap": vmap,
    "within jvp": lambda f: lambda x: jvp(f, (x,), (x,)),
    "within vjp": lambda f: lambda x: vjp(f, x)[1](torch.ones(())),
    "within jacfwd": jacfwd,
    "within jacrev": jacrev,
    "within hessian": hessian,
    "within vmap of grad": lambda f: vmap(grad(f)),
    "within vmap of jvp": lambda f: vmap(lambda x: jvp(f, (x,), (x,))),
    "within jvp of vmap": lambda f: lambda x: jvp(vmap(f), (x,), (x,)),
    "within jvp of grad": lambda f: lambda x: jvp(grad(f), (x,), (x,)),
}
USES, ASKS = "uses a tensor that is no argument:", "asks for the value of a tensor"
MINE = X.as_subclass(type("Mine", (torch.Tensor,), {}))
ERRORS = {  # a function, its argument, and the TypeError
    "a global": (closes_over_a_global, X, rf"{USES} TABLE float32\[3\] in closes_over_a_global {HERE}; pass it"),
    "a node": (closes_over_a_node, X, rf"{USES} WEIGHT.codes uint8\[4, 32\]"),
    "a local": (closes_over_a_local(), X, rf"{USES} hidden.w float32\[3\]"),
    **{
        name: (transformed(transform), X, rf"{USES} table float32\[3, 3\] in <lambda> {HERE}")
        for name, transform in TRANSFORMS.items()
    },
    **{
        f"held {name}": (held(transform), X, rf"{USES} (self|f).TABLE float32\[3, 3\] in __call__ {HERE}")
        for name, transform in TRANSFORMS.items()
    },
    "a method": (Holder().__call__, X, rf"{USES} self.TABLE float32\[3, 3\] in __call__ {HERE}"),
    "a module": (torch.nn.Linear(3, 2).forward, X, rf"{USES} self.weight float32\[2, 3\] in the function; pass"),
    "a module within": (closes_over_a_module(), X, rf"{USES} f.weight float32\[2, 3\] in <lambda> {HERE}"),
    "a branch": (branches, X, rf"jit: branches {HERE} {ASKS} .*; use torch.where"),
    "an item": (asks, X, rf"jit: asks {HERE} {ASKS}"),
    "a selection": (selects, X, rf"jit: selects {HERE} {ASKS} \(aten.nonzero"),
    "inside of torch": (
        covariance,
        X,
        rf"jit: covariance {HERE} calls cov, which itself asks .* write it as d = x - x.me",
    ),
    "inside of a transform": (
        lambda x: vmap(lambda x: x.corrcoef())(x[None]),
        X,
        rf"jit: <lambda> {HERE} calls corrcoef, which itself asks .* write it as d = ",
    ),
    "in a function of torch": (hot, X, rf"jit: hot {HERE} calls one_hot, which itself asks for the value"),
    "in another": (
        pairs,
        X,
        rf"jit: pairs {HERE} calls combinations, .*aten.masked_select.*; write it as tensor ops, or",
    ),
    "in another capture": (lambda x: jit(branches)(x), X, rf"jit: branches {HERE} {ASKS} .*; use torch.where"),
    "an array": (lambda x: x * x.numpy(), X, rf"jit: <lambda> {HERE} {ASKS} \(numpy"),
    "a generator": (draws, X, "jit: .* draws from a torch.Generator; use fquant.random, and pass a key"),
    "a result": (lambda x: (x, [TABLE]), X, rf"{USES} float32\[3\], its result.1.0; pass it as an argument"),
    "the result": (lambda x: TABLE, X, rf"{USES} float32\[3\], its result; pass it as an argument"),
    "a set": (abs, {1}, "x is a set, neither a tensor nor hashable; use a frozen value"),
    "a gradient": (abs, X.clone().requires_grad_(), r"x requires a gradient, .* jit\(grad\(abs\)\)"),
    "a subclass": (abs, MINE, "x is a Mine; pass plain tensors, of a mesh shard.local"),
}


@pytest.mark.parametrize("f, x, message", ERRORS.values(), ids=ERRORS)
def test_what_cannot_be_captured(f, x, message):
    captured, before = jit(f), dispatcher()
    for _ in range(2):
        with pytest.raises(TypeError, match=message):
            captured(x)
    assert dispatcher() == before and torch.equal(jvp(torch.square, (X,), (X,))[1], 2 * X * X)
    with pytest.raises(TypeError, match="too many positional arguments"):
        captured(X, X)
    if f is abs and torch.equal(captured(X), X):  # nor is what was captured of a plain tensor replayed with another
        with pytest.raises(TypeError, match=message):
            captured(x)


async def coroutine(x):
    return x


ODD = {  # tensors of X, and what they are called
    "sparse_coo": torch.Tensor.to_sparse,
    "sparse_csr": torch.Tensor.to_sparse_csr,
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "quantised by torch": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")  # torch's, of what it means to change
@pytest.mark.parametrize("what", ODD)
def test_tensors_that_are_not_dense(what):
    """A sparse tensor must not match the key of a dense one of its shape, such as an expanded number."""
    captured, x = jit(torch.abs), ODD[what](X)
    captured(torch.ones(()).expand(X.shape))
    for given in (x, x, x.clone()):
        with pytest.raises(TypeError, match=f"(x|input|args.*) is a tensor that is {what}; pass a dense one"):
            captured(given)
    assert len(captured.traced) == 1


@dataclass
class Pair:
    a: object


@dataclass(frozen=True)
class Frozen:
    a: object


RESULTS = {  # functions of X, and what their result is called
    "a dataclass": (lambda x: Pair(x), "the result is a Pair"),
    "a frozen dataclass": (lambda x: {"y": (x, Frozen(x))}, "y.1 is a Frozen"),
    "an object": (lambda x: [SimpleNamespace(a=x)], "0 is a SimpleNamespace"),
    "a set": (lambda x: (x, {1}), "1 is a set"),
    "a generator": (lambda x: (x for _ in range(2)), "the result is a generator"),
    "a coroutine": (coroutine, "the result is a coroutine"),
    "a closure": (lambda x: lambda: x, "the result is a function"),
    "a closure over a tree": (lambda x: (1, (lambda d: lambda: d)({"a": [x]})), "1 is a function"),
    "a map": (lambda x: map(torch.exp, [x]), "the result is a map"),
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("f, what", RESULTS.values(), ids=RESULTS)
def test_what_cannot_be_returned(f, what):
    with pytest.raises(TypeError, match=rf"jit: {what}, which is no tree, and not a frozen value without tensors; ret"):
        jit(f)(X)


def test_frozen_values_are_returned():
    f = lambda x: {"y": x * 2, "z": (Frozen((1, "a")), None, 2.5, torch.float32, slice, coroutine)}
    got = jit(f)(X)
    assert torch.equal(got.pop("y"), 2 * X) and got == {"z": f(X)["z"]}


def test_a_cost_names_the_same_place():
    for f in (branches, covariance, closes_over_a_global):
        with pytest.raises(TypeError, match=HERE) as captured:
            jit(f)(X)
        with pytest.raises(TypeError) as priced:
            cost(f, X)
        assert str(captured.value) == str(priced.value)


def test_donations_that_cannot_be():
    with pytest.raises(ValueError, match="jit: donate names b; <lambda> has a"):
        jit(lambda a: a, donate=("b",))
    with pytest.raises(ValueError, match=r"donate: a.0 is float32\[2, 3\], and no result of this kind is left"):
        jit(lambda a: a[0].sum(), donate=("a",))([X.clone()])


def test_too_many_traces_say_what_changed():
    captured = jit(lambda x, rate: x * rate, max_traces=8)
    for i in range(8):
        captured(X, 0.1 * i)
    with pytest.raises(
        RuntimeError, match="more than 8 times: rate is 9.0, and was 0.7.*; pass what changes .* as a tensor"
    ):
        captured(X, 9.0)
    captured(X, 0.0)
    with pytest.raises(RuntimeError, match=r"8 times: x is a tuple, and was a leaf; pass"):
        captured((X,), 0.0)


def test_an_error_of_the_function_is_its_own():
    with pytest.raises(ZeroDivisionError):
        jit(lambda x: x / (1 // 0))(X)
