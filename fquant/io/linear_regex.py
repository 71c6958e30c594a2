r"""Regular expressions of adapter files, matched in linear time.

A file's expression is hostile: ``(.*a?)*b`` keeps Python's ``re`` busy for ever. Here an expression is compiled to a
nondeterministic automaton (Thompson 1968), and a name is matched by the set of states that it reaches. Sets are cached,
so most steps are one look-up.

    literals  \.  .  \d \w \s \D \W \S  [a-z_]  [^.]  (...)  (?:...)  a|b      characters, groups
    * + ? {2} {1,3} {2,} and their lazy forms  ^ $ \b \A \Z  (?=...) (?!...)  quantifiers, assertions

A lazy quantifier matches the same whole names as a greedy one. Other syntax raises ValueError: back-references,
look-behind, flags, possessive quantifiers. So do an expression of over ``LONGEST`` characters or ``MOST_STATES``
states, groups nested deeper than ``DEEPEST``, and matching that takes over ``MOST_STEPS`` steps in all.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from ..tree import expect

LONGEST, MOST_STATES, DEEPEST, MOST_REPEATS = 10_000, 4_000, 20, 1_000
MOST_STEPS = 10_000_000  # a few seconds
KEPT = 20  # steps that a state counts in a cached set, which bounds the memory
LONGEST_NAME = 1_000  # characters of a name that is matched

Test = Callable[[str], bool]  # of one character

_WORD = lambda c: c == "_" or c.isalnum()
_CLASSES: dict[str, Test] = {
    "d": lambda c: c.isdecimal(), "w": _WORD, "s": str.isspace,
    "D": lambda c: not c.isdecimal(), "W": lambda c: not _WORD(c), "S": lambda c: not c.isspace(),
}  # fmt: skip
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}


class _Ahead(NamedTuple):
    start: int
    wanted: bool


def matcher(text: str) -> Callable[[str], bool]:
    """Return ``lambda name: re.fullmatch(text, name) is not None`` in linear time.

    Raises ValueError for an expression beyond the module's grammar or bounds. So does the function it returns for a
    name of over ``LONGEST_NAME`` characters, and once its matches take too many steps.
    """
    return Automaton(text, Budget()).matches


def check_name(name: str) -> None:
    """Raise ValueError for a name that is too long or has more than one line."""
    fault = f"{name:.80}: got a name of {len(name)} characters, wanted at most {LONGEST_NAME}"
    expect(len(name) <= LONGEST_NAME and "\n" not in name, f"{fault} in one line; the file is damaged")


class Budget:
    """The steps that are left to automata; they share one."""

    def __init__(self) -> None:
        self.left = MOST_STEPS

    def spend(self, steps: int, text: str) -> None:
        """Take ``steps``; raise ValueError if there are not as many."""
        self.left -= steps
        if self.left < 0:
            raise ValueError(f"got over {MOST_STEPS} steps at {text!r:.80}; list the names instead")


class Automaton:
    """A compiled expression: of each state what it tests, and the states that follow."""

    def __init__(self, text: str, budget: Budget) -> None:
        expect(len(text) <= LONGEST, f"got an expression of {len(text)} characters, wanted at most {LONGEST}")
        self._budget = budget
        self._text, self._at, self._depth = text, 0, 0
        self._tests: list[Test | str | _Ahead | None] = []  # of each state: a character, an assertion, or a free step
        self._next: list[list[int]] = []
        end = self._state(None)
        self._start = self._alternatives(end)
        if self._at < len(text):
            self._refuse("an unbalanced ')'")
        self._end = end
        self._cache: dict[Any, frozenset[int]] = {}

    def matches(self, name: str) -> bool:
        """Return True if the whole name matches; raise ValueError if that takes too many steps."""
        check_name(name)
        return self._run(name, 0, self._start, self._end)

    def _refuse(self, got: str) -> NoReturn:
        raise ValueError(f"got {got} at character {self._at} of {self._text!r:.80}, which is not supported")

    # --- parsing: each function returns the state of entry ------------------------------------------------------------

    def _state(self, test: Any, *following: int) -> int:
        expect(len(self._tests) < MOST_STATES, f"got over {MOST_STATES} states in {self._text!r:.80}; list the names")
        self._count(10)
        self._tests.append(test)
        self._next.append(list(following))
        return len(self._tests) - 1

    def _peek(self, n: int = 1) -> str:
        return self._text[self._at : self._at + n]

    def _alternatives(self, end: int) -> int:
        """Parse ``a|b|c`` up to a closing parenthesis; every alternative leads to ``end``."""
        expect(self._depth <= DEEPEST, f"got groups nested deeper than {DEEPEST} in {self._text!r:.80}; simplify it")
        entries = [self._sequence(end)]
        while self._peek() == "|":
            self._at += 1
            entries.append(self._sequence(end))
        return entries[0] if len(entries) == 1 else self._state(None, *entries)

    def _sequence(self, end: int) -> int:
        """Parse atoms with their quantifiers, each followed by the next."""
        entry = joint = self._state(None)
        while self._peek() not in ("", "|", ")"):
            begin = self._at
            after = self._state(None)
            first = self._atom(after)
            least, most = self._quantifier()
            finish = self._at
            self._next[joint].append(first)
            if (least, most) == (1, 1):
                joint = after
                continue
            joint = self._repeated(begin, joint, first, after, least, most)
            self._at = finish
        self._next[joint].append(end)
        return entry

    def _repeated(self, begin: int, joint: int, first: int, after: int, least: int, most: int | None) -> int:
        """Repeat the atom at character ``begin``, parsed once as ``first`` to ``after``; return the state after it."""
        out = self._state(None)
        if least == 0:
            self._next[joint].append(out)
        for count in range(2, max(least, most or 0) + 1):
            if count > least:
                self._next[after].append(out)
            self._at = begin
            copy = self._state(None)
            first = self._atom(copy)
            self._next[after].append(first)
            after = copy
        if most is None:
            self._next[after].append(first)
        self._next[after].append(out)
        return out

    def _quantifier(self) -> tuple[int, int | None]:
        least: int
        most: int | None
        if (c := self._peek()) in ("*", "+", "?"):
            self._at += 1
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[c]
        elif found := re.compile(r"\{(\d{1,4})(,?)(\d{0,4})\}").match(self._text, self._at):
            self._at = found.end()
            least = int(found[1])
            most = least if not found[2] else int(found[3]) if found[3] else None
            if max(least, most or 0) > MOST_REPEATS or (most is not None and not max(least, 1) <= most):
                self._refuse(f"the repetition {found[0]}")
        else:
            if c == "{":
                self._refuse("'{'")
            return 1, 1
        if self._peek() == "?":
            self._at += 1  # lazy
        if self._peek() in ("*", "+", "{", "?"):
            self._refuse(f"a second quantifier {self._peek()!r}")
        return least, most

    def _atom(self, after: int) -> int:
        c = self._peek()
        self._at += 1
        if c in "*+?{":
            self._refuse(f"a quantifier {c!r} of nothing")
        if c in "^$":
            return self._state(c, after)
        if c == "(":
            return self._group(after)
        if c == "[":
            return self._state(self._set(), after)
        if c == ".":
            return self._state(lambda x: x != "\n", after)
        if c == "\\":
            if self._peek() in ("b", "A", "Z"):
                self._at += 1
                return self._state({"A": "^", "Z": "$"}.get(kind := self._text[self._at - 1], kind), after)
            return self._state(self._escape(), after)
        return self._state(lambda x, c=c: x == c, after)

    def _group(self, after: int) -> int:
        self._depth += 1
        ahead = self._peek(2) in ("?=", "?!")
        wanted = self._peek(2) == "?="
        if self._peek(2) in ("?:", "?=", "?!"):
            self._at += 2
        elif self._peek() == "?":
            self._refuse(f"the group ({self._peek(2)}")
        entry = self._alternatives(self._state(None) if ahead else after)
        if self._peek() != ")":
            self._refuse("a missing ')'")
        self._at += 1
        self._depth -= 1
        return self._state(_Ahead(entry, wanted), after) if ahead else entry

    def _escape(self) -> Test:
        c = self._peek()
        self._at += 1
        if c in _CLASSES:
            return _CLASSES[c]
        if not c or (c.isalnum() and c not in _CONTROL):
            self._refuse(f"the escape \\{c}")
        literal = _CONTROL.get(c, c)
        return lambda x: x == literal

    def _set(self) -> Test:
        """Parse a class after its opening bracket."""
        negated = self._peek() == "^"
        self._at += negated
        tests: list[Test] = []
        while self._peek() != "]" or not tests:
            c = self._peek()
            if not c or c == "[":
                self._refuse("a class without its ']', or with a '['")
            if c == "\\":
                self._at += 1
                tests.append(self._escape())
                continue
            self._at += 1
            if self._peek() == "-" and self._peek(2)[1:] not in ("", "]"):
                high = self._peek(2)[1]
                self._at += 2
                if high in "\\[" or high < c:
                    self._refuse(f"the range {c}-{high}")
                tests.append(lambda x, c=c, high=high: c <= x <= high)
            else:
                tests.append(lambda x, c=c: x == c)
        self._at += 1
        return lambda x: any(test(x) for test in tests) != negated

    # --- matching -----------------------------------------------------------------------------------------------------

    def _run(self, name: str, begin: int, start: int, end: int | None) -> bool:
        """Return True if the automaton goes from ``start`` to ``end`` over the rest of the name.

        Without an ``end``, any state that nothing follows will do, after any number of characters.
        """
        accepts = lambda states: any(not self._next[s] for s in states) if end is None else end in states
        states = self._closure(name, begin, frozenset([start]))
        for i in range(begin, len(name)):
            if not states or (end is None and accepts(states)):
                break
            states = self._closure(name, i + 1, self._advance(states, name[i]))
        return accepts(states)

    def _advance(self, states: frozenset[int], c: str) -> frozenset[int]:
        self._count(1)
        if (known := self._cache.get((states, c))) is None:
            known = {t for s in states if callable(test := self._tests[s]) and test(c) for t in self._next[s]}
            self._count(KEPT * (len(states) + len(known)))
            known = self._cache[states, c] = frozenset(known)
        return known

    def _closure(self, name: str, i: int, states: frozenset[int]) -> frozenset[int]:
        """Return all states that free steps and assertions at position ``i`` reach."""
        key = (states, i == 0, i == len(name), _boundary(name, i))  # all that assertions see, except look-ahead
        if (known := self._cache.get(key)) is not None:
            return known
        seen, waiting, looked_ahead = set(states), list(states), False
        while waiting:
            self._count(1)
            s = waiting.pop()
            test = self._tests[s]
            looked_ahead |= isinstance(test, _Ahead)
            if test is None or (not callable(test) and self._holds(test, name, i)):
                new = set(self._next[s]) - seen
                seen |= new
                waiting += new
        known = frozenset(seen)
        if not looked_ahead:
            self._count(KEPT * len(known))
            self._cache[key] = known
        return known

    def _holds(self, test: Any, name: str, i: int) -> bool:
        if isinstance(test, _Ahead):
            return self._run(name, i, test.start, None) == test.wanted
        return {"^": i == 0, "$": i == len(name), "b": _boundary(name, i)}[test]

    def _count(self, steps: int) -> None:
        self._budget.spend(steps, self._text)


def _boundary(name: str, i: int) -> bool:
    return (i > 0 and _WORD(name[i - 1])) != (i < len(name) and _WORD(name[i]))
