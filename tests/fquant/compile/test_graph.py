"""Passes over a captured graph: their order, their effects, refused arguments, and the simplification of views."""

import pytest
import torch
from torch.fx import Graph

from fquant import cost, jit, tree
from fquant.compile import graph
from fquant.compile.trace import trace

pytestmark = pytest.mark.usefixtures("twice")

X = torch.arange(6.0).reshape(2, 3)


def doubled(x):
    return (x * 2).exp()


def halved(g: Graph):
    """Replace every product with 2 by a product with a half."""
    for node in g.nodes:
        if node.target is torch.ops.aten.mul.Tensor:
            node.args = (node.args[0], node.args[1] / 4)


def test_passes_change_what_is_replayed():
    captured = jit(doubled, passes=(halved,))
    assert torch.equal(captured(X), (X * 0.5).exp()) and torch.equal(captured(X + 1), ((X + 1) * 0.5).exp())
    assert torch.equal(jit(passes=[halved, halved])(doubled)(X), (X * 0.125).exp())
    assert torch.equal(jit(doubled)(X), (X * 2).exp())


def test_passes_come_after_tidying_and_before_donation():
    seen = []
    note = lambda g: seen.append([node.target for node in g.nodes if node.op == "call_function"])
    jit(lambda a: (a.detach() + 1, (a * 3).sum())[0], donate=("a",), passes=(note,))(X.clone())
    assert seen == [[torch.ops.aten.add.Tensor]]


def test_passes_count_in_the_cost():
    def twice(g: Graph):
        (node,) = (n for n in g.nodes if n.target is torch.ops.aten.exp.default)
        with g.inserting_before(node):
            again = g.create_node("call_function", node.target, node.args)
        again.meta["val"] = node.meta["val"]

    assert cost(doubled, X, passes=(twice,)).nodes == cost(doubled, X).nodes + 1


def backwards(g: Graph):
    last = [node for node in g.nodes if node.op == "call_function"][-1]
    next(iter(g.nodes)).prepend(last)


REFUSED = {
    "no sequence": (halved, TypeError, "passes is a function; wanted a sequence of functions"),
    "a string": ("halved", TypeError, "passes is a str"),
    "no function": ((halved, "prefetch"), TypeError, r"passes\[1\] is a str; wanted a function of a graph"),
    "a new graph": ((lambda g: Graph(),), TypeError, r"passes\[0\] returned a Graph; .* changed in place"),
    "out of order": ((halved, backwards), RuntimeError, "used before it has been defined"),
}


@pytest.mark.parametrize("passes, error, message", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("use", [lambda p: jit(doubled, passes=p)(X), lambda p: cost(doubled, X, passes=p)])
def test_what_is_no_pass(use, passes, error, message):
    with pytest.raises(error, match=message):
        use(passes)


WRITES = {  # functions of two arguments, and those that they write
    "nothing": (lambda a, b: a + b, ""),
    "one": (lambda a, b: a.add_(b), "a"),
    "the other": (lambda a, b: b.copy_(a), "b"),
    "a view": (lambda a, b: a[1:].mul_(2) + b[:1], "a"),
    "by name": (lambda a, b: torch.add(a, 1, out=b), "b"),
    "many": (lambda a, b: torch._foreach_add_([a, b], 1) or a, "ab"),
}


@pytest.mark.parametrize("f, names", WRITES.values(), ids=WRITES)
def test_what_is_written(f, names):
    g = trace(lambda args: f(*args), (X.clone(), X.clone())).module.graph
    memory = dict(zip("ab", (graph.storages(node) for node in g.nodes if node.op == "placeholder"), strict=False))
    written = set().union(*map(graph.written_storages, g.nodes))
    assert written == set().union(*(memory[name] for name in names))


def test_a_call_that_does_not_tell_what_it_writes():
    g = Graph()
    node = g.call_function(print, ())
    with pytest.raises(ValueError, match="does not declare what it writes; make it a torch.library op"):
        graph.written_storages(node)


def test_donation_looks_at_a_node_a_few_times(monkeypatch):
    """Visit nodes in proportion to the graph: a step of 80 layers donates thousands, of a hundred thousand nodes."""
    looks, storages = [0], graph.storages

    def counted(node):
        looks[0] += 1
        return storages(node)

    monkeypatch.setattr(graph, "storages", counted)

    def looked(leaves):
        looks[0] = 0
        state = {f"w{i}": torch.ones(3) for i in range(leaves)}
        memory = {name: t.data_ptr() for name, t in state.items()}
        new = jit(lambda state: tree.map(lambda t: 2 * t + 1, state), donate=("state",))(state)
        assert {name: t.data_ptr() for name, t in new.items()} == memory
        assert all(torch.equal(t, torch.full((3,), 3.0)) for t in new.values())
        return looks[0]

    few, many = looked(10), looked(40)
    assert few > 0 and many <= 4 * few


SEEN = {  # functions, and the number of ops that are left of their views
    "twice": (lambda x: (x[1:] * 2 + x[1:].mT.mT, x.view(12)), {"slice": 1, "view": 1, "transpose": 0}),
    "back": (lambda x: x.view(12).view(4, 3).mT.mT * 2, {"view": 0, "transpose": 0}),
    "written between": (lambda x: (y := x * 1, a := y[1:] * 1, y.add_(1), a + y[1:]), {"slice": 2}),
    "another dtype": (lambda x: x.view(torch.int32).view(torch.float32) + x.view(torch.int32), {"view": 1}),
    "conjugate": (lambda x: torch.complex(x, x).conj() * torch.complex(x, -x), {"_conj": 1}),
    "returned": (lambda x: (x[1:], x[1:], x.view(4, 3)), {"slice": 2, "view": 1}),
    "of results": (lambda x: (x @ x.mT).view(16) + (x @ x.mT).view(16), {"mm": 2, "transpose": 1, "view": 2}),
}


@pytest.mark.parametrize("case", SEEN)
def test_a_view_is_made_once(case):
    f, left = SEEN[case]
    x = torch.arange(12.0).view(4, 3)
    captured = jit(lambda x: f(x.clone()), fuse=False)
    got, wanted = captured(x), f(x.clone())
    assert tree.structure(got) == tree.structure(wanted)
    assert all(map(torch.equal, tree.leaves(got), tree.leaves(wanted)))
    (traced,) = captured.traced.values()
    names = [str(node.target).removeprefix("aten.").partition(".")[0] for node in traced.module.graph.nodes]
    assert {name: names.count(name) for name in left} == left


ONES = {  # functions with products with 1, and the number left
    "between": (lambda x: (x.exp() * 1).sin() + (1.0 * x.exp()).cos(), 0),
    "seen": (lambda x: (x.exp() * 1.0).view(12).sin() + (x.exp() * 1).mT[1:].reshape(-1).sum(), 0),
    "another number": (lambda x: (x.exp() * 2).sin(), 1),
    "another dtype": (lambda x: (x.isnan() * 1.0).sin(), 1),
    "other strides": (lambda x: (x[:1].exp().expand(4, 3) * 1).sin(), 1),
    "an argument": (lambda x: x * 1, 1),
    "seen of an argument": (lambda x: (x.view(12) * 1).view(3, 4), 1),
    "returned": (lambda x: (y := x.exp(), y * 1), 1),
    "written": (lambda x: (y := x.exp(), z := y * 1, y.add_(1), z.sin() + y), 1),
}


@pytest.mark.parametrize("case", ONES)
def test_products_with_one_are_taken_out_where_nobody_can_tell(case):
    f, left = ONES[case]
    x = torch.tensor([-0.0, 0.0, float("inf"), -float("inf"), float("nan"), 1e-40, *range(6)]).view(4, 3)
    captured = jit(f, fuse=False)
    got, wanted = tree.leaves(captured(x)), tree.leaves(f(x))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    pieces = lambda leaves: len({t.untyped_storage()._cdata for t in (x, *leaves)})
    assert pieces(got) == pieces(wanted)
    (traced,) = captured.traced.values()
    assert [node.target for node in traced.module.graph.nodes].count(torch.ops.aten.mul.Tensor) == left


@pytest.mark.parametrize("shape", [(4, 3, 1, 1), (1, 5)], ids=str)
def test_strides_of_single_elements_do_not_matter(shape):
    """Donate to tensors with such strides, as the gradient of a convolution of one pixel has."""
    other = [7 if n == 1 else s for n, s in zip(shape, torch.empty(shape).stride(), strict=True)]
    w, update = torch.empty_strided(shape, other).fill_(1.5), jit(lambda w, g: 0.5 * w + g, donate=("w",))
    for old in (w.clone(memory_format=torch.contiguous_format), w):
        memory = old.data_ptr()
        new = update(old, torch.ones(shape))
        assert new.data_ptr() == memory and (new == 1.75).all()
