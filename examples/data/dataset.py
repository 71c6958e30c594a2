"""Pure functions from files of records to batches of packed token rows.

    text   = tokenizer.text(folder)                       # the tokenizer's own configuration
    stored = dataset.prepare("chats.jsonl", folder, seq)  # tokenised once, on disk
    train, held = dataset.split(stored, holdout=16)
    rows   = dataset.batch(train, step, global_batch, seed)  # the Rows of a step: no state, so nothing to resume

The documents of a file are put one after another and cut every ``seq`` tokens:

    stream       | prompt  answer  eos | prompt  answer  eos | ...
    segment      | 0       0       0   | 1       1       1   | ...     attention stays within a segment
    target       | -       answer  eos | -       answer  eos | ...     predicted one position earlier

The last token of a row predicts the first of the next. The last row of a file is padded with a segment of its own and
no target. Preferences are not packed: each document has a row of its own, and is cut at ``seq`` tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fquant import random, tree
from fquant.tree import node, static

from . import store, tokenizer
from .encode import TOKEN
from .sources import Source, some, sources, stdlib_sources

IGNORED = -100  # the target of a position that predicts nothing, as in torch's cross_entropy
ROW = 1 << 40  # more than the rows of a file


@node
class Rows:
    """Rows of packed tokens, as in the module's docstring."""

    tokens: Tensor  # i64[n t]
    targets: Tensor  # i64[n t], the token after, or IGNORED
    segments: Tensor | None = None  # i64[n t], numbered from 0 in each row; absent: each row is one document


@dataclass(frozen=True)
class Part:
    """A file's tokens: their place, which may differ between ranks, and their digest, which may not."""

    path: Path = field(repr=False, compare=False)
    digest: str


@node
class Stored:
    """Rows on disk, which are read when a batch needs them; a row may occur several times."""

    rows: Tensor  # i64[n], the number of a part times ROW, plus a row or, of preferences, a record of the part
    parts: tuple[Part, ...] = static(default=())
    seq: int = static(default=1)
    kind: str = static(default="documents")


@node
class Preferences:
    """Answers to compare: rows of chosen and rejected ones; without pairs, rows of ``chosen`` and their labels."""

    chosen: Rows
    rejected: Rows | None = None
    labels: Tensor | None = None  # bool[n], whether an answer is a good one


def prepare(
    data: str | Path | None,
    folder: str | Path,
    seq: int,
    *,
    template: str | Path | None = None,
    characters: int = 1_500_000,
    parse_special: bool = False,
    cache: Path | None = None,
    note: Callable[[str], None] | None = None,
    progress: store.Progress | None = None,
) -> Stored:
    """Tokenise ``data`` by the tokenizer in ``folder``, or find what was tokenised before, and cut it into rows.

    ``data`` names files as in ``sources.py``; None takes ``characters`` of the standard library's source. ``template``
    replaces the tokenizer's chat template: a file, "chatml" or "zephyr". With ``parse_special`` special tokens in texts
    become control tokens, for texts that are formatted already. ``note`` is called with what a person should know.
    Raises ValueError, naming file and line, for what is not understood.
    """
    if seq < 1:
        raise ValueError(f"--seq: got {seq}, wanted at least 1")
    text, cache = tokenizer.text(folder, template), cache or store.default_folder()
    if data is None:
        named: tuple[Source, ...] = (Source(Path()),)
        paths = [store.of_texts(some(stdlib_sources(), characters), text, cache, progress)]
    else:
        named = sources(data)
        paths = [store.of_file(source.path, text, cache, parse_special, progress) for source in named]
    found = [store.about(path) for path in paths]
    for about in found:
        for line in about.notes:
            if note is not None:
                note(line)
    if len(kinds := {about.kind for about in found}) > 1:
        raise ValueError(f"{data}: files of {' and of '.join(sorted(kinds))}; wanted one kind")
    (kind,) = kinds
    rows = [_rows(about, seq) for about in found]
    numbers = [_weighted(n, source.weight) + i * ROW for i, (n, source) in enumerate(zip(rows, named, strict=True))]
    parts = tuple(Part(path, about.digest) for path, about in zip(paths, found, strict=True))
    return Stored(torch.cat(numbers), parts, seq, kind)


def _rows(about: store.About, seq: int) -> int:
    """Return the number of rows of a store."""
    if about.kind != "documents":
        return about.documents // (2 if about.kind == "pairs" else 1)
    if about.tokens <= seq:
        fix = f"use --seq {about.tokens - 1} or less, or more data" if about.tokens > 1 else "use more data"
        wanted = f"wanted at least {seq + 1} (--seq {seq} and one to predict)"
        raise ValueError(f"{about.name}: {about.tokens} tokens, {wanted}; {fix}")
    return -(-(about.tokens - 1) // seq)


def _weighted(n: int, weight: float) -> Tensor:
    """Return the numbers of rows of an epoch: each as often as ``weight`` has wholes, and some once more."""
    more = round((weight - int(weight)) * n)
    even = (2 * torch.arange(more, device="cpu") + 1) * n // max(1, 2 * more)
    return torch.cat([torch.arange(n, device="cpu").repeat(int(weight)), even])


def take(stored: Stored, index: Tensor) -> Rows:
    """Read the rows at the places ``index`` i64[b] of ``stored``. Raises ValueError for preferences."""
    if stored.kind != "documents":
        raise ValueError("the data are preferences (chosen and rejected, or label); wanted chats, instructions or text")
    return _stacked([_packed(*_place(stored, number), stored.seq) for number in stored.rows[index].tolist()])


def take_preferences(stored: Stored, index: Tensor) -> Preferences:
    """Read the preferences at the places ``index`` i64[b] of ``stored``. Raises ValueError for other data."""
    if stored.kind == "documents":
        raise ValueError("the data have no preferences; wanted records with chosen and rejected, or with label")
    places = [_place(stored, number) for number in stored.rows[index].tolist()]
    if stored.kind == "labelled":
        chosen = [_document(path, number, stored.seq) for path, number in places]
        labels = [bool(store.opened(path)[1][number] & 1) for path, number in places]
        return Preferences(_stacked(chosen), None, torch.tensor(labels, dtype=torch.bool, device="cpu"))
    chosen = [_document(path, 2 * number, stored.seq) for path, number in places]
    rejected = [_document(path, 2 * number + 1, stored.seq) for path, number in places]
    return Preferences(_stacked(chosen), _stacked(rejected))


def read(stored: Stored) -> Rows | Preferences:
    """Read all rows or preferences, for a set that is small, such as one for evaluation."""
    every = torch.arange(len(stored.rows), device="cpu")
    return take(stored, every) if stored.kind == "documents" else take_preferences(stored, every)


def _place(stored: Stored, number: int) -> tuple[Path, int]:
    return stored.parts[number // ROW].path, number % ROW


def _packed(path: Path, row: int, seq: int) -> tuple[np.ndarray, ...]:
    """Return tokens, targets and segments i64[seq] of a row of packed documents."""
    numbers, documents = store.opened(path)
    start = row * seq
    found = np.asarray(numbers[start : start + seq + 1])
    at = np.arange(start, start + len(found))
    segments = np.searchsorted(documents, 2 * at + 1, side="right")  # ends are doubled, and a label may be added
    return _row(found, segments, seq)


def _document(path: Path, number: int, seq: int) -> tuple[np.ndarray, ...]:
    """Return tokens, targets and segments i64[seq] of one document, cut or padded."""
    numbers, documents = store.opened(path)
    start = int(documents[number - 1]) >> 1 if number else 0
    found = np.asarray(numbers[start : min(int(documents[number]) >> 1, start + seq + 1)])
    return _row(found, np.zeros(len(found), np.int64), seq)


def _row(found: np.ndarray, segments: np.ndarray, seq: int) -> tuple[np.ndarray, ...]:
    tokens = np.zeros(seq + 1, np.int64)
    tokens[: len(found)] = found & TOKEN
    inside = np.full(seq + 1, segments[-1] + 1)
    inside[: len(found)] = segments
    counts = np.zeros(seq + 1, bool)
    counts[: len(found)] = found < 0
    learn = counts[1:] & (inside[1:] == inside[:-1])
    return tokens[:-1], np.where(learn, tokens[1:], IGNORED), inside[:-1] - inside[0]


def _stacked(rows: list[tuple[np.ndarray, ...]]) -> Rows:
    return Rows(*(torch.from_numpy(np.stack(column)) for column in zip(*rows, strict=True)))


def split(stored: Stored, holdout: int) -> tuple[Stored, Rows]:
    """Return ``(train, held)``, the parts of ``divide``, of which the second is read; ValueError for preferences."""
    train, held = divide(stored, holdout)
    return train, take(held, torch.arange(len(held.rows), device="cpu"))


def divide(stored: Stored, holdout: int) -> tuple[Stored, Stored]:
    """Take out ``holdout`` rows at even distances, so that they resemble the rest; return the rest and them.

    A row of a weighted file is taken out each time that it occurs.
    """
    each = stored.rows.unique()
    num_rows = len(each)
    if not 0 < holdout < num_rows:
        wanted = "wanted at least 1 and some left to train on; use a smaller --holdout or --seq, or more data"
        raise ValueError(f"holdout: got {holdout} of {num_rows} rows, {wanted}")
    held = each[(2 * torch.arange(holdout, device="cpu") + 1) * num_rows // (2 * holdout)]
    rest = stored.rows[~torch.isin(stored.rows, held)]
    keep = lambda rows: Stored(rows, stored.parts, stored.seq, stored.kind)
    return keep(rest), keep(held)


def batch(rows: Rows | Stored, step: int, global_batch: int, seed: int) -> Any:
    """Return the ``global_batch`` Rows or Preferences of a step, the same for every run and world size.

    Every epoch visits all rows once; a batch may hold the end of one epoch and the start of the next.
    """
    if isinstance(rows, Stored):
        index = places(len(rows.rows), step, global_batch, seed)
        return take(rows, index) if rows.kind == "documents" else take_preferences(rows, index)
    index = places(len(rows.tokens), step, global_batch, seed)
    return tree.map(lambda t: t[index], rows)


def places(num_rows: int, step: int, global_batch: int, seed: int) -> Tensor:
    """Return the places i64[global_batch] of the rows of a step among ``num_rows``."""
    first = step * global_batch
    epochs = range(first // num_rows, (first + global_batch - 1) // num_rows + 1)
    visited = torch.cat([_order(seed, epoch, num_rows) for epoch in epochs])
    start = first - epochs[0] * num_rows
    return visited[start : start + global_batch]


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_rows: int) -> Tensor:
    key = random.fold(random.key(seed), "data")
    return random.permutation(random.fold(key, epoch), num_rows)
