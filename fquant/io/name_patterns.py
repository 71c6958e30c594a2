"""Values by the name of a module: PEFT's ``rank_pattern`` and ``alpha_pattern``.

Keys are regular expressions for the end of a name, and the first that fits counts. Most are plain names, and a file may
have thousands of them, so those are looked up in dictionaries.
"""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from ..tree import at
from .linear_regex import LONGEST, Automaton, Budget, check_name

V = TypeVar("V")


def lookup(table: Mapping[str, V], usual: V) -> Callable[[str], V]:
    r"""Return the function from a name to the value of the first key of ``table`` that fits, else ``usual``.

    A key fits a name if ``re.match(rf"(.*\.)?({key})$", name)``, PEFT's rule. Keys without a quantifier, group or class
    are looked up in dictionaries, so thousands of them are fast. Raises ValueError as :func:`matcher` does.
    """
    budget = Budget()
    automata: list[tuple[int, V, Automaton]] = []
    fixed: dict[tuple[int, ...], dict[str, tuple[int, V]]] = {}  # by the places of dots that match any character
    for order, (key, value) in enumerate(table.items()):
        if _FIXED.fullmatch(key):
            literal = re.sub(r"\\(.)", r"\1", key)
            wild, n = [], 0
            for found in re.finditer(r"\\.|.", key, re.DOTALL):
                wild += [n] if found[0] == "." else []
                n += 1
            fixed.setdefault((n, *wild), {}).setdefault(literal, (order, value))
        else:
            with at(f"{key:.80}"):
                Automaton(key, budget)  # because a key must be an expression by itself
                automata.append((order, value, Automaton(rf"(.*\.)?({key})$", budget)))

    def value_of(name: str) -> V:
        check_name(name)
        budget.spend(len(fixed), name)
        ends = {len(name) - i - 1: name[i + 1 :] for i, c in enumerate(name) if c == "."} | {len(name): name}
        hits = []
        for (size, *wild), keys in fixed.items():
            if (end := ends.get(size)) is not None:
                masked = list(end)
                for i in wild:
                    masked[i] = "."
                hits += [hit] if (hit := keys.get("".join(masked))) else []
        best = min(hits, key=lambda hit: hit[0], default=None)
        for order, value, automaton in automata:
            if best and best[0] < order:
                break
            if automaton.matches(name):
                return value
        return best[1] if best else usual

    return value_of


_FIXED = re.compile(r"(?:[^\\.^$*+?{}\[\]()|]|\\[^\w\s]|\.)*")


def is_fixed(key: str) -> bool:
    """Return True if ``key`` has no quantifier, group or class, so that Python's ``re`` matches it in linear time."""
    return len(key) <= LONGEST and _FIXED.fullmatch(key) is not None
