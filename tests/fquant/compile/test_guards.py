"""A captured function equals the function in any state of torch, and is retraced if the state decides."""

from collections import OrderedDict
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.func import grad

from fquant import NF4_DQ, batch_invariant, jit, linear, quantize
from tests.helpers.qlora_step import X, equal

pytestmark = pytest.mark.usefixtures("twice")

W = torch.linspace(-1, 1, 9).reshape(3, 3)
PACKED = quantize(torch.linspace(-1, 1, 4 * 64).reshape(4, 64), NF4_DQ)


@contextmanager
def default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", torch.float16),
    "no autocast": lambda: torch.autocast("cpu", enabled=False),
    "another default dtype": lambda: default(torch.float64),
    "another default device": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "one kind of attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
}
SAME = {"no autocast"}  # as the state that there is without
attend = torch.nn.functional.scaled_dot_product_attention
FUNCTIONS = {
    "products": lambda x, w, packed: torch.nn.functional.silu(x @ w) @ w * 2,
    "numbers": lambda x, w, packed: (torch.arange(3, device=x.device) / 3 + x) * 2,
    "a gradient": lambda x, w, packed: grad(lambda x: (x @ w).softmax(-1).float().square().sum())(x),
    "attention": lambda x, w, packed: attend(*[x.reshape(1, 1, 2, 3)] * 3, is_causal=True),
    "a packed product": lambda x, w, packed: linear(x.repeat(1, 22)[:, :64], packed).exp() @ x.repeat(2, 1),
}


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("state", STATES)
def test_captured_is_eager_in_any_state(f, state):
    captured = jit(f)
    for around in (nullcontext, STATES[state], nullcontext, STATES[state]):
        with around():
            got, wanted = captured(X, W, PACKED), f(X, W, PACKED)
        assert equal(got, wanted)
    assert len(captured.traced) == 1 + (state not in SAME)


def test_too_many_states_are_told():
    captured = jit(lambda x: x @ x.mT, max_traces=1)
    captured(X)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(
            RuntimeError, match=r"more than 1 times: autocast is \(\('cpu', torch.bfloat16\),\), and was \(\);"
        ),
    ):
        captured(X)
    with default(torch.float64), pytest.raises(RuntimeError, match="torch's default dtype is torch.float64, and was"):
        captured(X)
    assert equal(captured(X), X @ X.mT)


# --- calls like earlier ones ------------------------------------------------------------------------------------------


def scaled(x, tree, k):
    return x * (tree["a"] @ tree["a"].mT).sum() * k, tree


def mapped(f, x, tree, k):
    return torch.func.vmap(lambda x: f(x, tree, k))(x[None])


def with_a_tangent(f, x, tree, k):
    with torch.autograd.forward_ad.dual_level():
        out, _ = f(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), tree, k)
        return torch.autograd.forward_ad.unpack_dual(out)


def in_anomaly_mode(f, x, tree, k):
    with torch.autograd.detect_anomaly():
        return f(x, tree, k)


def counted(f, x, tree, k):
    with torch.utils.flop_counter.FlopCounterMode(display=False) as mode:
        return f(x, tree, k), torch.tensor(mode.get_total_flops())


ONE, OTHER = torch.linspace(-1, 1, 6).reshape(2, 3), {"a": torch.linspace(1, 2, 6).reshape(2, 3)}
UNLIKE = {  # how `scaled` is called, and whether that is another trace
    "other values": (lambda f: f(ONE + 1, {"a": OTHER["a"] * 2}, 2), False),
    "the same tensor twice": (lambda f: f(ONE, {"a": ONE}, 2), False),
    "strides": (lambda f: f(ONE.mT.contiguous().mT, OTHER, 2), True),
    "shape": (lambda f: f(ONE[:1], OTHER, 2), True),
    "dtype": (lambda f: f(ONE.double(), OTHER, 2), True),
    "parameter": (lambda f: f(torch.nn.Parameter(ONE, requires_grad=False), OTHER, 2), True),
    "key": (lambda f: f(ONE, {"b": OTHER["a"], "a": OTHER["a"]}, 2), True),
    "kind of dictionary": (lambda f: f(ONE, OrderedDict(OTHER), 2), True),
    "number": (lambda f: f(ONE, OTHER, 3), True),
    "type of a number": (lambda f: f(ONE, OTHER, 2.0), True),
    "a tensor for a number": (lambda f: f(ONE, OTHER, torch.tensor(2)), True),
    "a number for a tensor": (lambda f: f(2, {"a": ONE}, ONE), True),
    "negated": (lambda f: f(torch._neg_view(ONE), OTHER, 2), False),
    "made in inference mode": (lambda f: f(torch.inference_mode()(ONE.clone)(), OTHER, 2), False),
    "in a vmap": (lambda f: mapped(f, ONE, OTHER, 2), False),
    "with a tangent": (lambda f: with_a_tangent(f, ONE, OTHER, 2), False),
    "in a mode": (lambda f: counted(f, ONE, OTHER, 2), False),
    "without gradients": (lambda f: torch.no_grad()(f)(ONE, OTHER, 2), False),
}


@pytest.mark.parametrize("call, traces", UNLIKE.values(), ids=UNLIKE)
def test_only_what_is_like_an_earlier_call_repeats_it(call, traces):
    captured = jit(scaled)
    for _ in range(3):
        assert equal(captured(ONE, OTHER, 2), scaled(ONE, OTHER, 2))
    for each in (call, lambda f: f(ONE, OTHER, 2), call):
        assert equal(each(captured), each(scaled))
    assert len(captured.traced) == 1 + traces


AS_IT_IS = {  # where a captured function is called as it is
    "in a vmap": lambda f: mapped(f, ONE, OTHER, 2),
    "in a vmap of something else": lambda f: torch.func.vmap(lambda x: x * f(ONE, OTHER, 2)[0])(ONE),
    "with a tangent": lambda f: with_a_tangent(f, ONE, OTHER, 2),
    "in another capture": lambda f: jit(lambda x, tree: f(x, tree, 2)[0])(ONE, OTHER),
    "in anomaly mode": lambda f: in_anomaly_mode(f, ONE, OTHER, 2),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("call", AS_IT_IS.values(), ids=AS_IT_IS)
def test_what_is_called_as_it_is_repeats_nothing(call):
    runs = []
    captured = jit(lambda *args: runs.append(args) or scaled(*args))
    for _ in range(3):
        captured(ONE, OTHER, 2)
    before = len(runs)
    assert equal(call(captured), call(scaled)) and len(runs) > before


def test_products_in_one_order_are_asked_for_inside_after_others():
    captured = jit(scaled)
    for _ in range(3):
        captured(ONE, OTHER, 2)
    with batch_invariant(), pytest.raises(RuntimeError, match="is called inside batch_invariant"):
        captured(ONE, OTHER, 2)


def test_a_tensor_that_requires_a_gradient_is_refused_after_others():
    captured = jit(scaled)
    for _ in range(3):
        captured(ONE, OTHER, 2)
    with pytest.raises(TypeError, match="x requires a gradient"):
        captured(ONE.clone().requires_grad_(), OTHER, 2)
    with torch.no_grad():
        captured(ONE.clone().requires_grad_(), OTHER, 2)


def test_memory_that_is_shared_is_not_taken_after_others():
    """Donate tensors of the same kinds, and then one whose memory another argument shares."""
    captured = jit(lambda x, y: (x + y, y * 2), donate=("x",))
    for _ in range(3):
        x, y = ONE.clone(), ONE + 1
        assert equal(captured(x, y), (ONE + y, y * 2))
        with pytest.raises(RuntimeError, match="was donated"):
            x.sum()
    whole = torch.linspace(-1, 1, 9).reshape(3, 3)
    x, y = whole[:2], whole[1:]
    assert equal(captured(x, y), (x + y, y * 2)) and equal(whole, torch.linspace(-1, 1, 9).reshape(3, 3))


def test_a_value_that_the_function_closes_over_is_read_at_repeats():
    k = 2
    captured = jit(lambda x: x * k)
    for k in (2, 2, 2, 3, 2, 3):
        assert equal(captured(ONE), ONE * k)
    assert len(captured.traced) == 2
