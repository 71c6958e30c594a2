"""Tokens on disk, written once and read at any place.

    DIGEST.tokens       i32[n]   a token and, in the highest bit, whether it counts (encode.py)
    DIGEST.documents    i64[d]   the end of each document in the tokens, times two, plus its label
    DIGEST.json         the kind of documents, their number, notes, and a digest of the tokens; written last

The name is a digest of the source's bytes, the tokenizer, its templates and the options. A second run therefore finds
what the first has written, and a change of any of these makes another store. Files appear whole: each is written
beside its place, synchronised and renamed. Several processes may write the same store at once.

A store is written in bounded memory. It is read through the page cache, so it may be larger than memory.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fquant.io.safetensors import replacing
from fquant.kernels.cpu import usable_cores

from . import files, workers
from .encode import COUNTS
from .tokenizer import Text
from .workers import Chunk

VERSION = 1  # of the layout and of how records become tokens
Progress = Callable[[int, int], None]  # bytes that are done, and all


@dataclass(frozen=True)
class About:
    """The description of a store.

    ``targets`` are tokens that count and have one before them in their document.
    """

    name: str
    kind: str  # documents, pairs or labelled
    tokens: int
    documents: int
    targets: int
    longest: int  # tokens of the longest document
    digest: str  # of the tokens and documents
    notes: tuple[str, ...]


def default_folder() -> Path:
    """Return the folder of stores: fquant/tokens in the user's folder of caches."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fquant" / "tokens"


def of_file(
    path: Path, text: Text, folder: Path, parse_special: bool = False, progress: Progress | None = None
) -> Path:
    """Return the store of a file of records, without its suffix; write it if it is not there."""
    next(iter(files.chunks(path)))  # faults of the file come first
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    size = path.stat().st_size
    options = {"parse_special": parse_special}
    return _written(files.chunks(path), str(path), size, digest.hexdigest(), text, folder, options, progress)


def of_texts(named: list[tuple[str, str]], text: Text, folder: Path, progress: Progress | None = None) -> Path:
    """Return the store of texts, each a document with a name, without its suffix; write it if it is not there."""
    if not named:
        raise ValueError("data: no documents; wanted at least one")
    digest = hashlib.blake2b(json.dumps(named).encode(), digest_size=16).hexdigest()
    name = named[0][0] if len(named) == 1 else f"{named[0][0]} ... {named[-1][0]}"
    chunks = files.gathered(name, ({"text": text} for _, text in named))
    size = sum(len(text) for _, text in named)
    return _written(chunks, name, size, digest, text, folder, {"parse_special": False}, progress)


def about(path: Path) -> About:
    """Return what the store ``path`` says about itself."""
    values = json.loads(Path(f"{path}.json").read_text("utf-8"))
    return About(**values | {"notes": tuple(values["notes"])})


@lru_cache(maxsize=64)
def opened(path: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the tokens i32[n] and documents i64[d] of a store, mapped. Raises ValueError if a file is cut short."""
    found = about(path)
    out = []
    for name, dtype, count in ((".tokens", np.int32, found.tokens), (".documents", np.int64, found.documents)):
        file = Path(f"{path}{name}")
        have, want = file.stat().st_size if file.is_file() else 0, count * np.dtype(dtype).itemsize
        if have != want:
            raise ValueError(f"{file}: has {have} bytes, wanted {want}; remove {path}.json, and it is written again")
        out.append(np.memmap(file, dtype, "r") if count else np.empty(0, dtype))
    return out[0], out[1]


def _written(
    chunks: Iterable[Chunk], name: str, size: int, source: str, text: Text, folder: Path, options: dict[str, Any],
    progress: Progress | None,
) -> Path:  # fmt: skip
    key = json.dumps([VERSION, source, text.digest, sorted(options.items())])
    path = folder / hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    if not Path(f"{path}.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        processes = max(1, min(usable_cores(), size >> 20))
        with replacing(Path(f"{path}.tokens")) as tokens, replacing(Path(f"{path}.documents")) as documents:
            parts = workers.parts(_counted(chunks, size, progress), text, processes, **options)
            found = _write(parts, tokens, documents, name)
        with replacing(Path(f"{path}.json")) as file:
            file.write(json.dumps(found.__dict__, indent=2).encode())
    return path


def _counted(chunks: Iterable[Chunk], size: int, progress: Progress | None) -> Iterable[Chunk]:
    done = 0
    for chunk in chunks:
        yield chunk
        done += len(chunk.lines)
        if progress is not None:
            progress(min(done, size), size)


def _write(parts: Iterable[workers.Part], tokens: Any, documents: Any, name: str) -> About:
    total = num_documents = targets = longest = 0
    kinds, notes, digest = set[str](), Counter[str](), hashlib.blake2b(digest_size=16)
    for part in parts:
        kinds.update(part.kinds)
        if len(kinds) > 1:
            raise ValueError(f"{name}: has records of the kinds {' and '.join(sorted(kinds))}; wanted one kind a file")
        ends = np.cumsum(part.lengths, dtype=np.int64)
        starts = ends - part.lengths
        counts = part.tokens < 0
        targets += int(counts.sum()) - int(counts[starts[part.lengths > 0]].sum())
        longest = max(longest, int(part.lengths.max(initial=0)))
        labels = np.array(part.labels, np.int64) if part.labels else 0
        for file, array in ((tokens, part.tokens), (documents, (ends + total) * 2 + labels)):
            file.write(array.tobytes())
            digest.update(array.tobytes())
        total, num_documents = total + len(part.tokens), num_documents + len(part.lengths)
        notes.update(part.notes)
    if not targets:
        wanted = "wanted outputs, assistant turns, or texts of 2 tokens or more"
        raise ValueError(f"{name}: none of {total} tokens can be learnt; {wanted}")
    said = tuple(f"{name}: {note} ({count} times)" for note, count in sorted(notes.items()))
    return About(name, kinds.pop(), total, num_documents, targets, longest, digest.hexdigest(), said)


assert COUNTS < 0  # so that a token counts if its number is negative
