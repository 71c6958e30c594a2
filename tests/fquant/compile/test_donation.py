"""A donated tensor raises on any use after the call that took it; results are new tensor objects."""

import copy
import pickle

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

from fquant import jit, tree
from fquant.compile import donation

GONE = r"a.w was donated to step\(...\), and its memory holds a result now; keep a copy \(tree.map\(torch.clone, x\)\)"


@jit(donate=("a",))
def step(a, g):
    return tree.map(lambda t: t - 0.5 * g, a), g.sum()


def given():
    return {"w": torch.arange(6.0).reshape(2, 3).clone()}


USES = {  # of a tensor that was donated
    "an operator": lambda t: t + 1,
    "on the other side": lambda t: torch.ones(2, 3) * t,
    "a method": lambda t: t.sum(),
    "an op": torch.ops.aten.sum.default,
    "in a list": lambda t: torch.stack([torch.ones(2, 3), t]),
    "a view": lambda t: t[0],
    "a view, by name": lambda t: t.view(-1),
    "a number": lambda t: t[0, 0].item(),
    "item": lambda t: t.item(),
    "a list": lambda t: t.tolist(),
    "print": repr,
    "format": lambda t: f"{t}",
    "numpy": lambda t: t.numpy(),
    "an array": lambda t: __import__("numpy").asarray(t),
    "bool": bool,
    "len": len,
    "iter": list,
    "the shape": lambda t: t.shape,
    "the dtype": lambda t: t.dtype,
    "the address": lambda t: t.data_ptr(),
    "the data": lambda t: t.data,
    "a copy": torch.clone,
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "safetensors": lambda t: __import__("safetensors.torch").torch.save({"a": t}),
    "einops": lambda t: __import__("einops").rearrange(t, "a b -> b a"),
    "a write": lambda t: t.zero_(),
    "a write into another": lambda t: torch.zeros(2, 3).copy_(t),
    "an index": lambda t: torch.zeros(4)[t],
    "a parameter": torch.nn.Parameter,
    "a call of a module": lambda t: functional_call(torch.nn.Linear(3, 2), {"weight": t}, torch.ones(3)),
    "a derivative": lambda t: grad(lambda t: (t * 0 + 1).sum())(t),
    "a forward derivative": lambda t: jvp(lambda t: t * 2, (t,), (torch.ones(2, 3),)),
    "a mapped function": lambda t: vmap(lambda t: t * 2)(t),
    "autograd": lambda t: torch.autograd.grad(t, [t]),
    "tree.map": lambda t: tree.map(lambda t: t * 2, {"a": [t]}),
    "the same call": lambda t: step({"w": t}, torch.ones(2, 3)),
    "another capture": lambda t: jit(lambda x: x + 1)(t),
    "within a capture": lambda t: jit(lambda x: x + t)(torch.ones(2, 3)),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_use_of_what_was_donated_raises(use):
    for _ in range(2):
        a = given()
        best = a
        after, _ = step(a, torch.ones(2, 3))
        with pytest.raises(RuntimeError, match=GONE):
            use(best["w"])
        assert torch.equal(after["w"], given()["w"] - 0.5)


def test_the_result_is_a_tensor_like_any_other():
    a = given()
    memory, old = a["w"].data_ptr(), a["w"]
    new = step(a, torch.ones(2, 3))[0]["w"]
    assert type(new) is torch.Tensor and new is not old and type(old) is donation.Donated
    assert new.data_ptr() == memory and new._base is None and new.is_leaf
    new.requires_grad_()
    (slope,) = torch.autograd.grad((new**2).sum(), new)
    assert torch.equal(slope, 2 * new) and torch.equal(grad(lambda t: (t**2).sum())(new.detach()), 2 * new)


def test_a_loop_that_keeps_a_copy():
    a, best = given(), given()
    for i in range(3):
        best = tree.map(torch.clone, a) if i == 1 else best
        a, _ = step(a, torch.ones(2, 3))
    assert torch.equal(best["w"], given()["w"] - 0.5) and torch.equal(a["w"], given()["w"] - 1.5)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_parameter(requires_grad):
    """As uncaptured: the result of an update without gradients is a plain tensor."""
    w = torch.nn.Parameter(given()["w"], requires_grad)
    with torch.no_grad():
        new, _ = step({"w": w}, torch.ones(2, 3))
    assert type(new["w"]) is torch.Tensor and not new["w"].requires_grad
    with pytest.raises(RuntimeError, match=GONE):
        w.sum()


def test_views_of_a_result_outlive_the_donation():
    f = jit(lambda a: (y := a * 2, y[1:], y.mT), donate=("a",))
    a = given()["w"]
    got = f(a)
    assert all(map(torch.equal, got, (2 * given()["w"], 2 * given()["w"][1:], 2 * given()["w"].mT)))
    got[1].zero_()
    assert torch.equal(got[0][1:], torch.zeros(1, 3))


def test_what_is_not_taken_over_is_not_retired():
    a = given()["w"]
    same, total = jit(lambda a: (a, a.sum()), donate=("a",))(a)
    assert same is a and torch.equal(total, a.sum())
    view = a[:1]
    new = jit(lambda a: a + 1, donate=("a",))(a)
    assert torch.equal(a, given()["w"]) and torch.equal(view, a[:1]) and torch.equal(new, a + 1)


def test_an_array_keeps_its_memory():
    a = given()["w"]
    array = a.numpy()
    new = jit(lambda a: a + 1, donate=("a",))(a)
    assert torch.equal(new, a + 1) and (array == given()["w"].numpy()).all()


def failing(a, at):
    """An index of 9 fails before the result is written, an index of 8 after that."""
    before = torch.arange(9.0).index_select(0, at)
    new = a + before
    return new, new.index_select(0, at)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_replay_that_fails(warm, fuse):
    captured = jit(failing, donate=("a",), fuse=fuse)
    if warm:
        captured(torch.zeros(8), torch.tensor([1]))
    a = torch.zeros(8)
    with pytest.raises(IndexError):
        captured(a, torch.tensor([9]))
    assert torch.equal(a, torch.zeros(8))  # nothing was written
    with pytest.raises(IndexError):
        captured(a, torch.tensor([8]))
    with pytest.raises(RuntimeError, match=r"a was donated to failing\(...\), which failed after it may have written"):
        a.sum()
    b = torch.zeros(8)
    assert torch.equal(captured(b, torch.tensor([2]))[0], torch.full((8,), 2.0))


def test_a_trace_that_fails_leaves_arguments_alone():
    a = given()["w"]
    with pytest.raises(TypeError, match="asks for the value"):
        jit(lambda a: a * a.sum().item(), donate=("a",))(a)
    assert torch.equal(a, given()["w"])


put = lambda a, x: a.index_put((torch.tensor([1]),), x)
REPLACED = {  # an argument with some elements replaced, and whether its memory is written in place
    "index_put": (lambda a, x: (put(a, x), x.sum()[None]), True),
    "scatter": (lambda a, x: (a.scatter(0, torch.tensor([[1]]), x), x.sum()[None]), True),
    "index_copy": (lambda a, x: (a.index_copy(0, torch.tensor([1]), x), x.sum()[None]), True),
    "used later": (
        lambda a, x: ((b := put(a, x)), (b[1] * 2 + b.mT[0, 0]).sum()[None]),
        True,
    ),
    "old value used later": (
        lambda a, x: ((b := put(a, x)), (a[1] + b[1]).sum()[None]),
        False,
    ),
    "from itself": (lambda a, x: (put(a, a[2:]), x[0, :1]), False),
}


@pytest.mark.parametrize("name", REPLACED)
def test_elements_replaced_in_place(name):
    f, in_place = REPLACED[name]
    captured = jit(f, donate=("a",))
    for _ in range(2):
        a, x = torch.arange(6.0).reshape(3, 2).clone(), torch.full((1, 2), 9.0)
        want, where = f(a.clone(), x), a.data_ptr()
        got = captured(a, x)
        assert all(map(torch.equal, got, want)) and got[0].data_ptr() == where
        with pytest.raises(RuntimeError, match="was donated"):
            a.sum()
    (trace,) = captured.traced.values()  # type: ignore[attr-defined]
    targets = {str(node.target) for node in trace.module.graph.nodes}
    assert ("aten.copy_.default" not in targets) == in_place
