"""User code: the names that a function's bytecode reads, the fields of a user's objects, and the name of a value.

Code of a library (torch, fquant, installed packages, the standard library) is distinguished by its file.
"""

import argparse
import dataclasses
import dis
import enum
import functools
import os
import site
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

Place = tuple[types.FrameType, int]  # a frame, and the offset of the instruction that it runs
_SEARCHED = 10_000  # objects at most that are searched for a tensor

_OURS = [Path(__file__).parents[2] / name for name in ("fquant", "shard", "models")]
_INSTALLED = [*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("stdlib", "purelib"))]
_LIBRARIES = (*(os.path.join(folder, "") for folder in (*_OURS, *_INSTALLED)), "<frozen")


class Read(NamedTuple):
    """A name that code reads, and the attributes that follow it."""

    kind: str  # global, cell or parameter
    name: str
    attributes: tuple[str, ...]


@functools.lru_cache
def reads(code: types.CodeType) -> tuple[Read, ...]:
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
        for read in [read for read in reads(inner) if read.kind != "parameter"]:
            is_local = read.kind == "cell" and read.name not in code.co_freevars
            found.append(read._replace(kind="parameter") if is_local else read)
    return tuple(dict.fromkeys(x for x in found if x.kind in ("global", "cell") or x.name in given))


def mapping_of(x: Any, name: str) -> Mapping[str, Any] | None:
    """Return the dictionary of an object, or of one of its classes, that has ``name``; None of a tensor."""
    owners = type.mro(x) if isinstance(x, type) else [] if isinstance(x, Tensor) else [x, *type(x).__mro__]
    return next((names for each in owners if name in (names := getattr(each, "__dict__", {}))), None)


def fields(x: Any) -> dict[str, Any] | None:
    """Return the attributes of a dataclass, a namespace or an object of a user's class; None for any other."""
    slots = _slots_of(type(x))
    if slots is None:
        return None
    own = getattr(x, "__dict__", {})
    return {**{name: getattr(x, name) for name in slots if hasattr(x, name)}, **own} if slots else own


@functools.lru_cache
def _slots_of(cls: type) -> tuple[str, ...] | None:
    """Return the slots of a class whose objects have fields in the sense of ``fields``, None for another."""
    if issubclass(cls, torch.nn.Module | Tensor | type | types.FunctionType | enum.Enum):
        return None
    known = dataclasses.is_dataclass(cls) or issubclass(cls, types.SimpleNamespace | argparse.Namespace)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if not known and not (is_users(file) if file else cls.__module__ == "__main__"):
        return None
    slots = [vars(each).get("__slots__", ()) for each in cls.__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    return tuple(name for name in names if not name.startswith("__"))


@functools.lru_cache
def is_open(cls: type) -> bool:
    """Return True for a class whose objects have fields that may be set."""
    return _slots_of(cls) is not None and not getattr(getattr(cls, "__dataclass_params__", None), "frozen", False)


def parameters(f: Any) -> tuple[str, ...]:
    """Return the names of the positional parameters of a function; none of what has no bytecode."""
    code = getattr(f, "__code__", None)
    return code.co_varnames[: code.co_argcount] if code else ()


@functools.lru_cache
def is_users(file: str) -> bool:
    """Return True if code of this file belongs to no library."""
    return not file.startswith(_LIBRARIES)


def held(
    x: Any, wanted: type | tuple[type, ...] = Tensor, searched: dict[int, Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield what is ``wanted`` in containers, objects, modules and functions within ``x``, by path, nearest first.

    ``searched`` has the objects that an earlier search has entered, by id. They are not entered again.
    """
    left, seen = deque([("", x)]), {} if searched is None else searched
    while left and len(seen) < _SEARCHED:
        path, each = left.popleft()
        if isinstance(each, wanted):
            yield path, each
        elif id(each) not in seen:
            seen[id(each)] = each
            left += [(f"{path}.{name}" if path else str(name), inner) for name, inner in _inner(each).items()]


def _inner(x: Any) -> dict[Any, Any]:
    """Return what a container or an object holds, by name."""
    if isinstance(x, dict):
        return x
    if isinstance(x, list | tuple | set | frozenset | deque):
        return dict(zip(getattr(x, "_fields", range(len(x))), x, strict=True))
    if isinstance(x, functools.partial):
        return {**dict(zip(parameters(x.func), x.args, strict=False)), **x.keywords, "func": x.func}
    if isinstance(x, types.MethodType):
        return {"__self__": x.__self__, "__func__": x.__func__}
    if isinstance(x, types.FunctionType):
        cells = dict(zip(x.__code__.co_freevars, x.__closure__ or (), strict=True))
        known = {name: cell.cell_contents for name, cell in cells.items() if cell != types.CellType()}
        defaults = dict(zip(reversed(parameters(x)), reversed(x.__defaults__ or ()), strict=False))
        return {**known, **defaults, **(x.__kwdefaults__ or {})}
    if isinstance(x, types.ModuleType | type):
        module = x if isinstance(x, types.ModuleType) else sys.modules.get(x.__module__)
        return dict(vars(x)) if is_users(getattr(module, "__file__", None) or "<frozen") else {}
    own = {**getattr(x, "__dict__", {})}
    if isinstance(x, torch.nn.Module):
        return {**x._parameters, **x._buffers, **x._modules, **own}
    slots = {name: getattr(x, name) for name in _slots_of(type(x)) or () if hasattr(x, name)}
    return {**slots, **own, "__class__": type(x)} if own or slots else own


def frames(frame: types.FrameType | None) -> Iterator[Place]:
    """Yield ``frame`` and its callers."""
    while frame is not None:
        yield frame, frame.f_lasti
        frame = frame.f_back


def name_of(x: Any, places: Iterable[Place]) -> str | None:
    """Return the name that code at one of ``places``, innermost first, reads the object ``x`` by; None if none does.

    Of several names the expression's own is taken, then the shortest. Code of a user goes before code of a library.
    """
    searched = dict[int, Any]()  # of all frames: what does not hold x for one of them does not for another
    for frame, offset in sorted(places, key=lambda place: not is_users(place[0].f_code.co_filename)):
        read = ".".join(("", *_names_at(frame.f_code, offset), ""))
        known = {k: v for k, v in frame.f_globals.items() if k in frame.f_code.co_names} | dict(frame.f_locals)
        paths = [path for path, leaf in held(known, type(x), searched) if leaf is x]
        rank = lambda path, read=read: (f".{path}." not in read, f".{path.split('.')[0]}." not in read)
        if paths:
            return min(paths, key=rank).replace("__self__", "self").replace(".__class__", "")
    return None


def _names_at(code: types.CodeType, offset: int) -> list[str]:
    """Return the names and constants, in order, in the expression that the instruction at ``offset`` computes.

    An instruction is the one at ``offset`` or the last one before it. If Python has specialised a call, the frame that
    waits for the call has the offset of the call's inline cache.
    """
    each = [(i, i.positions) for i in dis.get_instructions(code) if i.positions and i.positions.lineno is not None]
    at = next((p for i, p in reversed(each) if i.offset <= offset), None)
    if at is None:
        return []
    start, end = (at.lineno, at.col_offset), (at.end_lineno, at.end_col_offset)
    inside = [i for i, p in each if start <= (p.lineno, p.col_offset) and (p.end_lineno, p.end_col_offset) <= end]
    loads = [i.argval for i in inside if i.opname.startswith("LOAD")]
    return [str(name) for loaded in loads for name in (loaded if isinstance(loaded, tuple) else (loaded,))]
