"""Lowering to steps of programs, on the host and in graphs for CUDA, made without a card."""

from functools import partial

import pytest
import torch

from fquant.compile.passes.pointwise_lowering import _reciprocal, added_number
from fquant.compile.trace import apply, signature_of, trace
from fquant.device import HOST
from fquant.kernels.dispatch import runs_programs
from fquant.kernels.ops.pointwise import OP
from fquant.kernels.ops.pointwise_program import DTYPES, parse
from tests.helpers.arrays import equal
from tests.helpers.formats import alike, forced
from tests.helpers.graphs.bf16_step import start, step
from tests.helpers.graphs.retargeted import CUDA, on_fakes, on_host, traced

pytestmark = pytest.mark.skipif(not runs_programs("cuda"), reason="Triton is not installed")
F32, BF16, F16 = DTYPES.values()


def programs(captured):
    return [parse(node.args[2]) for node in captured.module.graph.nodes if node.target is OP]


def on(device, f, *args, **options):
    """Return ``f(*args)`` captured for a device."""
    if device == CUDA:
        return traced(f, *args, **options)
    return trace(partial(apply, f), signature_of(f).bind(*args).arguments, **options)


def constants(captured):
    (program,) = programs(captured)
    return [(op, [x for x in args if isinstance(x, float)]) for op, _, args in program.steps]


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_an_added_number_is_rounded_by_the_host_alone(dtype):
    x = torch.ones(8, dtype=dtype)
    for device in (HOST, CUDA):
        (added, _), (subtracted, _) = (found[1] + [None] for found in constants(on(device, lambda x: x + 0.1 - 0.3, x)))
        wanted = [float(torch.tensor(c, dtype=dtype if device == HOST else F32)) for c in (0.1, 0.3)]
        assert [added, subtracted] == wanted == [added_number(c, dtype, device) for c in (0.1, 0.3)]


def test_a_division_by_a_number_is_a_product_on_cuda():
    x = torch.ones(8, dtype=BF16)
    assert constants(on(HOST, lambda x: x / 8.0 * 2.0, x)) == [("div", [8.0]), ("mul", [2.0])]
    assert constants(on(CUDA, lambda x: x / 8.0 * 2.0, x)) == [("mul", [0.125]), ("mul", [2.0])]


def test_a_division_whose_reciprocal_depends_on_the_version_stays():
    """Versions of torch take the reciprocal of the number in float32 or in float64."""
    numbers = [n / 7 for n in range(1, 500)]
    differ = [n for n in numbers if _reciprocal(n) is None]
    assert 0 < len(differ) < len(numbers) and _reciprocal(0.0) is None
    for n in numbers:
        both = 1 / torch.tensor(n), (1 / torch.tensor(n, dtype=torch.float64)).float()
        assert (_reciprocal(n) is None) == (both[0].item() != both[1].item())
    f = lambda x: (x + 1) / differ[0] * 2
    assert programs(on(CUDA, f, torch.ones(8))) == [] and len(programs(on(HOST, f, torch.ones(8)))) == 1


def test_a_tensor_filled_with_a_number_is_divided_by():
    """CUDA multiplies by the reciprocal of a number only, not of a tensor that has it everywhere."""
    f = lambda x: (x + 1) / torch.full_like(x, 3.0)
    for device in (HOST, CUDA):
        assert constants(on(device, f, torch.ones(8))) == [("add", [1.0]), ("div", [3.0])]


def test_a_tensor_without_dims_on_the_host_is_no_argument():
    x, scale = torch.ones(8), torch.tensor(3.0)
    apart = traced(lambda x, scale: (x + 1) * scale, x, scale, host={id(scale)})
    assert programs(apart) == [] and {t.device for t in _values(apart)} == {HOST, CUDA}
    assert len(programs(traced(lambda x, scale: (x + 1) * scale, x, scale))) == 1


def _values(captured):
    return [node.meta["val"] for node in captured.module.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]


def test_groups_are_on_one_device():
    x, y = torch.ones(8), torch.ones(8)
    found = traced(lambda x, y: ((x + 1) * 2, (y + 1) * 2), x, y, host={id(y)})
    values = [node.meta["val"][0].device for node in found.module.graph.nodes if node.target is OP]
    assert sorted(map(str, values)) == ["cpu", "cuda:0"]


def test_a_step_of_training_fuses_alike_on_cuda():
    """The programs are those of the host but for divisions, and have the bits of the step.

    On the host the gradient of logits is written over these besides.
    """
    args = start()
    far, near = on(CUDA, step, *args), on(HOST, step, *args)
    ops = lambda captured: [str(n.target) for n in captured.module.graph.nodes if n.op == "call_function"]
    names = lambda captured: [[s.op.replace("div", "mul") for s in program.steps] for program in programs(captured)]
    loss = ("nll_backward", "getitem", "aten.empty")
    others = lambda captured: [op for op in ops(captured) if not any(name in op for name in loss)]
    assert names(far) == names(near) and others(far) == others(near) and len(programs(far)) > 20
    on_fakes(far.module)
    assert equal(on_host(far, *args), step(*args))
    plain = on(CUDA, step, *args, fuse=False)
    assert len(ops(far)) < 0.8 * len(ops(plain))


@pytest.mark.parametrize("op", ["neg", "reciprocal", "square"])
def test_operations_of_one_argument(op):
    x = torch.randn(64).to(BF16)
    f = lambda x: getattr(torch, op)(x) + x
    assert len(programs(on(CUDA, f, x))) == 1 and alike(on_host(on(CUDA, f, x), x), f(x))


def test_a_backend_that_is_forced_decides():
    for backend, wanted in {"reference": (False, False), "triton": (False, True), "cpu": (True, False)}.items():
        with forced(backend):
            assert (runs_programs("cpu"), runs_programs("cuda")) == wanted
    assert not runs_programs("meta") and not runs_programs("xpu")
