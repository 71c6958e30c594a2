"""Arguments of many sizes run by few traces, and results are those of the function on them as they are."""

import random as python_random
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, grad_and_value, vmap

from fquant import DynamicSize, Padded, bind, jit, lora, optim, tree
from fquant.compile.dynamic_sizes.results import same_up_to_rounding
from fquant.compile.retraces import RetraceWarning
from models import blocks, decoder
from tests.helpers.arrays import equal, normal
from tests.helpers.qlora_step import CFG, OPT, copied, start

LENGTH = DynamicSize("length", to=4)
W = normal(3, 3)


def rows(n, seed=0):
    return normal(n, 3, seed=seed)


def result(x, mask, w):
    """Return sums over rows that count, and results whose dims grow with the rows, in x f64[n 3], mask bool[n]."""

    def energy(w):
        return ((x @ w).tanh() * mask[:, None]).square().sum()

    slope, value = grad_and_value(energy)(w)
    each = vmap(lambda row: (row @ w).tanh())(x)
    return {"slope": slope, "value": value, "each": each, "ids": (x > 0, torch.arange(len(x)) * 2), "later": each[1:]}


def padded(size=LENGTH):
    return {"x": Padded(size, dim=0, value=0.0), "mask": Padded(size, dim=-1, value=False)}


def given_rows(n, seed=0):
    return rows(n, seed), torch.arange(n) % 3 != 1, W


def test_two_hundred_random_lengths():
    captured, drawn = jit(result, dynamic=padded()), python_random.Random(0)
    lengths = [drawn.randint(1, 64) for _ in range(200)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, n in enumerate(lengths):
            same_up_to_rounding(captured(*given_rows(n, i)), result(*given_rows(n, i)))
    assert len(set(lengths)) > 40 and len(captured.traced) == 5  # 4, 8, 16, 32, 64


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.sampled_from([3, (5, 9, 40), range(8, 41, 8)]))
def test_any_lengths_and_sizes(lengths, to):
    captured = jit(result, dynamic=padded(DynamicSize("rows", to)))
    sizes = [3, 6, 12, 24, 48] if to == 3 else list(to)
    for i, n in enumerate(lengths):
        got, wanted = captured(*given_rows(n, i)), result(*given_rows(n, i))
        same_up_to_rounding(got, wanted)
        assert [t.stride() for t in tree.leaves(got)] == [t.stride() for t in tree.leaves(wanted)]
        assert equal(got["ids"], wanted["ids"])
    assert len(captured.traced) == len({min(size for size in sizes if size >= n) for n in lengths})


def test_sizes_that_are_not_named_warn_as_before():
    captured = jit(lambda x: x * 2, dynamic={"x": Padded(LENGTH, 0, 0.0)})
    for n in (3, 4, 9, 33, 2, 17):
        captured(torch.ones(n, 2))
    captured(torch.ones(3, 3))
    with pytest.warns(RetraceWarning, match=r"x is float32\[4, 4\] .*, and was float32\[4, 3\]") as caught:
        captured(torch.ones(3, 4))
    assert [warning.filename for warning in caught] == [__file__]


def test_two_dims_of_a_result_grow_with_one_size():
    captured = jit(lambda x: (x @ x.mT, x.sum(-1)), dynamic={"x": Padded(LENGTH, 1, 0.0)})
    for t in (3, 4, 7, 5, 1):
        x = normal(3, t, 2, seed=t)
        same_up_to_rounding(captured(x), (x @ x.mT, x.sum(-1)))  # [b t t], [b t]
    assert len(captured.traced) == 2


def test_two_sizes():
    def outer(x, y):
        return x[:, None] * y, x.square().sum(), y + 1

    sizes = {"x": Padded(DynamicSize("batch", (4, 8)), 0, 0.0), "y": Padded(DynamicSize("length", (6, 12)), 0, 0.0)}
    captured = jit(outer, dynamic=sizes)
    for b, t in ((4, 6), (3, 5), (2, 4), (1, 5), (8, 12), (7, 11), (5, 12), (8, 7)):  # some padded by the same number
        x, y = normal(b, seed=b), normal(t, seed=t)
        same_up_to_rounding(captured(x, y), outer(x, y))
    assert len(captured.traced) == 2


def test_trees_and_absent_arguments():
    def count(rows, mask=None):
        return rows["x"].sum() if mask is None else (rows["x"] * mask).sum()

    captured = jit(count, dynamic={"rows": Padded(LENGTH, 0, 0.0), "mask": Padded(LENGTH, 0, 0.0)})
    for n in (3, 4, 2):
        x, mask = rows(n)[:, 0], rows(n)[:, 1]
        same_up_to_rounding(captured({"x": x}), count({"x": x}))
        same_up_to_rounding(captured({"x": x}, mask), count({"x": x}, mask))
        same_up_to_rounding(captured({"x": x}, None), count({"x": x}))
        same_up_to_rounding(bind(captured, mask=mask)(rows={"x": x}), count({"x": x}, mask))
    assert len(captured.traced) == 3


def test_inside_a_transform_it_is_the_function():
    captured = jit(result, dynamic=padded())
    f = lambda f, w: f(*given_rows(3)[:2], w)["value"]
    assert equal(grad(partial(f, captured))(W), grad(partial(f, result))(W)) and not captured.traced


def test_layouts_and_conjugates_of_arguments():
    captured = jit(lambda x: x.sin(), dynamic={"x": Padded(LENGTH, 1, 0.0)})
    x = torch.view_as_complex(normal(5, 5, 2)).mT.conj()
    for n in (4, 3, 4, 2):
        torch.testing.assert_close(captured(x[:2, :n]), x[:2, :n].sin())
    assert len(captured.traced) == 1


# --- a step of LoRA ---------------------------------------------------------------------------------------------------


def loss(adapters, base, tokens, targets):
    return decoder.loss(lora.attach(base, adapters), tokens, targets, CFG)


def lora_step(adapters, state, base, tokens, targets):
    grads, value = grad_and_value(loss)(adapters, base, tokens, targets)
    updates, state = OPT.update(grads, state, adapters)
    return optim.apply_updates(adapters, updates), state, value


def text(n):
    tokens = torch.randint(0, CFG.vocab, (2, n + 1), generator=torch.Generator().manual_seed(n))
    return tokens[:, :-1], torch.where(tokens[:, 1:] % 5 == 0, blocks.IGNORE, tokens[:, 1:])


TEXT = {"tokens": Padded(LENGTH, dim=1, value=0), "targets": Padded(LENGTH, dim=1, value=blocks.IGNORE)}


def test_gradients_of_a_lora_step_with_ignored_targets():
    adapters, _, base = start()
    adapters = tree.map(lambda t: t + 0.1, adapters)
    captured = jit(grad_and_value(loss), dynamic=TEXT)
    for n in (5, 8, 6, 3, 4, 2):
        got, wanted = captured(adapters, base, *text(n)), grad_and_value(loss)(adapters, base, *text(n))
        same_up_to_rounding(got, wanted)
    assert len(captured.traced) == 2


def test_donated_state():
    """An error of verification leaves what is donated; a call that is right takes it."""
    adapters, state, base = start()
    captured, ours = jit(lora_step, donate=("adapters", "state"), dynamic=TEXT), copied((adapters, state))
    for n in (5, 7, 8, 3, 6):
        before = tree.leaves(ours)
        *ours, value = captured(*ours, base, *text(n))
        adapters, state, wanted = lora_step(adapters, state, base, *text(n))
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=0.0)
        with pytest.raises(RuntimeError, match="was donated to lora_step"):
            before[0].sum()
    torch.testing.assert_close(tree.leaves(ours), tree.leaves([adapters, state]), rtol=1e-3, atol=1e-4)
    assert len(captured.traced) == 2
    wrong = jit(lora_step, donate=("adapters", "state"), dynamic=TEXT | {"targets": replace(TEXT["targets"], value=1)})
    kept = copied(ours)
    with pytest.raises(ValueError, match=r"length = 3 is padded to 4, on which the result depends: result 0\."):
        wrong(*ours, base, *text(3))
    assert equal(ours, kept)


# --- what depends on the padding --------------------------------------------------------------------------------------

VISIBLE = {
    "a mean": (lambda x: x.mean(), "the result differs by 0.25 of its norm, wanted at most 1.5e-08"),
    "a number": (lambda x: {"n": len(x)}, "result n is 4, and 3 without padding; compute it outside"),
    "a count": (lambda x: torch.ones_like(x).long().sum(), "the result differs in 1 of 1 elements, wanted none"),
    "doubled": (lambda x: torch.cat([x, x]), r"the result has the shape \[8\], and \[6\] without padding; wanted dims"),
    "reversed": (lambda x: x.flip(0), "the result differs by 0.58 of its norm"),
    "a structure": (lambda x: [x] * len(x), "the structure of the result is another one without padding"),
    "infinite": (lambda x: 1 / x.prod(), "the result is infinite or NaN in other places"),
    "of another rank": (
        lambda x: x if len(x) < 4 else x[None],
        r"the result has the shape \[1, 4\], and \[3\] without",
    ),
}


@pytest.mark.parametrize("case", VISIBLE)
def test_a_result_that_depends_on_the_padding(case):
    f, message = VISIBLE[case]
    captured, x = jit(lambda x: f(x), dynamic={"x": Padded(LENGTH, 0, 0.0)}), torch.ones(4, dtype=torch.float64)
    same_up_to_rounding(captured(x), f(x))  # it is not padded
    for _ in range(2):  # it is verified until it is right
        match = (
            f"length = 3 is padded to 4, on which the result depends: {message}.*; mask what is padded \\(x by 0.0\\)"
        )
        with pytest.raises(ValueError, match=match):
            captured(x[:3])


def test_each_trace_is_verified_once():
    seen = []

    def verify(got, wanted):
        seen.append(got.shape)
        same_up_to_rounding(got, wanted)

    captured = jit(lambda x, k: x.cumsum(0) * k, dynamic={"x": Padded(DynamicSize("n", 4, verify=verify), 0, 0.0)})
    for n, k in ((4, 1), (3, 1), (2, 1), (7, 1), (5, 1), (3, 2), (2, 2)):
        captured(rows(n), k)
    assert seen == [(3, 3), (7, 3), (3, 3)]


def test_without_verification_donated_state_is_taken_too():
    size = DynamicSize("n", 4, verify=None)
    captured = jit(lambda w, x: (w + x.sum(0), x + 1), donate=("w",), dynamic={"x": Padded(size, 0, 0.0)})
    w, wanted = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for n in (3, 2, 4, 7):
        before, (w, more) = w, captured(w, rows(n))
        wanted = wanted + rows(n).sum(0)
        same_up_to_rounding((w, more), (wanted, rows(n) + 1))
        with pytest.raises(RuntimeError, match="was donated"):
            before.sum()


def test_without_verification():
    captured = jit(lambda x: (x + x.sum(), x.mean()), dynamic={"x": Padded(DynamicSize("n", 4, verify=None), 0, 0.0)})
    for n in (3, 2, 5):
        y, mean = captured(torch.ones(n))
        assert equal(y, torch.full((n,), n + 1.0)) and mean.item() == n / captured_size(n)
    with pytest.raises(ValueError, match="without padding; wanted dims that grow"):
        jit(lambda x: torch.cat([x, x]), dynamic={"x": Padded(DynamicSize("n", 4, verify=None), 0, 0.0)})(torch.ones(3))


def captured_size(n):
    return 4 if n <= 4 else 8


# --- errors -----------------------------------------------------------------------------------------------------------


def pair(x, y=None):
    return x if y is None else x + y


BOUNDED = DynamicSize("length", (4, 8))
AT_ONCE = {
    "unknown": (dict(dynamic={"z": Padded(LENGTH, 0, 0)}), "jit: dynamic names z; pair has x, y"),
    "donated": (
        dict(dynamic={"x": Padded(LENGTH, 0, 0)}, donate=("x",)),
        "jit: dynamic and donate name x, which padding copies; donate others",
    ),
    "twice": (
        dict(dynamic={"x": Padded(LENGTH, 0, 0), "x.a": Padded(LENGTH, 0, 0)}),
        "jit: dynamic names x.a and x, which has it; name one of them",
    ),
    "two sizes": (
        dict(dynamic={"x": Padded(LENGTH, 0, 0), "y": Padded(BOUNDED, 0, 0)}),
        "jit: dynamic has two sizes called 'length'; use one, or two names",
    ),
}


@pytest.mark.parametrize("case", AT_ONCE)
def test_options_that_are_refused(case):
    options, message = AT_ONCE[case]
    with pytest.raises(ValueError, match=message):
        jit(pair, **options)


CALLS = {  # dynamic arguments, those of the call
    "longer than the largest": (
        {"x": Padded(BOUNDED, 0, 0.0)}, (torch.ones(9),),
        r"jit\(pair\): x has length = 9, wanted at most 8, the largest of its sizes; cut it, or add a size",
    ),
    "not the same": (
        {"x": Padded(BOUNDED, 0, 0.0), "y": Padded(BOUNDED, 0, 0.0)}, (torch.ones(3), torch.ones(1)),
        r"jit\(pair\): y has length = 1, and x has 3; wanted the same, or a size of its own",
    ),
    "no such dim": (
        {"x": Padded(BOUNDED, -2, 0.0)}, (torch.ones(3),),
        r"jit\(pair\): x has 1 dims, and dynamic names dim -2; name one that it has",
    ),
    "no such value": (
        {"x": Padded(BOUNDED, 0, -1)}, (torch.ones(3, dtype=torch.uint8),),
        r"jit\(pair\): x is of torch.uint8, which has no -1; pad it with a value that it has",
    ),
    "no such path": (
        {"x.b": Padded(BOUNDED, 0, 0)}, ({"a": torch.ones(3)},), r"jit\(pair\): dynamic names x.b; tensors are x.a"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_calls_that_are_refused(case):
    dynamic, args, message = CALLS[case]
    with pytest.raises(ValueError, match=message):
        jit(pair, dynamic=dynamic)(*args)


def test_errors_of_the_captured_function_are_as_before():
    captured = jit(pair, dynamic={"x": Padded(LENGTH, 0, 0.0)})
    with pytest.raises(TypeError, match="x requires a gradient"):
        captured(torch.ones(3, requires_grad=True))
    with pytest.raises(TypeError, match="y is a bytearray, neither a tensor nor hashable"):
        captured(torch.ones(3), bytearray())
    with pytest.raises(TypeError, match=r"x is a tensor that is sparse"):
        captured(torch.ones(3).to_sparse())
