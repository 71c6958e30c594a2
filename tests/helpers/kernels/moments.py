"""Arguments of steps with packed moments: every kind of format, rule, rounding, dtype and length."""

from dataclasses import replace

import torch

from fquant import random
from fquant.format import DYNAMIC8, MOMENT4, MOMENT4_UNSIGNED, MOMENT8, MOMENT8_UNSIGNED, MOMENT_FP8
from fquant.kernels import reference
from fquant.kernels.reference.moments import FLOAT32
from fquant.kernels.spec import Spec, layout
from tests.helpers.arrays import randn

SHUFFLED = torch.randperm(256, generator=torch.Generator().manual_seed(0)).tolist()
FORMATS = {
    "f32": (None, None),
    "8": (MOMENT8, MOMENT8_UNSIGNED),
    "4": (MOMENT4, MOMENT4_UNSIGNED),
    "fp8": (MOMENT_FP8, MOMENT_FP8),
    "4 and 8": (MOMENT4, MOMENT8_UNSIGNED),
    "blocks": (replace(MOMENT8, block=64), replace(MOMENT8_UNSIGNED, block=1024)),
    "order": (
        replace(MOMENT8, name="shuffled", table=tuple((DYNAMIC8.table or ())[i] for i in SHUFFLED)),
        replace(MOMENT4_UNSIGNED, name="backwards", table=(MOMENT4_UNSIGNED.table or ())[::-1]),
    ),
}
SHAPES = ((17, 300), (4096,), (3,), (1, 5, 7), (2, 4224))
RULES = ("adamw", "adam", "lion", "sgd", "nesterov", "mean", "nesterov_mean")


def zeros(format, shape):
    """Return the codes and the scales of a moment of zeros; of None values in float32."""
    if format is None:
        return [torch.zeros(shape), torch.zeros(0)]
    return [torch.zeros(leaf.shape, dtype=leaf.dtype) for leaf in layout(Spec(format, shape, torch.float32))]


def steps(rule, formats, shape, dtype, rounding, apply, count=3, key=None):
    """Yield the name and the arguments of an op for each step; send its result back.

    With a ``key`` parameters are rounded stochastically, from a number beyond 32 bits on.
    """
    two = rule in ("adamw", "adam")
    param, state = randn(*shape, seed=1).to(dtype), [t for f in formats[: 1 + two] for t in zeros(f, shape)]
    for t in range(1, count + 1):
        sizes = torch.exp(2 * randn(*shape, seed=2 * t))
        grad = (randn(*shape, seed=2 * t + 1) * sizes * 1e-2).to(dtype)
        rates = torch.tensor([-1e-3, 1 / (1 - 0.9**t), (1 - 0.99**t) ** -0.5])
        if formats[0] is None:
            rates = torch.tensor([-1e-3, 1 - 0.9**t, 1 - 0.99**t])
        texts = [FLOAT32 if f is None else f.text for f in formats[: 1 + two]]
        rest = (0.9, 0.99, 1e-8, 0.01, rule == "adam") if two else (rule, 0.9, 0.99, 0.01)
        drawn, first = (None, 0) if key is None else (random.fold(random.key(key), t), 2**32 - 100)
        name = "adam_update" if two else "momentum_update"
        result = yield name, (grad, param, *state, rates, *texts, rounding, *rest, apply, drawn, first, None)
        state = result[1:]


def many(rule, formats, shape, dtype, apply, key=None, active=(True, False, True)):
    """Return the name and the arguments of an op of many updates, each a step later, and the arguments of each alone.

    ``active`` says which change; None leaves it out, for three.
    """
    each = []
    for i in range(3 if active is None else len(active)):
        given = steps(rule, formats, shape, dtype, "nearest", apply, count=i + 2, key=key)
        name, args = next(given)
        for _ in range(i + 1):
            name, args = given.send(getattr(reference, name)(*args))
        each.append([*args[:-1], None if active is None else torch.tensor(active[i])])
    stacked = [torch.stack(some) if isinstance(some[0], torch.Tensor) else some[0] for some in zip(*each, strict=True)]
    return name, stacked, each
