"""Name sources of data: files with weights, or the standard library's source files.

a.jsonl,b.csv:0.5       a comma between files; a file of weight 0.5 gives half of its rows to each epoch
"""

import sysconfig
import tokenize
from pathlib import Path
from typing import NamedTuple

# Folders of the standard library with tests, generated files (tables, documentation, settings) or installed packages.
SKIPPED = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__", "__phello__"}
SKIPPED |= {"encodings", "pydoc_data", "turtledemo"}


class Source(NamedTuple):
    """A file of records, and how often an epoch visits each of its rows."""

    path: Path
    weight: float = 1.0


def sources(text: str | Path) -> tuple[Source, ...]:
    """Return the sources that ``text`` names, as in the module's docstring; a file's own name may have such signs."""
    if isinstance(text, Path) or Path(text).exists():
        return (Source(Path(text)),)
    found = []
    for part in filter(None, text.split(",")):
        path, colon, weight = part.rpartition(":")
        if not colon or Path(part).exists():
            found.append(Source(Path(part)))
            continue
        try:
            value = float(weight)
        except ValueError:
            raise ValueError(f"{part}: got the weight {weight!r}; wanted FILE or FILE:NUMBER") from None
        if not 0 < value <= 1000:
            raise ValueError(f"{part}: got the weight {value:g}; wanted more than 0 and at most 1000")
        found.append(Source(Path(path), value))
    if not found:
        raise ValueError(f"got no file in {text!r}; wanted FILE or FILE:WEIGHT, with commas between")
    return tuple(found)


def stdlib_sources() -> list[tuple[str, str]]:
    """Return names and texts of the interpreter's standard library by name, without tests and generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        inside = path.relative_to(root)
        generated = inside.parts[0].startswith(("config-", "_sysconfigdata"))
        if generated or SKIPPED & set(inside.parts) or not path.stat().st_size:
            continue
        with tokenize.open(path) as file:  # a source file may declare its encoding
            found.append((inside.as_posix(), file.read()))
    if not found:
        raise ValueError(f"{root}: no source files of the standard library here; use --data FILE")
    return found


def some(documents: list[tuple[str, str]], characters: int) -> list[tuple[str, str]]:
    """Return every n-th document, which together have about ``characters`` characters."""
    total = sum(len(text) for _, text in documents)
    return documents[:: max(1, round(total / characters))]
