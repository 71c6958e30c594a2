"""Another optimiser for each part of a tree, by the paths of its leaves."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from .. import tree
from ..tree import expect
from .optimizer import Optimizer, Tree, check_like, step

Parts = tuple[dict[str, Any], ...]


def partition(optimizers: Mapping[str, Optimizer[Any]]) -> Optimizer[tuple[Any, ...]]:
    """Return an optimiser that updates each leaf with that of the regular expression that its whole path matches.

        partition({r".*\\.(q|k|v|o|up|down)": muon(0.02), r".*(norm|bias|embed)": adamw(3e-4)})

    The state is a tuple of the states, in order; each is of a dict from paths to leaves. An optimiser that sees all
    leaves, such as ``clip_by_global_norm``, belongs in a ``chain`` in front. Raises ValueError for a leaf that
    matches no pattern or several. Raises ValueError for a pattern that matches no leaf, or is no regular expression.
    """
    rules = [tree.compiled("partition", pattern) for pattern in optimizers]
    every = tuple(optimizers.values())

    def split(x: Any) -> Parts:
        parts: Parts = tuple({} for _ in rules)
        for path, leaf in tree.items(x):
            found = [i for i, rule in enumerate(rules) if rule.fullmatch(path)]
            names = ", ".join(repr(rules[i].pattern) for i in found)
            expect(found, f"{path}: no pattern of the partition matches it; add one")
            expect(len(found) < 2, f"{path}: {names} match it, wanted one pattern of the partition; narrow the others")
            parts[found[0]][path] = leaf
        for rule, part in zip(rules, parts, strict=True):
            names = ", ".join(tree.paths(x)[:8])
            expect(part, f"partition: {rule.pattern!r} matches no path; the tree has {names}; remove or correct it")
        return parts

    def joined(parts: tuple[Any, ...], like: Tree) -> Tree:
        every = {path: leaf for part in parts for path, leaf in part.items()}
        return tree.map_with_path(lambda path, _: every[path], like)

    def run(call: Any, grads: Tree, state: tuple[Any, ...], params: Tree) -> tuple[Tree, tuple[Any, ...]]:
        check_like(grads, params)
        args = zip(every, split(grads), state, split(params), strict=True)
        results, states = zip(*(call(*each) for each in args), strict=True)
        return joined(results, params), states

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(each.init(part) for each, part in zip(every, split(params), strict=True))

    update = lambda grads, state, params: run(lambda each, *rest: each.update(*rest), grads, state, params)
    fused = lambda grads, state, params, key=None: run(partial(step, key=key), grads, state, params)
    return Optimizer(init, update, fused)
