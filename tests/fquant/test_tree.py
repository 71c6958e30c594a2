"""Tests of fquant.tree: nodes under torch's pytree, static fields, paths and errors."""

import copy
import dataclasses
import re

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from fquant import tree
from fquant.tree import node, static


@node
class TreeLeafy:
    weight: Tensor
    bias: Tensor | None = None
    tag: str = static(default="plain")


@node
class TreeDeep:
    layers: list[TreeLeafy]
    extra: dict[str, TreeLeafy]
    scale: TreeLeafy | Tensor | None = None
    kind: tuple[int, ...] = static(default=(1, 2))


@node
class TreeHalf(TreeLeafy):
    more: Tensor | None = None


@node
class TreeChecked:
    weight: Tensor

    def __post_init__(self):
        if self.weight.ndim != 2:
            raise ValueError(f"weight has {self.weight.ndim} dims, wanted 2")


def leafy(value=1.0, bias=False, tag="plain"):
    return TreeLeafy(torch.full((2, 3), value), torch.full((2,), value) if bias else None, tag)


def deep():
    return TreeDeep([leafy(0.0), leafy(1.0, bias=True)], {"a.b": leafy(2.0), "a": leafy(3.0)}, leafy(4.0))


PATHS = {
    "absent field": (leafy(), ["weight"]),
    "present field": (leafy(bias=True), ["weight", "bias"]),
    "all absent": (TreeLeafy(None), []),  # type: ignore[arg-type]
    "inherited": (TreeHalf(torch.ones(1), None, "t", torch.ones(1)), ["weight", "more"]),
    "a leaf": (torch.ones(1), [""]),
    "a list": ([1, [2, (3,)]], ["0", "1.0", "1.1.0"]),
    "keys of other types": ({1: 1, "x": 2}, ["1", "x"]),
    "None in a list is a leaf": ([None, 1], ["0", "1"]),
    "deep": (
        deep(),
        ["layers.0.weight", "layers.1.weight", "layers.1.bias", "extra.a.b.weight", "extra.a.weight", "scale.weight"],
    ),
}


@pytest.mark.parametrize("x, wanted", PATHS.values(), ids=PATHS)
def test_paths(x, wanted):
    assert tree.paths(x) == wanted
    leaves, structure = tree.flatten(x)
    assert len(leaves) == len(wanted) == len(tree.leaves(x))
    assert [id(leaf) for _, leaf in tree.items(x)] == [id(leaf) for leaf in leaves]
    again = tree.unflatten(structure, leaves)
    assert tree.structure(again) == structure and tree.paths(again) == wanted


def test_is_leaf_stops_at_nodes():
    assert tree.paths(deep(), is_leaf=tree.is_node) == [""]
    stop = lambda x: isinstance(x, TreeLeafy)
    assert tree.paths(deep(), is_leaf=stop) == ["layers.0", "layers.1", "extra.a.b", "extra.a", "scale"]


def test_node_is_frozen_and_compares_by_identity():
    x = leafy()
    with pytest.raises(dataclasses.FrozenInstanceError):
        x.tag = "other"  # type: ignore[misc]
    assert x == x and x != leafy()
    assert copy.copy(x).weight is x.weight
    y = dataclasses.replace(x, tag="other")
    assert y.weight is x.weight and (x.tag, y.tag) == ("plain", "other")


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"k": (x,)}], ids=["node", "list", "dict"])
def test_structure_is_hashable_and_holds_statics_and_absence(wrap):
    same = tree.structure(wrap(leafy(1.0))), tree.structure(wrap(leafy(2.0)))
    assert same[0] == same[1] and hash(same[0]) == hash(same[1])
    for other in (leafy(tag="other"), leafy(bias=True), TreeHalf(torch.ones(2, 3)), torch.ones(2, 3)):
        assert tree.structure(wrap(other)) != same[0]
    assert len({*same, tree.structure(wrap(leafy(tag="other")))}) == 2


STATIC = {
    "a tensor": (torch.ones(1), "TreeLeafy.tag is static but holds a tensor; make it an ordinary field"),
    "a tensor in a tuple": ((1, torch.ones(1)), "TreeLeafy.tag is static but holds a tensor"),
    "a node of tensors": (leafy(), "TreeLeafy.tag is static but holds a tensor"),
    "a list": ([1], r"TreeLeafy.tag is static but not hashable: \[1\]; use a tuple or a frozen dataclass"),
    "a dict in a tuple": (({},), r"TreeLeafy.tag is static but not hashable"),
}


@pytest.mark.parametrize("item, message", STATIC.values(), ids=STATIC)
def test_static_fields_are_checked(item, message):
    with pytest.raises(TypeError, match=message):
        TreeLeafy(torch.ones(1), tag=item)
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(leafy(), tag=item)


def test_post_init_of_the_class_runs():
    with pytest.raises(ValueError, match="weight has 1 dims, wanted 2"):
        TreeChecked(torch.ones(1))
    x = TreeChecked(torch.ones(2, 3))
    assert tree.map(lambda t: t.sum(), x).weight == 6  # a transform may put anything in the fields


def named(name, module):
    return type(name, (), {"__annotations__": {}, "__module__": module})


def test_name_collision():
    with pytest.raises(
        ValueError, match=rf"tests.other.TreeLeafy: {__name__} has a class of that name; choose another"
    ):
        node(named("TreeLeafy", "tests.other"))
    assert tree.NODES["tests.TreeLeafy"] is TreeLeafy
    assert [tree.is_node(x) for x in (leafy(), TreeLeafy, 3, [leafy()])] == [True, False, False, False]


def test_names_are_of_the_package():
    assert node(named("TreeLeafy", "elsewhere.a")) is tree.NODES["elsewhere.TreeLeafy"] is not TreeLeafy


def test_a_class_defined_again_takes_the_name():
    first, second = node(named("TreeAgain", __name__)), node(named("TreeAgain", __name__))
    assert tree.NODES["tests.TreeAgain"] is second and tree.is_node(first()) and tree.is_node(second())


def test_value_is_registered():
    cls = tree.value(dataclasses.dataclass(frozen=True)(named("TreeValue", __name__)))
    assert tree.VALUES["tests.TreeValue"] is cls
    with pytest.raises(ValueError, match="TreeValue: .* has a class of that name"):
        tree.value(named("TreeValue", "tests.other"))


MAP_AT = {
    "one leaf": (r"layers\.1\.bias", ["layers.1.bias"]),
    "a node as one thing": (r"layers\.0", ["layers.0"]),
    "the outermost wins": (r"layers(\.\d+)?(\.weight)?", ["layers"]),
    "several": (r".*weight", [path for path in tree.paths(deep()) if path.endswith("weight")]),
    "a key with a dot": (r"extra\.a\.b", ["extra.a.b"]),
    "whole paths only": (r"scale", ["scale"]),
    "everything": (r".*", ["layers", "extra", "scale"]),
}


@pytest.mark.parametrize("pattern, wanted", MAP_AT.values(), ids=MAP_AT)
def test_map_at(pattern, wanted):
    x, seen = deep(), []
    before = tree.leaves(x)

    def mark(subtree):
        seen.append(subtree)
        return "new"

    out = tree.map_at(pattern, mark, x)
    assert [path for path, leaf in tree.items(out) if leaf == "new"] == wanted
    assert [tree.get(x, path) for path in wanted] == seen
    assert all(a is b for a, b in zip(before, tree.leaves(x), strict=True))  # the argument is as it was
    for path, leaf in tree.items(out):
        assert leaf == "new" or leaf is tree.get(x, path)


NO_MATCH = {
    "deep": (
        r"layers\.7",
        deep(),
        "'layers\\\\.7' matches no path; the tree has layers.0, layers.1, extra.a.b, extra.a,",
    ),
    "not a whole path": ("layer", deep(), "'layer' matches no path"),
    "a node at the root": ("q", leafy(), "'q' matches no path; the tree has weight"),
    "the root has no path": ("", leafy(), "'' matches no path"),
    "nothing": ("q", [], "'q' matches no path; the tree has nothing"),
    "many": ("q", list(range(20)), "the tree has 0, 1, 2, 3, 4, 5, 6, 7, ... (20 in all)"),
}


@pytest.mark.parametrize("pattern, x, message", NO_MATCH.values(), ids=NO_MATCH)
def test_map_at_without_a_match(pattern, x, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tree.map_at(pattern, lambda y: y, x)


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_errors_carry_the_path(kind):
    def refuse(*_):
        raise kind("not here")

    with pytest.raises(kind, match=r"^layers\.1: not here$"):
        tree.map_at(r"layers\.1", refuse, deep())
    with pytest.raises(kind, match=r"^layers\.0\.weight: not here$"):
        tree.map_with_path(refuse, deep())
    with pytest.raises(kind, match=r"^outer: inner: not here$"), tree.at("outer"), tree.at("inner"):
        refuse()
    with pytest.raises(kind, match=r"^not here$"), tree.at(""):
        refuse()


def test_other_errors_pass_as_they_are():
    error = UnicodeDecodeError("utf-8", b"", 0, 1, "a ValueError whose constructor wants more than a message")
    for other in (error, KeyError("x")):
        with pytest.raises(type(other)) as raised, tree.at("outer"):
            raise other
        assert raised.value is other


def test_get():
    x = deep()
    inner = {"": x, "layers": x.layers, "layers.1": x.layers[1], "extra.a.b": x.extra["a.b"], "extra.a": x.extra["a"]}
    for path, item in [*inner.items(), *tree.items(x)]:
        assert tree.get(x, path) is item


GET_WRONG = {
    "layers.2": "layers.2: no '2' here; there is 0, 1",
    "layers.0.bias": "layers.0.bias: no 'bias' here; there is weight",
    "layers.0.weight.x": "layers.0.weight.x: no 'x' here; there is nothing",
    "extra.c": "extra.c: no 'c' here; there is a.b, a",
    "layer": "layer: no 'layer' here; there is layers, extra, scale",
    "kind": "kind: no 'kind' here",
    "layers.": "layers.: no '' here",
    ".layers": ".layers: no '.layers' here",
}


@pytest.mark.parametrize("path, message", GET_WRONG.items())
def test_get_what_is_not_there(path, message):
    with pytest.raises(KeyError, match=re.escape(message)):
        tree.get(deep(), path)


def test_children():
    cases = [(leafy(bias=True), ["weight", "bias"]), (TreeLeafy(None), []), ([], []), ({"a.b": 1}, ["a.b"])]  # type: ignore[arg-type]
    for x, wanted in cases:
        assert [name for name, _ in tree.children(x) or []] == wanted and tree.children(x) is not None
    assert tree.children(torch.ones(1)) is None and tree.children(1) is None


NBYTES = {
    "nothing": ([], 0),
    "not a tensor": ([1, "x"], 0),
    "f32": (torch.ones(3), 12),
    "bf16": (torch.ones(3, dtype=torch.bfloat16), 6),
    "codes and scales": ({"codes": torch.ones(5, dtype=torch.uint8), "scale": torch.ones(2, 1)}, 13),
    "a node": (leafy(bias=True), 32),
    "a view counts what it shows": (torch.ones(10)[::2], 20),
    "meta": (torch.ones(4, 4, device="meta"), 64),
}


@pytest.mark.parametrize("x, wanted", NBYTES.values(), ids=NBYTES)
def test_nbytes(x, wanted):
    assert tree.nbytes(x) == wanted


def loss(x, y):
    return ((y @ x.weight.T).tanh() + (0.0 if x.bias is None else x.bias)).square().sum()


@pytest.mark.parametrize("bias", [False, True])
def test_grad_and_vmap_of_a_node(bias):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    x = TreeLeafy(draw(4, 3), draw(4) if bias else None, tag="kept")
    ys = draw(5, 2, 3)

    def by_hand(y):
        free = [t.clone().requires_grad_() for t in tree.leaves(x)]
        return torch.autograd.grad(loss(tree.unflatten(tree.structure(x), free), y), free)

    got = grad(loss)(x, ys[0])
    assert isinstance(got, TreeLeafy) and got.tag == "kept" and (got.bias is not None) == bias
    for g, wanted in zip(tree.leaves(got), by_hand(ys[0]), strict=True):
        torch.testing.assert_close(g, wanted)

    each = vmap(grad(loss), in_dims=(None, 0))(x, ys)
    many = tree.map(lambda t: torch.stack([t] * 5), x)
    stacked = vmap(grad(loss))(many, ys)
    assert tree.structure(each) == tree.structure(stacked) == tree.structure(x)
    for i, y in enumerate(ys):
        for a, b, wanted in zip(tree.leaves(each), tree.leaves(stacked), by_hand(y), strict=True):
            torch.testing.assert_close(a[i], wanted)
            torch.testing.assert_close(b[i], wanted)


def test_map_over_paths_and_over_two_trees():
    out = tree.map_with_path(lambda path, t: f"{path} {tuple(t.shape)}", deep())
    assert out.layers[1].bias == "layers.1.bias (2,)" and out.kind == (1, 2)
    x, y = {"a": 1, "b": 2}, {"b": 20, "a": 10}
    assert tree.map(lambda p, q: p + q, x, y) == {"a": 11, "b": 22}  # by key, not by order


def test_a_compiled_function_gives_nodes_back():
    """Trace nodes that a graph creates, maps and rebuilds in a transform."""

    def step(x):
        made = TreeLeafy(x, x[0], "made")
        slope, kept = grad(lambda t: (t.weight.square().sum() + t.bias.sum(), t), has_aux=True)(made)
        return tree.map(lambda a, b: a + b, slope, kept), dataclasses.replace(kept, bias=None)

    torch._dynamo.reset()
    got, wanted = torch.compile(step, backend="aot_eager", fullgraph=True)(torch.ones(2, 3)), step(torch.ones(2, 3))
    assert tree.structure(got) == tree.structure(wanted) and type(got[0]) is TreeLeafy
    assert all(torch.equal(*both) for both in zip(tree.leaves(got), tree.leaves(wanted), strict=True))


def test_paths_and_patterns_of_other_types():
    for path in (3, None):
        with pytest.raises(TypeError, match=f"path: got {path}; wanted a str, such as"):
            tree.get({"a": 1}, path)
    with pytest.raises(TypeError, match="pattern: 3 is no regular expression"):
        tree.map_at(3, lambda x: x, {"a": 1})
    with pytest.raises(ValueError, match=r"pattern: '\(' is no regular expression: missing"):
        tree.map_at("(", lambda x: x, {"a": 1})
