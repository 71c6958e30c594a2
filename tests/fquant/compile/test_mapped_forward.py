"""A forward derivative that is mapped, vmap(jvp), is captured with the bits of the plain function.

torch makes its tangents on the device meta there, so such a function is traced on meta and moved to its device.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from fquant import NF4_DQ, jit, linear, lora, quantize, tree
from fquant.compile import trace
from fquant.device import HOST, META
from tests.helpers.arrays import equal

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
BASE = torch.randn(4, 3, generator=torch.Generator().manual_seed(5))

FUNCTIONS = {
    "tanh": lambda x: x.tanh().prod(),
    "sin": lambda x: x.sin().sum(),
    "softmax": lambda x: (x.softmax(-1) * torch.arange(4.0)).sum(),
    "log_softmax": lambda x: x.log_softmax(-1)[0],
    "logsumexp": lambda x: x.logsumexp(-1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor(1)),
    "product": lambda x: (torch.outer(x, x.sin()) @ x).square().sum(),
    "layer_norm": lambda x: F.layer_norm(x, (4,)).pow(3).sum(),
    "silu": lambda x: F.silu(x).square().sum(),
    "constants": lambda x: (
        (x.exp() * x.new_tensor([0.5, 1.0, 2.0, 3.0]) * torch.tensor(0.3)).sum() + torch.ones(2).sum()
    ),
    "where": lambda x: torch.where(x > 0, x**3, x.exp()).sum(),
    "indices": lambda x: (x[torch.tensor([3, 0, 0])] ** 2).cumsum(0).prod(),
    "inverse": lambda x: torch.linalg.inv(torch.outer(x, x) + torch.eye(4)).sum(),
}
TRANSFORMS = {
    "hessian": lambda f: vmap(hessian(f)),
    "jacfwd of grad": lambda f: vmap(jacfwd(grad(f))),
    "jvp": lambda f: vmap(lambda x: jvp(f, (x,), (x.cos(),))),
    "jvp of grad": lambda f: vmap(lambda x: jvp(grad(f), (x,), (x.cos(),))),
    "twice": lambda f: lambda x: vmap(vmap(hessian(f)))(torch.stack([x, x.cos()])),
    "jacrev of vmap": lambda f: jacrev(lambda x: vmap(lambda x: jvp(f, (x,), (x.cos(),))[1])(x)),
    "step of Newton": lambda f: vmap(lambda x: x - torch.linalg.solve(hessian(f)(x) + 9 * torch.eye(4), grad(f)(x))),
}


@pytest.mark.each_value
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_bits(transform, name):
    f = TRANSFORMS[transform](FUNCTIONS[name])
    wanted, captured = f(X), jit(f)
    assert equal(captured(X), wanted) and equal(captured(X), wanted)


@pytest.mark.parametrize("name", ["softmax", "sin"])
def test_a_trace_has_no_tensor_on_meta(name):
    """Whether its error or its graph tells that there was one."""
    f = TRANSFORMS["hessian"](FUNCTIONS[name])
    found = trace.trace(partial(trace.apply, f), trace.signature_of(f).bind(X).arguments)
    values = [node.meta["val"] for node in found.module.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    assert values and all(t.device == HOST for t in values)
    named = [x for node in found.module.graph.nodes for x in (*node.args, *node.kwargs.values())]
    assert META not in [x for x in named if isinstance(x, torch.device)]


@pytest.mark.parametrize("transform", [hessian, lambda f: jacfwd(grad(f))], ids=["hessian", "jacfwd of grad"])
def test_packed_weights_with_adapters(transform):
    base = {"w": quantize(BASE.mT, NF4_DQ)}
    adapters = tree.map(lambda t: t + 0.1, lora.init(base, "w", rank=2, key=0))

    def loss(x, adapters, base):
        return linear(x[None], lora.attach(base, adapters)["w"]).sin().sum()

    f = vmap(transform(loss), (0, None, None))
    assert equal(jit(f)(X, adapters, base), f(X, adapters, base))
    of_adapters = vmap(lambda x, a, base: jvp(lambda a: grad(loss, 1)(x, a, base), (a,), (a,)), (0, None, None))
    assert equal(jit(of_adapters)(X, adapters, base), of_adapters(X, adapters, base))


def test_a_batched_product():
    x, w = BASE.expand(2, 4, 3), torch.stack([BASE.mT, BASE.mT.sin()])
    product = lambda x, w: torch.einsum("ij,jk->ik", x, w).sin()
    within = vmap(lambda x, w: jvp(lambda x: product(x, w), (x,), (x,))[1])
    around = lambda x, w: jvp(lambda x: vmap(product)(x, w), (x,), (x,))[1]
    assert equal(jit(within)(x, w), within(x, w)) and equal(jit(around)(x, w), around(x, w))


def test_a_donated_argument():
    step = lambda x, rate: x - rate * vmap(hessian(FUNCTIONS["tanh"]))(x).sum(-1)
    mine, rate = X.clone(), torch.tensor(0.1)
    captured = jit(step, donate=("x",))
    at = mine.data_ptr()
    for _ in range(3):
        wanted, mine = step(mine, rate), captured(mine, rate)
        assert torch.equal(mine, wanted)
    assert mine.data_ptr() == at


def test_a_tensor_that_is_no_argument():
    with pytest.raises(TypeError, match="uses a tensor that is no argument.*pass it as an argument"):
        jit(vmap(hessian(lambda x: (x.softmax(-1) @ BASE).sin().sum())))(X)


def test_a_fault_of_the_function():
    with pytest.raises(RuntimeError, match=r"4.*3|3.*4|size"):
        jit(vmap(hessian(lambda x: (x.tanh() * torch.ones(3)).sum())))(X)


def casts(x):
    with torch.autocast("cpu", torch.bfloat16):
        return (torch.outer(x, x) @ x).float().sum()


def test_autocast():
    """Tensors of the device meta are not cast, so a function that enters autocast raises."""
    with pytest.raises(TypeError, match="autocast is on for cpu, which a captured function cannot follow; cast in"):
        jit(vmap(hessian(casts)))(X)
    assert equal(jit(vmap(grad(casts)))(X), vmap(grad(casts))(X))  # with no forward derivative it is followed

    def enters(x):
        torch.set_autocast_enabled("cuda", True)
        try:
            return x @ x.mT
        finally:
            torch.set_autocast_enabled("cuda", False)

    with pytest.raises(TypeError, match="autocast is on for cuda"):
        trace.trace(partial(trace.apply, enters), {"x": X}, device=torch.device("cuda"))
