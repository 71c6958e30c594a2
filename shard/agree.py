"""Agreement: all ranks compare their inputs, and all raise the same error if these differ.

Ranks that start with different configurations, checkpoints or adapters do not fail by themselves. They wait for each
other, or train different models. So all ranks exchange a fingerprint before anything is placed. Every rank takes part
in the same collectives, and decides nothing by what it alone knows.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from fquant import tree
from fquant.compile import all_gather_text, graph
from fquant.lazy import Lazy
from fquant.tree import expect

from .bundle import raw

T = TypeVar("T")
SEEN_WITHIN = 60.0  # seconds for which a network file system may remember that a path was not there

Gather = Callable[[str], list[str]]  # from the text of this rank to those of all, by rank


def same(what: str, facts: Mapping[str, str], gather: Gather | None = None) -> None:
    """Check that all ranks have the same ``facts`` (name -> short text) in one order; an empty text agrees with any.

    Raises ValueError on every rank, naming the first difference and the ranks that have it.
    """
    mine, gather = json.dumps(dict(facts)), gather or partial(all_gather_text, what=f"comparison: {what}")
    if len(set(gather(hashlib.blake2b(mine.encode(), digest_size=16).hexdigest()))) == 1:
        return
    tables = [json.loads(text) for text in gather(mine)]
    common = set(tables[0]).intersection(*tables)
    orders = ([name for name in table if name in common] for table in tables)
    turned = next((names for names in zip(*orders, strict=True) if len(set(names)) > 1), [""] * len(tables))
    for table, name in zip(tables, turned, strict=True):
        table["the order"] = name and f"{name} first"
    for name in dict.fromkeys(name for table in tables for name in table):
        seen: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            if text := table.get(name, "nothing"):
                seen.setdefault(text, []).append(rank)
        if len(seen) > 1:
            common = sorted(seen.items(), key=lambda item: -len(item[1]))
            have = lambda ranks: f"ranks {', '.join(map(str, ranks))} have" if ranks[1:] else f"rank {ranks[0]} has"
            shown = "; ".join(f"{have(ranks)} {text}" for text, ranks in common)
            raise ValueError(f"{what}: ranks disagree on {name}: {shown}; start every rank with the same")


def attempt(what: str, f: Callable[[], T], gather: Gather | None = None) -> T:
    """Return ``f()``, which uses no collectives; if it fails on any rank, raise on every rank.

    A rank that failed raises its own error, the others a ValueError with the failed ranks and their errors.
    """
    return attempt_and_tell(what, lambda: (f(), ""), gather)[0]


def attempt_and_tell(what: str, f: Callable[[], tuple[T, str]], gather: Gather | None = None) -> tuple[T, list[str]]:
    """Return the value of ``f()`` and the text beside it on every rank, by rank; raise as :func:`attempt`."""
    result: Any = None
    error: Exception | None = None
    try:
        result, text = f()
        text = f"+{text}"
    except Exception as caught:  # of any kind, because the other ranks wait to learn of it
        error, text = caught, f"-{type(caught).__name__}: {caught}"
    gather = gather or partial(all_gather_text, what=f"outcome: {what}")
    texts = gather(text)
    if error is not None:
        raise error
    if failed := [f"rank {rank}: {text[1:]}" for rank, text in enumerate(texts) if text[0] == "-"]:
        raise ValueError(f"{what} failed on {'; '.join(failed)}")
    return result, [text[1:] for text in texts]


def await_path(what: str, path: Path) -> None:
    """Wait until a file or folder that one rank has made is there for every rank, which each of them calls.

    Raises ValueError on every rank, with the ranks for which it is not there after ``SEEN_WITHIN`` seconds.
    """

    def wait() -> None:
        began = time.monotonic()
        while not path.exists():
            fault = f"{path}: is not there, and another rank made it; use a folder that all ranks see"
            expect(time.monotonic() - began < SEEN_WITHIN, fault)
            time.sleep(0.01)

    attempt(what, wait)


def fingerprint(x: Any, content: bool = True) -> dict[str, str]:
    """Describe the tree ``x`` by path: a node's class and static fields, a tensor's dtype and shape.

    With ``content`` also give a digest of a tensor's values, unless it is a meta tensor, and a Lazy leaf's stamp.
    Raises TypeError, by path, for a leaf that is neither a plain tensor nor Lazy, and ValueError for a path that two
    leaves have.
    """
    facts: dict[str, str] = {}

    def visit(path: str, x: Any, kind: str = "") -> None:
        name = path or "(root)"
        expect(name not in facts, f"{name}: two parts of the tree have this path; rename a key")
        if isinstance(x, Lazy):
            visit(path, x.like, "lazy ")
            facts[f"{name} (content)"] = x.stamp() if content else ""
        elif type(x) in (Tensor, torch.nn.Parameter):
            facts[name] = kind + graph.describe(x)
            if not kind:
                facts[f"{name} (content)"] = "" if x.is_meta or not content else _digest(x)
        else:
            inner = tree.children(x)
            if inner is None:
                raise TypeError(f"{name} is a {type(x).__name__}; wanted a plain tensor or a Lazy")
            statics = [f for f in dataclasses.fields(x) if f.metadata.get("static")] if tree.is_node(x) else []
            facts[name] = kind + type(x).__name__ + "".join(f" {f.name}={getattr(x, f.name)!r}" for f in statics)
            for key, child in inner:
                visit(f"{path}.{key}" if path else key, child, kind)

    visit("", x)
    return facts


def fields(name: str, x: Any) -> dict[str, str]:
    """Describe every field of the dataclass ``x``, or ``x`` itself if it is another object, by repr."""
    if not dataclasses.is_dataclass(x) or isinstance(x, type):
        return {name: repr(x)}
    return {name: type(x).__name__} | {f"{name}.{f.name}": repr(getattr(x, f.name)) for f in dataclasses.fields(x)}


def _digest(t: Tensor) -> str:
    return "content " + hashlib.blake2b(raw(t.cpu()).numpy().data, digest_size=8).hexdigest()
