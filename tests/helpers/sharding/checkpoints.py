"""What a run has left in its folder: its last state, and the bytes of its last checkpoint."""

from pathlib import Path
from typing import Any

import shard
from examples.common import checkpoints
from shard.checkpoint import manifest


def last_state(folder: Path) -> Any:
    """Return the whole last state of the run in ``folder``, on the host."""
    return shard.checkpoint.read(checkpoints.run_of(folder)[1])


def last_bytes(folder: Path) -> dict[str, Any]:
    """Return the content of each file of the last checkpoint in ``folder``; of the manifest without the run's name."""
    last = checkpoints.run_of(folder)[1]
    found: dict[str, Any] = {path.name: path.read_bytes() for path in sorted(last.iterdir())}
    return found | {manifest.MANIFEST: manifest.read(last) | {"run": ""}}
