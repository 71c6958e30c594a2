"""Steps of optimisers that a mask gates: the bits of a selection, in one op that writes over what is donated."""

import pytest
import torch
from torch.func import vmap

from fquant import jit, optim, tree
from fquant.compile.passes.gate_steps import STEPS
from fquant.kernels.ops.pointwise import OP
from tests.helpers.arrays import equal, randn
from tests.helpers.optim.runs import normal

PARAMS = {"w": normal("w", (300, 40), 0.1), "v": normal("v", (50,), 0.1)}
GRADS = tree.map_with_path(lambda path, p: normal(f"g{path}", tuple(p.shape), 0.01), PARAMS)
OPTIMISERS = {
    "adamw": optim.adamw(optim.cosine(1e-3, 10)),
    "adamw8": optim.adamw(1e-3, moments=optim.DYNAMIC8),
    "lion4": optim.lion(1e-3, moments=optim.DYNAMIC4),
    "sgd": optim.sgd(0.1, 0.9),
}
select = lambda mask, new, old: tree.map(lambda new, old: torch.where(mask, new, old), new, old)


def gated(captured):
    """Return how many steps of the captured graph a mask gates, and whether leaves are selected beside them."""
    (traced,) = captured.traced.values()
    calls = [node for node in traced.module.graph.nodes if node.op == "call_function"]
    selects = [node for node in calls if node.target is torch.ops.aten.where.self or node.target is OP]
    selects = [node for node in selects if "where" in str(node) + str(node.args[2])]
    of_leaves = [node for node in selects if any(x.meta["val"].ndim > 1 for x in node.all_input_nodes)]
    masks = [node.args[-1] is not None for node in calls if str(node.target) in STEPS]
    return sum(masks), bool(of_leaves)


@pytest.mark.parametrize("donate", [("params", "state"), ()], ids=str)
@pytest.mark.parametrize("opt", OPTIMISERS.values(), ids=OPTIMISERS)
def test_a_step_that_is_skipped(opt, donate):
    """One mask, as for gradients that are not finite."""

    def step(params, state, grads):
        ok = torch.stack([g.isfinite().all() for g in tree.leaves(grads)]).all()
        return select(ok, optim.step(opt, grads, state, params), (params, state))

    captured, bad = jit(step, donate=donate), tree.map(lambda g: g / 0, GRADS)
    got, want = tree.map(torch.clone, (PARAMS, opt.init(PARAMS))), (PARAMS, opt.init(PARAMS))
    for grads in (GRADS, bad, GRADS, bad):
        before, got, want = want, captured(*got, grads), step(*want, grads)
        assert equal(got, want) and equal(want, before) == (grads is bad)
    assert gated(captured) == (2, False)


@pytest.mark.parametrize("opt", OPTIMISERS.values(), ids=OPTIMISERS)
def test_many_steps_that_a_mask_gates(opt):
    """Mapped, with the gradients of batched products: one op for each leaf, that writes over params and moments."""
    stack = lambda t: torch.stack([t, 2 * t, -t])
    params, active = tree.map(stack, PARAMS), torch.tensor([True, False, True])
    state = vmap(opt.init)(params)

    def one(active, params, state, grads):
        return select(active, optim.step(opt, grads, state, params), (params, state))

    def step(params, state, x, y, active):
        grads = {"w": (x.mT @ y).mT, "v": params["v"]}
        return vmap(one)(active, params, state, grads)

    x, y = randn(3, 7, 40), randn(3, 7, 300, seed=1)
    captured = jit(step, donate=("params", "state"))
    got, want = tree.map(torch.clone, (params, state)), (params, state)
    for mask in (active, ~active, active):
        grads = {"w": (x.mT @ y).mT, "v": want[0]["v"]}
        each = [one(*tree.map(lambda t, i=i: t[i], (mask, *want, grads))) for i in range(3)]
        got, want = captured(*got, x, y, mask), step(*want, x, y, mask)
        assert equal(got, want) and equal(want, tree.map(lambda *some: torch.stack(some), *each))
    assert gated(captured) == (2, False)
    (traced,) = captured.traced.values()
    assert traced.placed is not None
    steps = [node for node in traced.placed.module.graph.nodes if "_update" in node.name and node.op == "call_function"]
    assert all(any(out.op == "placeholder" for out in node.kwargs.values()) for node in steps) and len(steps) == 2


OTHERWISE = {  # of old, new and grads: what is not a mask of a whole step
    "elements": lambda old, new, grads: tree.map(lambda n, o: torch.where(o > 0, n, o), new[0], old[0]),
    "turned around": lambda old, new, grads: select(grads["v"][0] < 0, old, new),
    "another old": lambda old, new, grads: select(grads["v"][0] < 0, new[0], grads),
    "two masks": lambda old, new, grads: (
        select(grads["v"][0] < 0, new[0], old[0]), select(grads["v"][1] < 0, new[1], old[1])
    ),
    "read beside": lambda old, new, grads: (select(grads["v"][0] < 0, new, old), new[0]["w"].sum(), new[0]["v"].sum()),
    "a mask of the result": lambda old, new, grads: select(new[0]["v"][0] < new[0]["w"][0, 0], new, old),
}  # fmt: skip


@pytest.mark.parametrize("f", OTHERWISE.values(), ids=OTHERWISE)
def test_what_is_no_mask_of_a_step_stays(f):
    opt = optim.adamw(1e-3)
    step = lambda params, state, grads: f((params, state), optim.step(opt, grads, state, params), grads)
    captured, state = jit(step), opt.init(PARAMS)
    for _ in range(2):
        assert equal(captured(PARAMS, state, GRADS), step(PARAMS, state, GRADS))
    assert gated(captured)[0] == 0
