"""Files that strangers made: those in the folder of a model, an adapter or a tokenizer.

    content(inside(folder / "config.json"))         its bytes
    header(inside(folder / "model.safetensors"))    a reader of its own

A folder that was fetched may hold links to private files of its reader, which a program would print or copy. It may
hold a pipe or a device in place of a file, which a program would wait for, and a file of any size. So each file of such
a folder is opened by a path of :func:`inside`. Links to the folder's own files are followed, and so are those of the
Hugging Face cache, from ``snapshots/REVISION/NAME`` to ``blobs/DIGEST``. A hard link is a file like any other: package
managers make them of every file that they install.
"""

import os
from pathlib import Path
from typing import Any

from ...tree import at, expect
from .. import tree_json

MOST = 1 << 25  # bytes of JSON and of templates; the largest indices of shards have 10 MB


def inside(path: Path, folder: Path | None = None) -> Path:
    """Return ``path``, a file of ``folder`` (by default the folder it is in), which may be missing.

    Raises ValueError for a symbolic link to a file outside, and for what is no regular file. ``folder`` is what the
    user named, and may be a link itself.
    """
    if not os.path.lexists(path):
        return path
    fault = "got a folder, a pipe, a device or a link to nothing, wanted a regular file"
    expect(path.is_file(), f"{path}: {fault}; fetch it again")
    home, real = Path(os.path.realpath(folder or path.parent)), Path(os.path.realpath(path))
    roots = [home, *(parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots")]
    fault = f"got a link to {real}, wanted a file of its folder; replace it by a copy if you trust it"
    expect(any(real.is_relative_to(root) for root in roots), f"{path}: {fault}")
    return path


def content(path: Path, most: int = MOST) -> bytes:
    """Return the bytes of a file; raise ValueError if it is missing, no regular file, or has more than ``most``."""
    expect(path.is_file(), f"{path}: no such file; fetch it again, or check the folder")
    with path.open("rb") as file:
        found = file.read(most + 1)
    expect(len(found) <= most, f"{path}: got more than {most} bytes, wanted at most as many; fetch it again")
    return found


def read_text(path: Path, most: int = MOST) -> str:
    """Return the text of a file as :func:`content` does; raise ValueError if it is not UTF-8."""
    try:
        return content(path, most).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{path}: got bytes that are no UTF-8; fetch it again") from None


def json_object(path: Path, wanted: str = "a JSON object", most: int = MOST) -> dict[str, Any]:
    """Return the JSON object in a file of a folder (:func:`inside`); raise ValueError, naming the file, for others."""
    found = read_text(inside(path), most)
    with at(str(path)):
        return tree_json.parse(found, wanted)
