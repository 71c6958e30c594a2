"""Partitions of a tree between optimisers: each leaf is updated as by its optimiser alone."""

import re

import pytest
import torch

from fquant import jit, optim, tree
from tests.helpers.optim.runs import normal, ours

PARAMS = {"layers": [{"w": normal("a", (6, 4), 0.1), "norm": normal("b", (4,), 0.1)}], "head": normal("c", (5, 4), 0.1)}
GRADIENTS = [
    tree.map_with_path(lambda path, p, i=i: normal(f"{path}{i}", tuple(p.shape), 0.01), PARAMS) for i in range(5)
]
MIXED = optim.partition({r".*\.w": optim.muon(0.02), r".*norm|head": optim.adamw(1e-3, moments=optim.DYNAMIC8)})


@pytest.mark.parametrize("captured", [False, True])
def test_each_leaf_is_updated_by_its_optimiser(captured):
    step = lambda params, state, grads: optim.step(MIXED, grads, state, params)
    step = jit(step) if captured else step
    params, state = PARAMS, MIXED.init(PARAMS)
    for grads in GRADIENTS:
        params, state = step(params, state, grads)
    some = lambda x: {"layers.0.norm": x["layers"][0]["norm"], "head": x["head"]}
    adam, adam_state = ours(optim.adamw(1e-3, moments=optim.DYNAMIC8), some(PARAMS), list(map(some, GRADIENTS)))
    matrix = lambda x: {"layers.0.w": x["layers"][0]["w"]}
    orthogonal, muon_state = ours(optim.muon(0.02), matrix(PARAMS), list(map(matrix, GRADIENTS)))
    assert torch.equal(params["head"], adam["head"]) and torch.equal(params["layers"][0]["w"], orthogonal["layers.0.w"])
    assert torch.equal(params["layers"][0]["norm"], adam["layers.0.norm"])
    assert all(map(torch.equal, tree.leaves(state), tree.leaves((muon_state, adam_state))))


def test_update_and_step_are_the_same():
    state = MIXED.init(PARAMS)
    updates, after = MIXED.update(GRADIENTS[0], state, PARAMS)
    want = optim.apply_updates(PARAMS, updates), after
    got = optim.step(MIXED, GRADIENTS[0], state, PARAMS)
    assert all(map(torch.equal, tree.leaves(got), tree.leaves(want)))


sgd = optim.sgd(0.1)
BAD = {
    "none": ({r".*\.w": sgd, "head": sgd}, "layers.0.norm: no pattern of the partition matches it; add one"),
    "two": ({".*": sgd, "head": sgd}, "head: '.*', 'head' match it, wanted one pattern of the partition"),
    "nothing": ({".*": sgd, "tail": sgd}, "partition: 'tail' matches no path; the tree has"),
    "regex": ({"(": sgd}, "partition: '(' is no regular expression"),
    "vector": ({".*": optim.muon(0.1)}, "layers.0.norm: got shape (4,), and Muon is for matrices"),
}


@pytest.mark.parametrize(("rules", "message"), BAD.values(), ids=BAD)
def test_bad_input_says_what_is_wrong(rules, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        optim.partition(rules).init(PARAMS)
