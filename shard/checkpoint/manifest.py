"""The manifest of a checkpoint, and the folders of checkpoints of a run."""

import hashlib
import json
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fquant.io import safetensors, tree_json
from fquant.io.files.replacing import replacing
from fquant.tree import at, expect

from .local_ranges import Range

MANIFEST, VERSION = "manifest.json", 1
SHARDING = "DCP_SHARDING_INFO"  # the key of torch's storage reader
_KEYS = {"version", "tree", "tensors", "files"}


def steps(root: str | Path) -> list[int]:
    """Return the numbers of the checkpoints step-N in ``root``, in order."""
    found = (path.parent.name.removeprefix("step-") for path in Path(root).glob(f"step-*/{MANIFEST}"))
    return sorted(int(name) for name in found if name.isdecimal())


def keep(root: str | Path, last: int, others: tuple[int, ...] = ()) -> None:
    """Remove the checkpoints step-N in ``root`` but the ``last`` ones and those of ``others``, such as the best."""
    expect(last > 0, f"keep: got last {last}, wanted at least 1")
    remove(root, [step for step in steps(root)[:-last] if step not in others])


def remove(root: str | Path, which: Iterable[int]) -> None:
    """Remove the checkpoints step-N in ``root`` of some steps; each loses its name first, so none is there in part."""
    for step in which:
        doomed = Path(root) / f"step-{step}"
        shutil.rmtree(doomed.rename(doomed.with_name(f".{doomed.name}.{secrets.token_hex(4)}.tmp")))


def clean(root: str | Path) -> None:
    """Remove the temporary folders that killed runs have left in ``root``, where no other run writes."""
    for path in Path(root).glob(".*.tmp"):
        if path.is_dir():
            shutil.rmtree(path)


def described(it: Range) -> dict[str, Any]:
    """Return the entry of a whole tensor in the manifest."""
    return {"dtype": safetensors.NAMES[it.values.dtype], "shape": list(it.shape)}


def write(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the manifest of ``folder``, whole or not at all."""
    with replacing(folder / MANIFEST) as file:
        file.write((json.dumps({**content, "digest": _digest_of(content)}) + "\n").encode())


def read(folder: Path) -> dict[str, Any]:
    """Return the content of the manifest of ``folder``; raise ValueError if it is not what was written."""
    path = folder / MANIFEST
    expect(path.is_file(), f"{folder}: got no {MANIFEST} there, wanted a checkpoint that is whole; take an earlier one")
    with at(str(path)):
        content = tree_json.parse(path.read_bytes(), "a manifest")
        digest = content.pop("digest", None)
        fault = "its content has changed since it was written; take an earlier checkpoint"
        expect(digest == _digest_of(content), fault)
        tree_json.check_keys("manifest", content.keys() - {"run"}, _KEYS)
        fault = f"got version {content['version']!r}, wanted {VERSION}; use another release"
        expect(content["version"] == VERSION, fault)
    return content


def header_digest(path: Path) -> str:
    """Return the digest of the header of a file, which has the digests of its data."""
    with path.open("rb") as file:
        length = file.read(8)
        return hashlib.blake2b(length + file.read(int.from_bytes(length, "little")), digest_size=16).hexdigest()


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
