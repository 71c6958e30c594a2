"""Steps with packed moments: the same bits on every backend, in any memory, under transforms; and errors."""

import math
import re

import pytest
import torch
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant.format import DYNAMIC8, INT8, MOMENT8, MOMENT8_UNSIGNED, NF4
from fquant.kernels import moment_codes, reference
from fquant.kernels.ops import moments
from tests.helpers.arrays import named, randn
from tests.helpers.formats import ISAS, alike, built, forced
from tests.helpers.kernels.moments import FORMATS, RULES, SHAPES, many, steps, zeros


def run(rule, formats, shape, dtype, rounding, apply, compare, key=None):
    """Call ``compare(name, args)`` in each step, whose result is the next state."""
    given = steps(rule, formats, shape, dtype, rounding, apply, key=key)
    call = next(given)
    while True:
        try:
            call = given.send(compare(*call))
        except StopIteration:
            return


def same(name, args):
    got, want = getattr(moments, name)(*args), getattr(reference, name)(*args)
    assert all(alike(a, b) for a, b in zip(got, want, strict=True)), [
        int((a != b).sum()) for a, b in zip(got, want, strict=True)
    ]
    return got


@built
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("apply", [False, True])
@named("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("rule", RULES)
def test_c_has_the_bits_of_the_reference(rule, formats, shape, dtype, apply, isa):
    with forced(isa):
        run(rule, FORMATS[formats], shape, dtype, "nearest", apply, same)
        if apply:
            run(rule, FORMATS[formats], shape, dtype, "nearest", apply, same, key=3)
        if formats == "8":
            run(rule, FORMATS[formats], shape, dtype, "grid", apply, same)
            run(rule, FORMATS[formats], shape, dtype, "torchao", apply, same)


@built
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", [f for name, pair in FORMATS.items() if name != "f32" for f in pair], ids=str)
def test_c_changes_codes_where_the_reference_does(format, isa):
    """Numbers at each threshold and beside it, and of every magnitude, in blocks whose scale is one."""
    thresholds, top = moment_codes.codes(format, "nearest").thresholds, moment_codes.largest(format)
    near = [torch.nextafter(thresholds, torch.full((), end)) for end in (-math.inf, math.inf)]
    ladder = torch.exp2(torch.arange(-140.0, 9.0)).clamp(max=top)
    x = torch.cat([thresholds, *near, ladder, torch.zeros(3)])
    x = torch.cat([x, -x]) if min(format.table) < 0 else x[x >= 0]
    x = torch.cat([torch.cat([torch.full((1,), top), part]) for part in x.split(format.block - 1)])
    state = zeros(format, tuple(x.shape))
    with forced(isa):  # a mean that keeps nothing of the old one is the gradient
        _, got, scale = moments.momentum_update(
            x, x, *state, torch.ones(3), format.text, "nearest", "mean", 0.0, 0.0, 0.0, False, None, 0, None
        )
    wanted, _ = reference.encode_moment(x, format, "nearest")
    assert torch.equal(got, wanted) and scale.eq(1.0).all()


def test_it_takes_any_memory_and_writes_over_its_arguments(device):
    given = steps("adamw", FORMATS["8"], (40, 30), torch.float32, "nearest", True, count=2)
    name, args = next(given)
    _, args = given.send(getattr(moments, name)(*args))
    args = [t.to(device) if isinstance(t, torch.Tensor) else t for t in args]
    want = moments.adam_update(*args)
    apart = [t.mT.contiguous().mT if isinstance(t, torch.Tensor) and t.ndim == 2 else t for t in args]
    assert not apart[0].is_contiguous()
    assert all(map(torch.equal, moments.adam_update(*apart), want))
    if device.type == "cpu":
        over = args[1:6]
        torch.ops.fquant.adam_update.out(*args, **{f"out{i}": t for i, t in enumerate(over)})
        assert all(map(torch.equal, over, want))


@pytest.mark.parametrize("formats", ["8", "4", "f32"])
@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_it_is_the_same_traced_and_under_vmap(rule, formats):
    given = steps(rule, FORMATS[formats], (5, 69), torch.float32, "nearest", False, count=2)
    name, args = next(given)
    _, args = given.send(getattr(moments, name)(*args))
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    call = lambda *some: getattr(moments, name)(*some, *args[len(tensors) :])
    want = call(*tensors)
    traced = make_fx(call, tracing_mode="fake")(*tensors)
    assert sum("_update" in str(node.target) for node in traced.graph.nodes) == 1
    assert all(map(torch.equal, traced(*tensors), want))
    grads = torch.stack([2 * tensors[0], tensors[0]], -1)
    mapped = vmap(call, in_dims=(-1, *[None] * (len(tensors) - 1)))
    assert all(torch.equal(a[1], b) for a, b in zip(mapped(grads, *tensors[1:]), want, strict=True))
    nested = vmap(mapped, in_dims=(0, *[None] * (len(tensors) - 1)))
    traced = make_fx(nested)(torch.stack([grads, -grads]), *tensors[1:])
    assert sum("_update" in str(node.target) for node in traced.graph.nodes) == 1
    twice = nested(torch.stack([grads, -grads]), *tensors[1:])
    assert all(torch.equal(a[0, 1], b) for a, b in zip(twice, want, strict=True))
    assert all(map(torch.equal, [t[1, 0] for t in twice], call(-2 * tensors[0], *tensors[1:])))


@built
@pytest.mark.parametrize("isa", ISAS)
@named("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(17, 301), (4224,)], ids=str)
@pytest.mark.parametrize("formats", ["f32", "8", "4", "blocks"])
@pytest.mark.parametrize("rule", ["adamw", "adam", "lion", "sgd"])
def test_many_updates_in_one_op_are_those_of_each(rule, formats, shape, dtype, isa):
    """The op and the reference, beside the reference of each; what is not active stays as it was."""
    for apply, key, active in ((True, None, (True, False, True)), (True, 3, None), (False, None, (False, True))):
        name, args, each = many(rule, FORMATS[formats], shape, dtype, apply, key, active)
        want = [torch.stack(some) for some in zip(*(getattr(reference, name)(*one) for one in each), strict=True)]
        with forced(isa):
            for got in (getattr(moments, name)(*args), getattr(reference, name)(*args)):
                assert all(map(alike, got, want))
        for i in [i for i, is_active in enumerate(active or ()) if not is_active]:
            old = [each[i][1] if apply else torch.zeros(shape), *each[i][2 : 4 + 2 * (name == "adam_update")]]
            assert all(map(torch.equal, [t[i] for t in want], old))


TRANSPOSED = [(64, 300), (300, 64), (4, 1500), (1500, 4), (33, 70), (2, 17, 130), (1, 40), (16, 256), (2, 2)]


@built
@pytest.mark.parametrize("isa", ISAS)
@named("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", TRANSPOSED, ids=str)
@pytest.mark.parametrize("rule", ["adamw", "lion"])
def test_gradients_that_are_transposed(rule, shape, dtype, isa):
    """Products give the gradients of low-rank adapters so; they are read there, and results are contiguous."""
    turned = lambda t: t.mT.contiguous().mT
    for active in (None, (True, False)):
        name, args, each = many(rule, FORMATS["f32"], shape, dtype, True, None, active)
        for some in (args, *each):
            want = getattr(reference, name)(*some)
            with forced(isa):
                got = getattr(moments, name)(turned(some[0]), *some[1:])
            assert all(map(alike, got, want)) and all(t.is_contiguous() for t in got)


def test_many_updates_write_over_their_arguments():
    name, args, _ = many("adamw", FORMATS["4"], (40, 31), torch.float32, True)
    want = moments.adam_update(*args)
    over = args[1:6]
    getattr(torch.ops.fquant, name).out(*args, **{f"out{i}": t for i, t in enumerate(over)})
    assert all(map(torch.equal, over, want))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible_in_its_block_and_nowhere_else(bad, backend):
    name, args = next(steps("adamw", FORMATS["8"], (3, 256), torch.float32, "nearest", False))
    args[0][1, 7] = bad
    with forced(backend):
        got = getattr(moments, name)(*args)
    assert not got[0][1, 7].isfinite() and got[0][::2].isfinite().all()
    for scale in got[2::2]:
        assert not scale[1].isfinite() and scale[::2].isfinite().all()


def call(
    grad=None, param=None, state=None, format=MOMENT8, rounding="nearest", rule="sgd", rates=None, key=None, start=0,
    active=None,
):  # fmt: skip
    param = torch.zeros(300) if param is None else param
    grad, state = param if grad is None else grad, zeros(MOMENT8, (300,)) if state is None else state
    rates, text = torch.zeros(3) if rates is None else rates, "float32" if format is None else format.text
    return moments.momentum_update(
        grad, param, *state, rates, text, rounding, rule, 0.9, 0.0, 0.0, False, key, start, active
    )


CODES, SCALE = zeros(MOMENT8, (300,))
BAD = {
    "dtype": (lambda: call(grad=torch.zeros(300).double()), TypeError, "momentum_update got grad torch.float64 (300,)"),
    "shape": (lambda: call(grad=torch.zeros(30)), ValueError, "got grad (30,) and param (300,); wanted grad (300,)"),
    "codes": (lambda: call(state=(CODES[:9], SCALE)), ValueError, "got codes (9,) and param (300,); wanted codes"),
    "scale": (lambda: call(state=(CODES, SCALE.half())), TypeError, "got scale torch.float16"),
    "rates": (lambda: call(rates=torch.zeros(2)), ValueError, "got rates (2,)"),
    "rule": (lambda: call(rule="adam"), ValueError, "got the rule 'adam'; wanted one of sgd, nesterov, lion, mean"),
    "rounding": (lambda: call(rounding="up"), ValueError, "got the rounding 'up'; wanted one of nearest, grid"),
    "rows": (lambda: call(format=NF4), ValueError, "got a moment in nf4; wanted a flat format"),
    "centre": (lambda: call(format=DYNAMIC8), ValueError, "got a moment in dynamic8; wanted a flat format"),
    "table": (lambda: call(format=INT8), ValueError, "got a moment in int8; wanted a flat format"),
    "grid": (
        lambda: call(format=FORMATS["4"][0], state=zeros(FORMATS["4"][0], (300,)), rounding="grid"),
        ValueError, "got the rounding grid of moment4; wanted 8 bits",
    ),
    "key": (lambda: call(key=torch.zeros(2, dtype=torch.int64)), ValueError, "got key (2,)"),
    "words": (lambda: call(key=torch.zeros(())), TypeError, "got key torch.float32"),
    "many rates": (lambda: call(rates=torch.zeros(2, 3)), ValueError, "got rates (2, 3) and param (300,); wanted"),
    "many keys": (
        lambda: call(
            param=torch.zeros(2, 300), state=[torch.stack([t, t]) for t in (CODES, SCALE)], rates=torch.zeros(2, 3),
            key=torch.zeros((), dtype=torch.int64),
        ), ValueError, "got key () and param (2, 300); wanted key (2,)",
    ),
    "one state": (
        lambda: call(param=torch.zeros(2, 300), state=(CODES, SCALE), rates=torch.zeros(2, 3)),
        ValueError, "got codes (300,) and param (2, 300); wanted codes (2, 300)",
    ),
    "active": (lambda: call(active=torch.ones(())), TypeError, "got active torch.float32"),
    "start": (lambda: call(start=-1), ValueError, "got the start -1; wanted at least 0"),
    "values": (lambda: call(format=None, state=(torch.zeros(9), torch.zeros(0))), ValueError, "got moment (9,)"),
    "scales of values": (lambda: call(format=None, state=(torch.zeros(300), SCALE)), ValueError, "got scale (2,)"),
    "two forms": (
        lambda: moments.adam_update(
            torch.zeros(300), torch.zeros(300), CODES, SCALE, torch.zeros(300), torch.zeros(0), torch.zeros(3),
            MOMENT8.text, "float32", "nearest", 0.9, 0.99, 1e-8, 0.0, False, True, None, 0, None,
        ), ValueError, "adam_update got one moment in float32 and one packed; wanted both in one form",
    ),
    "gradient": (lambda: call(grad=torch.zeros(300, requires_grad=True)), TypeError, "keep the moments in float32"),
}  # fmt: skip


@pytest.mark.parametrize(("bad", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_does_not_reach_c(bad, error, message, no_kernel):
    with pytest.raises(error, match=re.escape(message)):
        bad()


def test_an_update_of_nothing():
    state = [torch.zeros(0, 4, dtype=torch.uint8), torch.zeros(0)]
    got = call(param=torch.zeros(0, 4), state=state, format=MOMENT8_UNSIGNED)
    assert [tuple(t.shape) for t in got] == [(0, 4), (0, 4), (0,)]


def test_arguments_are_not_changed():
    name, args = next(steps("adam", FORMATS["4"], (5, 70), torch.bfloat16, "nearest", True))
    kept = [t.clone() for t in args if isinstance(t, torch.Tensor)]
    getattr(moments, name)(*args)
    assert all(map(torch.equal, kept, args)) and randn(1).dtype == torch.float32
