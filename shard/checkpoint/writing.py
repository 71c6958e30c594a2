"""Write a checkpoint: a copy on the host, a file a rank, and at last the manifest and the folder's name."""

import json
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fquant.io.files import digests
from fquant.io.files.replacing import replacing, sync_folder
from fquant.tree import expect

from .. import agree
from ..rules import Rules
from . import manifest
from .manifest import header_digest
from .plan import Plan, copy, plan

PATIENCE = 600.0  # seconds that rank 0 waits for the files of others
LEAVE = 1.0  # seconds that it waits once its program has ended


@dataclass
class Writing:
    """A checkpoint that is being written; a later one takes its plan and its memory."""

    folder: Path
    plan: Plan
    memory: Tensor  # u8[n], on the host
    thread: threading.Thread
    errors: list[Exception] = field(default_factory=list)


def save(folder: str | Path, state: Any, mesh: DeviceMesh, rules: Rules, run: str = "") -> None:
    """Write the tree ``state``, placed or local, to the new ``folder``; every rank calls it.

    ``load`` compares the name ``run``, which only rank 0 needs. Raises ValueError on every rank if their trees differ,
    if the folder exists, or if a rank cannot write or does not see it.
    """
    finish(begin(folder, state, mesh, rules, run=run))


def begin(
    folder: str | Path, state: Any, mesh: DeviceMesh, rules: Rules, after: Writing | None = None,
    first: Callable[[], None] | None = None, run: str = "",
) -> Writing:  # fmt: skip
    """Copy what this rank writes of ``state`` to the host, and start to write it; raises as :func:`save`.

    The checkpoint ``after`` which this one comes is finished first. The ranks exchange one text for both. The
    thread of rank 0 calls ``first`` before it writes. If that removes old checkpoints (``keep``), new files get their
    memory in the system's cache, which is faster than other memory.
    """
    folder, rank, ranks = Path(folder), dist.get_rank(), dist.get_world_size()
    token, made = secrets.token_hex(4), list[Path]()

    def prepare() -> tuple[tuple[Plan, Tensor], str]:
        if after is not None:
            _wait(after)
        expect(not folder.exists(), f"{folder}: exists, wanted a new folder; a checkpoint is never written over")
        found, local = plan(state, mesh, rules, after and after.plan)
        memory = copy(found, local, after and after.memory)
        if rank == 0:
            made.append(_temporary(folder, token))
            made[0].mkdir(parents=True)
        return (found, memory), json.dumps([str(folder), found.digest, token])

    try:
        (found, memory), texts = agree.attempt_and_tell("checkpoint", prepare)
        told = [json.loads(text) for text in texts]
        if any(each[:2] != told[0][:2] for each in told):
            agree.same("checkpoint", {"folder": str(folder), **found.facts})
        temporary, names = _temporary(folder, told[0][2]), [_file(i, ranks) for i in range(ranks)]
        if after is None or after.folder.parent != folder.parent:
            agree.await_path("checkpoint", temporary)
    except BaseException:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)
        raise

    def write() -> None:
        try:
            if rank == 0 and first is not None:
                first()
            _write(temporary / names[rank], found, memory)
            if rank == 0:
                _commit(temporary, folder, names, found.content | ({"run": run} if run else {}))
        except Exception as error:  # raised by finish
            writing.errors.append(error)
            if rank and temporary.exists():
                told = temporary / f"{names[rank]}.tmp"  # which rank 0 does not wait for
                with suppress(OSError):  # on a full disk the name alone tells it
                    told.write_text(f"{type(error).__name__}: {error}")
                told.rename(_failed(temporary / names[rank]))

    writing = Writing(folder, found, memory, threading.Thread(target=write, name=f"checkpoint {folder.name}"))
    writing.thread.start()
    return writing


def finish(writing: Writing) -> None:
    """Wait until a checkpoint is on disk; every rank calls it. Raises ValueError on every rank if it is not."""
    agree.attempt("checkpoint", lambda: _wait(writing))


def _wait(writing: Writing) -> None:
    writing.thread.join()
    if writing.errors:
        raise ValueError(f"{writing.folder}: {writing.errors[0]}") from writing.errors[0]


def _temporary(folder: Path, token: str) -> Path:
    return folder.with_name(f".{folder.name}.{token}.tmp")


def _failed(path: Path) -> Path:
    return path.with_name(f"{path.name}.failed")


def _file(rank: int, ranks: int) -> str:
    return f"rank-{rank}-of-{ranks}.safetensors"


def _write(path: Path, plan: Plan, memory: Tensor) -> None:
    data = memory.numpy().data
    with replacing(path, is_last=False) as file:  # the folder may get its name as soon as the file has its own
        file.write(digests.filled(plan.head, (data[p.at : p.at + p.nbytes] for p in plan.pieces)))
        file.write(data)


def _commit(temporary: Path, folder: Path, names: Sequence[str], content: dict[str, Any]) -> None:
    """Wait for the files of all ranks, write the manifest, and give the folder its name."""
    for name in names:
        _await(temporary / name)
    files = {
        name: {"bytes": (temporary / name).stat().st_size, "header": header_digest(temporary / name)} for name in names
    }
    manifest.write(temporary, {**content, "files": files})
    temporary.rename(folder)
    sync_folder(folder.parent)


def _await(path: Path) -> None:
    """Wait for the file of a rank; it has none if that rank has died, and then the main thread of this one ends too."""
    failed, began, limit = _failed(path), time.monotonic(), PATIENCE
    while not path.exists():
        expect(not failed.exists(), f"{path.name}: {failed.read_text() if failed.exists() else ''}")
        expect(path.parent.is_dir(), f"{path.parent}: was removed while it was written")
        if not threading.main_thread().is_alive() and limit == PATIENCE:
            limit = min(PATIENCE, time.monotonic() - began + LEAVE)
        expect(time.monotonic() - began < limit, f"{path.name}: not written in {limit:.0f} s; is its rank alive?")
        time.sleep(0.002)
