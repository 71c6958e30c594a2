"""Steps with packed moments, captured: the same bits whatever is donated, and written over what is."""

import pytest
import torch

from fquant import dequantize, jit, optim, tree
from tests.helpers.optim.runs import normal

PARAMS = {"w": normal("w", (300, 40), 0.1), "v": normal("v", (50,), 0.1)}
GRADIENTS = [
    tree.map_with_path(lambda path, p, i=i: normal(f"{path}{i}", tuple(p.shape), 0.01), PARAMS) for i in range(4)
]
OPTIMISERS = {
    "adamw": optim.adamw(optim.cosine(1e-3, 10), moments=optim.DYNAMIC8),
    "chain": optim.chain(optim.clip_by_global_norm(0.1), optim.lion(1e-3, moments=optim.DYNAMIC4)),
    "float32": optim.adamw(1e-3),
    "sgd": optim.sgd(0.1, 0.9, moments=optim.FP8),
}


def apart(opt, params, state, grads):
    updates, state = opt.update(grads, state, params)
    return optim.apply_updates(params, updates), state


def at_once(opt, params, state, grads):
    return optim.step(opt, grads, state, params)


def with_old_values(opt, params, state, grads):
    moments = [x for x in tree.leaves(state, is_leaf=lambda x: hasattr(x, "format")) if hasattr(x, "format")]
    read = dequantize(moments[0]) if moments else tree.leaves(state.mean)[0] * 2
    return *optim.step(opt, grads, state, params), tree.map(lambda p: 2 * p, params), read


@pytest.mark.parametrize("opt", OPTIMISERS.values(), ids=OPTIMISERS)
@pytest.mark.parametrize("donate", [("params", "state"), ("state",), ("params",), ()], ids=str)
@pytest.mark.parametrize("function", [apart, at_once, with_old_values])
@pytest.mark.usefixtures("twice")
def test_the_same_bits_whatever_is_donated(function, donate, opt):
    captured = jit(lambda params, state, grads: function(opt, params, state, grads), donate=donate)
    got = tree.map(torch.clone, (PARAMS, opt.init(PARAMS)))
    want = PARAMS, opt.init(PARAMS)
    for grads in GRADIENTS:
        got, want = captured(*got, grads)[:2], apart(opt, *want, grads)
        assert all(map(torch.equal, tree.leaves(got), tree.leaves(want)))


@pytest.mark.parametrize(("name", "written"), [("adamw", 5), ("float32", 3)])
def test_a_step_writes_over_what_is_donated(name, written):
    opt = OPTIMISERS[name]
    captured = jit(lambda params, state, grads: at_once(opt, params, state, grads), donate=("params", "state"))
    given = tree.map(torch.clone, (PARAMS, opt.init(PARAMS)))
    for grads in GRADIENTS[:2]:
        given = captured(*given, grads)
    where = [t.data_ptr() for t in tree.leaves(given)]
    (traced,) = captured.traced.values()
    steps = [node for node in traced.placed.module.graph.nodes if "adam_update" in node.name and node.op != "get_attr"]
    assert len(steps) == 2
    for node in steps:
        assert sum(out.op == "placeholder" for out in node.kwargs.values()) == written and len(node.kwargs) == 5
    given = captured(*given, GRADIENTS[2])
    assert [t.data_ptr() for t in tree.leaves(given)] == where
