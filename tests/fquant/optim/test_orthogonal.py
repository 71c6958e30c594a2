"""Muon against torch.optim.Muon."""

import re

import pytest
import torch

from fquant import optim
from tests.helpers.optim.runs import normal, ours, theirs

SHAPES = {"wide": (30, 50), "tall": (60, 20), "square": (16, 16)}
PARAMS = {name: normal(name, shape, 0.1) for name, shape in SHAPES.items()}
GRADIENTS = [{name: normal(f"{name}{i}", shape, 0.01) for name, shape in SHAPES.items()} for i in range(20)]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.6, "weight_decay": 0.0}])
def test_it_equals_torch(options, scale, nesterov):
    got, state = ours(optim.muon(0.02, nesterov=nesterov, scale=scale, **options), PARAMS, GRADIENTS)
    make = lambda p: torch.optim.Muon(p, 0.02, nesterov=nesterov, adjust_lr_fn=scale, **options)
    want, peer = theirs(make, PARAMS, GRADIENTS)
    for name, there in zip(PARAMS, peer.state.values(), strict=True):
        assert torch.equal(state.momentum[name], there["momentum_buffer"])
        torch.testing.assert_close(got[name], want[name], atol=1e-6, rtol=0)


def test_an_update_is_nearly_orthogonal():
    opt = optim.muon(1.0, weight_decay=0.0)
    updates, _ = opt.update(GRADIENTS[0], opt.init(PARAMS), PARAMS)
    assert 0.5 < torch.linalg.svdvals(updates["wide"]).min() and torch.linalg.svdvals(updates["wide"]).max() < 1.4


BAD = {
    "vector": (
        lambda: optim.muon(1e-3).init({"norm": torch.zeros(3)}),
        "norm: got shape (3,), and Muon is for matrices",
    ),
    "stack": (lambda: optim.muon(1e-3).init({"w": torch.zeros(3, 2, 2)}), "w: got shape (3, 2, 2), and Muon"),
    "scale": (lambda: optim.muon(1e-3, scale="none"), "scale: got 'none', wanted 'original' or 'match_rms_adamw'"),
    "steps": (lambda: optim.muon(1e-3, steps=100), "steps: got 100, wanted 0 to 99"),
    "momentum": (lambda: optim.muon(1e-3, momentum=1.0), "momentum: got 1.0"),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_bad_input_says_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
