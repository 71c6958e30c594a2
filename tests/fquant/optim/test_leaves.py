"""The loop over leaves: one op a leaf with the bits of the formula, and transfers of moments in order."""

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant import optim, random, tree
from fquant.communication import Memory
from tests.helpers.arrays import named
from tests.helpers.optim.runs import normal

KEY = random.key(5)
SHAPES = {"w": (30, 41), "v": (77,), "s": ()}
FORMULAS = {  # with moments in float32
    "adamw": optim.adamw(optim.cosine(1e-3, 10), weight_decay=0.1),
    "adam": optim.adam(1e-3, 0.8, 0.95, 1e-6, 0.1),
    "lion": optim.lion(1e-3, weight_decay=0.1),
    "sgd": optim.sgd(0.1, 0.9, weight_decay=0.01),
    "nesterov": optim.sgd(0.1, 0.9, True),
}
EVERY = FORMULAS | {
    "no momentum": optim.sgd(0.1),
    "8 bits": optim.adamw(1e-3, moments=optim.DYNAMIC8),
    "4 bits": optim.lion(1e-3, moments=optim.DYNAMIC4),
    "chain": optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-3)),
    "partition": optim.partition({"w": optim.lion(1e-3), "v|s": optim.sgd(0.1, 0.9, moments=optim.FP8)}),
    "no step of its own": optim.adafactor(1e-2),
}
dtypes = named("dtype", [torch.float32, torch.bfloat16, torch.float16])


def draw(name, dtype, size):
    return {path: normal(f"{name}{path}", shape, size, dtype) for path, shape in SHAPES.items()}


def steps(opt, step, dtype):
    """Return parameters and state after three steps."""
    params = draw("p", dtype, 0.1)
    state = opt.init(params)
    for i in range(3):
        params, state = step(opt, draw(f"g{i}", dtype, 0.01), state, params)
    return params, state


def equal(a, b):
    return tree.structure(a) == tree.structure(b) and all(map(torch.equal, tree.leaves(a), tree.leaves(b)))


@dtypes
@pytest.mark.parametrize("opt", FORMULAS.values(), ids=FORMULAS)
def test_an_op_has_the_bits_of_the_formula(opt, dtype):
    """Under vmap too. The formula is computed in a transposed parameter's strides, and where a derivative is asked."""
    ops = make_fx(lambda *args: optim.step(opt, *args))(draw("g", dtype, 0.01), opt.init(p := draw("p", dtype, 0.1)), p)
    assert sum("_update" in str(node.target) for node in ops.graph.nodes) == len(SHAPES)
    wanted = steps(opt, optim.step, dtype)

    def mapped(opt, *args):
        some = tree.map(lambda t: t[None], args)
        graph = make_fx(vmap(lambda *args: optim.step(opt, *args)))(*some).graph
        assert sum("_update" in str(node.target) for node in graph.nodes) == len(SHAPES)
        return tree.map(lambda t: t[0], vmap(lambda *args: optim.step(opt, *args))(*some))

    def turned(opt, grads, state, params):
        turn = lambda x: tree.map(lambda t: t.mT.contiguous().mT if t.ndim == 2 else t, x)
        new, state = optim.step(opt, grads, state, turn(params))
        assert new["w"].stride() == turn(params)["w"].stride()
        return new, state

    assert equal(steps(opt, mapped, dtype), wanted) and equal(steps(opt, turned, dtype), wanted)


def test_a_step_in_float32_has_derivatives():
    opt, params = FORMULAS["adam"], draw("p", torch.float32, 0.1)
    grads, state = draw("g", torch.float32, 0.01), opt.init(params)
    f = lambda w: optim.step(opt, grads | {"w": w}, state, params)[0]["w"]
    direction = normal("d", SHAPES["w"], 1.0)
    value, tangent, *_ = jvp(f, (grads["w"],), (direction,))
    assert torch.equal(value, f(grads["w"])) and tangent.abs().max() > 0
    back = grad(lambda w: (f(w) * direction).sum())(grads["w"])
    torch.testing.assert_close((back * direction).sum(), (tangent * direction).sum(), rtol=1e-4, atol=1e-6)
    of_two = torch.stack([grads["w"], 2 * grads["w"]])
    each = torch.stack([grad(lambda w: (f(w) * direction).sum())(w) for w in of_two])
    assert torch.equal(vmap(grad(lambda w: (f(w) * direction).sum()))(of_two), each)
    torch.testing.assert_close(grad(lambda some: (vmap(f)(some) * direction).sum())(of_two), each)
    outside = of_two.clone().requires_grad_()
    (vmap(f)(outside) * direction).sum().backward()
    torch.testing.assert_close(outside.grad, each)


@dtypes
@pytest.mark.parametrize("opt", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
def test_a_step_is_an_update_and_its_application(opt, key, dtype):
    def apart(opt, grads, state, params):
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates, key), state

    got = steps(opt, lambda *args: optim.step(*args, key), dtype)
    assert equal(got, steps(opt, apart, dtype))
    differs = not equal(got[0], steps(opt, optim.step, dtype)[0])
    assert differs == (key is not None and dtype != torch.float32)


@pytest.mark.parametrize("opt", [EVERY["8 bits"], FORMULAS["sgd"]], ids=["8 bits", "f32"])
def test_a_stochastic_step_is_one_op_a_leaf(opt):
    params, grads = draw("p", torch.bfloat16, 0.1), draw("g", torch.bfloat16, 0.01)
    traced = make_fx(lambda *args: optim.step(opt, *args))(grads, opt.init(params), params, KEY)
    names = [str(node.target) for node in traced.graph.nodes]
    assert sum("_update" in name for name in names) == len(SHAPES) and not any("arange" in name for name in names)


def test_moments_of_the_next_leaf_are_fetched_and_those_of_the_last_stored_meanwhile():
    log, params = [], {name: torch.full((2,), float(i)) for i, name in enumerate("abc")}
    name = lambda p: "abc"[int(p[0])]

    def wait(text, t):
        log.append(text)
        return lambda: log.append(f"wait: {text}") or t

    def new(old, t):
        return wait(f"store {name(old)}", t)

    memory = Memory(
        lambda shape, dtype, p: log.append(f"zeros {name(p)}") or p.clone(),
        lambda moment, p: wait(f"fetch {name(p)}", moment),
        new,
    )
    opt = optim.sgd(1.0, 0.5, memory=memory)
    state = opt.init(params)
    assert log == ["zeros a", "zeros b", "zeros c"]
    log.clear()
    got, state = optim.step(opt, tree.map(torch.zeros_like, params), state, params)
    assert log == [
        "fetch a", "fetch b", "wait: fetch a", "store a", "fetch c", "wait: fetch b", "wait: store a", "store b",
        "wait: fetch c", "wait: store b", "store c", "wait: store c",
    ]  # fmt: skip
    half = tree.map(lambda p: 0.5 * p, params)
    assert equal(state.momentum, half) and equal(got, half)


def test_a_fault_of_a_transfer_names_the_leaf():
    def fault(*_):
        raise ValueError("no room")

    for memory in (Memory(fetch=fault), Memory(store=fault)):
        opt = optim.lion(1e-3, memory=memory)
        params = draw("p", torch.float32, 0.1)
        with pytest.raises(ValueError, match=r"^w: no room"):
            optim.step(opt, params, opt.init(params), params)
