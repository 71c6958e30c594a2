"""The out variants of torch's ops that memory plans use: the bits of the op, in the memory that they are given.

The oracle is the op itself, on the samples of torch's own tests (``op_db``), forward and backward.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch
import torchgen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchgen.gen import parse_native_yaml
from torchgen.model import SchemaKind

from fquant import tree
from fquant.compile.memory.out_variants import (
    RESIZED,
    UNSTRUCTURED,
    describe,
    out_variant,
    result_names,
    without_results,
)
from tests.helpers.arrays import randn

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)
SAMPLES = 6  # of an op and a dtype


def same_bits(a, b):
    """Return True for tensors of equal layout and bytes."""
    flat = [t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else t.reshape(-1) for t in (a, b)]
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype and torch.equal(*flat)


class Compared(TorchDispatchMode):
    """Calls the out variant of each op that has one too; ``wrong`` are ops of other bits or in other memory."""

    def __init__(self):
        super().__init__()
        self.calls, self.wrong = Counter(), {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made, kwargs = op(*args, **(kwargs or {})), kwargs or {}
        results = [made] if isinstance(made, Tensor) else made
        if (variant := out_variant(op)) is not None and all(t.layout is torch.strided for t in results):
            self.calls[op] += 1
            places = [torch.full_like(t, 3) for t in results]
            at = [t.data_ptr() for t in places]
            variant(*args, **kwargs, **dict(zip(result_names(variant), places, strict=True)))
            same = all(same_bits(place, t) for place, t in zip(places, results, strict=True))
            if not same or at != [t.data_ptr() for t in places]:
                self.wrong[op] = [(t.dtype, tuple(t.shape)) for t in results]
        return made


def run(compared, op, dtype):
    """Run samples of an op, backward too where torch can."""
    differentiable = op.supports_autograd and dtype is torch.float32
    for sample in list(op.sample_inputs("cpu", dtype, requires_grad=differentiable))[:SAMPLES]:
        with compared:
            result = op.get_op()(sample.input, *sample.args, **sample.kwargs)
            results = [t for t in tree.leaves(result) if isinstance(t, Tensor) and t.requires_grad]
            if differentiable and results:
                torch.autograd.backward(results, [torch.ones_like(t) for t in results])


def every_op():
    """Return the overloads of torch's ops that write nothing."""
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)]
    packets = [each for each in packets if isinstance(each, torch._ops.OpOverloadPacket)]
    ops = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return [op for op in ops if not op._schema.is_mutable]


def test_the_ops_are_those_that_torch_calls_structured():
    """Compare the rule with the file that torch generates its dispatch from; ``narrow_copy`` also computes there."""
    folder = Path(torchgen.__file__).parent / "packaged/ATen/native"
    functions = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml")).native_functions
    functional = [f for f in functions if f.structured_delegate is not None and f.func.kind() is SchemaKind.functional]
    structured = {f"aten::{f.func.name}" for f in functional}
    found = {op.name() for op in every_op() if op not in UNSTRUCTURED and out_variant(op) is not None}
    assert found - structured <= {"aten::narrow_copy"}
    assert len(found) > 0.9 * len(structured - {op.name() for op in RESIZED}) > 200


def test_an_out_variant_is_that_of_one_op():
    for op in every_op():
        if (variant := out_variant(op)) is not None:
            assert without_results(variant) is op
    assert without_results(torch.ops.aten.add.Tensor) is without_results(torch.ops.aten.mse_loss.out) is None
    assert out_variant(torch.ops.aten.mse_loss.default) is out_variant(torch.ops.aten.add_.Tensor) is None
    assert out_variant(len) is None


@pytest.mark.filterwarnings("ignore")  # torch's samples warn of what they show
@pytest.mark.parametrize("dtype", [pytest.param(dtype, id=str(dtype), marks=pytest.mark.slow) for dtype in DTYPES])
def test_the_bits_are_those_of_the_op(dtype):
    pytest.importorskip("expecttest", reason="torch's samples import expecttest; pip install expecttest")
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    compared, failed = Compared(), 0
    for op in op_db:
        if dtype in op.supported_dtypes("cpu"):
            try:
                run(compared, op, dtype)
            except (RuntimeError, NotImplementedError, TypeError, AttributeError, AssertionError):
                failed += 1  # samples that torch cannot run in a mode, or on this machine
    assert not compared.wrong and len(compared.calls) > 60 and failed < 0.2 * len(op_db)


def given(op):
    """Return arguments of one of the ops that are named."""
    x, mask = randn(5, 7), randn(5, 7, seed=1) > 0
    args = {
        "where": (mask, x, -x),
        "index_select": (x, 1, torch.tensor([3, 0, 3])),
        "abs": (x,),
        "logical_not": (mask,),
        "linalg_solve_triangular": (x[:, :5].triu() + 9 * torch.eye(5), x),
    }
    kwargs = {"upper": True} if op is torch.ops.aten.linalg_solve_triangular.default else {}
    return args.get(op.overloadpacket.__name__, (mask, x)), kwargs


@pytest.mark.parametrize("op", UNSTRUCTURED, ids=str)
def test_the_bits_of_those_that_are_named(op):
    args, kwargs = given(op)
    with Compared() as compared:
        op(*args, **kwargs)
    assert compared.calls[op] == 1 and not compared.wrong


@pytest.mark.parametrize("op", UNSTRUCTURED, ids=str)
def test_those_that_are_named_are_described_without_values(op):
    args, kwargs = given(op)
    result, described = op(*args, **kwargs), describe(op, args, kwargs)
    assert described.is_meta and (described.shape, described.dtype) == (result.shape, result.dtype)
    with Largest() as largest:
        describe(op, args, kwargs)
    assert largest.numel <= 1


class Largest(TorchDispatchMode):
    """Remembers the most elements of a result that has values."""

    numel = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        self.numel = max(self.numel, 0 if made.is_meta else made.numel())
        return made
