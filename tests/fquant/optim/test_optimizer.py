"""Tests of fquant.optim against torch.optim, torch's schedulers and clipping, and a float64 loop for Lion."""

import math
import re

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant import optim, random, tree
from fquant.tree import node
from tests.helpers.cases import slow_after

STEPS = 50


@node
class Layer:
    w: Tensor
    bias: Tensor | None = None


def make(dtype=torch.float32, seed=0):
    k = random.key(seed)
    draw = lambda name, *shape: random.normal(random.fold(k, name), shape, dtype) * 0.1
    return {"layers": [Layer(draw("a", 4, 3), draw("b", 4)), Layer(draw("c", 5, 2))], "scale": draw("d")}


def gradients(params, step, dtype=torch.float32):
    def one(path, p):
        return random.normal(random.fold(random.fold(random.key(9), path), step), tuple(p.shape), dtype) * 0.01

    return tree.map_with_path(one, params)


def run(opt, params, steps=STEPS):
    state = opt.init(params)
    for step in range(steps):
        updates, state = opt.update(gradients(params, step), state, params)
        params = optim.apply_updates(params, updates)
    return params, state


PEERS = {
    "adamw": (optim.adamw(1e-3), lambda p: torch.optim.AdamW(p, 1e-3)),
    "adamw options": (
        optim.adamw(3e-3, 0.8, 0.95, 1e-6, 0.1),
        lambda p: torch.optim.AdamW(p, 3e-3, (0.8, 0.95), 1e-6, 0.1),
    ),
    "adamw without memory": (
        optim.adamw(1e-3, 0.0, 0.9, 1e-4, 0.0),
        lambda p: torch.optim.AdamW(p, 1e-3, (0.0, 0.9), 1e-4, 0.0),
    ),
    "sgd": (optim.sgd(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "sgd momentum": (optim.sgd(0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
    "sgd all": (
        optim.sgd(0.1, 0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01, nesterov=True),
    ),
}
peers = pytest.mark.parametrize(("opt", "peer"), PEERS.values(), ids=PEERS)
EVERY = {**{name: opt for name, (opt, _) in PEERS.items()}, "lion": optim.lion(1e-3, weight_decay=0.1)}
EVERY["chain"] = optim.chain(optim.clip_by_global_norm(0.02), optim.adamw(optim.cosine(1e-3, STEPS, 5)))
every = pytest.mark.parametrize("opt", EVERY.values(), ids=EVERY)


@peers
def test_fifty_steps_equal_torch(opt, peer):
    params = make()
    theirs = tree.map(lambda p: p.clone().requires_grad_(), params)
    torch_opt = peer(tree.leaves(theirs))
    for step in range(STEPS):
        for p, g in zip(tree.leaves(theirs), tree.leaves(gradients(params, step)), strict=True):
            p.grad = g
        torch_opt.step()
    ours, state = run(opt, params)
    assert state.step == STEPS and state.step.dtype == torch.int64
    for (path, got), want in zip(tree.items(ours), tree.leaves(theirs), strict=True):
        torch.testing.assert_close(got, want.detach(), atol=1e-6, rtol=0, msg=lambda m, path=path: f"{path}: {m}")
    assert not torch.equal(tree.leaves(ours)[0], tree.leaves(params)[0])


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lion_equals_a_loop_in_float64(decay):
    params = make()
    ours, state = run(optim.lion(1e-3, weight_decay=decay), params)
    for path, p in tree.items(params):
        p, m = p.double(), torch.zeros_like(p, dtype=torch.float64)
        for step in range(STEPS):
            g = tree.get(gradients(params, step), path).double()
            p = p - 1e-3 * decay * p - 1e-3 * torch.sign(0.9 * m + (1 - 0.9) * g)
            m = 0.99 * m + (1 - 0.99) * g
        torch.testing.assert_close(tree.get(ours, path).double(), p, atol=1e-6, rtol=0)
        torch.testing.assert_close(tree.get(state.momentum, path).double(), m, atol=1e-7, rtol=0)


FORMULAS = {
    "constant": (optim.constant(0.5), lambda i: 0.5),
    "linear": (optim.linear(0.5, 12, 3, 0.1), lambda i: max(0.1, 0.5 - 0.4 * (i - 3) / 9)),
    "cosine": (optim.cosine(0.5, 12, 3, 0.1), lambda i: 0.3 + 0.2 * math.cos(math.pi * min(1, (i - 3) / 9))),
    "one step": (optim.cosine(0.5, 4, 3), lambda i: 0.5 if i == 3 else 0.0),
}


@pytest.mark.parametrize(("schedule", "after"), FORMULAS.values(), ids=FORMULAS)
def test_schedules_equal_their_formula(schedule, after):
    for i in range(20):
        rising = i < 3 and schedule is not FORMULAS["constant"][0]
        rate = schedule(torch.tensor(i))
        assert rate.dtype == torch.float32 and rate.shape == ()
        assert abs(rate.item() - (0.5 * (i + 1) / 4 if rising else after(i))) < 1e-7


SCHEDULERS = {
    "warm": (optim.constant(0.5, warmup=4), lambda opt: torch.optim.lr_scheduler.LinearLR(opt, 0.2, 1.0, 4)),
    "linear": (optim.linear(0.5, 10, end=0.1), lambda opt: torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.2, 10)),
    "cosine": (optim.cosine(0.5, 10, end=0.1), lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10, 0.1)),
}


SCHEDULES_OF_NUMBERS = {
    "constant": lambda lr, total, warmup, end: optim.constant(lr, warmup),
    "linear": optim.linear,
    "cosine": optim.cosine,
}


@pytest.mark.parametrize("schedule", SCHEDULES_OF_NUMBERS.values(), ids=SCHEDULES_OF_NUMBERS)
def test_schedules_of_tensors_have_the_bits_of_numbers(schedule):
    """Map over learning rates, lengths and steps; a loop has Python's numbers."""
    lr, total, warmup = torch.tensor([1e-3, 0.3, 7e-5]), torch.tensor([9, 4, 12]), torch.tensor([2, 0, 5])
    end, steps = torch.zeros(3), torch.tensor([3, 11, 4])
    got = vmap(lambda *numbers: schedule(*numbers[:4])(numbers[4]))(lr, total, warmup, end, steps)
    each = zip(lr.tolist(), total.tolist(), warmup.tolist(), end.tolist(), steps, strict=True)
    assert torch.equal(got, torch.stack([schedule(*numbers[:4])(numbers[4]) for numbers in each]))


@pytest.mark.parametrize(("schedule", "peer"), SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedules_equal_torch(schedule, peer):
    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = peer(opt)
    for i in range(11):
        assert abs(schedule(torch.tensor(i)).item() - opt.param_groups[0]["lr"]) < 1e-7
        opt.step()
        scheduler.step()


def test_a_schedule_moves_the_optimiser_from_step_zero_on():
    params = {"w": torch.zeros(3)}
    got, _ = run(optim.sgd(optim.linear(0.1, 4, warmup=1)), params, steps=6)
    rates = [0.05, 0.1, 0.1 * 2 / 3, 0.1 / 3, 0.0, 0.0]
    want = -sum(r * gradients(params, i)["w"].double() for i, r in enumerate(rates))
    torch.testing.assert_close(got["w"].double(), want, atol=1e-8, rtol=0)


@pytest.mark.parametrize("max_norm", slow_after(3, [1e-3, 0.05, 10.0]))
def test_clipping_equals_torch(max_norm):
    params = make()
    grads = gradients(params, 0)
    theirs = tree.map(lambda p: p.clone().requires_grad_(), params)
    for p, g in zip(tree.leaves(theirs), tree.leaves(grads), strict=True):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(tree.leaves(theirs), max_norm)
    torch.testing.assert_close(optim.global_norm(grads).float(), norm)
    got, state = optim.clip_by_global_norm(max_norm).update(grads, (), params)
    assert state == ()
    for a, b in zip(tree.leaves(got), tree.leaves(theirs), strict=True):
        torch.testing.assert_close(a, b.grad, atol=1e-9, rtol=1e-6)


def test_a_chain_is_its_parts_in_order():
    params = make()
    chained, (clip_state, adam_state) = run(optim.chain(optim.clip_by_global_norm(0.01), optim.adamw(1e-3)), params)
    clip, adam = optim.clip_by_global_norm(0.01), optim.adamw(1e-3)
    by_hand, state = params, adam.init(params)
    for step in range(STEPS):
        clipped, _ = clip.update(gradients(params, step), (), by_hand)
        updates, state = adam.update(clipped, state, by_hand)
        by_hand = optim.apply_updates(by_hand, updates)
    for a, b in zip(tree.leaves((chained, adam_state)), tree.leaves((by_hand, state)), strict=True):
        assert torch.equal(a, b)


@every
def test_bf16_parameters_are_computed_in_float32_and_cast_once(opt):
    params = make(torch.bfloat16)
    state = opt.init(params)
    wide = tree.map(lambda p: p.float(), params)
    grads = gradients(params, 0, torch.bfloat16)
    updates, after = opt.update(grads, state, params)
    assert all(leaf.dtype in (torch.float32, torch.int64) for leaf in tree.leaves(after))
    want, _ = opt.update(tree.map(lambda g: g.float(), grads), opt.init(wide), wide)
    for u, w in zip(tree.leaves(updates), tree.leaves(want), strict=True):
        assert u.dtype == torch.float32 and torch.equal(u, w)
    new, summed = optim.apply_updates(params, updates), optim.apply_updates(wide, want)
    for p, w in zip(tree.leaves(new), tree.leaves(summed), strict=True):
        assert p.dtype == torch.bfloat16 and torch.equal(p, w.bfloat16())


@every
def test_nothing_given_is_changed(opt):
    params = make()
    grads, state = gradients(params, 0), opt.init(params)
    _, state = opt.update(grads, state, params)
    kept = tree.map(torch.clone, (grads, state, params))
    updates, _ = opt.update(grads, state, params)
    optim.apply_updates(params, updates)
    for a, b in zip(tree.leaves(kept), tree.leaves((grads, state, params)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "opt", slow_after(2, [pytest.param(EVERY[name], id=name) for name in ("chain", "lion", *PEERS)])
)
def test_a_step_is_the_same_traced_compiled_and_under_vmap(opt):
    def step(params, state, grads):
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    params = make()["layers"][0]
    state = opt.init(params)
    want = step(*step(params, state, gradients(params, 0)), gradients(params, 1))
    args = (*step(params, state, gradients(params, 0)), gradients(params, 1))
    traced = make_fx(step, tracing_mode="fake")(params, state, gradients(params, 0))
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    twice = vmap(step)(*tree.map(lambda t: torch.stack([t, t]), args))
    for got in (traced(*args), compiled(*args), tree.map(lambda t: t[1], twice)):
        for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
            torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)


def test_it_minimises_what_grad_differentiates():
    target = make(seed=1)

    def loss(params):
        return sum(((p - t) ** 2).sum() for p, t in zip(tree.leaves(params), tree.leaves(target), strict=True))

    params, opt = make(), optim.adamw(optim.cosine(0.05, 200), weight_decay=0.0)
    state, first = opt.init(params), loss(params)
    for _ in range(200):
        updates, state = opt.update(grad(loss)(params), state, params)
        params = optim.apply_updates(params, updates)
    assert loss(params) < 1e-4 * first


FLOATS = {"w": torch.zeros(2)}
CODES = {"q": Layer(torch.zeros(2), torch.zeros(2, dtype=torch.uint8))}
BAD = {
    "integer leaf": (lambda: optim.adamw(1e-3).init(CODES), TypeError, "q.bias: got uint8, wanted a float"),
    "no tensor": (lambda: optim.sgd(1e-3).init({"w": 1.0}), TypeError, "w: got float, wanted a float tensor"),
    "apply": (lambda: optim.apply_updates(CODES, CODES), TypeError, "q.bias: got uint8"),
    "structure": (
        lambda: optim.lion(1e-3).update({"v": torch.zeros(2)}, optim.lion(1e-3).init(FLOATS), FLOATS),
        ValueError, "gradients: got another structure .* (v is in one only)",
    ),
    "shape": (
        lambda: optim.sgd(1e-3).update({"w": torch.zeros(3)}, optim.sgd(1e-3).init(FLOATS), FLOATS),
        ValueError, "w: gradient of shape (3,), wanted the parameter's (2,)",
    ),
    "no leaves": (lambda: optim.global_norm({}), ValueError, "global_norm: got a tree without leaves"),
    "lr zero": (lambda: optim.adamw(0.0), ValueError, "lr: got 0.0, wanted a finite number above 0"),
    "lr negative": (lambda: optim.cosine(-1.0, 10), ValueError, "lr: got -1.0"),
    "lr nan": (lambda: optim.sgd(math.nan), ValueError, "lr: got nan"),
    "b1": (lambda: optim.adamw(1e-3, b1=1.0), ValueError, "b1: got 1.0, wanted in [0, 1)"),
    "b2": (lambda: optim.lion(1e-3, b2=-0.1), ValueError, "b2: got -0.1"),
    "eps": (lambda: optim.adamw(1e-3, eps=-1.0), ValueError, "eps: got -1.0, wanted a finite number of at least 0"),
    "decay": (lambda: optim.lion(1e-3, weight_decay=-1.0), ValueError, "weight_decay: got -1.0"),
    "momentum": (lambda: optim.sgd(1e-3, momentum=1.0), ValueError, "momentum: got 1.0"),
    "nesterov": (lambda: optim.sgd(1e-3, nesterov=True), ValueError, "nesterov: got momentum 0.0"),
    "norm": (lambda: optim.clip_by_global_norm(0.0), ValueError, "max_norm: got 0.0, wanted above 0"),
    "warmup": (lambda: optim.constant(1e-3, -1), ValueError, "warmup: got -1 steps, wanted at least 0"),
    "total": (lambda: optim.cosine(1e-3, 5, 5), ValueError, "total: got 5 steps, wanted more than the 5 of warmup"),
    "end": (lambda: optim.linear(1e-3, 5, end=1.0), ValueError, "end: got 1.0, wanted between 0 and lr = 0.001"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_says_what_is_wrong(call, error, message):
    with pytest.raises(error, match=re.escape(message).replace(r"\.\*", ".*")):
        call()
