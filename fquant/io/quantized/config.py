"""Checks of the dict ``quantization_config``: every key is understood, known to be harmless, or refused by name."""

import reprlib
from collections.abc import Mapping
from typing import Any

from ...tree import expect
from ..tree_json import Rule

MOST = 2**31  # a size above this is no size
_listed = lambda x: x is None or (isinstance(x, list) and all(isinstance(item, str) for item in x))

ANY: Rule = (lambda x: True, "anything")  # a key that does not change a weight
SIZE: Rule = (lambda x: type(x) is int and 1 <= x < MOST, "a positive integer")
GROUP: Rule = (lambda x: type(x) is int and (x == -1 or 1 <= x < MOST), "-1 or a positive integer")
FLAG: Rule = (lambda x: type(x) is bool, "true or false")
OPTIONAL_FLAG: Rule = (lambda x: x is None or type(x) is bool, "true, false or null")
NAMES: Rule = (_listed, "a list of names, or null")
ABSENT: Rule = (lambda x: not x and not isinstance(x, int), "null or nothing")
BLOCK_SHAPE: Rule = (
    lambda x: x is None or (isinstance(x, list | tuple) and len(x) == 2 and all(map(SIZE[0], x))),
    "two positive integers, or null",
)

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
show = _repr.repr  # short, and not deeper than six levels


def check(config: Any, rules: Mapping[str, Rule], where: str, required: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the dict ``config``; raise ValueError for a key without a rule, a value against it, or a missing key."""
    got = type(config).__name__
    expect(isinstance(config, Mapping), f"{where}: got {got}, wanted an object; check config.json")
    for key, value in config.items():
        got = f"{where}: key {show(key)}"
        expect(key in rules, f"{got} is unknown, and may change the weights; remove it if it does not")
        fits, wanted = rules[key]
        expect(_fits(fits, value), f"{got} is {show(value)}, wanted {wanted}; others are not supported")
    for key in required:
        expect(key in config, f"{where}: key {key!r} is missing; take it from the original config.json")
    return dict(config)


def is_in(*values: str) -> Rule:
    """Return the rule of one of these strings, in either case."""
    return lambda x: isinstance(x, str) and x.lower() in values, " or ".join(map(repr, values))


def _fits(fits: Any, value: Any) -> bool:
    try:
        return bool(fits(value))
    except TypeError:  # an unhashable value where one of a set is wanted
        return False


def integer_in(*values: int) -> Rule:
    """Return the rule of one of these integers."""
    return lambda x: type(x) is int and x in values, " or ".join(map(str, values))
