"""User code: the names that a function's bytecode reads, and the fields of a user's objects.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
