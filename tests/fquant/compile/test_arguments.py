"""Leaves and structures of arguments are those of torch's pytree, and arguments by name those of ``inspect``."""

import inspect
from collections import OrderedDict, defaultdict, deque, namedtuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fquant import INT8, NF4, jit, lora, quantize, tree
from fquant.compile.arguments import binder, builder, flatten

Pair = namedtuple("Pair", "a b")
Other = namedtuple("Other", "a b")


@tree.node
class Holder:
    inside: object
    beside: object
    label: str = tree.static()


X = torch.zeros(1)
LEAVES = st.sampled_from([X, torch.nn.Parameter(X), None, 1, 2.5, "text", frozenset([1])])
KEYS = st.sampled_from(["a", "b", 0])


def containers(inner):
    """Return trees whose children are ``inner``."""
    few = st.lists(inner, max_size=3)
    pairs = st.lists(st.tuples(KEYS, inner), max_size=3)
    return st.one_of(
        few,
        few.map(tuple),
        few.map(deque),
        pairs.map(dict),
        pairs.map(OrderedDict),
        pairs.map(lambda x: defaultdict(list, x)),
        *(st.tuples(inner, inner).map(lambda x, kind=kind: kind(*x)) for kind in (Pair, Other)),
        st.tuples(inner, inner, st.sampled_from("pq")).map(lambda x: Holder(*x)),
        st.tuples(inner, inner).map(lambda x: torch.return_types.max(x)),
    )


TREES = st.recursive(LEAVES, containers, max_leaves=8)
ARGUMENTS = st.dictionaries(st.sampled_from("xyz"), TREES, max_size=3)


@given(ARGUMENTS, ARGUMENTS)
@settings(max_examples=400, deadline=None)
def test_leaves_and_equality_are_those_of_the_pytree(first, second):
    (leaves, structure), (_, other) = flatten(first), flatten(second)
    wanted, spec = tree.flatten(first)
    assert len(leaves) == len(wanted) and all(a is b for a, b in zip(leaves, wanted, strict=True))
    assert (structure == other) == (spec == tree.structure(second))
    assert structure == flatten(tree.map(lambda x: x, first))[1] and structure != spec
    assert structure != other or hash(structure) == hash(other)
    assert (structure == other) == (not structure.changes(other)) == (not other.changes(structure))
    parts = structure.parts(leaves)
    assert list(parts) == list(first)
    assert all(a is b for name in first for a, b in zip(parts[name], tree.leaves(first[name]), strict=True))


@given(TREES, TREES)
@settings(max_examples=400, deadline=None)
def test_results_are_built_as_the_pytree_builds_them(example, other):
    leaves, spec = tree.flatten(example)
    build, numbers = builder(example), [*range(len(leaves))]
    for inner in (leaves, numbers):
        built = build(inner)
        assert all(a is b for a, b in zip(tree.leaves(built), inner, strict=True))
        assert flatten({"": built})[1] == flatten({"": tree.unflatten(spec, inner)})[1]
    assert (tree.structure(build(leaves)) == tree.structure(other)) == (spec == tree.structure(other))


def test_static_fields_are_part_of_the_structure():
    w = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
    structures = [flatten({"w": quantize(w * k, format)})[1] for format in (NF4, INT8) for k in (1, 2)]
    assert structures[0] == structures[1] != structures[2] == structures[3]
    assert structures[2].changes(structures[0]) == {"w": [f"w.format is {INT8}, and was {NF4}"]}


@pytest.mark.parametrize(
    ("now", "before", "words"),
    [
        pytest.param(X, (X,), ["x is a leaf, and was a tuple"], id="kind"),
        pytest.param([X], [X, X], ["x.1 is missing"], id="shorter"),
        pytest.param([X, [X, X]], [X, [X]], ["x.1.1 is new"], id="longer, inside"),
        pytest.param({"a": X, "b": X}, {"b": X, "c": X}, ["x.a is new", "x.c is missing"], id="keys"),
        pytest.param({"a": X, "b": X}, {"b": X, "a": X}, ["x has its items in another order"], id="order"),
        pytest.param(Holder(X, X, "p"), Holder(X, X, "q"), ["x.label is p, and was q"], id="static field"),
        pytest.param(Holder(X, None, "p"), Holder(X, X, "p"), ["x.beside is missing"], id="absent field"),
        pytest.param(Pair(X, X), Other(X, X), ["x is a Pair, and was a Other"], id="type"),
        pytest.param(deque([X], 1), deque([X], 2), ["x is a deque with 1, and was with 2"], id="another context"),
    ],
)
def test_changes_are_named(now, before, words):
    beside = {str(i): (X, X) for i in range(100)}  # is not in the text
    structures = [flatten({"beside": beside, "x": x})[1] for x in (now, before)]
    assert structures[0].changes(structures[1]) == {"x": words}
    assert structures[0].changes(flatten({"beside": beside})[1])["x"][0].endswith("and was absent")


def plain(x, k, y=3, z=4): ...
def stars(x, *rest, k=2, **more): ...
def none(): ...
def positional(x, /, y=1): ...
def named(x, *, y): ...


CALLS = [((), {}), ((1,), {}), ((1, 2), {}), ((1, 2, 3, 4), {}), ((1,) * 5, {}), ((1,), {"k": 2}), ((1, 2), {"z": 5})]
CALLS += [((), {"k": 1, "x": 2}), ((1,), {"y": 2}), ((1, 2), {"x": 3}), ((), {"w": 1})]


@pytest.mark.parametrize("f", [plain, stars, none, positional, named])
def test_names_are_those_of_inspect(f):
    signature = inspect.signature(f)
    for args, kwargs in CALLS:
        try:
            wanted = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            with pytest.raises(TypeError, match=str(error)):
                binder(signature)(args, kwargs)
            continue
        got = binder(signature)(args, kwargs)
        assert got == wanted and list(got) == list(wanted)


def test_a_model_is_one_structure():
    """Give many nodes, of which each has static fields, twice; another static field is another trace."""
    w = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
    base = {f"w{i}": quantize(w * (i + 1), NF4) for i in range(20)}
    adapters = lora.init(base, ".*", rank=2, alpha=4, key=0)
    f = jit(lambda base, adapters, x: sum(t.sum() for t in tree.leaves(adapters)) + x)
    for rank in (2, 2, 3):
        adapters = lora.init(base, ".*", rank=rank, alpha=4, key=0)
        assert isinstance(f(base, adapters, X), Tensor)
    f(base, lora.init(base, ".*", rank=2, alpha=8, key=0), X)
    assert len(f.traced) == 3
