"""The structure of a tree as JSON, so that a file of named tensors can hold a tree.

    Lora(a=t, b=t, magnitude=None, alpha=16.0, ...)
    {"node": "Lora", "fields": {"a": "tensor", "b": "tensor", "magnitude": null}, "static": {"alpha": 16.0, ...}}

A tree is a tensor, a node, a dict with str keys, a list, a tuple, or a plain value as in static fields: None, bool,
int, float, str, torch.dtype, tuples of them, and frozen dataclasses registered with ``tree.value``. Classes are looked
up by name in ``tree.NODES`` and ``tree.VALUES``, former names included, and must match field by field.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..tree import FORMER_FIELDS, FORMER_NAMES, NODES, VALUES, is_node, name_of

Path = tuple[str, ...]  # names that lead to a leaf, joined by dots in files and messages

VERSION = 1
DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, torch.dtype)}
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
    try:
        content = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structure: got no JSON ({error}), wanted what fquant writes; check the file") from error
    _check_keys(content, {"version", "tree"}, ("structure",))
    if content["version"] != VERSION:
        raise ValueError(f"structure: got version {content['version']!r}, wanted {VERSION}; use another release")
    return _decode(content["tree"], (), leaf)


def _encode(x: Any, path: Path, tensors: dict[str, Tensor]) -> Any:
    def inner(pairs: Any) -> list[Any]:
        return [_encode(child, _join(path, name), tensors) for name, child in pairs]

    if isinstance(x, Tensor):
        name = ".".join(path)
        if name in tensors:
            raise ValueError(f"{name}: got two tensors of that path, wanted one; rename a key that contains a dot")
        tensors[name] = x
        return "tensor"
    if is_node(x):
        fields, statics = _fields(type(x))
        children = inner((name, getattr(x, name)) for name in fields)
        values = {name: _encode_value(getattr(x, name), _join(path, name)) for name in statics}
        return {"node": name_of(type(x)), "fields": dict(zip(fields, children, strict=True)), "static": values}
    if type(x) is dict:
        for key in x:
            if type(key) is not str:
                where = _dots(_join(path, key))
                raise TypeError(f"{where}: got a key of type {type(key).__name__}, wanted str; use str(key)")
        return {"dict": dict(zip(x, inner(x.items()), strict=True))}
    if type(x) in (list, tuple):
        return {type(x).__name__: inner(enumerate(x))}
    return None if x is None else {"value": _encode_value(x, path)}


def _decode(spec: Any, path: Path, leaf: Callable[[str], Any]) -> Any:
    match spec:
        case "tensor":
            return leaf(".".join(path))
        case None:
            return None
        case {"node": str(name), "fields": dict(children), "static": dict(static), **rest} if not rest:
            cls = _lookup(NODES, name, path)
            fields, statics = _fields(cls)
            now = {str(key): FORMER_FIELDS.get((name_of(cls), str(key)), str(key)) for key in children}
            _check_keys({now[key]: child for key, child in children.items()}, set(fields), _join(path, name))
            _check_keys(static, set(statics), _join(path, name))
            parts = {now[key]: _decode(child, _join(path, key), leaf) for key, child in children.items()}
            return _make(cls, path, parts | {key: _decode_value(static[key], _join(path, key)) for key in statics})
        case {"dict": dict(inner), **rest} if not rest:
            return {key: _decode(child, _join(path, key), leaf) for key, child in inner.items()}
        case {"list": list(inner), **rest} if not rest:
            return [_decode(child, _join(path, i), leaf) for i, child in enumerate(inner)]
        case {"tuple": list(inner), **rest} if not rest:
            return tuple(_decode(child, _join(path, i), leaf) for i, child in enumerate(inner))
        case {"value": inner, **rest} if not rest:
            return _decode_value(inner, path)
    raise ValueError(f"{_dots(path)}: got structure {spec!r:.80}, wanted what fquant writes; check the file")


def _encode_value(x: Any, path: Path) -> Any:
    if x is None or type(x) in (bool, int, str):
        return x
    if type(x) is float:
        return x if math.isfinite(x) else {"float": str(x)}
    if type(x) is tuple:
        return {"tuple": [_encode_value(item, _join(path, i)) for i, item in enumerate(x)]}
    if isinstance(x, torch.dtype):
        return {"dtype": str(x).removeprefix("torch.")}
    if VALUES.get(name_of(type(x))) is type(x):
        parts = {f.name: _encode_value(getattr(x, f.name), _join(path, f.name)) for f in dataclasses.fields(x)}
        return {"value": name_of(type(x)), "fields": parts}
    fix = "use a node, a plain value, or a frozen dataclass registered with tree.value"
    got = f"{type(x).__module__}.{type(x).__qualname__}"
    raise TypeError(f"{_dots(path)}: got {got}, wanted something a file can hold; {fix}")


def _decode_value(spec: Any, path: Path) -> Any:
    match spec:
        case None | bool() | int() | float() | str():
            return spec
        case {"float": str(name), **rest} if not rest and name in NUMBERS:
            return NUMBERS[name]
        case {"tuple": list(inner), **rest} if not rest:
            return tuple(_decode_value(item, _join(path, i)) for i, item in enumerate(inner))
        case {"dtype": str(name), **rest} if not rest and name in DTYPES:
            return DTYPES[name]
        case {"value": str(name), "fields": dict(inner), **rest} if not rest:
            cls = _lookup(VALUES, name, path)
            names = [f.name for f in dataclasses.fields(cls)]
            _check_keys(inner, set(names), _join(path, name))
            return _make(cls, path, {key: _decode_value(inner[key], _join(path, key)) for key in names})
    raise ValueError(f"{_dots(path)}: got value {spec!r:.80}, wanted what fquant writes; check the file")


def _fields(cls: type) -> tuple[list[str], list[str]]:
    """Return the names of a node's children and of its static fields."""
    named = lambda static: [f.name for f in dataclasses.fields(cls) if bool(f.metadata.get("static")) == static]
    return named(False), named(True)


def _lookup(table: dict[str, type], name: str, path: Path) -> type:
    name = FORMER_NAMES.get(name, name)
    if name not in table:
        raise ValueError(f"{_dots(path)}: got class {name!r}, wanted a registered one; import its module first")
    return table[name]


def _make(cls: type, path: Path, parts: dict[str, Any]) -> Any:
    try:
        return cls(**parts)
    except Exception as error:  # a class may raise anything for wrong fields
        message = f"{_dots(path)}: got a {cls.__name__} that its class rejects ({error}); check the file"
        raise ValueError(message) from error


def _check_keys(content: Any, wanted: set[str], path: Path) -> None:
    if not isinstance(content, dict) or content.keys() != wanted:
        got = ", ".join(content) if isinstance(content, dict) else f"{content!r:.40}"
        names = ", ".join(sorted(wanted))
        raise ValueError(f"{_dots(path)}: got fields {got}; wanted {names}; use the release that wrote it")


def _join(path: Path, name: Any) -> Path:
    return (*path, str(name))


def _dots(path: Path) -> str:
    return ".".join(path) or "the tree"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
