"""Calls of a captured function with arguments of varying sizes: measure, agree, pad, learn, run, cut."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ... import tree
from .. import collective_check, guards
from ..arguments import Structure, flatten
from ..trace import Captured
from .results import cut, growing
from .sizes import DynamicSize, Padded, holds, next_size, pad


class Prepared(NamedTuple):
    """A call whose guards have been read."""

    bound: dict[str, Any]
    tensors: list[Tensor]
    donated: Any
    key: guards.Key
    objects: Any


class Jit(NamedTuple):
    """The parts of a captured function that padding calls."""

    prepare: Callable[..., Prepared]  # (arguments, *flatten(arguments), the sizes that they are padded to)
    run: Callable[[Prepared], Any]
    trace: Callable[[dict[str, Any]], Captured]  # which donates nothing
    replay: Callable[[Captured, list[Tensor], str], Any]  # by a name


class _Measured(NamedTuple):
    """A size at a call: of this rank's arguments, what they are padded to, and whether a rank pads."""

    own: int
    to: int
    pads: bool

    @property
    def padding(self) -> int:
        return self.to - self.own


@dataclasses.dataclass
class _Learnt:
    """Facts of a trace: leaves and dims of the result that grow with a size, and sizes that are verified."""

    grows: dict[str, list[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    verified: set[str] = dataclasses.field(default_factory=set)


class Padding:
    """The calls of a captured function ``name`` with ``dynamic`` arguments, by path."""

    def __init__(
        self, name: str, parameters: Sequence[str], dynamic: Mapping[str, Padded], donate: Sequence[str], jit: Jit
    ) -> None:
        self._name, self._dynamic, self._donate, self._jit = name, dict(dynamic), donate, jit
        self._sizes, self._learnt = dict[str, DynamicSize](), defaultdict[guards.Key, _Learnt](_Learnt)
        self._parameters = list(dict.fromkeys(map(_parameter, dynamic)))
        for path, padded in dynamic.items():
            if (parameter := _parameter(path)) not in parameters:
                raise ValueError(f"jit: dynamic names {path}; {name} has {', '.join(parameters)}")
            if parameter in donate:
                raise ValueError(f"jit: dynamic and donate name {parameter}, which padding copies; donate others")
            if outer := [other for other in dynamic if path.startswith(f"{other}.")]:
                raise ValueError(f"jit: dynamic names {path} and {outer[0]}, which has it; name one of them")
            if self._sizes.setdefault(padded.size.name, padded.size) != padded.size:
                raise ValueError(f"jit: dynamic has two sizes called {padded.size.name!r}; use one, or two names")

    def __call__(self, bound: dict[str, Any], leaves: list[Any], structure: Structure) -> Any:
        """Return the result for arguments by parameter, which are padded for it; it is cut."""
        sizes = self._agreed(bound)
        to = {name: size.to for name, size in sizes.items()}
        padded = self._padded(bound, to)
        parts = structure.parts(leaves)  # because flattening all takes milliseconds
        flat = itertools.chain(
            *(tree.leaves(x) if each in self._parameters else parts[each] for each, x in padded.items())
        )
        prepared = self._jit.prepare(padded, list(flat), structure, tuple(to.values()))
        try:
            known = self._learnt[prepared.key]
        except TypeError:
            return self._jit.run(prepared)  # which raises for what is not hashable
        for name, size in sizes.items():
            if size.pads and self._sizes[name].verify is not None and name not in known.verified:
                self._verify(name, sizes, bound, padded, known)
                prepared = self._prepared(padded, sizes)  # a trace may have changed what the function closes over
                self._learnt[prepared.key] = known
        new = [name for name, size in sizes.items() if size.padding and name not in known.grows]
        smaller = {name: self._jit.trace(self._alone(name, sizes, bound).bound) for name in new}  # before it is donated
        result = self._jit.run(prepared)
        known.grows |= {name: growing(result, captured, sizes[name].padding) for name, captured in smaller.items()}
        for name, size in sizes.items():
            if size.padding:
                result = cut(result, known.grows[name], size.padding)
        return result

    def _prepared(self, bound: dict[str, Any], sizes: Mapping[str, _Measured]) -> Prepared:
        return self._jit.prepare(bound, *flatten(bound), tuple(size.to for size in sizes.values()))

    def _alone(self, name: str, sizes: Mapping[str, _Measured], bound: dict[str, Any]) -> Prepared:
        """Prepare a call without the padding of the size ``name``; others are padded."""
        to = {each: size.own if each == name else size.to for each, size in sizes.items()}
        return self._prepared(self._padded(bound, to), {})

    def _verify(
        self, name: str, sizes: Mapping[str, _Measured], bound: dict[str, Any], padded: dict[str, Any], known: _Learnt
    ) -> None:
        """Compare results of ``padded`` arguments, cut, with those that lack the padding of the size ``name``."""
        guards.check(self._name, bound)
        smaller, size, agree = self._alone(name, sizes, bound), sizes[name], self._sizes[name].agree
        captured = self._on_every_rank(lambda: self._jit.trace(smaller.bound), agree)
        hint = "to verify padding; on ranks of different sizes use DynamicSize(agree=True), or verify=None"
        wanted = self._jit.replay(captured, smaller.tensors, f"{self._name} ({hint})")
        copies = {each: tree.map(_clone, x) if each in self._donate else x for each, x in padded.items()}
        got = self._jit.run(self._prepared(copies, sizes))

        def compare() -> None:
            try:
                grows = growing(got, captured, size.padding) if size.padding else []
                if (verify := self._sizes[name].verify) is not None:
                    verify(cut(got, grows, size.padding), wanted)
            except (ValueError, AssertionError) as error:
                given = ", ".join(f"{path} by {x.value}" for path, x in self._dynamic.items() if x.size.name == name)
                fix = f"mask what is padded ({given}), or take {name} out of dynamic"
                what = f"{name} = {size.own}" if size.padding else f"{name} of another rank"
                text = f"jit({self._name}): {what} is padded to {size.to}, on which the result depends: {error}; {fix}"
                raise ValueError(text) from error
            known.grows |= {name: grows} if size.padding else {}

        self._on_every_rank(compare, agree)
        known.verified.add(name)

    def _agreed(self, bound: dict[str, Any]) -> dict[str, _Measured]:
        """Measure the sizes of a call; what they are padded to holds those of all ranks that agree on it."""
        names = [name for name, size in self._sizes.items() if size.agree]
        found, fault = dict[str, int](), None
        try:
            found = self._measured(bound)
        except ValueError as error:
            fault = error
        every = {name: [n] for name, n in found.items()}
        if names:
            mine = [int(fault is not None), *(found.get(name, 0) for name in names)]
            faults, *columns = zip(*self._exchange(lambda: collective_check.all_gather_numbers(mine)), strict=True)
            every |= dict(zip(names, columns, strict=True))
            if any(faults):
                self._on_every_rank(lambda: _raise(fault), agree=True)
        _raise(fault)
        to = {name: next_size(self._sizes[name], max(every[name])) for name in found}
        return {name: _Measured(n, to[name], min(every[name]) < to[name]) for name, n in found.items()}

    def _measured(self, bound: dict[str, Any]) -> dict[str, int]:
        """Return the size of arguments by name; raise ValueError for those that have none, or not the same."""
        found, first, seen = dict[str, int](), dict[str, str](), set[str]()
        for key, path, t in self._tensors(bound):
            seen.add(key)
            dim, size, value = self._dynamic[key].dim, self._dynamic[key].size, self._dynamic[key].value
            where = f"jit({self._name}): {path}"
            if not -t.dim() <= dim < t.dim():
                raise ValueError(f"{where} has {t.dim()} dims, and dynamic names dim {dim}; name one that it has")
            if not holds(t.dtype, value):
                raise ValueError(f"{where} is of {t.dtype}, which has no {value!r}; pad it with a value that it has")
            if (n := t.shape[dim]) != found.setdefault(size.name, n):
                other = f"{first[size.name]} has {found[size.name]}"
                raise ValueError(f"{where} has {size.name} = {n}, and {other}; wanted the same, or a size of its own")
            first.setdefault(size.name, path)
            if not isinstance(size.to, int) and n > max(size.to):
                largest = f"wanted at most {max(size.to)}, the largest of its sizes"
                raise ValueError(f"{where} has {size.name} = {n}, {largest}; cut it, or add a size")
        for key in self._dynamic.keys() - seen:
            if (argument := bound.get(_parameter(key))) is not None:
                paths = [path for path, x in tree.items({_parameter(key): argument}) if isinstance(x, Tensor)]
                raise ValueError(
                    f"jit({self._name}): dynamic names {key}; tensors are {', '.join(paths) or 'not there'}"
                )
        return found

    def _tensors(self, bound: dict[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
        """Yield key in ``dynamic``, path and tensor of all that is padded."""
        for path, leaf in tree.items({name: bound[name] for name in self._parameters if name in bound}):
            if isinstance(leaf, Tensor) and (key := self._key(path)) is not None:
                yield key, path, leaf

    def _key(self, path: str) -> str | None:
        return next((key for key in self._dynamic if path == key or path.startswith(f"{key}.")), None)

    def _padded(self, bound: dict[str, Any], to: Mapping[str, int]) -> dict[str, Any]:
        """Return the arguments, padded to sizes by name."""

        def padded(path: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or (key := self._key(path)) is None or not guards.is_plain(leaf):
                return leaf
            how = self._dynamic[key]
            return pad(leaf, how.dim, to[how.size.name], how.value)

        return bound | tree.map_with_path(padded, {name: bound[name] for name in self._parameters if name in bound})

    def _on_every_rank(self, f: Callable[[], Any], agree: bool) -> Any:
        """Return ``f()``; if ranks ``agree`` and it fails on one, raise on every rank."""
        out, fault = None, None
        try:
            out = f()
        except Exception as error:
            fault = error
        if agree:
            mine = str(fault) or type(fault).__name__ if fault else ""
            texts = self._exchange(lambda: collective_check.all_gather_text(mine, "errors of padding"))
            if fault is None and any(texts):
                raise ValueError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text))
        _raise(fault)
        return out

    def _exchange(self, f: Callable[[], Any]) -> Any:
        try:
            return f()
        except RuntimeError as error:
            raise RuntimeError(f"jit({self._name}): not every rank came to agree on sizes: {error}") from error


def _parameter(path: str) -> str:
    return path.partition(".")[0]


def _raise(fault: Exception | None) -> None:
    if fault is not None:
        raise fault


def _clone(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x
