"""Pointwise fusion and reinplacing: the bits of the unfused graph, in fewer nodes and less memory."""

import random as dice

import pytest
import torch
from torch.func import grad_and_value, vmap

from fquant import cost, jit, optim, tree
from fquant.compile import liveness
from fquant.compile.passes.fuse_pointwise import MAX_STEPS
from fquant.compile.trace import trace
from fquant.kernels.ops.pointwise import OP
from fquant.kernels.ops.pointwise_program import parse
from fquant.kernels.ops.silu import silu, silu_derivative
from models import blocks
from tests.helpers.arrays import equal, randn, same
from tests.helpers.cases import slow_after
from tests.helpers.formats import ISAS, alike, forced
from tests.helpers.graphs.bf16_step import OPT, start, step
from tests.helpers.live_memory import Peak

pytestmark = pytest.mark.usefixtures("twice")

BF16 = torch.bfloat16


def programs(f, *args, **options):
    """Return the programs of ``f`` captured, and the names of its other ops."""
    traced = trace(lambda args: f(*args), args, **options)
    calls = [node for node in traced.module.graph.nodes if node.op == "call_function"]
    texts = [parse(str(node.args[2])) for node in calls if node.target is OP]
    others = [getattr(node.target, "_opname", "getitem") for node in calls if node.target is not OP]
    return texts, [name for name in others if name != "getitem"]


@pytest.mark.parametrize("backend", slow_after(1, [*reversed(ISAS), "reference"]))
def test_a_step_of_training_has_the_same_bits(backend):
    with forced(backend):
        plain, fused = (jit(step, donate=("adapters", "state"), fuse=fuse) for fuse in (False, True))
        (*a, base, tokens), (*b, _, _) = start(), start()
        for _ in range(3):
            *a, value = plain(*a, base, tokens)
            *b, other = fused(*b, base, tokens)
            assert alike(value, other) and equal(a, b)
        nodes = [next(iter(f.traced.values())).module.graph.nodes for f in (plain, fused)]
    if backend == "reference":
        assert all(node.target is not OP for node in nodes[1])
    else:
        assert len(nodes[1]) < 0.8 * len(nodes[0])


def test_only_the_sign_and_payload_of_a_nan_may_differ():
    """Operands of any bits: NaNs are where they were, and all else has the same bits."""
    generator = torch.Generator().manual_seed(0)
    a, b, c = torch.randint(-(2**31), 2**31, (3, 40_000), generator=generator).int().view(torch.float32)
    a[:20_000:2], b[:20_000:3] = torch.nan, -torch.nan
    f = lambda a, b, c: ((a * b + c) * torch.sigmoid(a) - b / c, -(a + b) * c, torch.where(a > 0, b * c, c + b))
    assert any(programs(f, a, b, c)[0])
    for got, wanted in zip(jit(f)(a, b, c), f(a, b, c), strict=True):
        assert torch.equal(got.isnan(), wanted.isnan()) and wanted.isnan().any()
        bits = [t[~wanted.isnan()].view(torch.int32) for t in (got, wanted)]
        assert torch.equal(*bits)


def updated(opt):
    """Return the programs of an update, and the ops outside of them."""
    adapters, state, *_ = start()
    over, grads = {id(t) for t in tree.leaves((adapters, state))}, tree.map(torch.clone, adapters)

    def update(adapters, state, grads):
        updates, state = opt.update(grads, state, adapters)
        return optim.apply_updates(adapters, updates), state

    return *programs(update, adapters, state, grads, donate=over), len(tree.leaves(adapters))


def test_an_optimiser_is_a_program_each_side_of_its_root():
    texts, others, leaves = updated(OPT)
    assert others.count("sqrt") == leaves and others.count("copy_") == 1 and others.count("mul") < 4
    assert sum(len(text.over) for text in texts) >= 3 * leaves


def test_adamw_is_one_op_for_each_leaf():
    _, others, leaves = updated(optim.adamw(1e-2))
    assert sum(name.startswith("adam_update") for name in others) == leaves and "sqrt" not in others, others


JOINED = {  # the number of steps of each program, and the ops outside of programs
    "chain": (lambda x, y: (x * y + x) / 3 - y, [4], []),
    "casts": (lambda x, y: (x.to(BF16) * y.to(BF16)).float(), [4], []),
    "square": (lambda x, y: x**2 + y, [2], []),
    "one alone": (lambda x, y: x * y, [], ["mul"]),
    "two results": (lambda x, y: (z := x * y, z + 1), [2], []),
    "rows": (lambda x, y: (x * y[:1] + y[:, :1]) * 2, [3], ["slice", "slice"]),
    "around a product": (lambda x, y: ((x * y + 1) @ (x * 2 - y).mT) * 2 + 1, [4, 2], ["mm", "transpose"]),
    "beside each other": (lambda x, y: (x * y + 1, y * 3, x - 2), [4], []),
    "beside, of another shape": (lambda x, y: (x * y + 1, x[:3] * 2 + 1), [2, 2], ["slice"]),
    "beside, by rows": (lambda x, y: (x * y[0] + 1, y * y[0] * 2), [2, 2], ["select"]),
    "beside, and not beside a third": (
        lambda x, y: ((a := x * y + 1), (b := x - 2), (a @ y).sum() * x * 2, b),
        [3, 2],
        ["mm", "sum"],
    ),
    "beside, but wanted before": (lambda x, y: ((z := x * y + 1) @ y, x * z.sum() * 2), [2, 2], ["mm", "sum"]),
    "exponentials": (lambda x, y: (x * y + 1).exp() * x + y, [2, 2], ["exp"]),
    "silu": (lambda x, y: silu(x * y + 1) * x + silu_derivative(y).to(BF16), [7], []),
    "silu of torch": (lambda x, y: torch.nn.functional.silu(x * y + 1) * x + y, [2, 2], ["silu"]),
    "silu of a number": (lambda x, y: silu(torch.full_like(x, 0.3)) * x + y, [3], []),
    "silu of float64": (lambda x, y: silu(x.double()) * 2 + 1, [], ["_to_copy", "add", "mul", "silu"]),
    "other shapes": (lambda x, y: (x.sum() * 2 + 1) * x + y, [2, 2], ["sum"]),
    "integers": (lambda x, y: x.long() * 2 + 1, [], ["_to_copy", "add", "mul"]),
    "float64": (lambda x, y: x.double() * 2 + 1, [], ["_to_copy", "add", "mul"]),
    "mixed by a number's dtype": (lambda x, y: x.to(BF16) * y.sum() + 1, [], ["_to_copy", "add", "mul", "sum"]),
    "alpha": (lambda x, y: torch.add(x, y, alpha=2) * 2, [], ["add", "mul"]),
    "rounded": (lambda x, y: torch.div(x, y, rounding_mode="floor") * 2, [], ["div", "mul"]),
    "masks": (lambda x, y: torch.where(x > 0, x * 2, y - 1) + 1, [4], ["gt"]),
    "in place": (lambda x, y: (x * y).sub_(y).mul_(x), [3], []),
    "filled": (lambda x, y: torch.full_like(x, 0.3).sub_(y) * x, [2], []),
    "the shape of a constant": (lambda x, y: torch.full((6, 6), 2.0) * x[0] + 1, [], ["add", "full", "mul", "select"]),
    "a number beside mapped scalars": (lambda x, y: vmap(lambda t: 0.5 * t.sum())(x) + 1, [2], ["_to_copy", "sum"]),
    "seen otherwise between": (lambda x, y: (x + y).view(4, 9) * y.view(4, 9) - 1, [3], ["view"] * 3),
    "seen otherwise, and read as it is": (
        lambda x, y: ((z := x * y).view(4, 9) * 2 + 1, z),
        [2],
        ["mul", "view"],
    ),
    "seen otherwise, of rows": (lambda x, y: (x + y[0]).view(4, 9) * 2 + 1, [2], ["add", "select", "view"]),
    "halves turned": (
        lambda x, y: torch.cat([-(z := (x * y)[:, :4])[:, 2:], z[:, :2]], -1) * 2 + x[:, :4],
        [3],
        ["mul", "slice", "slice"],
    ),
    "transposed": (lambda x, y: x.mT * 2 + y.mT, [], ["add", "mul", "transpose", "transpose"]),
    "too long": (
        lambda x, y: sum([x * i for i in range(60)], y),
        [MAX_STEPS, MAX_STEPS - 1, 119 - 2 * MAX_STEPS, 2],
        [],
    ),
}


@pytest.mark.parametrize("case", JOINED)
def test_what_becomes_one(case):
    f, steps, others = JOINED[case]
    x, y = randn(6, 6), randn(6, 6, seed=1)
    texts, rest = programs(f, x, y)
    assert (sorted(len(text.steps) for text in texts), sorted(rest)) == (sorted(steps), sorted(others))
    assert same(f, x, y)


@pytest.mark.parametrize("backend", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_swiglu_is_a_program_forwards_and_one_backwards(dtype, backend):
    """Fuse a gated MLP and its gradient: the bits are those of the unfused graph, and of the uncaptured function."""
    x, d, w = randn(40, 24, dtype=dtype), randn(40, 24, seed=1, dtype=dtype), 0.2 * randn(3, 24, 96, seed=2)
    f = grad_and_value(lambda w, x, d: (blocks.swiglu(x @ w[0], x @ w[1]) @ w[2].mT * d).sum().float())
    with forced(backend):
        texts, others = programs(f, w.to(dtype), x, d, recompute=False)
        assert [[op for op, *_ in text.steps] for text in texts if len(text.steps) > 1][:2] == [
            ["silu", "mul"],
            ["silu_derivative", "mul", "mul", "silu", "mul"],
        ]
        assert not {"silu", "silu_derivative", "sigmoid"} & {*others}
        assert same(f, w.to(dtype), x, d)


def test_a_value_is_not_read_before_it_is_there_nor_after_it_is_gone():
    """Write over an argument, by an op or by a program, before and behind views of it."""

    def through_a_view(p, g):
        view = p[:1]
        new = p * 2 + g
        p.copy_(new)
        return view * 1 + 1, new * 3

    def of_the_old(p, g):
        a = p * 2 + 1
        p.add_(g)
        return a * g + p

    def by_a_program(p, g):
        old = p[:3] * 2 + 1
        p.copy_(p * g + 1)
        return old * 2, p[:3] * 2 + 1

    def through_another_name(p, g):
        view, new = p.view(36).view(6, 6), p * 2 + g
        p.copy_(new)
        return new * view + 1

    def crosswise(p, g):
        p.copy_(g * 2 + p.mT)
        return p * 1

    def of_what_has_a_view(p, g):
        new = p * g
        view = new[:3]
        new.sub_(g)
        return view * 2 + 1, new + p

    for f in (through_a_view, of_the_old, by_a_program, through_another_name, crosswise, of_what_has_a_view):
        for fuse in (False, True):
            (p, g), (q, _) = (randn(6, 6), randn(6, 6, seed=1)), (randn(6, 6), None)
            wanted, got = f(p, g), jit(f, fuse=fuse)(q, g)
            assert equal(got, wanted) and alike(p, q), (f.__name__, fuse)


def any_function(draw):
    """Draw a function of elementwise ops of several shapes and dtypes, products, views and permitted writes."""
    script = [(draw.choice("aaaammmmtcvvseqwxrdnhh"), draw.random(), draw.random()) for _ in range(draw.randint(5, 40))]

    def f(*args):
        values, out = list(args), []
        for op, i, j in script:
            x = values[int(i * len(values))]
            fitting = [y for y in values if y.dtype == x.dtype and y.shape in (x.shape, x.shape[-1:], ())]
            y = fitting[int(j * len(fitting))]
            match op:
                case "a":
                    values.append(x + y if j < 0.7 else x - 0.3)
                case "m":
                    values.append(x * y if j < 0.7 else x / 1.7)
                case "t":
                    values.append(x.to(BF16 if j < 0.5 else torch.float32))
                case "c":
                    values.append(torch.where(x > 0, x, torch.full_like(x, j)))
                case "v":
                    whole = x.is_contiguous() and x.numel() % 4 == 0
                    values.append(x.view(-1)[: x.numel() // 2].view(-1, 2) if whole else -x)
                case "s":
                    values.append(x.sum())
                case "e":
                    values.append(x.sigmoid())
                case "h":
                    parts = x.chunk(2, -1) if x.ndim and x.shape[-1] % 2 == 0 else ()
                    values.append(torch.cat([-parts[1], parts[0]] if j < 0.5 else [*parts[::-1]], -1) if parts else -x)
                case "q":
                    values.append(silu(x) if j < 0.5 else silu_derivative(x))
                case "w":
                    x.mul_(0.5)
                case "x":
                    args[0].copy_(args[0] * 0.5 + (y.sum().float() if j < 0.5 else 1.0))
                case "r":
                    out.append(x)
                case "d":
                    values.append(x.mT if x.ndim > 1 else x.neg())
                case "n":
                    values.append(x * 1.0 + 1.0)
        return [values[-1], *out]

    return f


def some_arguments(seed):
    return [randn(4, 6, seed=seed), randn(4, 6, seed=seed + 1), randn(4, 6, seed=2, dtype=BF16), randn(6, seed=3)]


@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 150), marks=pytest.mark.slow)], ids=str)
def test_any_function(seeds):
    shorter = 0
    for seed in seeds:
        f = any_function(dice.Random(seed))
        args, wanted_args = some_arguments(seed), some_arguments(seed)
        wanted = f(*wanted_args)
        plain, fused = (trace(lambda args, f=f: f(*args), args, fuse=fuse) for fuse in (False, True))
        assert equal((fused(*args), args), (wanted, wanted_args)), seed
        shorter += len(fused.module.graph.nodes) < len(plain.module.graph.nodes)
        assert liveness.peak(fused.module.graph).nbytes <= 1.3 * liveness.peak(plain.module.graph).nbytes, seed
    assert shorter > len(seeds) / 2


def test_what_nobody_reads_any_more_is_written_over():
    f = lambda x, w: ((x @ w) * 2 + (x @ w.mT)) @ w
    x, w = randn(64, 64), randn(64, 64, seed=1)
    (text,), _ = programs(f, x, w)
    assert text.over and not text.new
    plain, fused = (jit(f, fuse=fuse) for fuse in (False, True))
    most = []
    for each in (plain, fused):
        each(x, w)
        with Peak() as peak:
            out = each(x, w)
        most.append(peak.most)
        assert alike(out, f(x, w))
    assert most == [4 * x.nbytes, 2 * x.nbytes] or most[1] < most[0]


OVER = {  # the number of results of each program written over dead arguments, and of new ones
    "again": (lambda x, w: (b := (x @ w) * 2 + 1, b * b.sum() + x)[1], [(1, 0), (1, 0)]),
    "beside a part of it": (lambda x, w: ((b := x @ w) * b[:1] + 1) * 2, [(0, 1)]),
    "a part": (lambda x, w: (x @ w)[:2] * 2 + 1, [(0, 1)]),
    "another dtype": (lambda x, w: ((x @ w) * 2).to(BF16), [(0, 1)]),
    "two of two": (lambda x, w: ((s := (a := x @ w) + w @ x) * 1.5, s - a), [(2, 0)]),
    "kept": (lambda x, w: (a := x @ w, a * 2 + 1), [(0, 1)]),
    "an argument": (lambda x, w: x * 2 + 1, [(0, 1)]),
}


@pytest.mark.parametrize("case", OVER)
def test_what_is_written_over(case):
    f, counts = OVER[case]
    x, w = randn(6, 6), randn(6, 6, seed=1)
    texts, _ = programs(f, x, w)
    assert [(len(text.over), len(text.new)) for text in texts] == counts and same(f, x, w)


def test_nothing_is_put_off_that_would_hold_more():
    def by_a_user(x, w):
        c = (x @ w) * (w @ x) + 1
        return c * 2 + torch.cat([w] * 8).sum()

    def by_who_reads_the_same(x, w):
        c = (x @ w) * (w @ x) * x + 1
        return c, x * torch.cat([w] * 8).sum() + 1

    for f in (by_a_user, by_who_reads_the_same):
        plain, fused = (
            trace(lambda args, f=f: f(*args), (randn(256, 256), randn(256, 256)), fuse=fuse) for fuse in (False, True)
        )
        assert liveness.peak(fused.module.graph).nbytes <= liveness.peak(plain.module.graph).nbytes, f


IN_PLACE = {  # ops in place on results, with operands of other dtypes and layouts
    "double": lambda x, y: (x * 2).add_(y.double()).mul(2),
    "half": lambda x, y: (x * 2).half().add_(y).mul_(y).sub(1),
    "bfloat16": lambda x, y: (x * 2).bfloat16().div_(y + 5).mul_(0.5),
    "a number of a wider dtype": lambda x, y: (x * 2).bfloat16().add_(y.sum()).mul(2),
    "one number": lambda x, y: (x * 2).bfloat16().sub_(torch.full((1,), 2.5)).mul(2),
    "columns": lambda x, y: (x.mT * 2).add_(y).mul_(2) + 1,
    "columns over rows": lambda x, y: (x * 2).add_(y.mT).mul_(x.mT) + 1,
    "broadcast": lambda x, y: (x * 2).add_(y[0]).mul_(y[:, :1]) + 1,
}


@pytest.mark.parametrize("case", IN_PLACE)
def test_ops_in_place_keep_dtype_and_layout(case):
    x, y, f = randn(8, 8), randn(8, 8, seed=1), IN_PLACE[case]
    wanted, got = f(x, y), jit(f)(x, y)
    assert alike(got, wanted) and got.stride() == wanted.stride()


def test_neither_arguments_nor_results_nor_views_are_written_over():
    def f(x, w):
        a, b = x @ w, x @ w.mT
        part = b[1:]
        kept = (a * 2 + b) * x
        return kept, a, part * 2 + 1, (kept * 3 + x) * w

    x, w = randn(8, 8), randn(8, 8, seed=1)
    before = tree.map(torch.clone, (x, w))
    assert same(f, x, w) and equal((x, w), before)
    got = jit(f)(x, w)
    assert equal(got, f(x, w)) and equal((x, w), before)


def test_replays_do_not_share_their_memory():
    f = jit(lambda x, w: (x @ w) * 2 + (x @ w.mT))
    x, w = randn(8, 8), randn(8, 8, seed=1)
    first = f(x, w)
    kept = first.clone()
    f(w, x)
    assert alike(first, kept)


@pytest.mark.slow
def test_less_is_read_and_written():
    args, donate = start(), ("adapters", "state")
    plain, fused = (cost(step, *args, donate=donate, fuse=fuse) for fuse in (False, True))
    assert fused.nodes < 0.8 * plain.nodes and fused.peak <= plain.peak and fused.flops == plain.flops
    assert fused.read + fused.written < 0.9 * (plain.read + plain.written)


@pytest.mark.parametrize("asked", ["reference", "triton"])
def test_without_the_kernels_of_c_nothing_is_fused(monkeypatch, asked):
    monkeypatch.setenv("FQUANT_KERNELS", asked)
    assert programs(lambda x, y: x * y + 1, randn(2), randn(2)) == ([], ["mul", "add"])
