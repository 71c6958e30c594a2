"""The folder of a run: its choice, its record run.json, and the checks before the run is resumed.

    {"run": "5d...", "options": {...}, "mesh": "fsdp=2", "torch": "2.13.0", "ranks": [...],
     "inputs": {"DIR/config.json": "e1...", "--model DIR": "04...", "--data FILE": "9f..."}, "digest": "7c..."}

A resumed run is the run that was started. So run.json has a digest of each input, which is compared with that of the
same input now, and a digest of itself. It names the run, and so does each checkpoint: that of another run is refused.
Temporary files of writers that were killed are as large as a state; a run that begins or resumes in a folder removes
them.

One process has a lock on the folder (``LOCK``) while its run lives: the one that starts all ranks, or rank 0 under
torchrun. A second run in the folder is refused with the name of that process.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import secrets
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import shard
from fquant.compile import all_gather_text
from fquant.io import safetensors
from fquant.io.files import locking
from fquant.io.files.digests import of_file
from fquant.io.files.reading import inside, read_text
from fquant.io.files.replacing import is_leftover, remove_leftovers
from shard import agree

from . import checkpoints, devices
from .checkpoints import RUN

if TYPE_CHECKING:
    from .runs import Options

    T = TypeVar("T", bound=Options)

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

# Options that a resumed run may change: they change no step that is done.
LATER = (
    "steps", "save_every", "publish_every", "keep", "validate_every", "patience", "verify_every", "compare_dense",
    "track", "offload", "offload_activations",
)  # fmt: skip


LOCK = ".lock"
TAKEOVER = 60.0  # seconds that an elastic run waits for the ranks of its last start, which may be on other hosts


@contextmanager
def held(options: T, default: str) -> Iterator[T]:
    """Give the options with the folder of the run, which this process holds meanwhile, unless it is a later rank.

    Raises ValueError if another process holds the folder, or if a new run cannot begin there (:func:`free`).
    """
    if os.environ.get("RANK", "0") != "0":
        yield options
        return
    with ExitStack() as stack:
        folder, wait = options.resume or options.out, TAKEOVER if options.elastic else 0.0
        if folder is not None:
            if options.resume is None and folder.exists() and not folder.is_dir():
                free(folder, default)
            stack.enter_context(locking.held(folder / LOCK, wait))
        while folder is None:
            found = free(None, default)
            try:
                stack.enter_context(locking.held(found / LOCK))
                folder = found
            except ValueError:
                if not found.exists():  # else another process has begun in it since
                    raise
        yield options if options.resume else replace(options, out=free(folder, default))


def free(out: Path | None, default: str) -> Path:
    """Return ``out``, or the first free of ``default``, ``default``-2, ...; raise ValueError if ``out`` has files."""
    if out is None:
        names = (Path(default if n == 1 else f"{default}-{n}") for n in itertools.count(1))
        return next(name for name in names if not name.exists())
    if out.exists() and (
        not out.is_dir() or any(path.name != LOCK and not is_leftover(path) for path in out.iterdir())
    ):
        fix = f", or --resume {out}" if (out / RUN).is_file() else ""
        raise ValueError(f"--out {out}: is not empty; choose another folder{fix}")
    return out


def announce(options: Options, inputs: Mapping[str, str]) -> None:
    """Make the folder, remove what dead writers left and write run.json, on rank 0, and wait until each rank sees it.

    ``inputs`` has a digest of each input by its name (:func:`digests`). A failure is raised on every rank.
    """
    device = devices.name(options.device)
    me = {"rank": dist.get_rank(), "pid": os.getpid(), "host": gethostname(), "device": device}
    ranks = [json.loads(rank) for rank in all_gather_text(json.dumps(me))]
    content = {"options": options.shared(), "mesh": options.mesh, "torch": torch.__version__, "ranks": ranks}

    def begin() -> None:
        options.folder().mkdir(parents=True, exist_ok=True)
        content["run"] = secrets.token_hex(8) if options.resume is None else run_name(options.resume)
        clear(options.folder())
        shard.checkpoint.clean(checkpoints.folder_of(options.folder()))
        record(options.folder() / RUN, content | {"inputs": dict(inputs)})

    agree.attempt("start", lambda: begin() if dist.get_rank() == 0 else None)
    agree.await_path("start", options.folder() / RUN)


def clear(folder: Path) -> None:
    """Remove the temporary files of dead writers in the folder of a run, and in those that it holds."""
    for inner in (folder, *folder.glob("*"), *folder.glob("*/*")):
        if inner.is_dir() and not inner.is_symlink():
            remove_leftovers(inner)


def record(path: Path, content: Mapping[str, Any]) -> None:
    """Write a run.json, with a digest of its content."""
    write(path, {**content, "digest": digest(content)})


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file of JSON, whole or not at all."""
    with safetensors.replacing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def run_name(folder: Path) -> str:
    """Return the name of the run in ``folder``; its checkpoints have it too. Raises ValueError if it has none."""
    found = read(folder / RUN).get("run")
    if not isinstance(found, str):
        raise ValueError(f"{folder / RUN}: does not name its run, as its checkpoints must; start a new one with --out")
    return found


def read(path: Path) -> dict[str, Any]:
    """Return the content of a run.json; raise ValueError if it has none, or another one than its digest says."""
    try:
        content = dict(json.loads(read_text(inside(path))))
        written = content.pop("digest", None)
        _ = content["mesh"], content["options"].items(), content.get("inputs", {}).items()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: holds no options of a run ({error!r:.200}); start a new one with --out") from error
    if written is not None and written != digest(content):
        fix = "use a copy of it, or remove its line 'digest' if it was edited on purpose"
        raise ValueError(f"{path}: its content is not what was written, by its digest; {fix}")
    return content


def restored(kind: type[T], path: Path) -> T:
    """Return the options in a run.json; raise ValueError for options that this release does not know."""
    run, types = read(path), typing.get_type_hints(kind)
    values = _options(kind, path, run)
    for name, value in values.items():
        if value is not None and types[name] in (Path, Path | None):
            values[name] = Path(value)
    return kind(**values)


def _options(kind: type[Options], path: Path, run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in the ``run`` read from ``path``, in today's names; ValueError for values of other types."""
    types = typing.get_type_hints(kind)
    try:
        values: dict[str, Any] = {"mesh": run["mesh"], **kind.upgraded(run["options"])}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: options: got {error!r:.80}, wanted values of an earlier release") from error
    if strange := sorted(values.keys() - {field.name for field in fields(kind)}):
        raise ValueError(f"{path}: option {strange[0]!r:.80} is unknown; resume with the release that wrote it")
    for name, value in values.items():
        if not _fits(value, types[name]):
            wanted = str(getattr(types[name], "__name__", types[name])).replace("typing.", "")
            raise ValueError(
                f"{path}: options.{name}: got {value!r:.80}, wanted {wanted:.200}; start a new run with --out"
            )
    return values


def _fits(value: Any, hint: Any) -> bool:
    """Return True if a value of JSON is one of the type ``hint`` of an option."""
    if hint in (str, Path):
        return isinstance(value, str) and not CONTROL.search(value)
    if hint in (int, float):
        return type(value) in (int, hint) and abs(value) < (1 << 63 if hint is int else math.inf)
    if isinstance(hint, type):
        return type(value) is hint
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return value in inner
    if typing.get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(x, inner[0]) for x in value)
    return any(_fits(value, each) for each in inner)


def check_resumed(resume: Path, options: Options) -> None:
    """Raise ValueError for a folder without a run, or of a run with other options."""
    if not (resume / RUN).is_file():
        fault = f"--resume {resume}: there is no {RUN}; wanted the folder of a run"
        raise ValueError(f"{fault}. A run that was stopped before it wrote one is started again, with --out")
    was = _options(type(options), resume / RUN, read(resume / RUN))
    done = checkpoints.newest(resume)
    if done is not None and options.steps is not None and options.steps < done:
        raise ValueError(f"--steps is {options.steps}, and {resume} has taken {done}; wanted at least as many")
    was = {field.name: field.default for field in fields(options)} | was  # options that came later have their default
    for name, now in options.shared().items():
        if name not in LATER and was[name] != now:
            fault = f"--{name.replace('_', '-')} was {was[name]} and is now {now}"
            raise ValueError(f"{resume}: {fault}; resume with the options that the run was started with")


def digest(content: Mapping[str, Any]) -> str:
    """Return a digest of what JSON can hold, which does not depend on the order of keys."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def digests(named: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of the content of each tree, by its name; leaves are tensors or Lazy (:func:`agree.fingerprint`).

    It depends on values alone, so that a later release finds the same.
    """
    facts = {name: agree.fingerprint(x) for name, x in named.items()}
    return {name: digest({at: x for at, x in of.items() if at.endswith("(content)")}) for name, of in facts.items()}


def files(*paths: Path) -> dict[str, str]:
    """Return a digest of each of the files that are there, by its path."""
    return {str(path): of_file(path) for path in paths if path.exists()}


def split_files(paths: Callable[[], list[Path]]) -> dict[str, str]:
    """Return :func:`files` of large files. Each rank reads some of the files, so every rank calls this function."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    some = lambda: json.dumps(files(*paths()[rank::ranks]))
    _, texts = agree.attempt_and_tell("prepare", lambda: (None, some()))
    return {path: found for text in texts for path, found in json.loads(text).items()}


def check_same(options: Options, inputs: Mapping[str, str]) -> None:
    """Raise ValueError on every rank if a resumed run has other options, or an input of another digest, than before.

    The first of ``inputs`` that differs is named, so the causes of others come first. The ``options`` have nothing left
    open. To be called before anything is placed.
    """

    def check() -> None:
        if options.resume is None:
            return
        check_resumed(options.resume, options)
        was = read(options.resume / RUN).get("inputs")
        if was is None:
            raise ValueError(f"{options.resume / RUN}: has no digests of the run's input; start a new run with --out")
        for each in dict.fromkeys([*inputs, *was]):
            if was.get(each) != inputs.get(each):
                how = "has another content than" if each in inputs else "is not there, and was"
                fault = f"{options.resume}: {each} {how if each in was else 'is there, and was not'} when the run was"
                raise ValueError(f"{fault} started; restore what it was, or start a new run with --out")

    agree.attempt("resume", check)


def is_saved(options: Options) -> bool:
    """Return True if the run resumes from a state; one that was killed before its first begins at step 0.

    Raises ValueError on every rank if they see different files.
    """
    found = None if options.resume is None else checkpoints.newest(options.resume)
    agree.same("resume", {"last state": "none" if found is None else f"of step {found}"})
    return found is not None


def resumed(options: Options, state: Any, mesh: DeviceMesh, rules: shard.Rules) -> Any:
    """Return the last state of the run that is resumed, in the form of ``state``, or ``state`` if there is none."""
    if not is_saved(options):
        return state
    run = agree.attempt("resume", lambda: run_name(options.folder()))
    return checkpoints.load(options.folder(), state, mesh, rules, run)
