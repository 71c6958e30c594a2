"""The arguments of a call: their leaves, and their structure, which is part of the key of a trace.

A call of a captured function flattens its arguments, hashes their structure and compares it with that of the trace.
torch's ``TreeSpec`` does so recursively in Python, which for 8 tensors takes as long as the rest of a call beside the
ops. Here a structure is two flat sequences, which Python hashes and compares in C. One has the type of each node and
the number of its children. The other has what else torch's pytree knows of it, such as keys and static fields. The hash
leaves the latter out, because they may be unhashable or slow to hash. Leaves are those of :func:`fquant.tree.flatten`,
in its order.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

from torch import Tensor

from .. import tree


class Structure:
    """The structure of arguments by name; equal for arguments that differ in leaves only."""

    __slots__ = ("_contexts", "_ends", "_nodes")

    def __init__(self, nodes: tuple[Any, ...], contexts: list[Any], ends: list[int]) -> None:
        self._nodes = nodes  # in order: a name begins an argument, None is a leaf, a type and a number are a node
        self._contexts = contexts  # of the nodes that are no leaves
        self._ends = ends  # of each argument among the leaves

    def __hash__(self) -> int:
        return hash(self._nodes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._nodes == other._nodes and self._contexts == other._contexts

    def parts(self, leaves: Sequence[Any]) -> dict[str, Sequence[Any]]:
        """Split the leaves of all arguments into those of each, by name."""
        names = [each for each in self._nodes if type(each) is str]
        return {name: leaves[begin:end] for name, begin, end in zip(names, [0, *self._ends], self._ends, strict=False)}

    def changes(self, before: "Structure") -> dict[str, list[str]]:
        """Return how this structure differs from ``before``, in words, by the name of the argument."""
        now, then = self._trees(), before._trees()
        found = {name: list(_changes(name, now.get(name), then.get(name))) for name in {**now, **then}}
        return {name: texts for name, texts in found.items() if texts}

    def _trees(self) -> dict[str, Any]:
        nodes, contexts = iter(self._nodes), iter(self._contexts)
        return {name: _tree(nodes, contexts) for name in nodes}


def binder(signature: Signature) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """Return what gives the arguments of a call by the names of their parameters, in the order of ``signature``."""
    parameters = signature.parameters.values()
    names = [each.name for each in parameters]
    needed = sum(each.default is Parameter.empty for each in parameters)
    simple = all(each.kind is Parameter.POSITIONAL_OR_KEYWORD for each in parameters)

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if simple and not kwargs and needed <= len(args) <= len(names):
            return dict(zip(names, args, strict=False))  # a few times faster than the signature
        return signature.bind(*args, **kwargs).arguments

    return bind


def flatten(arguments: Mapping[str, Any]) -> tuple[list[Any], Structure]:
    """Return the leaves of arguments by name, and their structure."""
    leaves, nodes, contexts, ends = list[Any](), list[Any](), list[Any](), list[int]()
    for name, x in arguments.items():
        nodes.append(name)
        _add(x, leaves, nodes, contexts)
        ends.append(len(leaves))
    return leaves, Structure(tuple(nodes), contexts, ends)


def builder(example: Any) -> Callable[[Iterable[Any]], Any]:
    """Return what builds trees of the structure of ``example`` of their leaves, faster than torch's pytree."""
    steps = list[tuple[Callable[[list[Any], Any], Any], int, Any] | None]()  # from the leaves up; None is a leaf

    def visit(x: Any) -> None:
        found = tree.flatten_once(x)
        if found is not None:
            for child in found[0]:
                visit(child)
        steps.append(found and (tree.unflattener(type(x)), len(found[0]), found[1]))

    def build(leaves: Iterable[Any]) -> Any:
        left, made = iter(leaves), list[Any]()
        for step in steps:
            if step is None:
                made.append(next(left))
            else:
                unflatten, count, context = step
                first = len(made) - count
                made[first:] = [unflatten(made[first:], context)]
        return made[0]

    visit(example)
    return build


def _add(x: Any, leaves: list[Any], nodes: list[Any], contexts: list[Any]) -> None:
    found = tree.flatten_once(x)
    if found is None:
        leaves.append(x)
        nodes.append(None)
        return
    children, context = found
    nodes += (type(x), len(children))
    contexts.append(context)
    for child in children:
        if type(child) is Tensor:  # most are, and a call of a function takes longer than the rest
            leaves.append(child)
            nodes.append(None)
        else:
            _add(child, leaves, nodes, contexts)


def _tree(nodes: Iterator[Any], contexts: Iterator[Any]) -> Any:
    """Return the next tree, with a star for each leaf."""
    kind = next(nodes)
    if kind is None:
        return "*"
    count, context = next(nodes), next(contexts)
    return tree.unflattener(kind)([_tree(nodes, contexts) for _ in range(count)], context)


def _changes(path: str, now: Any, before: Any) -> Iterator[str]:
    """Yield how the trees ``now`` and ``before`` at ``path`` differ; None is a tree that is absent."""
    if type(now) is not type(before):
        yield f"{path} is {_name(now)}, and was {_name(before)}"
        return
    children, others = (dict(tree.children(x) or ()) for x in (now, before))
    found = [f"{path}.{name} is new" for name in children if name not in others]
    found += [f"{path}.{name} is missing" for name in others if name not in children]
    for name in tree.field_names(type(now))[1] if tree.is_node(now) else ():
        if (new := getattr(now, name)) != (old := getattr(before, name)):
            found.append(f"{path}.{name} is {new}, and was {old}")
    if not found and list(children) != list(others):
        found = [f"{path} has its items in another order"]
    elif not found and (new := _context(now)) != (old := _context(before)):
        found = [f"{path} is {_name(now)} with {new}, and was with {old}"]
    yield from found
    for name in children:
        if name in others:
            yield from _changes(f"{path}.{name}", children[name], others[name])


def _context(x: Any) -> Any:
    return (tree.flatten_once(x) or (None, None))[1]


def _name(x: Any) -> str:
    return "absent" if x is None else "a leaf" if x == "*" else f"a {type(x).__name__}"
