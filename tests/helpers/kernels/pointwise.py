"""Test data of elementwise programs, and programs drawn at random with tensors that they read."""

import math

import torch
from hypothesis import strategies as st

from fquant.device import HOST
from fquant.kernels.ops.pointwise_program import ARITY, DTYPES, OWN, PIECE, Program, Step
from tests.helpers.arrays import rng
from tests.helpers.formats import shifted, strided

FLOATS = tuple(DTYPES.values())
TORCHS = tuple(op for op in ARITY if op not in (*OWN, "turn"))
NUMBERS = (0.0, -0.0, 1.0, 0.1, -3.7, 1e-5, 1e-30, 2.0**20)

SPECIAL = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-40, -1e-45, 3e38, -3e38, 65504.0, 1e-8, 1 / 3)


def values(n, dtype, seed=0):
    """Return numbers of all sizes, and every pair of special ones if n allows."""
    x = torch.randn(n, generator=rng(seed)) * torch.exp2(torch.randint(-20, 20, (n,), generator=rng(seed + 1)))
    special = torch.tensor(SPECIAL).repeat_interleave(len(SPECIAL) ** (seed % 2)).repeat(n // len(SPECIAL) + 1)[:n]
    return torch.where(torch.arange(n) < n // 2, special, x).to(dtype)


@st.composite
def programs(draw, reads, ops, width):
    """Draw a program of steps of ``ops`` on ``reads`` values, the first a mask, with rows of ``width``."""
    ops = (*ops, "turn") if width and width % 2 == 0 and PIECE % width == 0 else ops
    kinds, steps = [torch.bool, *(draw(st.sampled_from(FLOATS)) for _ in range(reads - 1))], []
    for _ in range(draw(st.integers(0, 30))):
        op, dtype = draw(st.sampled_from(ops)), draw(st.sampled_from(FLOATS))
        fitting = [i for i, kind in enumerate(kinds) if kind == dtype or (dtype == torch.float32 and kind in FLOATS)]
        args: list = [draw(st.sampled_from(fitting)) if fitting else None for _ in range(ARITY[op])]
        if op == "to":
            args = [draw(st.integers(0, len(kinds) - 1))]
        elif None in args:
            continue
        elif op == "where":
            args[0] = 0
        if op == "turn":
            args[1] = draw(st.sampled_from((0.5, -0.5))) * width
        elif ARITY[op] == 2 and draw(st.booleans()):
            args[1] = draw(st.sampled_from(NUMBERS))
        steps.append(Step(op, dtype, tuple(args)))
        kinds.append(dtype)
    wanted = st.lists(st.integers(1, len(kinds) - 1), max_size=4)
    return kinds[:reads], kinds, Program(tuple(steps), tuple(draw(wanted)), tuple(draw(wanted)))


PLACES = (lambda t: t, shifted, strided, lambda t: t.mT.contiguous().mT if t.ndim > 1 else t)
SIZES = st.sampled_from([1, 2, 3, 16, 31, 64, 512, 513, 1025]) | st.integers(0, 40)


@st.composite
def cases(draw, ops=TORCHS, device=HOST):
    reads = draw(st.integers(2, 5))
    shape = draw(st.lists(SIZES, max_size=4).filter(lambda s: math.prod(s) < 5000))
    kinds, all_kinds, program = draw(programs(reads, ops, shape[-1] if shape else 1))
    tensors = []
    for i, kind in enumerate(kinds):
        own = [1 if i > 1 and draw(st.integers(0, 3)) == 0 else size for size in shape]
        own = own[draw(st.integers(0, len(own))) :] if i > 1 else own
        x = values(math.prod(own), torch.float32, i).to(device, kind).reshape(own)
        tensors.append(draw(st.sampled_from(PLACES))(x))
    return tensors, [all_kinds[i] for i in program.over], program
