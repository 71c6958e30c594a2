"""The structure of a tree as JSON, so that a file of named tensors can hold a tree.

    Lora(a=t, b=t, magnitude=None, alpha=16.0, ...)
    {"node": "Lora", "fields": {"a": "tensor", "b": "tensor", "magnitude": null}, "static": {"alpha": 16.0, ...}}

A tree is a tensor, a node, a dict with str keys, a list, a tuple, or a plain value as in static fields: None, bool,
int, float, str, torch.dtype, tuples of them, and frozen dataclasses registered with ``tree.value``. Classes are looked
up by name in ``tree.NODES`` and ``tree.VALUES``, former names included, and must match field by field. A field of
``tree.LATER_FIELDS`` that has the value of older files is left out, so that older releases read the file.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..tree import FORMER_FIELDS, FORMER_NAMES, LATER_FIELDS, NODES, VALUES, at, expect, field_names, is_node, name_of

Path = tuple[str, ...]  # names that lead to a leaf, joined by dots in files and messages
Rule: TypeAlias = tuple[Callable[[Any], object], str]  # True for a value that fits, and the values that fit in words

VERSION = 1
DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
_dots = lambda path: ".".join(path) or "the tree"
NUMBERS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}  # not in JSON


def encode(tree: Any) -> tuple[str, dict[str, Tensor]]:
    """Return the structure of ``tree`` as text, and its tensors by path.

    Raises TypeError, with the path, for objects that cannot be written, and ValueError if two tensors have one path.
    """
    tensors: dict[str, Tensor] = {}
    spec = _encode(tree, (), tensors)
    return json.dumps({"version": VERSION, "tree": spec}, allow_nan=False, separators=(",", ":")), tensors


def decode(text: str, leaf: Callable[[str], Any]) -> Any:
    """Return the tree of ``text``, with ``leaf(path)`` for each tensor; raise ValueError for any other text."""
    with at("structure"):
        content = parse(text, "what fquant writes", parse_constant=lambda name: expect(False, f"{name} is no JSON"))
    check_keys("structure", content, {"version", "tree"})
    got = content["version"]
    expect(got == VERSION, f"structure: got version {got!r}, wanted {VERSION}; use another release")
    return _decode(content["tree"], (), leaf)


def parse(text: str | bytes, wanted: str, **options: Any) -> dict[str, Any]:
    """Return the JSON object ``text``; raise ValueError for anything else, and for a name that occurs twice."""
    try:
        content = json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=_unique, **options)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"got no JSON ({error}), wanted {wanted}; the file is damaged, fetch it again") from error
    expect(isinstance(content, dict), f"got a JSON {type(content).__name__}, wanted an object; check the file")
    return content


def check_keys(where: str, got: Collection[str], wanted: Collection[str]) -> None:
    """Raise ValueError that begins with ``where`` unless the names ``got`` are those ``wanted``."""
    missing, unknown = set(wanted).difference(got), set(got).difference(wanted)
    listed = lambda names: ", ".join(sorted(names)) or "none"
    fault = f"{where}: missing {listed(missing)}, unknown {listed(unknown)}; wanted {listed(wanted)}"
    expect(not missing and not unknown, f"{fault}; check the release that wrote it")


def check_values(content: Mapping[str, Any], rules: Mapping[str, Rule]) -> None:
    """Raise ValueError that names the key of a value of ``content`` against the rules."""
    for key, (fits, wanted) in rules.items():
        expect(fits(content[key]), f"{key}: got {content[key]!r:.80}, wanted {wanted}; others are not supported")


def one_of(*values: Any) -> Rule:
    """Return the rule of one of these values."""
    return values.__contains__, " or ".join(map(repr, values))


def _encode(x: Any, path: Path, tensors: dict[str, Tensor] | None) -> Any:
    """Encode ``x``, part of a tree, or of a static field if ``tensors`` is None."""

    def inside(pairs: Any, tensors: dict[str, Tensor] | None = tensors) -> dict[str, Any]:
        return {name: _encode(child, (*path, str(name)), tensors) for name, child in pairs}

    kind = type(x)

    def pairs(names: list[str]) -> list[tuple[str, Any]]:
        later = _later(kind)
        return [(name, getattr(x, name)) for name in names if name not in later or getattr(x, name) is not later[name]]

    if x is None or (tensors is None and (kind in (bool, int, str) or (kind is float and math.isfinite(x)))):
        return x
    if kind is tuple or (kind is list and tensors is not None):
        return {kind.__name__: list(inside(enumerate(x)).values())}
    if tensors is None:
        if kind is float:
            return {"float": str(x)}
        if isinstance(x, torch.dtype):
            return {"dtype": str(x).removeprefix("torch.")}
        if VALUES.get(name_of(kind)) is kind:
            return {"value": name_of(kind), "fields": inside(pairs(field_names(kind)[0]))}
        got = f"{_dots(path)}: got {kind.__module__}.{kind.__qualname__}, wanted something a file can hold"
        raise TypeError(f"{got}; use a node, a plain value, or a frozen dataclass registered with tree.value")
    if isinstance(x, Tensor):
        name = ".".join(path)
        expect(name not in tensors, f"{name}: got two tensors of that path, wanted one; rename a key that has a dot")
        tensors[name] = x
        return "tensor"
    if is_node(x):
        fields, statics = field_names(kind)
        return {"node": name_of(kind), "fields": inside(pairs(fields)), "static": inside(pairs(statics), None)}
    if kind is dict:
        for key in x:
            got = f"{_dots((*path, str(key)))}: got a key of type {type(key).__name__}"
            expect(type(key) is str, f"{got}, wanted str; use str(key)", TypeError)
        return {"dict": inside(x.items())}
    return {"value": _encode(x, path, None)}


def _decode(spec: Any, path: Path, leaf: Callable[[str], Any] | None) -> Any:
    """Decode a part of a tree, or of a static field if ``leaf`` is None."""

    def inside(pairs: Any, leaf: Callable[[str], Any] | None = leaf) -> dict[str, Any]:
        return {key: _decode(child, (*path, str(key)), leaf) for key, child in pairs}

    match spec:
        case None:
            return None
        case "tensor" if leaf:
            return leaf(".".join(path))
        case bool() | int() | float() | str() if not leaf:
            return spec
        case {"tuple": list(items), **rest} if not rest:
            return tuple(inside(enumerate(items)).values())
        case {"list": list(items), **rest} if leaf and not rest:
            return list(inside(enumerate(items)).values())
        case {"dict": dict(items), **rest} if leaf and not rest:
            return inside(items.items())
        case {"node": str(name), "fields": dict(children), "static": dict(statics), **rest} if leaf and not rest:
            cls = _lookup(NODES, name, path)
            now = [FORMER_FIELDS.get((name_of(cls), str(key)), str(key)) for key in children]
            for got, wanted in zip((now, statics), field_names(cls), strict=True):
                check_keys(_dots((*path, name)), {*got, *_later(cls)} & {*got, *wanted}, wanted)
            found = dict(zip(now, inside(children.items()).values(), strict=True))
            return _make(cls, path, _later(cls) | found | inside(statics.items(), None))
        case {"value": value, **rest} if leaf and not rest:
            return _decode(value, path, None)
        case {"value": str(name), "fields": dict(fields), **rest} if not leaf and not rest:
            cls = _lookup(VALUES, name, path)
            check_keys(_dots((*path, name)), {*fields, *_later(cls)}, field_names(cls)[0])
            return _make(cls, path, _later(cls) | inside(fields.items()))
        case {"float": str(name), **rest} if not leaf and not rest and name in NUMBERS:
            return NUMBERS[name]
        case {"dtype": str(name), **rest} if not leaf and not rest and name in DTYPES:
            return DTYPES[name]
    got = f"{'structure' if leaf else 'value'} {spec!r:.80}"
    raise ValueError(f"{_dots(path)}: got {got}, wanted what fquant writes; check the file")


def _later(cls: type) -> dict[str, Any]:
    """Return the fields of a class that older files lack, with their values then."""
    return {name: then for (owner, name), then in LATER_FIELDS.items() if owner == name_of(cls)}


def _lookup(table: dict[str, type], name: str, path: Path) -> type:
    name = FORMER_NAMES.get(name, name)
    expect(name in table, f"{_dots(path)}: got class {name!r}, wanted a registered one; import its module first")
    return table[name]


def _make(cls: type, path: Path, parts: dict[str, Any]) -> Any:
    try:
        return cls(**parts)
    except Exception as error:  # a class may raise anything for wrong fields
        raise ValueError(f"{_dots(path)}: got a {cls.__name__} that its class rejects ({error}); check it") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    expect(len(out := dict(pairs)) == len(pairs), "a name occurs twice")
    return out
