"""Trees of *nodes*: frozen dataclasses, registered as pytree nodes with torch.

A node's fields are tensors, or lists, dicts and nodes of tensors, beside hashable *static* fields.

    @node
    class Packed:
        codes: Tensor                 # a leaf
        scale: Tensor | Packed        # a subtree
        format: Format = static()     # part of the structure, never a leaf

* A field that is None is absent: it is not a leaf, and its absence is part of the structure. (torch's own pytree counts
  None as a leaf, and ``torch.func.grad`` rejects it.)
* Static fields hold no tensor, and are compared when structures are compared.
* A node has no method that computes. Verbs are functions.

The *path* of a leaf is the field names, keys and indices that lead to it, joined by dots: ``layers.0.q.codes``.
"""

import contextlib
import dataclasses
import re
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar, dataclass_transform

import torch
from torch.utils import _pytree as pytree

Structure: TypeAlias = pytree.TreeSpec
T = TypeVar("T")

NODES: dict[str, type] = {}  # node classes by name_of, for files
VALUES: dict[str, type] = {}  # static value classes by name_of, for files
_CLASSES: set[type] = set()  # all node classes, including those that a later definition replaced in NODES
# Renamed classes: the name in older files -> the name now.
FORMER_NAMES = {"fquant.BookPart": "fquant.ShardedBook", "fquant.PartStats": "fquant.ShardedStats"}
LONGEST_MESSAGE = 2000  # characters of an error
FORMER_FIELDS = {  # renamed fields: the class and field in older files -> the field now
    ("fquant.Projections", "enter"): "project_in", ("fquant.Projections", "leave"): "project_out",
    ("fquant.ShardedStats", "own"): "local", ("fquant.ShardedStats", "at"): "drawn",
}  # fmt: skip
LATER_FIELDS: dict[tuple[str, str], Any] = {  # fields that older files lack: the class and field -> the value then
    ("fquant.Format", "zero"): False, ("fquant.Packed", "zero"): None, ("fquant.Format", "shared"): False,
    ("fquant.Format", "mean"): False, ("fquant.Format", "power"): False, ("fquant.Format", "unit"): None,
}  # fmt: skip


def static(**options: Any) -> Any:
    """Declare a node's field as part of the structure: hashable, and never a leaf."""
    return dataclasses.field(metadata={"static": True}, **options)


def value(cls: type[T]) -> type[T]:
    """Register a frozen dataclass that is used in static fields, so that files can hold it (see fquant.io)."""
    _register(VALUES, cls)
    return cls


@dataclass_transform(frozen_default=True, field_specifiers=(static, dataclasses.field))
def node(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen dataclass and a pytree node.

    Instances raise TypeError for a static field that is unhashable or holds a tensor, then run ``__post_init__`` of the
    class. Transforms build nodes without either.
    """
    own_post_init = cls.__dict__.get("__post_init__")

    def post_init(self: Any) -> None:
        for name in statics:
            _check_static(cls.__name__, name, getattr(self, name))
        if own_post_init:
            own_post_init(self)

    cls.__post_init__ = post_init  # type: ignore[attr-defined]
    cls = dataclasses.dataclass(frozen=True, eq=False)(cls)
    children, statics = field_names(cls)

    def flatten(self: Any) -> tuple[list[Any], Any]:
        present: list[str] = []
        inner: list[Any] = []
        for name in children:  # a loop, because every call of a captured function flattens every node
            child = getattr(self, name)
            if child is not None:
                present.append(name)
                inner.append(child)
        return inner, (tuple(present), tuple([getattr(self, name) for name in statics]))

    def flatten_with_keys(self: Any) -> tuple[list[Any], Any]:
        leaves, context = flatten(self)
        return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(context[0], leaves, strict=True)], context

    def unflatten(leaves: Any, context: Any) -> Any:
        # Dynamo cannot read a class from a closure. Transforms put placeholders in fields, so no check runs here.
        self = object.__new__(NODES[name_of(cls)] if torch.compiler.is_dynamo_compiling() else cls)
        for name in children:
            object.__setattr__(self, name, None)
        for name, leaf in zip(context[0], leaves, strict=True):
            object.__setattr__(self, name, leaf)
        for name, item in zip(statics, context[1], strict=True):
            object.__setattr__(self, name, item)
        return self

    pytree.register_pytree_node(cls, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)
    _register(NODES, cls)
    _CLASSES.add(cls)
    return cls


def field_names(cls: Any) -> tuple[list[str], list[str]]:
    """Return the names of the children and of the static fields of a node class; a value's fields are children."""
    named = lambda static: [f.name for f in dataclasses.fields(cls) if f.metadata.get("static", False) == static]
    return named(False), named(True)


def name_of(cls: type) -> str:
    """Return the name of a class in files: package and class name, because modules of a package may be renamed."""
    return f"{cls.__module__.partition('.')[0]}.{cls.__qualname__}"


def add_later_fields(cls: type, first: str) -> None:
    """Say that files from before ``first`` lack it and the fields of ``cls`` after it, and mean their defaults."""
    fields = dataclasses.fields(cls)
    for field in fields[[field.name for field in fields].index(first) :]:
        LATER_FIELDS[name_of(cls), field.name] = field.default


def _register(table: dict[str, type], cls: type) -> None:
    other, here = table.get(name_of(cls), cls).__module__, cls.__module__
    fault = f"{here}.{cls.__name__}: {other} has a class of that name; choose another"
    expect(other == here, fault)  # within a module it is the same class, defined again
    table[name_of(cls)] = cls


def _check_static(owner: str, name: str, item: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        return  # Dynamo cannot trace hash
    if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(item)):
        raise TypeError(f"{owner}.{name} is static but holds a tensor; make it an ordinary field")
    try:
        hash(item)
    except TypeError:
        fix = "use a tuple or a frozen dataclass"
        raise TypeError(f"{owner}.{name} is static but not hashable: {item!r}; {fix}") from None


def is_node(x: Any) -> bool:
    """Return True if ``x`` is an instance of a class made by :func:`node`."""
    return type(x) in _CLASSES


flatten: Callable[..., tuple[list[Any], Structure]] = pytree.tree_flatten
leaves: Callable[..., list[Any]] = pytree.tree_leaves
structure: Callable[..., Structure] = pytree.tree_structure
map: Callable[..., Any] = pytree.tree_map


def unflatten(structure: Structure, leaves: Any) -> Any:
    """Return the tree of ``structure`` with ``leaves``, in the order of :func:`flatten`."""
    return pytree.tree_unflatten(leaves, structure)


def path_of(keys: Any) -> str:
    """Return the dotted path of one of torch's key paths."""
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", None)))) for k in keys)


def items(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Return ``(path, leaf)`` for every leaf, in the order of :func:`flatten`."""
    return [(path_of(keys), leaf) for keys, leaf in pytree.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]]


def paths(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """Return the path of every leaf."""
    return [path for path, _ in items(tree, is_leaf)]


def map_with_path(f: Callable[[str, Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Replace every leaf by ``f(path, leaf)``; an error of ``f`` is raised with the path in front."""

    def call(keys: Any, leaf: Any) -> Any:
        with at(path := path_of(keys)):
            return f(path, leaf)

    return pytree.tree_map_with_path(call, tree, is_leaf=is_leaf)


def compiled(name: str, pattern: str) -> re.Pattern[str]:
    """Return a regular expression; raise TypeError or ValueError, with the ``name`` of the argument, for none."""
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        fault = f"{name}: {pattern!r} is no regular expression: {error}; correct it"
        raise (ValueError if isinstance(pattern, str) else TypeError)(fault) from None


def map_at(pattern: str, f: Callable[[Any], Any], tree: Any) -> Any:
    """Replace every subtree whose whole path matches the regular expression ``pattern`` by ``f(subtree)``.

    The outermost match wins, and its inside is not visited. Raises ValueError if nothing matches. An error of ``f`` is
    raised with the path in front.
    """
    rule, found = compiled("pattern", pattern), []

    def visit(prefix: tuple[str, ...], x: Any) -> Any:
        path = ".".join(prefix)
        if prefix and rule.fullmatch(path):
            found.append(path)
            with at(path):
                return f(x)
        return map_children(lambda name, child: visit((*prefix, name), child), x)

    out = visit((), tree)
    if not found:
        is_small = lambda x: is_node(x) and all(isinstance(c, torch.Tensor) for _, c in children(x) or [])
        names = paths(tree, is_leaf=lambda x: x is not tree and is_small(x))
        raise ValueError(f"{pattern!r} matches no path; the tree has {_listed(names)}")
    return out


def children(x: Any) -> list[tuple[str, Any]] | None:
    """Return ``(name, child)`` one level down, or None if ``x`` is a leaf."""
    kind = _kind(x)
    return None if kind is None else [(path_of([key]), child) for key, child in kind.flatten_with_keys_fn(x)[0]]


def flatten_once(x: Any) -> tuple[Any, Any] | None:
    """Return the children of ``x`` and what else its structure has, such as keys, or None if ``x`` is a leaf."""
    kind = _kind(x)
    return None if kind is None else kind.flatten_fn(x)


def unflattener(cls: type) -> Callable[[list[Any], Any], Any]:
    """Return what builds a ``cls`` from the children and the context that :func:`flatten_once` takes it apart into."""
    kind: Any = namedtuple if issubclass(cls, tuple) and hasattr(cls, "_fields") else cls
    return pytree.SUPPORTED_NODES[kind].unflatten_fn


def map_children(f: Callable[[str, Any], Any], x: Any) -> Any:
    """Replace every child one level down by ``f(name, child)``; return a leaf as it is."""
    kind = _kind(x)
    if kind is None:
        return x
    inner, context = kind.flatten_with_keys_fn(x)
    return kind.unflatten_fn([f(path_of([key]), child) for key, child in inner], context)


def _kind(x: Any) -> Any:
    """Return torch's flatten functions for ``x``, or None for a leaf."""
    kind: Any = namedtuple if isinstance(x, tuple) and hasattr(x, "_fields") else type(x)
    return pytree.SUPPORTED_NODES.get(kind)


def get(tree: Any, path: str) -> Any:
    """Return the subtree at ``path``; raise KeyError with the part that is missing and the names that exist there."""
    expect(isinstance(path, str), f"path: got {path!r}; wanted a str, such as 'layers.0.q'", TypeError)
    rest, x = path + "." if path else "", tree
    while rest:
        inner = children(x) or []
        # Keys of an adapter dictionary contain dots, so the longest key that fits is the right one.
        fits = [n for n, _ in inner if rest.startswith(n + ".")]
        if not fits:
            raise KeyError(f"{path}: no {rest[:-1]!r} here; there is {_listed([n for n, _ in inner])}")
        name = max(fits, key=len)
        x, rest = dict(inner)[name], rest[len(name) + 1 :]
    return x


def nbytes(tree: Any) -> int:
    """Return the bytes of all tensors in the tree, each leaf counted once."""
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor))


def printable(text: str, keep: str = "", most: int | None = None) -> str:
    """Escape what a terminal obeys or hides, except for ``keep``; of more than ``most`` characters keep both ends."""
    if most is not None and len(text) > most:
        half = most // 2
        text = f"{text[:half]} [{len(text) - 2 * half} characters] {text[-half:]}"
    return text if text.isprintable() else "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


@contextlib.contextmanager
def at(path: str) -> Iterator[None]:
    """Put ``path`` in front of the message of a ValueError or TypeError raised inside; both are made printable."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if type(error) not in (ValueError, TypeError) or not path:
            raise
        raise type(error)(printable(f"{path}: {error}", "\n", LONGEST_MESSAGE)) from error


def expect(condition: object, message: str, error: type[Exception] = ValueError) -> None:
    """Raise ``error(message)``, made printable, unless the ``condition`` is true."""
    if not condition:
        raise error(printable(message, "\n"))


def _listed(names: list[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit]) or "nothing"
    return shown + (f", ... ({len(names)} in all)" if len(names) > limit else "")
