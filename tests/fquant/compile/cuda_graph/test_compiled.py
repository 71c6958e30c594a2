"""Functions that torch.compile has compiled are recorded as they are, and nothing is compiled while one is recorded."""

import shutil

import pytest
import torch

from fquant import jit
from tests.helpers.arrays import equal
from tests.helpers.graphs import bf16_step
from tests.helpers.graphs.recorder import use
from tests.helpers.qlora_step import copied

X = torch.arange(6.0).reshape(2, 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled(monkeypatch):
    host = use(monkeypatch)
    torch._dynamo.reset()
    f = jit(lambda w, x: ((w @ x).tanh(), w + 1), compile="eager", donate=("w",), cuda_graph=True)
    w, other = torch.eye(3), torch.eye(3)
    for i in range(4):
        y, w = f(w, X.mT + i)
        assert torch.equal(y, (other @ (X.mT + i)).tanh())
        other = other + 1
        assert torch.equal(w, other)
    assert host.recorded == 1


needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no compiler of C++")


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inductor(monkeypatch, mode):
    """What the first call has compiled is recorded, also if that was in inference mode; nothing is compiled again."""
    host, compiled = use(monkeypatch, whole=True), lambda w, x: ((w @ x).relu() * 2, w + 1)
    torch._dynamo.reset()
    f, w, other = jit(compiled, compile=True, donate=("w",), cuda_graph=True), torch.eye(3), torch.eye(3)
    with mode():
        y, w = f(w.clone(), X.mT + 0)
    assert torch.equal(y, X.mT * 2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(1, 5):
            other = other + 1
            at, (y, w) = w.data_ptr(), f(w, X.mT + i)
            assert w.data_ptr() == at and torch.equal(y, (other @ (X.mT + i)).relu() * 2)
            assert torch.equal(w, other + 1)
    assert (host.warmed, host.recorded, host.replayed) == (1, 1, 4)


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_step_of_inductor(monkeypatch):
    host, (adapters, state, base, tokens) = use(monkeypatch, whole=True), bf16_step.start()
    torch._dynamo.reset()
    plain = jit(bf16_step.step, compile=True, cuda_graph=False)
    f = jit(bf16_step.step, compile=True, donate=("adapters", "state"), cuda_graph=True)
    ours, losses = copied((adapters, state)), set()
    for i in range(5):
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            *ours, loss = f(*ours, base, tokens.roll(i, 0))
            adapters, state, wanted = plain(adapters, state, base, tokens.roll(i, 0))
        assert equal((*ours, loss), (adapters, state, wanted))
        losses.add(float(loss))
    assert (host.recorded, host.replayed, len(losses)) == (1, 4, 5)
