"""Tests of fquant.io.safetensors against the safetensors library, over random trees, and on damaged files."""

import dataclasses
import json
import math
import os
import re
import struct
from typing import Any

import pytest
import safetensors.torch as peer
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fquant import tree
from fquant.io import safetensors, tree_json
from fquant.io.files.digests import KEY
from fquant.lazy import Lazy
from fquant.tree import node, static, value
from tests.helpers.arrays import same_bits, without_digests


@value
@dataclasses.dataclass(frozen=True)
class Recipe:
    bits: int
    inner: "Recipe | None" = None
    table: tuple[float, ...] = ()
    dtype: torch.dtype = torch.float32

    def __post_init__(self):
        if self.bits < 1:
            raise ValueError(f"bits: got {self.bits}, wanted at least 1")


@node
class Box:
    codes: Any
    scale: Any = None
    recipe: Any = static(default=None)
    alpha: float = static(default=16.0)


DTYPES = [
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
]  # fmt: skip


def make(dtype, shape):
    torch.manual_seed(0)
    return torch.randint(0, 2, shape).bool() if dtype == torch.bool else (torch.rand(shape) * 100).to(dtype)


def awkward():
    base = torch.arange(24.0).reshape(4, 6)
    shared = {"all": base, "transposed": base.T, "row": base[1], "strided": base[:, ::2], "wide": base[0].expand(3, 6)}
    conjugate = torch.complex(base, -base).conj()
    return shared | {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "none": torch.empty(2, 0), "ä.b": base,
                     "conj": conjugate, "imag": conjugate.imag}  # fmt: skip


PLAIN = {str(d).removeprefix("torch."): make(d, (3, 5)) for d in DTYPES} | awkward()


def test_the_library_reads_what_is_written(tmp_path):
    safetensors.write(tmp_path / "x.safetensors", PLAIN, {"format": "pt", "note": "ü\n\"'"})
    theirs = peer.load_file(tmp_path / "x.safetensors")
    assert theirs.keys() == PLAIN.keys() and all(same_bits(theirs[k].resolve_neg(), v.resolve_conj().resolve_neg())
                                                 for k, v in PLAIN.items())  # fmt: skip
    with peer.safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata().items() - {KEY: file.metadata()[KEY]}.items() == {("format", "pt"), ("note", "ü\n\"'")}
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_bytes_are_those_of_the_library(tmp_path):
    """Two tensors of each dtype, given in another order than a file's; all is equal without the digests."""
    raw = torch.arange(16, dtype=torch.uint8) % 2
    tensors = {f"{i}{name}": raw.clone().view(dtype) for i in "ba" for name, dtype in safetensors.DTYPES.items()}
    safetensors.write(tmp_path / "a", tensors, {"format": "pt"})
    assert without_digests(tmp_path / "a") == peer.save(tensors, {"format": "pt"})


def test_a_lazy_tensor_is_read_when_its_turn_comes(tmp_path):
    reads = []

    def lazy(name, like=None):
        w = torch.full((2, 3), float(len(name)))
        return Lazy(lambda: reads.append(name) or w, w.to("meta") if like is None else like)

    safetensors.write(tmp_path / "a", {"bb": lazy("bb"), "c": torch.ones(4, dtype=torch.float64), "a": lazy("a")})
    assert reads == ["a", "bb"]
    assert torch.equal(safetensors.read(safetensors.header(tmp_path / "a"), "bb"), torch.full((2, 3), 2.0))
    for like in (torch.empty(3, 2, device="meta"), torch.empty(2, 3, dtype=torch.float16, device="meta")):
        with pytest.raises(ValueError, match="d: got torch.float32 .2, 3., wanted the announced torch.float"):
            safetensors.write(tmp_path / "b", {"d": lazy("d", like)})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_the_library_writes_is_read(tmp_path):
    plain = {k: v.resolve_conj().resolve_neg().contiguous().clone() for k, v in PLAIN.items()}
    peer.save_file(plain, tmp_path / "x.safetensors", {"format": "pt"})
    found = safetensors.header(tmp_path / "x.safetensors")
    assert found.metadata == {"format": "pt"} and found.tensors.keys() == plain.keys()
    for name, want in plain.items():
        assert (found.tensors[name].dtype, found.tensors[name].shape) == (want.dtype, tuple(want.shape))
        assert same_bits(safetensors.read(found, name), want)


def test_a_file_without_tensors_and_without_metadata(tmp_path):
    safetensors.write(tmp_path / "x", {})
    assert safetensors.header(tmp_path / "x").tensors == {} == peer.load_file(tmp_path / "x")


@pytest.mark.parametrize("rows", [slice(None), slice(1, 3), slice(2, None), slice(None, 1), slice(2, 2), slice(4, 4)])
@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 3), (4, 0)])
def test_rows_are_read_alone(tmp_path, rows, shape):
    x = make(torch.bfloat16, shape)
    safetensors.write(tmp_path / "x", {"before": torch.ones(3), "w": x})
    got = safetensors.read(safetensors.header(tmp_path / "x"), "w", rows)
    assert same_bits(got, x[rows])
    assert got.untyped_storage().nbytes() == got.numel() * 2


def test_only_the_bytes_asked_for_are_touched(tmp_path):
    x = torch.arange(12.0).reshape(4, 3)
    peer.save_file({"w": x}, tmp_path / "x")  # without digests
    found = safetensors.header(tmp_path / "x")
    with open(tmp_path / "x", "r+b") as file:
        file.truncate(found.tensors["w"].stop - 12)  # the last row is gone
    assert same_bits(safetensors.read(found, "w", slice(0, 3)), x[:3])
    with pytest.raises(ValueError, match=r"x: w: got 12 bytes too few; the file changed since"):
        safetensors.read(found, "w")


def test_rows_write_into_no_file(tmp_path):
    safetensors.write(tmp_path / "x", {"w": torch.ones(4)})
    safetensors.read(safetensors.header(tmp_path / "x"), "w").zero_()
    assert safetensors.read(safetensors.header(tmp_path / "x"), "w").sum() == 4


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def one(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"w": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}}


DAMAGED = {
    "empty": (b"", "got 0 bytes, wanted at least 8"),
    "short": (b"\x01\x00", "got 2 bytes, wanted at least 8"),
    "long header": (file_of({}, length=3), "got a header of 3 bytes, wanted at most the 2 that follow"),
    "huge header": (file_of({}, length=2**63), "got a header of 9223372036854775808 bytes"),
    "a zip": (b"PK\x03\x04" + b"\x00" * 60, "got a header of 67324752 bytes"),
    "not JSON": (file_of(b"{nope"), "header: got no JSON"),
    "not text": (file_of(b"\xff\xfe"), "header: got no JSON"),
    "deep": (file_of(b"[" * 100_000), "header: got no JSON"),
    "a list": (file_of([]), "header: got a JSON list, wanted an object"),
    "twice": (file_of(b'{"w": 1, "w": 2}'), "a name occurs twice"),
    "metadata": (file_of({"__metadata__": {"a": 1}}), "__metadata__: got {'a': 1}, wanted an object of strings"),
    "entry": (file_of({"w": 3}), "w: got 3, wanted exactly dtype, shape and data_offsets"),
    "more keys": (file_of(one(extra=1), bytes(8)), "w: got {"),
    "dtype": (file_of(one("F33"), bytes(8)), "w: got unknown dtype 'F33', wanted one of BOOL, U8"),
    "dtype list": (file_of(one(["F32"]), bytes(8)), "w: got unknown dtype ['F32']"),
    "negative": (file_of(one(shape=(-2,)), bytes(8)), "w: got shape [-2], wanted a list of numbers of at least 0"),
    "bool shape": (file_of(one(shape=(True, 2)), bytes(8)), "w: got shape [True, 2]"),
    "offsets": (file_of(one(offsets=(0, 4, 8)), bytes(8)), "w: got data_offsets [0, 4, 8], wanted [start, stop]"),
    "bytes": (file_of(one(shape=(3,)), bytes(8)), "w: got bytes 0 to 8, wanted 12 bytes for F32 of shape [3]"),
    "overflow": (file_of(one(shape=(2**62, 4)), bytes(8)), "w: got bytes 0 to 8, wanted 73786976294838206464 bytes"),
    "backwards": (file_of(one(shape=(0,), offsets=(8, 0)), bytes(8)), "w: got bytes 8 to 0"),
    "hole": (file_of(one(offsets=(4, 12)), bytes(12)), "it leaves a hole before it"),
    "overlap": (
        file_of({"v": one()["w"], "w": one(offsets=(4, 12))["w"]}, bytes(12)), "it overlaps what is before it",
    ),
    "truncated": (file_of(one(), bytes(7)), "wanted the"),
    "surplus": (file_of(one(), bytes(9)), "the file is damaged or cut short"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_says_what_is_wrong(tmp_path, content, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="^" + re.escape(str(path)) + ": .*" + re.escape(message)):
        safetensors.header(path)


def test_every_truncation_is_noticed(tmp_path):
    safetensors.write(tmp_path / "x", {"w": torch.ones(3), "v": torch.ones(2, 2)}, {"a": "b"})
    content = (tmp_path / "x").read_bytes()
    for length in range(len(content)):
        (tmp_path / "x").write_bytes(content[:length])
        with pytest.raises(ValueError, match="x: got"):
            safetensors.header(tmp_path / "x")


def test_a_missing_file_name_or_row(tmp_path):
    with pytest.raises(ValueError, match="absent: got no such file"):
        safetensors.header(tmp_path / "absent")
    safetensors.write(tmp_path / "x", {"w": torch.ones(3), "s": torch.tensor(1)})
    found = safetensors.header(tmp_path / "x")
    with pytest.raises(ValueError, match=r"x: got no tensor 'v', wanted one of the 2 there: s, w"):
        safetensors.read(found, "v")
    for rows in (slice(0, 4), slice(-1, None), slice(2, 1), slice(0, 3, 2)):
        with pytest.raises(ValueError, match=r"w: got rows .* wanted rows within 0:3 and no step"):
            safetensors.read(found, "w", rows)
    with pytest.raises(ValueError, match="s: got rows of a scalar"):
        safetensors.read(found, "s", slice(0, 1))


UNWRITABLE = {
    "list": ({"w": [1.0]}, None, TypeError, "'w': got list, wanted a tensor"),
    "sparse": ({"w": torch.eye(2).to_sparse()}, None, TypeError, "w: got torch.float32 torch.sparse_coo"),
    "dtype": ({"w": torch.ones(2, dtype=torch.complex128)}, None, TypeError, "w: got torch.complex128"),
    "meta": ({"w": torch.ones(2, device="meta")}, None, ValueError, "w: got a meta tensor"),
    "reserved": ({"__metadata__": torch.ones(2)}, None, ValueError, "got a tensor of that name"),
    "surrogate": ({"\ud800": torch.ones(2)}, None, ValueError, "got a name that is no Unicode text"),
    "metadata": ({}, {"a": 1}, TypeError, "metadata 'a': got 1, wanted a string"),
    "digests": ({}, {KEY: ""}, ValueError, f"metadata {KEY!r}: got text for it, wanted none"),
}


@pytest.mark.parametrize(("tensors", "metadata", "error", "message"), UNWRITABLE.values(), ids=UNWRITABLE)
def test_what_cannot_be_written_leaves_the_old_file(tmp_path, tensors, metadata, error, message):
    safetensors.write(tmp_path / "x", {"old": torch.ones(1)})
    with pytest.raises(error, match=re.escape(message)):
        safetensors.write(tmp_path / "x", tensors, metadata)
    assert os.listdir(tmp_path) == ["x"] and "old" in safetensors.header(tmp_path / "x").tensors


def equal_trees(a, b):
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and same_bits(a, b)
    if type(a) is not type(b):
        return False
    if tree.is_node(a):
        return all(equal_trees(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal_trees(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(equal_trees(x, y) for x, y in zip(a, b, strict=True))
    return repr(a) == repr(b)  # tells -0.0 from 0.0, and nan equals itself


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(DTYPES),
    lambda inner: st.tuples(inner, inner) | st.builds(Recipe, st.integers(1, 8), inner, st.tuples(inner)),
    max_leaves=4,
)
tensors = st.builds(make, st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3).map(tuple))
keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="."), max_size=5)
trees = st.recursive(
    tensors | st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.dictionaries(keys, inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
        | st.builds(Box, inner, inner, values, st.floats())
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(trees)
def test_any_tree_comes_back(tmp_path_factory, x):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    safetensors.save(path, x)
    assert equal_trees(safetensors.load(path), x)
    wanted = {name: t for name, t in tree.items(x) if isinstance(t, Tensor)}
    got = peer.load_file(path)
    assert got.keys() == wanted.keys() and all(same_bits(got[name], t) for name, t in wanted.items())


def test_leaves_are_named_by_their_paths_and_dots_in_keys_are_kept(tmp_path):
    adapters = {"layers.0.q": Box(torch.ones(2), alpha=math.inf), "layers.1.q": Box(torch.ones(3), torch.zeros(1))}
    safetensors.save(tmp_path / "x", adapters)
    assert list(peer.load_file(tmp_path / "x")) == ["layers.0.q.codes", "layers.1.q.codes", "layers.1.q.scale"]
    got = safetensors.load(tmp_path / "x")
    assert equal_trees(got, adapters) and tree.structure(got) == tree.structure(adapters)


def test_leaves_that_share_memory_or_lie_strided_come_back(tmp_path):
    safetensors.save(tmp_path / "x", {"inside": awkward()})
    got = safetensors.load(tmp_path / "x")["inside"]
    assert all(same_bits(got[name], t.resolve_conj().resolve_neg()) for name, t in awkward().items())


class Odd:
    __hash__ = object.__hash__


UNSAVABLE = {
    "collision": (
        {"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}, ValueError, "a.b: got two tensors of that path, wanted one",
    ),
    "key": ({"a": {3: torch.ones(1)}}, TypeError, "a.3: got a key of type int, wanted str"),
    "object": (
        {"a": [Odd()]}, TypeError, "a.0: got tests.fquant.io.test_safetensors.Odd, wanted something a file can hold",
    ),
    "static": ({"a": Box(torch.ones(1), recipe=(1, Odd()))}, TypeError, "a.recipe.1: got tests"),
    "function": (Box(torch.ones(1), recipe=same_bits), TypeError, "recipe: got builtins.function"),
    "subclass": ({"a": dataclasses.make_dataclass("Recipe", [])()}, TypeError, "a: got"),
    "enum like": ({"a": type("Int", (int,), {})(3)}, TypeError, "a: got"),
    "reserved": ({"__metadata__": torch.ones(1)}, ValueError, "got a tensor of that name"),
}  # fmt: skip


@pytest.mark.parametrize(("x", "error", "message"), UNSAVABLE.values(), ids=UNSAVABLE)
def test_what_cannot_be_saved_is_named(tmp_path, x, error, message):
    with pytest.raises(error, match=re.escape(message)):
        safetensors.save(tmp_path / "x", x)
    assert os.listdir(tmp_path) == []


def spec(x, version=1):
    return json.dumps({"version": version, "tree": x})


def box(codes: Any = "tensor", name="tests.Box", more=None, **statics):
    fields = {"codes": codes, "scale": None} | (more or {})
    return {"node": name, "fields": fields, "static": {"recipe": None, "alpha": 1.0} | statics}


RECIPE = {"bits": 4, "inner": None, "table": {"tuple": []}, "dtype": {"dtype": "int8"}}
FOREIGN = {
    "no JSON": ("{", "structure: got no JSON"),
    "constant": (spec(box(alpha=math.inf)), "structure: got no JSON (Infinity is no JSON)"),
    "deep": ("[" * 100_000, "structure: got no JSON"),
    "version": (spec(box(), 2), "structure: got version 2, wanted 1; use another release"),
    "no version": (json.dumps({"tree": box()}), "structure: missing version, unknown none; wanted tree, version"),
    "class": (spec(box(name="Popen")), "the tree: got class 'Popen', wanted a registered one; import its"),
    "value class": (
        spec(box(recipe={"value": "system", "fields": {}})), "recipe: got class 'system', wanted a registered one",
    ),
    "node as value": (spec(box(recipe={"value": "tests.Box", "fields": {}})), "recipe: got class 'tests.Box'"),
    "field": (spec(box(more={"eval": "tensor"})), "tests.Box: missing none, unknown eval; wanted codes, scale"),
    "static": (spec(box(beta=1)), "tests.Box: missing none, unknown beta; wanted alpha, recipe"),
    "value field": (
        spec(box(recipe={"value": "tests.Recipe", "fields": RECIPE | {"x": 1}})),
        "recipe.tests.Recipe: missing none, unknown x; wanted bits",
    ),
    "missing field": (
        spec(box(recipe={"value": "tests.Recipe", "fields": {"bits": 1}})),
        "recipe.tests.Recipe: missing dtype, inner, table, unknown none;",
    ),
    "rejected": (
        spec(box(recipe={"value": "tests.Recipe", "fields": RECIPE | {"bits": 0}})),
        "recipe: got a Recipe that its class rejects (bits: got 0, wanted at least 1)",
    ),
    "ill-typed": (
        spec(box(recipe={"value": "tests.Recipe", "fields": RECIPE | {"bits": "4"}})),
        "recipe: got a Recipe that its class rejects ('<'",
    ),
    "dtype": (spec(box(recipe={"dtype": "os"})), "recipe: got value {'dtype': 'os'}"),
    "float": (spec(box(alpha={"float": "1"})), "alpha: got value {'float': '1'}"),
    "list in static": (spec(box(alpha=[1])), "alpha: got value [1]"),
    "word": (spec(box("tensors")), "codes: got structure 'tensors', wanted what fquant writes"),
    "surplus key": (spec({"list": [], "x": 1}), "the tree: got structure {'list': [], 'x': 1}"),
    "missing": (spec({"dict": {"codes": "tensor", "more": "tensor"}}), "more: got no such tensor, wanted one"),
    "surplus": (spec({"dict": {}}), "codes: got a tensor that the structure lacks"),
    "collision": (
        spec({"dict": {"a.b": "tensor", "a": {"dict": {"b": "tensor"}}}}), "a.b: got 2 leaves of that path, wanted one",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), FOREIGN.values(), ids=FOREIGN)
def test_a_structure_that_was_not_written_by_save_is_refused(tmp_path, text, message):
    safetensors.write(tmp_path / "x", {"codes": torch.ones(2)}, {safetensors.TREE: text})
    with pytest.raises(ValueError, match="x: " + re.escape(message)):
        safetensors.load(tmp_path / "x")


def test_a_file_without_a_structure_says_what_to_use(tmp_path):
    peer.save_file({"w": torch.ones(2)}, tmp_path / "x")
    with pytest.raises(ValueError, match=r"x: got no 'fquant.tree' in its metadata.*use header and read instead"):
        safetensors.load(tmp_path / "x")


def test_the_text_of_a_structure_is_pinned():
    """A file of this release must be readable by later ones."""
    text, tensors = tree_json.encode({"a.b": Box(torch.ones(1), recipe=Recipe(4, table=(0.5, -math.inf)))})
    assert list(tensors) == ["a.b.codes"]
    assert text == (
        '{"version":1,"tree":{"dict":{"a.b":{"node":"tests.Box","fields":{"codes":"tensor","scale":null},"static":'
        '{"recipe":{"value":"tests.Recipe","fields":{"bits":4,"inner":null,"table":{"tuple":[0.5,{"float":"-inf"}]},'
        '"dtype":{"dtype":"float32"}}},"alpha":16.0}}}}}'
    )
