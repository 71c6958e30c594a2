"""Elementwise programs in Triton: the bits of the reference; compiled for three kinds of devices."""

import itertools
import re
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings

from fquant.kernels import cpu, reference
from fquant.kernels.ops.pointwise import pointwise, turn
from fquant.kernels.ops.pointwise_program import ARITY, OWN, PIECE, Program, Step, parse
from fquant.kernels.ops.silu import OPS as SILU
from tests.helpers.arrays import named
from tests.helpers.formats import ISAS, alike, built, shifted, strided
from tests.helpers.kernels.ahead_of_time import TARGETS, assert_exact, assert_fits, compiled_for
from tests.helpers.kernels.interpreter import fuses, interpreted, interpreter  # noqa: F401
from tests.helpers.kernels.pointwise import FLOATS, NUMBERS, TORCHS, cases
from tests.helpers.kernels.pointwise import values as drawn

if find_spec("triton") is None:
    pytest.skip("triton is not installed; pip install triton", allow_module_level=True)
pytestmark = pytest.mark.xdist_group("interpreter")
F32, BF16, F16 = FLOATS
SMALL = (1e-40, -1e-45, float("inf"))  # constants that a compiler may round or flush


def values(device, *args):
    """Draw values on the host, and move them."""
    return drawn(*args).to(device)


def agrees(reads, program, write=()):
    """Return True if a program has the bits of the reference, in new tensors and in those that it overwrites."""
    over = [t.cpu().clone() for t in write]
    aliased = [next((o for o, t in zip(over, write, strict=True) if t is read), read.cpu()) for read in reads]
    wanted = reference.pointwise(aliased, over, program.text)
    got = pointwise(reads, list(write), program)
    return len(got) == len(wanted) and all(
        alike(a.cpu(), b) for a, b in zip((*got, *write), (*wanted, *over), strict=True)
    )


@named("dtype", FLOATS)
@named("op", [op for op in TORCHS if op not in ("to", "where")])
@interpreted
def test_a_step(device, op, dtype):
    """Steps of tensors, of numbers on either side, and of a tensor without dims."""
    x, y, lone = values(device, 1501, dtype, 0), values(device, 1501, dtype, 1), torch.tensor(0.3).to(device, dtype)
    numbers = (*NUMBERS, *SMALL)
    some = [(0,)] if ARITY[op] == 1 else [(0, 1), (1, 0), (0, 2), (2, 0), *((0, c) for c in numbers), (0.1, 0)]
    steps = tuple(Step(op, dtype, args) for args in some)
    assert agrees([x, y, lone], Program(steps, tuple(range(3, 3 + len(steps))), ()))


@interpreted
def test_casts_and_choices(device):
    for a, b in itertools.product((*FLOATS, torch.bool), FLOATS):
        assert agrees([values(device, 1501, F32).to(a)], Program((Step("to", b, (0,)),), (1,), ()))
    for dtype in FLOATS:
        mask, x, y = values(device, 999, F32) > 0, values(device, 999, dtype), values(device, 999, dtype, 1)
        steps = (Step("where", dtype, (0, 1, 2)), Step("where", dtype, (0, 1, -0.0)), Step("where", dtype, (0, 0.5, 2)))
        assert agrees([mask, x, y], Program(steps, (3, 4, 5), ()))


@pytest.mark.parametrize("own", [False, True])
@interpreted
def test_any_program_on_any_tensors(device, own):
    """Programs of torch's ops have the bits of the reference; those with silu have the bits of its steps alone."""

    @settings(deadline=None, max_examples=15 if own or device.type == "cuda" else 60)
    @given(case=cases(TORCHS + 5 * OWN if own else TORCHS, device))
    def check(case):
        reads, over, program = case
        shape = torch.broadcast_shapes(*(t.shape for t in reads))
        write = [torch.full(shape, 9.0, dtype=kind, device=device) for kind in over]
        assert (agrees_with_its_steps if own else agrees)(reads, program, write)

    check()


def agrees_with_its_steps(reads, program, write):
    """Return True if a program has the bits of its steps, each a program of its own."""
    steps = list(torch.broadcast_tensors(*reads))
    for step in program.steps:
        half = step.op == "turn"
        first = steps[step.args[0]].to(step.dtype) if half or step.op in OWN else None
        if half:
            steps.append(turn(first, int(step.args[1])))
        elif step.op in OWN:
            steps.append(SILU[step.op](first))
        else:
            steps += pointwise(steps, [], Program((step,), (len(steps),), ()))
    got = pointwise(reads, write, program)
    return all(map(alike, (*got, *write), (steps[i] for i in (*program.new, *program.over))))


@interpreted
def test_what_is_read_may_be_written_over(device):
    p, g = values(device, 3000, F32, 2).view(-1, 2), values(device, 3000, F32, 3).view(-1, 2)
    steps = (Step("add", F32, (0, 1)), Step("turn", F32, (0, 1.0)), Step("sub", F32, (3, 1)))
    assert agrees([p, g], Program(steps, (4,), (2, 0)), [p, g])


@named("dtype", FLOATS)
@interpreted
def test_turn(device, dtype):
    """Turn by every half, at every place, alone and twice in a chain of other steps."""
    for half in (1, 16, 256):
        x = values(device, 6 * half * 7, dtype).reshape(7, 3, 2 * half)
        assert PIECE % (2 * half) == 0
        for t in (x, shifted(x), strided(x), x.transpose(0, 1), x[:0], x[0, 0], x[:1].expand(4, -1, -1)):
            for n in (half, -half):
                assert alike(turn(t, n).cpu(), reference.turn(t.cpu(), n))
        steps = (
            Step("turn", dtype, (0, float(half))), Step("mul", dtype, (2, 1)), Step("turn", dtype, (3, -float(half))),
            Step("add", dtype, (4, 0)), Step("turn", dtype, (1, float(half))),
        )  # fmt: skip
        assert agrees([x, x[0]], Program(steps, (2, 3, 5, 6), ()))


@interpreted
def test_many_dims(device):
    """More dims than a launch of the C kernels takes, of tensors whose dims are in other orders."""
    wide = torch.arange(2 * 3 * 4 * 5 * 6 * 7 * 8 * 2.0, device=device).reshape(2, 3, 4, 5, 6, 7, 8, 2)[..., 0]
    crossed = wide.permute(6, 1, 4, 3, 2, 5, 0)
    assert agrees([wide], NEGATE) and agrees([crossed], NEGATE)
    assert agrees([crossed, wide.permute(6, 1, 4, 3, 2, 5, 0)[:1]], Program((Step("add", F32, (0, 1)),), (2,), ()))


NEGATE = Program((Step("neg", F32, (0,)),), (1,), ())


@built
@named("dtype", FLOATS)
@named("name", OWN)
@interpreted
def test_silu_has_the_bits_of_plain_c(device, name, dtype):
    """Triton fuses products and sums in its interpreter from version 3.9 on, and C where the instruction set does."""
    x = torch.cat([drawn(4000, F32), torch.linspace(-110, 110, 3001)]).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FQUANT_KERNELS", ISAS[-1 if fuses() else 0])
        plain = getattr(cpu, name)(x)
    assert alike(SILU[name](x.to(device)).cpu(), plain)
    step = Program((Step("mul", dtype, (0, 1.0)), Step(name, dtype, (1,))), (2,), ())
    assert alike(pointwise([x.to(device)], [], step)[0].cpu(), plain)


@interpreted
def test_reads_that_are_broadcast(device):
    """Every dim of a read may be broadcast, alone and with others, in whole tiles and short ones."""
    for shape in ((4, 8, 64), (3, 5, 7)):
        whole = values(device, shape[0] * shape[1] * shape[2], F32).reshape(shape)
        for kept in itertools.product((True, False), repeat=3):
            part = whole[tuple(slice(None) if keep else slice(1) for keep in kept)].bfloat16()
            assert agrees([whole, part], Program((Step("mul", F32, (0, 1)), Step("to", BF16, (2,))), (2, 3), ()))


@named("dtype", FLOATS)
@interpreted
def test_results_of_a_turn_may_be_written_over_what_it_read(device, dtype):
    """Both halves of a row are read before either is overwritten."""
    x, y = (values(device, 6 * 64, dtype, i).reshape(6, 64) for i in range(2))
    steps = Step("turn", dtype, (0, 32.0)), Step("add", dtype, (2, 1)), Step("turn", dtype, (3, -32.0))
    assert agrees([x, y], Program(steps, (3,), (2, 4)), [x, y])


def test_a_kernel_does_not_depend_on_sizes():
    """Strides and dims that do not matter do not either; bits of constants do."""
    from fquant.kernels.triton import elementwise

    plans = [elementwise._describe(NEGATE.text, ((F32, *kind),)) for kind in SHAPES]
    assert plans[0].constants == plans[1].constants == plans[2].constants != plans[3].constants
    assert plans[0].sizes[1:] == plans[1].sizes[1:] == plans[2].sizes[1:] == ((1,), (1,))
    signs = [elementwise._encoded(Program((Step("mul", F32, (0, x)),), (1,), ())) for x in (0.0, -0.0)]
    assert signs[0] != signs[1]


def test_large_tensors_are_numbered_in_64_bits():
    from fquant.kernels.triton import elementwise

    long = lambda *kind: elementwise._describe(NEGATE.text, ((F32, *kind),)).constants[-4]
    assert not long(torch.Size([2**20, 2**10]), (2**10, 1)) and long(torch.Size([2**20, 2**11]), (2**11, 1))
    assert long(torch.Size([4, 8]), (2**30, 1)) and not long(torch.Size([2, 8]), (2**30, 1))


SHAPES = [
    (torch.Size([4, 1024]), (1024, 1)),
    (torch.Size([2, 2, 2048]), (4096, 2048, 1)),
    (torch.Size([1, 8, 4096]), (5, 4096, 1)),
    (torch.Size([4, 1024]), (2048, 1)),
]

# --- without the interpreter ------------------------------------------------------------------------------------------

ADAM = """mul.float32 2 0x1.ccccccp-1; mul.float32 1 0x1.99999ap-4; add.float32 4 5; mul.float32 3 0x1.ff7ceep-1;
mul.float32 1 1; mul.float32 8 0x1.0624dep-10; add.float32 7 9; div.float32 6 10; mul.float32 11 -0x1.a36e2ep-13;
add.float32 0 12; new; over 13 6 10"""
GATED = """silu.bfloat16 0; silu_derivative.bfloat16 0; mul.bfloat16 2 1; mul.bfloat16 2 3; mul.bfloat16 5 4;
mul.bfloat16 2 3; new 6 7; over"""
ROPE = "turn.bfloat16 0 0x1p6; mul.bfloat16 0 1; mul.bfloat16 3 2; add.bfloat16 4 5; new 6; over"
NORMED = "to.float32 0; mul.float32 3 2; to.bfloat16 4; mul.bfloat16 5 1; new 6; over"
MIXED = "add.float32 0 1; to.bfloat16 2; new 2 3; over"
FOUR, TWO = ".v4.b32", ".v2.b32"


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def typical():
    """Return the reads, the tensors to overwrite, the text, and the accesses of memory of typical programs."""
    state, hidden = [meta(2**20, dtype=F32) for _ in range(4)], [meta(8192, 14336) for _ in range(3)]
    q, waves = meta(4, 32, 2048, 128), meta(2048, 128)
    return {
        "adam": (state, [state[0], *state[2:]], ADAM, {FOUR}),
        "gated": (hidden, [], GATED, {FOUR}),
        "rope": ([q, waves, waves], [], ROPE, {FOUR}),
        "rope, heads behind": ([q.transpose(1, 2), waves[:, None], waves[:, None]], [], ROPE, {FOUR}),
        "normed": ([meta(8192, 4096), meta(4096), meta(8192, 1, dtype=F32)], [], NORMED, {FOUR, ".b32"}),
        "mixed": ([meta(8192, 4096), meta(8192, 4096, dtype=F32)], [], MIXED, {FOUR, TWO}),
        "odd": ([meta(4097, 129), meta(4097, 129)], [], "add.bfloat16 0 1; new 2; over", {".b16"}),
    }


@named("target", TARGETS)
def test_compiled(target):
    """Registers do not spill, nothing is shared or approximated, and a thread reads and writes 16 bytes at a time."""
    from fquant.kernels import triton

    with compiled_for(target) as reports:
        for read, write, text, _ in typical().values():
            triton.pointwise(read, write, parse(text).text)
    for (name, (*_, accesses)), report in zip(typical().items(), reports, strict=True):
        assert_fits(report)
        if name != "gated":  # whose polynomial has fused multiply-adds
            assert_exact(report)
        assert not re.search(r"\.ftz|\.approx|div\.full", report.ptx), name
        assert set(re.findall(r"(?:ld|st)\.global(\S*)", report.ptx)) == accesses, name
        assert report.shared == 0 and report.registers <= 64, (name, report.registers)


@named("target", TARGETS)
def test_the_largest_program_fits(target):
    """Sixteen tensors that are all needed until the end, in the narrowest and the widest dtype."""
    from fquant.compile.passes.fuse_pointwise import MAX_READS, MAX_STEPS
    from fquant.kernels import triton

    with compiled_for(target) as reports:
        for dtype in (BF16, F32):
            steps = [Step("mul", dtype, (i, i + 1)) for i in range(MAX_READS - 1)]
            while len(steps) < MAX_STEPS:
                steps.append(Step("add", dtype, (len(steps) % MAX_READS, MAX_READS + len(steps) - 1)))
            last = MAX_READS + MAX_STEPS - 1
            program = Program(tuple(steps), (last, last - 20), ())
            triton.pointwise([meta(2**20, dtype=dtype) for _ in range(MAX_READS)], [], program.text)
    for report in reports:
        assert_fits(report)
        assert_exact(report)
        assert report.shared == 0
