"""The checks of kernels against the reference, in Triton's interpreter: right ones pass, and wrong ones do not."""

import itertools
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from fquant.format import INT8, NF4_DQ
from tests.helpers.kernels.interpreter import interpreted, interpreter  # noqa: F401

pytestmark = pytest.mark.xdist_group("interpreter")
SHAPES = ((1, 20, 301), (17, 9, 64), (9, 8, 130))
triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; pip install triton")


@triton
@interpreted
def test_kernels_that_are_right_pass():
    check = import_module("tests.bench.gpu.reference")
    with check.poisoned():
        assert check.check_formats("cpu", 1, [NF4_DQ]) == {"decodings": 2, "products": 4}
        assert check.check_integers("cpu", 1, [INT8], SHAPES) == {"products of integers": 12 + 16}
        assert check.check_draws("cpu", 1, 2001) == {"draws": 17}
        assert check.check_losses("cpu", 1, (7, 300)) == {"losses": 23}
        assert check.check_norms("cpu", 1, (7, 300)) == {"norms": 23}
    assert check.check_big("cpu", 2, (80, 320)) == {"encodings": 1, "decodings": 2, "products": 4}
    assert not torch.are_deterministic_algorithms_enabled()


@triton
@interpreted
def test_kernels_that_are_wrong_do_not():
    check = import_module("tests.bench.gpu.reference")
    faults = {
        "encode": lambda f: lambda *args: (f(*args)[0] ^ 1, f(*args)[1]),
        "decode": lambda f: lambda *args: f(*args) * 1.01,
        "matmul": lambda f: lambda *args: f(*args) * 1.01,
        "matmul_t": lambda f: lambda *args: torch.full_like(f(*args), torch.nan),
    }
    for (name, fault), shape in itertools.product(faults.items(), [(80, 320)]):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(check.triton, name, fault(getattr(check.triton, name)))
            with pytest.raises(AssertionError, match=f"^{name} "):
                check.check_big("cpu", 3, shape)
    above = lambda f: lambda *args: (y := f(*args)).nextafter(torch.full_like(y, torch.inf))
    for name in ("integer_matmul", "integer_mm"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(check.triton, name, above(getattr(check.triton, name)))
            with pytest.raises(AssertionError, match=f"^{name} "):
                check.check_integers("cpu", 3, [] if name == "integer_mm" else [INT8], SHAPES)
    wrong = lambda f: lambda *args: f(*args) ^ 1
    for name in ("fold", "bits", "bernoulli"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(check.triton, name, wrong(getattr(check.triton, name)))
            with pytest.raises(AssertionError, match=f"^{name} "):
                check.check_draws("cpu", 3, 100)
    faults = {
        "a loss of": lambda value, slope: (value * 1.001, slope),
        "a loss of .*its slope": lambda value, slope: (value, slope * 1.01),
        "the ends of a loss": lambda value, slope: (value, slope * (slope.shape != (7, 300))),
    }
    for name, fault in faults.items():
        with pytest.MonkeyPatch.context() as patch:
            right = check.triton.nll_backward
            patch.setattr(check.triton, "nll_backward", lambda *args, right=right, fault=fault: fault(*right(*args)))
            patch.setattr(check.losses, "ROWS", {"all equal": check.losses.ROWS["all equal"]})
            with pytest.raises(AssertionError, match=name):
                check.check_losses("cpu", 3, (7, 300))
    at_the_end = lambda t: torch.where(torch.arange(len(t))[:, None] == 6, 0, t) if t.shape == (7, 300) else t
    faults = {
        "a scale of": ("rms_norm", lambda out: (out[0], out[1] * 1.0001)),
        "a norm of": ("rms_norm", lambda out: (out[0] * 1.01, out[1])),
        "a slope of": ("rms_norm_backward", lambda dx: dx * 1.01),
        "a norm at the ends of": ("rms_norm", lambda out: (at_the_end(out[0]), out[1])),
        "a slope at the ends of": ("rms_norm_backward", at_the_end),
    }
    for message, (name, fault) in faults.items():
        with pytest.MonkeyPatch.context() as patch:
            right = getattr(check.triton, name)
            patch.setattr(check.triton, name, lambda *args, right=right, fault=fault: fault(right(*args)))
            patch.setattr(check.losses, "ROWS", {"all equal": check.losses.ROWS["all equal"]})
            with pytest.raises(AssertionError, match=message):
                check.check_norms("cpu", 3, (7, 300))
