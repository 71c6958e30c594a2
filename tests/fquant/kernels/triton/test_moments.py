"""Steps with packed moments in Triton: the bits of the reference."""

from importlib.util import find_spec

import pytest
import torch

from fquant.kernels import reference
from fquant.kernels.ops import moments
from tests.helpers.arrays import named
from tests.helpers.formats import alike
from tests.helpers.kernels.interpreter import interpreted, interpreter  # noqa: F401
from tests.helpers.kernels.moments import FORMATS, RULES, many, steps

if find_spec("triton") is None:
    pytest.skip("triton is not installed; pip install triton", allow_module_level=True)
pytestmark = pytest.mark.xdist_group("interpreter")


@pytest.mark.each_value
@pytest.mark.parametrize("apply", [False, True])
@named("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(17, 130), (3,), (2, 1024)], ids=str)
@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("rule", RULES)
@interpreted
def test_it_has_the_bits_of_the_reference(device, rule, formats, shape, dtype, apply):
    kinds = [("nearest", None), ("grid", None), ("torchao", None)] if formats == "8" else [("nearest", None)]
    for rounding, key in [*kinds, ("nearest", 3)] if apply else kinds:
        given = steps(rule, FORMATS[formats], shape, dtype, rounding, apply, count=2, key=key)
        name, args = next(given)
        while True:
            there = [t.to(device) if isinstance(t, torch.Tensor) else t for t in args]
            got = [t.cpu() for t in getattr(moments, name)(*there)]
            want = getattr(reference, name)(*args)
            wrong = [int((a != b).sum()) for a, b in zip(got, want, strict=True)]
            assert all(alike(a, b) for a, b in zip(got, want, strict=True)), wrong
            try:
                name, args = given.send(want)
            except StopIteration:
                break


@pytest.mark.each_value
@pytest.mark.parametrize("formats", ["f32", "8", "4 and 8"])
@pytest.mark.parametrize("rule", ["adamw", "lion"])
@interpreted
def test_many_updates_in_one_op(device, rule, formats):
    """With and without a mask, with gradients that are transposed, and with parameters that are rounded by keys."""
    for dtype, key, active in ((torch.float32, None, (True, False, True)), (torch.bfloat16, 3, None)):
        name, args, _ = many(rule, FORMATS[formats], (33, 131), dtype, True, key, active)
        there = [t.to(device) if isinstance(t, torch.Tensor) else t for t in args]
        there[0] = there[0].mT.contiguous().mT
        want = getattr(reference, name)(*args)
        assert all(alike(a.cpu(), b) for a, b in zip(getattr(moments, name)(*there), want, strict=True))
