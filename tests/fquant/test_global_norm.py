"""fquant.global_norm: a norm beyond float32 by float64, ordinary ones with the bits of float32, under transforms."""

import math

import pytest
import torch
from torch.func import grad, jvp, vmap

from fquant import jit, optim
from fquant.global_norm import ROW, _far_in_few_kernels, root, sum_of_squares
from tests.helpers.kernels.threads import num_threads


def drawn(scale, seed=0):
    draw = torch.Generator().manual_seed(seed)
    some = [torch.randn(n, generator=draw, dtype=torch.float64, device="cpu").clamp(-2, 2) for n in (3, 500, 70000)]
    return [(scale * t).float() for t in some]


def plain(leaves):
    """The norm in float32, as it is where that does not overflow."""
    return torch.stack([leaf.float().square().sum() for leaf in leaves]).sum().sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponent", [-30, -3, 0, 3, 15])
def test_an_ordinary_norm_is_that_of_float32(exponent, dtype):
    leaves = [t.to(dtype) for t in drawn(10.0**exponent)]
    small = [t for t in leaves if len(t) <= ROW]
    assert torch.equal(optim.global_norm(small), plain(small).double())
    torch.testing.assert_close(optim.global_norm(leaves), plain(leaves).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e25])
def test_the_bits_do_not_depend_on_threads(scale, captured):
    leaves, found = drawn(scale), set()
    norm = jit(optim.global_norm) if captured else optim.global_norm
    for threads in (1, 2, 3, 5):
        with num_threads(threads):
            found.add(float(norm(leaves)))
    assert len(found) == 1


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("scale", [1e17, 1e20, 1e30, 1.7e38])
def test_a_norm_beyond_float32_is_that_of_float64(scale, captured):
    leaves, clip = drawn(scale), optim.clip_by_global_norm(0.5)
    assert plain(leaves).isinf()
    f = lambda leaves: (optim.global_norm(leaves), clip.update(leaves, (), leaves)[0])
    norm, clipped = (jit(f) if captured else f)(leaves)
    wanted = math.sqrt(sum(float(t.double().square().sum()) for t in leaves))
    assert float(norm) == pytest.approx(wanted, rel=1e-6)
    for got, leaf in zip(clipped, leaves, strict=True):  # the factor is a float32, and loses digits below 1e-38
        bound = 1e-6 if scale < 1e30 else 2e-3
        torch.testing.assert_close(got.double(), 0.5 * leaf.double() / wanted, rtol=bound, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e20, 1.7e38])
def test_few_kernels_give_the_sum_in_float64(scale, dtype, device):
    """That of CUDA, whose op is for the host too."""
    leaves = [t.to(device, dtype) for t in (*drawn(scale), torch.zeros(0), torch.full((2, 3), -scale))]
    got, wanted = _far_in_few_kernels(leaves[0], leaves), sum(t.double().square().sum() for t in leaves)
    assert got.dtype is torch.float64 and got.shape == ()
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=0)


def test_small_elements_are_scaled_too():
    leaves = [torch.tensor([1e20, 1.0, 1e-3], device="cpu")]
    (clipped,), _ = optim.clip_by_global_norm(1.0).update(leaves, (), leaves)
    torch.testing.assert_close(clipped, torch.tensor([1.0, 1e-20, 1e-23], device="cpu"))


@pytest.mark.parametrize(("bad", "wanted"), [(math.inf, math.inf), (-math.inf, math.inf), (math.nan, math.nan)])
def test_what_is_not_finite_stays_so(bad, wanted):
    leaves = [torch.ones(3, device="cpu"), torch.tensor([1e30, bad], device="cpu")]
    assert float(optim.global_norm(leaves)) == pytest.approx(wanted, nan_ok=True)


def test_under_vmap_each_row_has_its_own_norm():
    near, far = drawn(1.0), drawn(1e25, seed=1)
    rows = [torch.stack([a, b]) for a, b in zip(near, far, strict=True)]
    torch.testing.assert_close(vmap(optim.global_norm)(rows)[1], optim.global_norm(far))
    torch.testing.assert_close(vmap(optim.global_norm)(rows)[0], optim.global_norm(near), rtol=1e-6, atol=0)
    shared = vmap(lambda x: root(sum_of_squares([x, far[1]])), in_dims=1)(rows[0].T)
    torch.testing.assert_close(shared[0], optim.global_norm([near[0], far[1]]))


def test_derivatives_of_an_ordinary_norm():
    x = drawn(1.0)[1]
    norm = float(optim.global_norm(x))
    got = grad(lambda x: optim.global_norm([x]).float())(x)
    torch.testing.assert_close(got, x / norm)
    along = jvp(lambda x: optim.global_norm([x]), (x,), (x,))[1]
    assert float(along) == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("leaf", [None, 2.0, torch.ones(2, dtype=torch.complex64)], ids=["None", "float", "complex"])
def test_a_leaf_that_is_no_tensor_of_real_numbers_is_refused(leaf):
    with pytest.raises(TypeError, match=r"global_norm: got a leaf of \S+, wanted tensors of real numbers"):
        optim.global_norm({"a": torch.ones(2), "b": leaf})
