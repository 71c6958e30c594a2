"""Any program of torch's: captured it is what it is, to the bit, however it is transformed, fused and donated to."""

import random

import pytest

from fquant import jit, tree

from . import programs
from .formats import alike

pytestmark = [
    pytest.mark.usefixtures("twice"),
    pytest.mark.filterwarnings("ignore"),  # of torch, of all that is slow, deprecated or of no elements
]
LIMITS = (  # of torch's tracer, which refuses what torch computes
    "has_fw_view",  # a tangent of a view of an argument that begins within its memory
    "got meta", "from meta", "devices",  # the zeros that are nowhere, of second derivatives
    "division by zero",  # the mean of no elements
    "expected scalar type",  # a product of no elements of two dtypes
    "two bool tensors",  # a softmax of no elements of bool
    "aten.mul.Scalar gives (torch.float64, torch.Size([])",  # a number times the zeros that are nowhere, of bool
)  # fmt: skip
MANY = [*range(60), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(60, 1500))]


@pytest.mark.parametrize("seed", MANY)
def test_any_program(seed):
    draw = random.Random(seed)
    made, (way, transformed) = programs.program(draw), draw.choice(list(programs.WAYS.items()))
    names = [f"x{i}" for i in range(len(made.arguments))]
    space = {"g": lambda *xs: transformed(made.function, xs)}
    exec(f"def step({', '.join(names)}): return g({', '.join(names)})", space)
    donate = tuple(name for name in names if draw.random() < 0.5) if way == "descent" else ()
    options = {"fuse": draw.random() < 0.85, "recompute": draw.random() < 0.85}
    eager, values = space["step"], lambda i: [kind.of(seed + 1000 * i + j) for j, kind in enumerate(made.arguments)]
    try:
        wanted = [tree.leaves(eager(*values(i))) for i in range(3)]
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        pytest.skip(f"torch itself refuses {way}: {str(error)[:60]}")
    captured = jit(eager, donate=donate, **options)
    try:
        captured(*values(0))
    except ValueError as error:
        assert "no result of this kind is left" in str(error) and donate, made.text
        captured = jit(eager, **options)
    except (RuntimeError, ZeroDivisionError) as error:
        assert any(limit in str(error) for limit in LIMITS), f"{way} {options} {made.text}\n{error}"
        pytest.skip(f"torch traces no {way} of this: {str(error)[:60]}")
    told = f"{way} {options} donate={donate}\n{made.arguments}\n{made.text}"
    before = []
    for i in range(3):
        given, kept = values(i), values(i)
        before.append(tree.leaves(captured(*given)))
        for got, right in list(zip(before, wanted, strict=False))[-1 if donate else 0 :]:  # earlier results stay
            assert all(map(alike, got, right)) and len(got) == len(right), told
        for name, x, y in zip(names, given, kept, strict=True):
            assert name in donate or alike(x, y), f"{name} is changed by {told}"
    assert len(captured.traced) == 1
