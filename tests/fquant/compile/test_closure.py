"""A captured function is retraced when a Python value that it reads and is not given has changed."""

import enum
import math
import types
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import NamedTuple

import pytest
import torch
from torch.func import grad

from fquant import jit, optim
from fquant.compile import closure
from tests.helpers.qlora_step import X, equal, start, step, tokens_of

RATE = 0.5
SETTINGS = {"rate": 0.5, "other": [1, 2]}


class Kind(enum.Enum):
    SIN = "sin"
    COS = "cos"


@dataclass
class Config:
    rate: float = 0.5
    rates: list = field(default_factory=lambda: [0.5, 1.0])
    kind: Kind = Kind.SIN


@dataclass(frozen=True)
class Frozen:
    rate: float = 0.5
    inner: Config = field(default_factory=Config)


@dataclass(slots=True)
class Slotted:
    rate: float = 0.5


class Pair(NamedTuple):
    rate: float
    other: int


class Model:
    scale = 2.0

    def __init__(self):
        self.rate, self.rates, self.config, self.unread = 0.5, [0.5], Config(), 0

    def __call__(self, x):
        return x * self.rate

    def method(self, x):
        return x * self.rate + self.helper(x) * self.doubled

    def helper(self, x):
        return x * self.rates[0] * self.scale * self.config.rate

    @property
    def doubled(self):
        return 2 * self.config.rates[-1]


def cell():
    rate = 0.5

    def change():
        nonlocal rate
        rate = 0.25

    return lambda x: x * rate, change, "`rate` was 0.5, is 0.25"


def a_global():
    return lambda x: x * RATE, lambda: globals().update(RATE=0.25), "`RATE` was 0.5, is 0.25"


def attribute_of(name, change, said, call=Model.method):
    def case():
        model = Model()
        return (
            partial(call, model) if name == "partial" else types.MethodType(call, model),
            partial(change, model),
            said,
        )

    return case


def of(x, read, change, said):
    """A case of a closed-over ``x``."""

    def case():
        held = x() if callable(x) else x
        return lambda y: read(y, held), lambda: change(held), said

    return case


def nested():
    rate = 0.5

    def change():
        nonlocal rate
        rate = 0.25

    def inner(x):
        return [(lambda y: y * rate)(x) for _ in range(2)][1]

    def outer(x):
        return inner(x) + 1

    return outer, change, "`rate` was 0.5, is 0.25"


def through_a_library():
    config = Config()
    return grad(lambda x: (x * config.rate).sum()), lambda: setattr(config, "rate", 0.25), "`config.rate` was 0.5, is"


def of_an_optimiser():
    config = Config()
    opt = optim.chain(optim.adamw(lambda count: count * 0 + config.rate))
    update = lambda params: opt.update(params, opt.init(params), params)[0]
    return lambda x: update({"w": x})["w"], lambda: setattr(config, "rate", 0.25), "`config.rate` was 0.5, is 0.25"


def a_partial():
    config = Config()
    f = lambda config, x: x * config.rate
    return partial(f, config), lambda: setattr(config, "rate", 0.25), "`config.rate` was 0.5, is 0.25"


def a_partial_of_a_list():
    rates = [0.5]
    return (
        partial(lambda x, rates: x * rates[0], rates=rates),
        partial(rates.__setitem__, 0, 0.25),
        "`rates[0]` was 0.5",
    )


def a_default():
    rates = [0.5]

    def f(x, rates=rates):
        return x * rates[0]

    return f, partial(rates.__setitem__, 0, 0.25), "`rates[0]` was 0.5, is 0.25"


def a_wrapped_function():
    config = Config()

    def decorated(f):
        @wraps(f)
        def g(*args):
            return f(*args)

        return g

    return decorated(lambda x: x * config.rate), lambda: setattr(config, "rate", 0.25), "`config.rate` was 0.5, is 0.25"


def a_function():
    f = lambda x: x * 2

    def change():
        nonlocal f
        f = lambda x: x * 3

    return lambda x: f(x), change, "`f` was <function a_function.<locals>"


def a_captured_function():
    config = Config()
    inner = jit(lambda x: x * config.rate)
    return lambda x: inner(x) + 1, lambda: setattr(config, "rate", 0.25), "`config.rate` was 0.5, is 0.25"


def rebound():
    config = Config()

    def change():
        nonlocal config
        config = Config(rate=0.25)

    return lambda x: x * config.rate, change, "`config.rate` was 0.5, is 0.25"


def a_class():
    class Options:
        rate = 0.5

    return lambda x: x * Options.rate, lambda: setattr(Options, "rate", 0.25), "`Options.rate` was 0.5, is 0.25"


def a_module():
    module = types.ModuleType("settings_of_a_user")
    module.__file__, module.rate = "/elsewhere/settings.py", 0.5
    return lambda x: x * module.rate, lambda: setattr(module, "rate", 0.25), "`module.rate` was 0.5, is 0.25"


def rates_of(config, x):
    return x * config.rates[0] * (config.rate + (config.kind is Kind.SIN))


put = lambda key, value: lambda x: x.__setitem__(key, value)
let = lambda name, value: lambda x: setattr(x, name, value)
CASES = {
    "a variable of an enclosing function": cell,
    "a global": a_global,
    "a nested function": nested,
    "an attribute of self": attribute_of("self", let("rate", 0.25), "`self.rate` was 0.5, is 0.25"),
    "an attribute of self in another method": attribute_of("self", let("scale", 3.0), "`self.scale` was 2.0, is 3.0"),
    "an item of a list of self": attribute_of("self", lambda m: m.rates.append(1), "`self.rates[1]` was absent, is 1;"),
    "an attribute of an attribute": attribute_of(
        "self", lambda m: let("rate", 1)(m.config), "`self.config.rate` was 0.5"
    ),
    "in a property": attribute_of(
        "self", lambda m: put(1, 2.0)(m.config.rates), r"`self.config.rates[1]` was 1.0, is 2"
    ),
    "a partial method": attribute_of("partial", let("rate", 0.25), "`self.rate` was 0.5, is 0.25"),
    "a callable object": attribute_of("self", let("rate", 0.25), "`self.rate` was 0.5, is 0.25", Model.__call__),
    "an item of a list": of(lambda: [1, 0.5], lambda x, v: x * v[1], put(1, 0.25), "`held[1]` was 0.5, is 0.25"),
    "the type of an item": of(lambda: [1, 2], lambda x, v: x * v[1], put(1, 2.0), "`held[1]` was 2, is 2.0"),
    "an item of a list in a list": of(
        lambda: [[0.5]], lambda x, v: x * v[0][0], lambda v: put(0, 0.25)(v[0]), "`held[0][0]` was 0.5"
    ),
    "a value of a dict": of(
        lambda: {"a": 1, "b": 0.5}, lambda x, v: x * v["b"], put("b", 0.25), "`held['b']` was 0.5, is 0.25"
    ),
    "a key of a dict": of(lambda: {"a": 1}, lambda x, v: x * len(v), put("b", 1), "`held['b']` was absent, is 1;"),
    "a set": of(lambda: {1}, lambda x, v: x * len(v), lambda v: v.add(2), "`held` was frozenset({(<class 'int'>, 1)})"),
    "a field of a dataclass": of(Config, lambda x, v: rates_of(v, x), let("rate", 0.25), "`held.rate` was 0.5"),
    "a list of a dataclass": of(
        Config, lambda x, v: rates_of(v, x), lambda v: put(0, 0.25)(v.rates), "`held.rates[0]` was 0.5, is 0.25"
    ),
    "an enum": of(
        Config,
        lambda x, v: rates_of(v, x),
        let("kind", Kind.COS),
        "`held.kind` was <Kind.SIN: 'sin'>, is <Kind.COS: 'cos'>",
    ),
    "within a frozen dataclass": of(
        Frozen, lambda x, v: x * v.inner.rate, lambda v: let("rate", 0.25)(v.inner), "`held.inner.rate` was 0.5"
    ),
    "slots": of(Slotted, lambda x, v: x * v.rate, let("rate", 0.25), "`held.rate` was 0.5, is 0.25"),
    "a namespace": of(
        lambda: types.SimpleNamespace(rate=0.5), lambda x, v: x * v.rate, let("rate", 0.25), "`held.rate`"
    ),
    "a function of a library": through_a_library,
    "an optimiser": of_an_optimiser,
    "a partial": a_partial,
    "a list of a partial": a_partial_of_a_list,
    "a default": a_default,
    "a wrapped function": a_wrapped_function,
    "a function": a_function,
    "a captured function": a_captured_function,
    "another object": rebound,
    "a class": a_class,
    "a module": a_module,
}


@pytest.fixture(autouse=True)
def globals_come_back(monkeypatch):
    monkeypatch.setitem(globals(), "RATE", 0.5)
    yield
    Model.scale = 2.0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_change_is_retraced_by_name(case):
    f, change, said = case()
    captured = jit(f, max_traces=2)
    before = captured(X)
    assert equal(captured(X), before) and equal(before, f(X)) and len(captured.traced) == 1
    change()
    after = captured(X)
    assert equal(after, f(X)) and equal(captured(X), after) and len(captured.traced) == 2
    f, change, said = case()
    Model.scale = 2.0
    globals()["RATE"] = 0.5
    once = jit(f, max_traces=1)
    once(X)
    change()
    with pytest.raises(RuntimeError) as caught:
        once(X)
    assert said in str(caught.value) and "more than 1 times" in str(caught.value)


def test_a_value_that_comes_back_is_not_retraced():
    config = Config()
    captured = jit(lambda x: x * config.rate)
    for rate in (0.5, 0.25, 0.5, 0.25):
        config.rate = rate
        assert equal(captured(X), X * rate)
    config = replace(config)  # equal, and another object
    assert equal(captured(X), X * 0.25) and len(captured.traced) == 2


SAME = {  # changes that the function cannot see
    "an attribute that is not read": attribute_of("self", let("unread", 1), ""),
    "an equal list": of(lambda: {"a": [1, 2]}, lambda x, v: x * v["a"][0], put("a", [1, 2]), ""),
    "a global of a library": lambda: (lambda x: x * math.pi, lambda: None, ""),
    "a large container": of(lambda: [1] * 1000, lambda x, v: x * v[0], put(0, 2), ""),
}


@pytest.mark.parametrize("case", SAME.values(), ids=SAME)
def test_what_is_not_retraced(case):
    f, change, _ = case()
    captured = jit(f)
    captured(X)
    change()
    captured(X)
    assert len(captured.traced) == 1


def test_what_the_trace_changes_is_not_guarded():
    calls, config, count = [], Config(), 0

    def f(x):
        nonlocal count
        calls.append(x.shape)
        count += 1
        return x * config.rate

    captured = jit(f)
    for _ in range(3):
        captured(X)
    assert len(calls) == count == len(captured.traced) == 1
    config.rate = 0.25
    assert equal(captured(X), X * 0.25) and len(calls) == count == 2


def test_attributes_of_an_argument_are_guarded():
    class Trainer:
        def __init__(self):
            self.rate = 0.5

        @jit
        def step(self, x):
            return x * self.rate

    trainer = Trainer()
    assert equal(trainer.step(X), X * 0.5)
    trainer.rate = 0.25
    assert equal(trainer.step(X), X * 0.25) and len(Trainer.step.traced) == 2
    rate = 0.5
    apply = jit(lambda f, x: f(x))
    f = lambda x: x * rate
    assert equal(apply(f, X), X * 0.5)
    rate = 0.25
    assert equal(apply(f, X), X * 0.25)


def test_two_variables_of_one_name():
    def scale(rate):
        def change(value):
            nonlocal rate
            rate = value

        return lambda x: x * rate, change

    (f, change_f), (g, change_g) = scale(0.5), scale(2.0)
    captured = jit(lambda x: f(x) + g(x))
    assert equal(captured(X), X * 0.5 + X * 2.0)
    change_f(0.25)
    assert equal(captured(X), X * 0.25 + X * 2.0)
    change_g(0.25)
    assert equal(captured(X), X * 0.25 + X * 0.25) and len(captured.traced) == 3


def test_a_number_that_becomes_a_tensor_is_refused():
    rate = 0.5
    captured = jit(lambda x: x * rate)
    captured(X)
    rate = torch.ones(3)
    with pytest.raises(TypeError, match=r"uses a tensor that is no argument: rate float32\[3\]"):
        captured(X)


def test_a_replay_compares_and_does_not_search(monkeypatch):
    adapters, state, base = start()
    captured = jit(step)
    captured(adapters, state, base, tokens_of(0))
    monkeypatch.setattr(closure, "_Search", None)
    captured(adapters, state, base, tokens_of(0))
    assert len(captured.traced) == 1
