"""A step of an adapter beside a base of every known format, in the dtypes of training: gradients, transforms, capture.

The loss is that of ``x · Wᵀ + x · Aᵀ · Bᵀ``, differentiated in the adapter and in x. The oracle is the same function of
the dequantised weight in float64. An error may be twice that of the dense weight in the dtype of x, because both round
each product once, in another order. The table of transforms (``tests/integration/test_transforms.py``) has the same in
float64, where nothing but a wrong derivative shows; kernels of float32 and bfloat16 are others.
"""

import pytest
import torch
from torch.func import grad, grad_and_value, jvp, vmap

from fquant import dequantize, linear, lora, quantize, tree
from tests.helpers.arrays import named, randn
from tests.helpers.formats import KNOWN
from tests.helpers.kernels.block_loop import fitting
from tests.helpers.qlora_step import replays

OUT, IN, ROWS, EXAMPLES = 21, 67, 5, 3
known = pytest.mark.parametrize("format", KNOWN.values(), ids=KNOWN)


def product(theta, base, x):
    """Multiply with a weight and its adapter; theta has the adapter and a factor of x."""
    return linear(theta["x"] * x, lora.attach({"w": base}, theta["lora"])["w"])


def loss(theta, base, x):
    return product(theta, base, x).square().mean()


def pushed(theta, along, base, x):
    """Return the product and its tangent, which are no sums that cancel."""
    return jvp(lambda t: product(t, base, x), (theta,), (along,))


def arguments(format, dtype):
    """Return theta, a direction of theta, a packed weight and examples f[examples rows in] of ``dtype``."""
    base = quantize(fitting(randn(OUT, IN) / 4, format).to(dtype), format)
    theta = {"lora": lora.init({"w": base}, "w", rank=3, alpha=6, key=1, dtype=torch.float32), "x": torch.ones(IN)}
    theta = tree.map_with_path(lambda path, t: t + 0.1 * randn(*t.shape, seed=len(path)), theta)
    theta["x"] = theta["x"].to(dtype)
    along = tree.map(lambda t: randn(*t.shape, seed=5).to(t.dtype), theta)
    return theta, along, base, randn(EXAMPLES, ROWS, IN, seed=2, dtype=dtype)


TRANSFORMS = {
    "grad": lambda theta, along, base, x: grad(loss)(theta, base, x[0]),
    "grads of examples": lambda theta, along, base, x: vmap(grad(loss), (None, None, 0))(theta, base, x),
    "jvp": lambda theta, along, base, x: pushed(theta, along, base, x[0]),
    "jvp of examples": lambda theta, along, base, x: vmap(pushed, (None, None, None, 0))(theta, along, base, x),
}


@named("dtype", [torch.float32, torch.bfloat16])
@known
def test_derivatives_are_those_beside_the_dense_weight(format, dtype):
    theta, along, base, x = arguments(format, dtype)
    wide = lambda t: tree.map(lambda leaf: leaf.double(), t)
    for name, transform in TRANSFORMS.items():
        got = transform(theta, along, base, x)
        usual = transform(theta, along, dequantize(base), x)
        wanted = transform(wide(theta), wide(along), dequantize(base, torch.float64), wide(x))
        assert tree.structure(got) == tree.structure(usual) == tree.structure(wanted)
        for (path, a), b, c in zip(tree.items(got), tree.leaves(usual), tree.leaves(wanted), strict=True):
            assert a.dtype == b.dtype and c.norm() > 0, (name, path)
            least = torch.finfo(dtype).eps / 2 * c.norm()  # a rounding of each element
            assert (a - c).norm() <= 2 * (b - c).norm() + least, (name, path)


def step(theta, base, x):
    """Gradients of each example, and a step of gradient descent."""
    each, values = vmap(grad_and_value(loss), (None, None, 0))(theta, base, x)
    return tree.map(lambda t, g: t - 0.1 * g.mean(0), theta, each), each, values


@pytest.mark.each_value
@pytest.mark.usefixtures("twice")
@named("dtype", [torch.float32, torch.bfloat16])
@known
def test_a_captured_step_is_the_step(format, dtype):
    theta, _, base, x = arguments(format, dtype)
    replays(step, theta, base, x)
