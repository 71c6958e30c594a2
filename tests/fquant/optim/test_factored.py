"""Adafactor against torch.optim.Adafactor."""

import re

import pytest
import torch

from fquant import optim, tree
from tests.helpers.optim.runs import normal, ours, theirs

SHAPES = {"w": (30, 50), "b": (60,), "stack": (3, 4, 5), "scale": ()}
PARAMS = {name: normal(name, shape, 0.1) for name, shape in SHAPES.items()}
GRADIENTS = [{name: normal(f"{name}{i}", shape, 0.01) for name, shape in SHAPES.items()} for i in range(50)]
OPTIONS = {
    "default": ({}, {}),
    "decay": ({"lr": 0.05, "weight_decay": 0.1}, {"lr": 0.05, "weight_decay": 0.1}),
    "all": (
        {"beta2_decay": -0.5, "eps1": 1e-4, "eps2": 0.1, "clip": 2.0},
        {"beta2_decay": -0.5, "eps": (1e-4, 0.1), "d": 2.0},
    ),
}


@pytest.mark.parametrize(("options", "named"), OPTIONS.values(), ids=OPTIONS)
def test_it_equals_torch(options, named):
    got, state = ours(optim.adafactor(**options), PARAMS, GRADIENTS)
    want, peer = theirs(lambda p: torch.optim.Adafactor(p, **named), PARAMS, GRADIENTS)
    for name in PARAMS:
        torch.testing.assert_close(got[name], want[name], atol=2e-6, rtol=1e-5)
    there = next(iter(peer.state.values()))
    torch.testing.assert_close(state.rows["w"], there["row_var"])
    torch.testing.assert_close(state.columns["w"], there["col_var"])
    assert tree.nbytes((state.rows, state.columns)) == 4 * (30 + 50 + 60 + 12 + 15 + 1)


BAD = {
    "beta2_decay": (lambda: optim.adafactor(beta2_decay=0.5), "beta2_decay: got 0.5, wanted at most 0"),
    "eps1": (lambda: optim.adafactor(eps1=-1.0), "eps1: got -1.0, wanted None or at least 0"),
    "eps2": (lambda: optim.adafactor(eps2=-1.0), "eps2: got -1.0, wanted at least 0"),
    "clip": (lambda: optim.adafactor(clip=0.5), "clip: got 0.5, wanted at least 1"),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD)
def test_bad_input_says_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
