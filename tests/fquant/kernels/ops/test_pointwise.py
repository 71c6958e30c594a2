"""Elementwise programs on every instruction set: the bits of torch's operations, one after another."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from fquant.compile.passes.pointwise_lowering import added_number
from fquant.device import HOST
from fquant.kernels import reference
from fquant.kernels.cpu import elementwise
from fquant.kernels.ops import silu
from fquant.kernels.ops.pointwise import pointwise, root, turn
from fquant.kernels.ops.pointwise_program import ARITY, OWN, Program, Step, parse
from tests.helpers.devices.placing import on
from tests.helpers.formats import CARD, ISAS, alike, forced
from tests.helpers.kernels.pointwise import FLOATS, NUMBERS, TORCHS, cases, values
from tests.helpers.kernels.threads import num_threads

BACKENDS = ("reference", *ISAS)
ANY = (*BACKENDS, CARD)
OPS = tuple(op for op in TORCHS if op not in ("to", "where"))
F32, BF16, F16 = FLOATS


def of_torch(op, dtype, args):
    """Return the step as an operation of torch."""
    if op == "root":
        return args[0].double().sqrt().float().to(dtype)
    return args[0].to(dtype) if op == "to" else getattr(torch, op)(*args)


@pytest.mark.parametrize("backend", ANY)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", OPS)
def test_a_step_has_the_bits_of_torch(op, dtype, backend, device):
    """Steps of tensors, of numbers on either side, and of a tensor without dims."""
    x, y, lone = values(1501, dtype, 0), values(1501, dtype, 1), torch.tensor(0.3).to(dtype)
    there = on(device, [x, y, lone])
    cases = [(0,)] if ARITY[op] == 1 else [(0, 1), (1, 0), (0, 2), (2, 0), *((0, c) for c in NUMBERS)]
    with forced(backend):
        for args in cases:
            taken = [added_number(a, dtype, HOST) if op in ("add", "sub") and isinstance(a, float) else a for a in args]
            got = pointwise(there, [], Program((Step(op, dtype, tuple(taken)),), (3,), ()))
            wanted = of_torch(op, dtype, [[x, y, lone][a] if isinstance(a, int) else a for a in args])
            assert alike(got[0].cpu(), wanted.expand(1501)), args


@pytest.mark.parametrize("backend", ANY)
def test_a_cast_has_the_bits_of_torch(backend, device):
    with forced(backend):
        for a, b in itertools.product((*FLOATS, torch.bool), FLOATS):
            x = values(1501, F32).to(a)
            assert alike(pointwise([x.to(device)], [], Program((Step("to", b, (0,)),), (1,), ()))[0].cpu(), x.to(b))
            wide = values(3000, F32, 1)
            both = Program((Step("to", a, (0,)), Step("to", b, (1,))), (1, 2), ()) if a != torch.bool else None
            if both:
                got = on(HOST, pointwise([wide.to(device)], [], both))
                assert all(map(alike, got, (wide.to(a), wide.to(a).to(b))))


@pytest.mark.parametrize("backend", ANY)
@pytest.mark.parametrize("dtype", FLOATS)
def test_where_chooses_by_a_mask(dtype, backend, device):
    mask, x, y = values(999, F32) > 0, values(999, dtype), values(999, dtype, 1)
    with forced(backend):
        both = Program((Step("where", dtype, (0, 1, 2)), Step("where", dtype, (0, 1, 0.5))), (3, 4), ())
        got = on(HOST, pointwise(on(device, [mask, x, y]), [], both))
    assert all(map(alike, got, (torch.where(mask, x, y), torch.where(mask, x, torch.tensor(0.5, dtype=dtype)))))


@pytest.mark.parametrize("backend", ANY)
def test_roots_are_rounded_correctly(backend, device):
    x = values(20000, F32)
    with forced(backend):
        assert alike(on(HOST, root(x.to(device))), x.double().sqrt().float())
    with pytest.raises(TypeError, match=r"root got x torch.float64 \(2,\); wanted float32"):
        root(torch.ones(2, dtype=torch.float64))


@settings(deadline=None)
@given(case=cases(), backend=st.sampled_from(ISAS))
def test_any_program_on_any_tensors(case, backend):
    reads, over, program = case
    shape = torch.broadcast_shapes(*(t.shape for t in reads))
    write, wanted = ([torch.full(shape, 9.0, dtype=kind) for kind in over] for _ in range(2))
    new = reference.pointwise(reads, wanted, program.text)
    with forced(backend):
        got = pointwise(reads, write, parse(program.text))
    assert len(got) == len(new) and all(t.is_contiguous() for t in got)
    assert all(map(alike, (*got, *write), (*new, *wanted)))


@settings(deadline=None, max_examples=50)
@given(case=cases(TORCHS + 5 * OWN), backend=st.sampled_from(BACKENDS))
def test_any_program_has_the_bits_of_its_steps_alone(case, backend):
    """Each step is run as a program of its own, and those with bits of their own as ops."""
    reads, over, program = case
    kinds = [t.dtype for t in reads] + [step.dtype for step in program.steps]
    values = list(torch.broadcast_tensors(*reads))
    with forced(backend):
        for op, dtype, args in program.steps:
            if op in OWN:
                values.append(getattr(silu, op)(values[args[0]].to(dtype)))
            elif op == "turn":
                values.append(turn(values[args[0]].to(dtype), int(args[1])))
            else:
                alone = Program((Step(op, dtype, args),), (len(values),), ())
                values += pointwise(values, [], alone)
        write = [torch.zeros(values[0].shape, dtype=kind) for kind in over]
        got = pointwise(reads, write, program)
    assert [kinds[i] for i in program.over] == over
    assert all(map(alike, (*got, *write), (values[i] for i in (*program.new, *program.over))))


@pytest.mark.parametrize("backend", ANY)
def test_what_is_read_may_be_written_over(backend, device):
    """Every read gives the old values, at any place in the program."""
    p, g = (values(2000, F32, seed).to(device) for seed in (2, 3))
    steps = (Step("add", F32, (0, 1)), Step("mul", F32, (2, 0)), Step("sub", F32, (3, 1)))
    old, grad = p.clone(), g.clone()
    with forced(backend):
        (got,) = pointwise([p, g], [p, g], Program(steps, (4,), (2, 0)))
    assert alike(p, old + grad) and alike(g, old) and alike(got, (old + grad) * old - grad)


@pytest.mark.parametrize("backend", [*ISAS, CARD])
@pytest.mark.parametrize("threads", [1, 2])
def test_large_tensors_are_shared_out(threads, backend, device):
    x, w = values(300 * 1000, BF16).reshape(300, 1000).to(device), values(1000, BF16, 1).to(device)
    steps = (Step("to", F32, (0,)), Step("mul", F32, (2, 2)), Step("to", BF16, (3,)), Step("mul", BF16, (1, 4)))
    with num_threads(threads), forced(backend):
        got = pointwise([x, w], [], Program(steps, (3, 5), ()))
    assert all(map(alike, got, (x.float() ** 2, (x.float() ** 2).bfloat16() * w)))


def test_dims_that_lie_as_one_are_one():
    wide = torch.arange(2 * 3 * 4 * 5 * 6 * 7 * 8 * 2.0).reshape(2, 3, 4, 5, 6, 7, 8, 2)[..., 0]
    program = Program((Step("neg", F32, (0,)),), (1,), ())
    assert alike(pointwise([wide], [], program)[0], -wide)
    crossed = wide.permute(6, 1, 4, 3, 2, 5, 0)
    with forced("reference"):
        assert pointwise([crossed], [], program)[0].shape == crossed.shape
    with forced("cpu"):  # which takes 6 dims, and copies tensors of more
        assert alike(pointwise([crossed], [], program)[0], -crossed.contiguous())
        over = crossed.contiguous()
        both = Program((Step("add", F32, (0, 1)),), (), (2,))
        assert pointwise([crossed, over], [over], both) == [] and alike(over, (crossed + crossed).contiguous())


def test_the_text_of_a_program_is_the_program():
    program = Program((Step("mul", BF16, (0, 0.1)), Step("to", F32, (1,)), Step("add", F32, (2, -1e-30))), (2, 3), (1,))
    assert repr(parse(program.text)) == repr(program) and program.text.startswith("mul.bfloat16 0 0x1.")
    for text in (
        "",
        "new 1",
        "over; new",
        "add.float32 0; new; over",
        "pow.float32 0 1; new; over",
        "neg 0; new; over",
    ):
        with pytest.raises(ValueError, match="pointwise: "):
            parse(text)


X = torch.ones(4, 3)
ADD = Program((Step("add", F32, (0, 1)),), (2,), ())
BAD = {
    "nothing": (([], [], ADD), ValueError, "nothing to read"),
    "integers": (([X, X.long()], [], ADD), TypeError, r"torch.int64 \(4, 3\); wanted f32, bf16, f16 or bool"),
    "shapes": (([X, X[:, :2]], [], ADD), RuntimeError, "broadcast|match"),
    "later": (([X], [], ADD), ValueError, "step 0 .* takes a value that is not there yet"),
    "narrowed": (
        ([X, X], [], Program((Step("add", BF16, (0, 1)),), (2,), ())),
        TypeError,
        "step 0 .*float32.*bfloat16",
    ),
    "mask": (([X, X], [], Program((Step("where", F32, (0, 1, 1)),), (2,), ())), TypeError, "step 0 .*bool"),
    "unknown": (([X, X], [], ADD._replace(new=(3,))), ValueError, "wants a value that is not there"),
    "turned": (([X], [], Program((Step("turn", F32, (0, 2.0)),), (1,), ())), ValueError, r"\(4, 3\); wanted .* half"),
    "odd": (([X], [], Program((Step("turn", F32, (0, 1.5)),), (1,), ())), ValueError, "by which 512 can be divided"),
    "a number turned": (
        ([X[:, :2]], [], Program((Step("turn", F32, (1.0, 1.0)),), (1,), ())),
        ValueError,
        "wanted a value",
    ),
    "of no dims": (([X[0, 0]], [], Program((Step("turn", F32, (0, 1.0)),), (1,), ())), ValueError, "half of a last"),
    "room": (([X, X], [X[0]], ADD._replace(new=(), over=(2,))), ValueError, "to write over; wanted contiguous"),
    "dtype": (([X, X], [X.half()], ADD._replace(new=(), over=(2,))), ValueError, "to write over; wanted contiguous"),
    "strides": (([X, X], [X.mT.contiguous().mT], ADD._replace(new=(), over=(2,))), ValueError, "wanted contiguous"),
    "shared": (([X, X[:1]], [X], ADD._replace(new=(), over=(2,))), ValueError, "shares its memory"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_calls_raise(case):
    args, error, message = BAD[case]
    with pytest.raises(error, match=message):
        pointwise(*args)


def test_fake_tensors_have_the_shapes_of_real_ones():
    with FakeTensorMode() as mode:
        x, y = torch.empty(5, 1, 4, dtype=BF16), torch.empty(3, 4)
    with mode:
        fakes = pointwise([x, y], [], Program((Step("add", F32, (0, 1)),), (2, 0), ()))
    assert [(t.shape, t.dtype) for t in fakes] == [((5, 3, 4), F32), ((5, 3, 4), BF16)]


def test_a_derivative_is_refused(device):
    x = X.to(device)
    with pytest.raises(TypeError, match="a gradient through pointwise"):
        pointwise([x.clone().requires_grad_(), x], [], ADD)


def test_plans_are_kept():
    before = elementwise.describe.cache_info().hits
    with forced("cpu"):
        for _ in range(3):
            pointwise([X, X], [], ADD)
    assert elementwise.describe.cache_info().hits >= before + 2
