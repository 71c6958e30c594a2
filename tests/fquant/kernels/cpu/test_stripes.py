"""Products of many rows, in stripes of columns, have the bits of those of few rows, in groups of rows of the weight."""

import pytest
import torch

from fquant import kernels
from fquant.kernels import cpu
from fquant.kernels.spec import Spec
from tests.helpers.arrays import named
from tests.helpers.formats import ISAS, KINDS, alike, built, draw, forced
from tests.helpers.kernels.threads import num_threads

pytestmark = built
MANY, FEW = 200, 100  # rows of x on both sides of STRIPED_ROWS of kernels.c
WIDTHS = (333, 1098)  # ends within a word, a vector, a panel and 128 words


def rows_of(width, dtype):
    return torch.randn(MANY, width, generator=torch.Generator().manual_seed(width)).to(dtype)


@named("dtype", [torch.float32, torch.bfloat16, torch.float16])
@named("format", KINDS)
def test_packed_weights(format, dtype):
    """Stripes are as many as threads, and columns of the last are no whole panel."""
    for width in WIDTHS:
        spec = Spec(format, (330, width), torch.bfloat16)
        buffers, x = draw(spec), rows_of(width, dtype)
        for isa in ISAS:
            with forced(isa), num_threads(2):
                got = kernels.matmul(x, buffers, spec)
                assert alike(got[:FEW], kernels.matmul(x[:FEW], buffers, spec)), (isa, width)


@named("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_weights(dtype):
    for width in WIDTHS:
        w, x = torch.randn(330, width, generator=torch.Generator().manual_seed(1)).to(dtype), rows_of(width, dtype)
        for isa in ISAS:
            with forced(isa), num_threads(2):
                got = cpu.ordered_matmul(x, w.mT)
                assert alike(got[:FEW], cpu.ordered_matmul(x[:FEW], w.mT)), (isa, width)


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_rows_of_a_narrow_result_are_divided_among_threads(threads):
    """g · w has too few stripes for all threads."""
    w = torch.randn(300, 130, generator=torch.Generator().manual_seed(2))
    g = rows_of(300, torch.float32)
    wanted = cpu.ordered_matmul(g[:FEW], w)
    with num_threads(threads):
        assert alike(cpu.ordered_matmul(g, w)[:FEW], wanted)
