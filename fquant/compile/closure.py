"""Guards on the Python values that a captured function reads and is not given.

A trace freezes every Python value: ``lr`` of an enclosing function, a global ``CONFIG.lr``, ``self.rates[0]``. So each
call compares these values with those of the trace, and a change of one retraces the function. A call costs one identity
comparison for each name. Only if one differs are the values searched and compared.

The bytecode of the function gives the names that it reads, and the attributes that follow them (user_code.py). The
functions that it names are searched too: nested ones, methods of an object, ``functools.partial``, and functions that a
library's function holds, as ``grad(loss)`` does.

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

import dataclasses
import enum
import functools
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .retraces import Change
from .user_code import Read, fields, is_open, is_users, mapping_of, parameters, reads

LIMIT = 256  # elements of a container that are compared
_DEPTH = 5  # of containers and objects within each other
_ATOMS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum, range, slice)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial, type)
_CONTAINERS = (list, tuple, dict, set, frozenset)
_ABSENT = object()
Value = tuple[Any, ...]  # a type, and what distinguishes values of it


def freeze(x: Any) -> Value:
    """Return a value that distinguishes 1 from 1.0 and True, and 0.0 from -0.0, and is hashable if ``x`` is."""
    return (type(x), x.hex() if type(x) is float else x)


def may_change(x: Any) -> bool:
    """Return True for an argument that is a function, or an object whose attributes may be set."""
    return not isinstance(x, Tensor) and (isinstance(x, _FUNCTIONS) or is_open(type(x)))


class Closure:
    """The Python values that ``fn`` reads and is not given, in numbered versions; equal values have one number."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn, self._ignored, self._versions = fn, frozenset[str](), list[dict[str, Value]]()
        self._latest = dict[tuple[int, ...], tuple[_Search, int]]()

    def version(self, objects: Sequence[tuple[str, Any]] = ()) -> int:
        """Return the number of the present values; attributes of ``objects``, arguments by path, are among them."""
        place = tuple([id(x) for _, x in objects])
        if (found := self._latest.get(place)) is not None and found[0].holds():
            return found[1]
        search = _Search(self._fn, objects, self._ignored)
        if search.values not in self._versions:
            self._versions.append(search.values)
        number = self._versions.index(search.values)
        if len(self._latest) >= LIMIT:
            self._latest.clear()
        self._latest[place] = search, number
        return number

    def ignore_changes(self, before: int, objects: Sequence[tuple[str, Any]] = ()) -> int:
        """Stop guarding what has changed since the version ``before``, and return the version without it."""
        if (now := self.version(objects)) == before:
            return now
        self._ignored |= self._changed(before, now).keys()
        self._latest.clear()
        return self.version(objects)

    def changes(self, before: int, now: int) -> list[Change]:
        """Return the differences of two versions, in words such as "`lr` was 0.5, is 0.25"."""
        found = sorted(self._changed(before, now).items(), key=lambda item: item[0])
        deepest = [name for name, _ in found if not any(x.startswith((name + ".", name + "[")) for x, _ in found)]
        text_of = lambda name, old, new: f"`{name}` was {text(old)}, is {text(new)}"
        return [Change(name, text_of(name, *values)) for name, values in found if name in deepest]

    def _changed(self, before: int, now: int) -> dict[str, tuple[Value | None, Value | None]]:
        old, new = self._versions[before], self._versions[now]
        return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


class _Search:
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
            given = dict(zip(parameters(f.func), f.args, strict=False)) | f.keywords
            for name, x in given.items():
                self._value(name, x)
            self._function(f.func, {**bound, **given})
        elif isinstance(f, types.MethodType):
            self._function(f.__func__, dict.fromkeys(parameters(f.__func__)[:1], f.__self__))
        elif isinstance(f, types.FunctionType):
            cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
            if not is_users(f.__code__.co_filename):
                return self._functions_in([content(cell) for cell in cells.values()])
            defaults = dict(zip(reversed(parameters(f)), reversed(f.__defaults__ or ()), strict=False))
            for name, x in (defaults | (f.__kwdefaults__ or {})).items():
                self._value(name, x)
            for read in reads(f.__code__):
                self._read(read, f.__globals__, cells, bound)
        elif not isinstance(f, type):
            method = getattr(type(f), "forward" if isinstance(f, torch.nn.Module) else "__call__", None)
            if isinstance(method, types.FunctionType) and is_users(method.__code__.co_filename):
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
            if x is _ABSENT or isinstance(x, types.ModuleType) and not is_users(getattr(x, "__file__", None) or ""):
                return
            mapping = mapping_of(x, attribute)
            if mapping is None or f"{name}.{attribute}" in self._ignored:
                break
            raw, is_method = mapping[attribute], isinstance(x, type) or mapping is not getattr(x, "__dict__", None)
            if isinstance(raw, property):
                return self._function(raw.fget, dict.fromkeys(parameters(raw.fget)[:1], x))
            if is_method and isinstance(raw, types.FunctionType) and is_users(raw.__code__.co_filename):
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
        elif (inner := x if isinstance(x, _CONTAINERS) else fields(x)) is not None:
            self.values[name] = (type(x), len(inner))
            if depth == _DEPTH or len(inner) > LIMIT or (id(x), "elements") in self._seen:
                return
            self._seen[id(x), "elements"] = x
            if isinstance(x, list | dict) or is_open(type(x)):
                self._contents.append((x, _elements(x)))
            for key, each in inner.items() if isinstance(inner, dict) else enumerate(inner):
                self._value(f"{name}[{key!r}]" if isinstance(x, _CONTAINERS) else f"{name}.{key}", each, depth + 1)
            self._function(x, {})
        else:
            self.values[name] = (type(x),)
            self._functions_in(x)

    def _functions_in(self, x: Any, depth: int = 0) -> None:
        """Search the functions that a value of a library holds."""
        is_record = dataclasses.is_dataclass(x) and not isinstance(x, type)
        inner = list((fields(x) or {}).values()) if is_record else x
        if isinstance(inner, tuple | list) and depth < _DEPTH and len(inner) <= LIMIT:
            for each in inner:
                self._functions_in(each, depth + 1)
        elif callable(x):
            self._function(x, {})


def _elements(x: Any) -> list[Any]:
    inner = x if isinstance(x, _CONTAINERS) else fields(x) or {}
    return [*inner, *inner.values()] if isinstance(inner, dict) else [*inner]


def content(cell: types.CellType) -> Any:
    """Return the value of a variable that a function closes over; a placeholder if it is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def text(value: Value | None) -> str:
    """Return a value as a message shows it."""
    if value is None:
        return "absent"
    if len(value) == 1 or issubclass(value[0], _CONTAINERS) and isinstance(value[1], int):
        return value[0].__name__ + (f" of {value[1]}" if len(value) > 1 else "")
    return repr(float.fromhex(value[1]) if value[0] is float else value[1])
