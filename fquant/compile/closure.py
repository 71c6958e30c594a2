"""Guards on the Python values that a captured function reads and is not given.

A trace freezes every Python value: ``lr`` of an enclosing function, a global ``CONFIG.lr``, ``self.rates[0]``. So each
call compares these values with those of the trace, and a change of one retraces the function. A call costs one identity
comparison for each name. Only if one differs are the values searched and compared.

The bytecode of the function gives the names that it reads, and the attributes that follow them. The functions that it
names are searched too: nested ones, methods of an object, ``functools.partial``, and functions that a library's
function holds, as ``grad(loss)`` does. Code of a library is distinguished by its file.

Guarded are

* by value: numbers, strings, None, dtypes, devices, enums; tuples, lists, dicts and sets of up to ``LIMIT`` of these;
* attributes that the function names, of modules, classes and objects;
* if it uses a dataclass, a namespace or an object of a user's class as a whole, all attributes in its ``__dict__``;
* by identity: functions and classes.

Not guarded are

* globals of libraries: torch, fquant, shard, models, installed packages, the standard library;
* larger containers, and what is nested deeper than 5 levels;
* attributes of an ``nn.Module``, or of another object of a library, that the function does not name;
* names that are computed, by ``getattr`` for instance;
* tensors, which the trace refuses, and values that change while it runs, such as a list of the function's calls.
"""

import argparse
import dataclasses
import dis
import enum
import functools
import operator
import os
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

_OURS = [Path(__file__).parents[2] / name for name in ("fquant", "shard", "models")]
_INSTALLED = [*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("stdlib", "purelib"))]
_LIBRARIES = (*(os.path.join(folder, "") for folder in (*_OURS, *_INSTALLED)), "<frozen")
LIMIT = 256  # elements of a container that are compared
_DEPTH = 5  # of containers and objects within each other
_ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, range, slice)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, type)
CONTAINERS = (list, tuple, dict, set, frozenset)
_ABSENT = object()
Value = tuple[Any, ...]  # a type, and what distinguishes values of it


def freeze(x: Any) -> Value:
    """Return a value that distinguishes 1 from 1.0 and True, and 0.0 from -0.0, and is hashable if ``x`` is."""
    return (type(x), x.hex() if type(x) is float else x)


def may_change(x: Any) -> bool:
    """Return True for an argument that is a function, or an object whose attributes may be set."""
    return not isinstance(x, Tensor) and (isinstance(x, _FUNCTIONS) or is_open(type(x)))


class Read(NamedTuple):
    """A name that code reads, and the attributes that follow it."""

    kind: str  # global, cell or parameter
    name: str
    attributes: tuple[str, ...]


class Search:
    """One search: the values by name, and the places where they are bound."""

    def __init__(self, fn: Any, objects: Sequence[tuple[str, Any]], ignored: frozenset[str]) -> None:
        self.values = dict[str, Value]()
        self._bindings = list[tuple[Callable[[], Any], Any]]()  # what returns the object of a name, and that object
        self._contents = list[tuple[Any, list[Any]]]()  # what may be written, and its elements
        self._ignored, self._seen, self._owners = ignored, dict[Any, Any](), dict[str, Any]()
        self._function(fn, {})
        for path, x in objects:
            self._value(path, x)
        del self._seen, self._owners

    def holds(self) -> bool:
        """Return True if every name is bound to the same object, and what may be written has the same elements."""
        if not all(get() is x for get, x in self._bindings):
            return False
        elements = ((_elements(owner), before) for owner, before in self._contents)
        return all(len(now) == len(before) and all(map(operator.is_, now, before)) for now, before in elements)

    def _function(self, f: Any, bound: Mapping[str, Any]) -> None:
        """Search a callable, of whose parameters those in ``bound`` are known."""
        place = (id(f), *map(id, bound.values()))
        if place in self._seen:
            return
        self._seen[place] = f, bound  # which keeps the ids
        if isinstance(f, functools.partial):
            given = dict(zip(_parameters(f.func), f.args, strict=False)) | f.keywords
            for name, x in given.items():
                self._value(name, x)
            self._function(f.func, {**bound, **given})
        elif isinstance(f, types.MethodType):
            self._function(f.__func__, dict.fromkeys(_parameters(f.__func__)[:1], f.__self__))
        elif isinstance(f, types.FunctionType):
            cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
            if not _is_users(f.__code__.co_filename):
                return self._functions_in([content(cell) for cell in cells.values()])
            defaults = dict(zip(reversed(_parameters(f)), reversed(f.__defaults__ or ()), strict=False))
            for name, x in (defaults | (f.__kwdefaults__ or {})).items():
                self._value(name, x)
            for read in _reads(f.__code__):
                self._read(read, f.__globals__, cells, bound)
        elif not isinstance(f, type):
            method = getattr(type(f), "forward" if isinstance(f, torch.nn.Module) else "__call__", None)
            if isinstance(method, types.FunctionType) and _is_users(method.__code__.co_filename):
                self._function(types.MethodType(method, f), {})
            elif isinstance(inner := getattr(f, "__wrapped__", None), types.FunctionType):
                self._function(inner, {})

    def _read(
        self, read: Read, names: dict[str, Any], cells: Mapping[str, types.CellType], bound: Mapping[str, Any]
    ) -> None:
        """Follow a name of a function to its value, and guard every binding on the way."""
        name, x = read.name, _ABSENT
        if name in self._ignored:
            return
        if read.kind == "parameter":
            x = bound.get(name, _ABSENT)
        elif read.kind == "cell":
            x = self._bind(content, cells[name])
        elif name in names:
            x = self._bind(names.get, name)
        for attribute in read.attributes:
            if x is _ABSENT or isinstance(x, types.ModuleType) and not _is_users(getattr(x, "__file__", None) or ""):
                return
            mapping = _mapping_of(x, attribute)
            if mapping is None or f"{name}.{attribute}" in self._ignored:
                break
            raw, is_method = mapping[attribute], isinstance(x, type) or mapping is not getattr(x, "__dict__", None)
            if isinstance(raw, property):
                return self._function(raw.fget, dict.fromkeys(_parameters(raw.fget)[:1], x))
            if is_method and isinstance(raw, types.FunctionType) and _is_users(raw.__code__.co_filename):
                return self._function(types.MethodType(raw, x), {})
            if is_method and hasattr(raw, "__get__"):
                break
            if attribute not in getattr(x, "__dict__", (attribute,)):
                self._bind(x.__dict__.get, attribute, _ABSENT)  # where an assignment would hide it
            name, x = f"{name}.{attribute}", self._bind(mapping.get, attribute)
        if x is not _ABSENT:
            self._value(name, x)

    def _bind(self, get: Callable[..., Any], *args: Any) -> Any:
        bound = functools.partial(get, *args)
        self._bindings.append((bound, bound()))
        return bound()

    def _value(self, name: str, x: Any, depth: int = 0) -> None:
        """Guard ``x`` and its elements or attributes."""
        while self._owners.setdefault(name, x) is not x:
            name += "'"  # another variable of the same name
        if name in self.values or name in self._ignored or isinstance(x, types.ModuleType):
            return
        if isinstance(x, _ATOMS):
            self.values[name] = freeze(x)
        elif isinstance(x, _FUNCTIONS):
            self.values[name] = (type(x), x)
            self._function(x, {})
        elif type(x) in (set, frozenset):
            self.values[name] = (type(x), frozenset(freeze(each) for each in x if isinstance(each, _ATOMS)))
            self._contents.append((x, _elements(x)))
        elif (inner := x if isinstance(x, CONTAINERS) else _fields(x)) is not None:
            self.values[name] = (type(x), len(inner))
            if depth == _DEPTH or len(inner) > LIMIT or (id(x), "elements") in self._seen:
                return
            self._seen[id(x), "elements"] = x
            if isinstance(x, list | dict) or is_open(type(x)):
                self._contents.append((x, _elements(x)))
            for key, each in inner.items() if isinstance(inner, dict) else enumerate(inner):
                self._value(f"{name}[{key!r}]" if isinstance(x, CONTAINERS) else f"{name}.{key}", each, depth + 1)
            self._function(x, {})
        else:
            self.values[name] = (type(x),)
            self._functions_in(x)

    def _functions_in(self, x: Any, depth: int = 0) -> None:
        """Search the functions that a value of a library holds."""
        is_record = dataclasses.is_dataclass(x) and not isinstance(x, type)
        inner = list((_fields(x) or {}).values()) if is_record else x
        if isinstance(inner, tuple | list) and depth < _DEPTH and len(inner) <= LIMIT:
            for each in inner:
                self._functions_in(each, depth + 1)
        elif callable(x):
            self._function(x, {})


def _elements(x: Any) -> list[Any]:
    inner = x if isinstance(x, CONTAINERS) else _fields(x) or {}
    return [*inner, *inner.values()] if isinstance(inner, dict) else [*inner]


def content(cell: types.CellType) -> Any:
    """Return the value of a variable that a function closes over; a placeholder if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


@functools.lru_cache
def _reads(code: types.CodeType) -> tuple[Read, ...]:
    """Return the names that ``code`` reads, and the code within it."""
    found, given = list[Read](), code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for each in dis.get_instructions(code):
        name = each.argval
        if each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found[-1] = found[-1]._replace(attributes=(*found[-1].attributes, name))
        elif each.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.append(Read("global", name, ()))
        elif each.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"):
            found.append(Read("cell" if name in code.co_freevars else "parameter", name, ()))
        elif each.opname.startswith("LOAD_FAST"):
            found += [Read("parameter", one, ()) for one in (name if isinstance(name, tuple) else (name,))]
        else:
            found.append(Read("value", "", ()))  # on top of the stack, where the next attribute is read
    for inner in (x for x in code.co_consts if isinstance(x, types.CodeType)):
        for read in [read for read in _reads(inner) if read.kind != "parameter"]:
            is_local = read.kind == "cell" and read.name not in code.co_freevars
            found.append(read._replace(kind="parameter") if is_local else read)
    return tuple(dict.fromkeys(x for x in found if x.kind in ("global", "cell") or x.name in given))


def _mapping_of(x: Any, name: str) -> Mapping[str, Any] | None:
    """Return the dictionary of an object, or of one of its classes, that has ``name``; None of a tensor."""
    owners = type.mro(x) if isinstance(x, type) else [] if isinstance(x, Tensor) else [x, *type(x).__mro__]
    return next((names for each in owners if name in (names := getattr(each, "__dict__", {}))), None)


def _fields(x: Any) -> dict[str, Any] | None:
    """Return the attributes of a dataclass, a namespace or an object of a user's class; None for any other."""
    slots = _slots_of(type(x))
    if slots is None:
        return None
    own = getattr(x, "__dict__", {})
    return {**{name: getattr(x, name) for name in slots if hasattr(x, name)}, **own} if slots else own


@functools.lru_cache
def _slots_of(cls: type) -> tuple[str, ...] | None:
    """Return the slots of a class whose objects have fields in the sense of ``_fields``, None for another."""
    if issubclass(cls, torch.nn.Module | Tensor | type | types.FunctionType | enum.Enum):
        return None
    known = dataclasses.is_dataclass(cls) or issubclass(cls, types.SimpleNamespace | argparse.Namespace)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if not known and not (_is_users(file) if file else cls.__module__ == "__main__"):
        return None
    slots = [vars(each).get("__slots__", ()) for each in cls.__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    return tuple(name for name in names if not name.startswith("__"))


@functools.lru_cache
def is_open(cls: type) -> bool:
    """Return True for a class whose objects have fields that may be set."""
    return _slots_of(cls) is not None and not getattr(getattr(cls, "__dataclass_params__", None), "frozen", False)


def _parameters(f: Any) -> tuple[str, ...]:
    code = getattr(f, "__code__", None)
    return code.co_varnames[: code.co_argcount] if code else ()


@functools.lru_cache
def _is_users(file: str) -> bool:
    return not file.startswith(_LIBRARIES)
