"""Products in order: float64 as the oracle, and elements whose bits depend on a row and a column alone."""

import itertools

import pytest
import torch
from torch.func import vmap

from fquant.kernels import dispatch
from fquant.kernels.cpu.library import isas
from fquant.kernels.ops.ordered_matmul import ordered_matmul
from tests.helpers.arrays import randn, rng
from tests.helpers.kernels.threads import num_threads

BACKENDS = ["reference", *(f"cpu:{isa}" for isa in isas())]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = [
    (1, 1, 1), (3, 5, 7), (17, 64, 33), (100, 130, 64), (40, 16, 300), (300, 32, 600), (70, 513, 260), (130, 1100, 1),
    (1, 300, 200), (64, 256, 48), (66, 254, 16), (600, 40, 9),
]  # fmt: skip


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, request.param)
    return request.param


def drawn(m, k, n, dtype):
    return randn(m, k).to(dtype), randn(k, n, seed=1).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_values_and_layouts(backend, size, dtype):
    """Both operands in both layouts, and with gaps, give the bits of the first, which are right."""
    a, b = drawn(*size, dtype)
    exact, wanted = a.double() @ b.double(), ordered_matmul(a, b)
    bound = (size[1] + 2) * 2.0**-24 * (a.double().abs() @ b.double().abs()) + torch.finfo(dtype).eps * exact.abs()
    assert bool(((wanted - exact).abs() <= bound).all())
    layouts = (lambda t: t, lambda t: t.mT.contiguous().mT, lambda t: torch.stack([t, t], -1)[..., 0])
    for first, second in itertools.product(layouts, layouts):
        assert torch.equal(ordered_matmul(first(a), second(b)), wanted)
    unaligned = torch.cat([a.new_zeros(1), a.flatten()])[1:].view_as(a)
    assert torch.equal(ordered_matmul(unaligned, b), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_an_element_depends_on_its_row_and_its_column_alone(backend, size, dtype):
    a, b = drawn(*size, dtype)
    whole, (m, _, n) = ordered_matmul(a, b), size
    for start, stop in ((0, 1), (m // 3, m), (m // 2, m // 2 + 9), (m - 1, m)):
        assert torch.equal(ordered_matmul(a[start:stop], b), whole[start:stop])
    for start, stop in ((0, 1), (n // 3, n), (n - 1, n)):
        assert torch.equal(ordered_matmul(a, b[:, start:stop]), whole[:, start:stop])
        assert torch.equal(ordered_matmul(a[-1:], b[:, start:stop]), whole[-1:, start:stop])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES[:8], ids=str)
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_batches(backend, size, dtype, batch):
    """Each product is that of its operands alone, also of operands that all share and of transposed ones."""
    m, k, n = size
    a, b = randn(batch, m, k).to(dtype), randn(batch, k, n, seed=1).to(dtype)
    wanted = torch.stack([ordered_matmul(x, w) for x, w in zip(a, b, strict=True)])
    assert torch.equal(ordered_matmul(a, b), wanted)
    assert torch.equal(ordered_matmul(a.mT.contiguous().mT, b.transpose(0, 1).contiguous().transpose(0, 1)), wanted)
    shared = torch.stack([ordered_matmul(x, b[0]) for x in a])
    assert torch.equal(ordered_matmul(a, b[:1].expand(batch, k, n)), shared)
    shared = torch.stack([ordered_matmul(a[0], w) for w in b])
    assert torch.equal(ordered_matmul(a[:1].expand(batch, m, k), b), shared)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_change_no_bit(dtype):
    for size in SIZES:
        a, b = drawn(*size, dtype)
        found = []
        for n in (1, 2, 3):
            with num_threads(n):
                found += [ordered_matmul(a, b), ordered_matmul(a.expand(2, *a.shape), b.expand(2, *b.shape))[1]]
        assert all(torch.equal(t, found[0]) for t in found)


def test_empty_operands(backend):
    assert ordered_matmul(torch.ones(0, 3), torch.ones(3, 4)).shape == (0, 4)
    assert torch.equal(ordered_matmul(torch.ones(2, 0), torch.ones(0, 4)), torch.zeros(2, 4))
    assert ordered_matmul(torch.ones(0, 2, 3), torch.ones(0, 3, 4)).shape == (0, 2, 4)


def test_float64():
    a, b = randn(5, 70).double(), randn(70, 3).double()
    torch.testing.assert_close(ordered_matmul(a, b), a @ b, rtol=1e-14, atol=1e-13)


@pytest.mark.parametrize("k", [2, 16, 300])
def test_sums_are_rounded_to_nearest(backend, k):
    """Sums of two numbers, which float32 has: ties, results beyond the largest, infinities and NaN."""
    a, ones = torch.zeros(40, 130, k, dtype=torch.bfloat16), torch.zeros(k, 1, dtype=torch.bfloat16)
    ones[:2] = 1
    a[..., :2] = randn(40, 130, 2) * torch.exp2(torch.randint(-8, 9, (40, 130, 2), generator=rng(2)).float())
    a[0, :, :2] = torch.tensor([1.0, 2.0**-8])
    a[1, :, :2] = torch.tensor([torch.finfo(torch.bfloat16).max, 2.0**119])
    a[2, 5:99, 0], a[3, 7, 1], a[4, 64:96, 1] = torch.nan, torch.inf, -torch.inf
    a[5, :, :2] = torch.tensor([torch.inf, -torch.inf])
    wanted = (a[..., 0].float() + a[..., 1].float()).to(torch.bfloat16)
    got = ordered_matmul(ones.mT.expand(40, 1, k).contiguous(), a.mT)[:, 0]
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    got = ordered_matmul(a, ones.expand(40, k, 1).contiguous())[..., 0]
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_infinite_elements_reach_their_own_row_and_column_alone(backend):
    a, b = drawn(20, 40, 30, torch.float32)
    a[3, 2], b[5, 7] = torch.inf, torch.nan
    found = ordered_matmul(a, b).isfinite()
    assert not found[3].any() and not found[:, 7].any()
    assert found[[i for i in range(20) if i != 3]][:, [i for i in range(30) if i != 7]].all()


@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0), (1, 2)])
def test_vmap(in_dims):
    a, b = randn(3, 4, 5), randn(5, 6, seed=1)
    a = a if in_dims[0] is not None else a[0]
    b = b if in_dims[1] is None else torch.stack([b, b + 1, b + 2, b + 3][: a.shape[in_dims[0] or 0]], in_dims[1])
    if in_dims[1] == 0 and in_dims[0] is None:
        b = b[:2]
    size = a.shape[in_dims[0]] if in_dims[0] is not None else b.shape[in_dims[1]]
    pick = lambda t, dim, i: t if dim is None else t.select(dim, i)
    got = vmap(ordered_matmul, in_dims)(a, b)
    assert torch.equal(
        got, torch.stack([ordered_matmul(pick(a, in_dims[0], i), pick(b, in_dims[1], i)) for i in range(size)])
    )
    stacked = vmap(vmap(ordered_matmul, (0, None)), (None, 0))(randn(3, 4, 5), torch.stack([randn(5, 2)] * 2))
    assert stacked.shape == (2, 3, 4, 2)


FAULTS = {
    "got a (2, 3) and b (4, 5); wanted [m k] and [k n]": (torch.ones(2, 3), torch.ones(4, 5)),
    "got a (2, 3) and b (1, 3, 5); wanted": (torch.ones(2, 3), torch.ones(1, 3, 5)),
    "got a (2, 2, 3) and b (3, 3, 5); wanted": (torch.ones(2, 2, 3), torch.ones(3, 3, 5)),
    "got a on cpu and b on meta; move one": (torch.ones(2, 3), torch.ones(3, 5, device="meta")),
}


@pytest.mark.parametrize("message", FAULTS)
def test_faults(message):
    with pytest.raises(ValueError) as error:
        ordered_matmul(*FAULTS[message])
    assert message in str(error.value)


def test_faults_of_kinds():
    with pytest.raises(TypeError, match="ordered_matmul got a torch.float32 and b torch.float64; wanted one dtype"):
        ordered_matmul(torch.ones(2, 3), torch.ones(3, 5).double())
    with pytest.raises(TypeError, match="ordered_matmul got a torch.int64"):
        ordered_matmul(torch.ones(2, 3).long(), torch.ones(3, 5).long())
    with pytest.raises(TypeError, match=r"a gradient through ordered_matmul was asked for; .*batch_invariant"):
        ordered_matmul(torch.ones(2, 3, requires_grad=True), torch.ones(3, 5))
