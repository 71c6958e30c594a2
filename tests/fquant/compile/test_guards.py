"""A captured function equals the function in any state of torch, and is retraced if the state decides."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.func import grad

from fquant import NF4_DQ, jit, linear, quantize
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
