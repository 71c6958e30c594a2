"""Start, record and resume a run of a program that trains.

    run.json              the options, the mesh, and the processes of the run
    metrics.jsonl         a line a step (examples/common/progress.py)
    state.safetensors     the state, every so many steps and at the end
    result.json           the results

Each file is written whole, so the state of a killed run is that of one step. A run resumes on any mesh from its folder,
and on the same mesh to the bit.
"""

import itertools
import json
import math
import os
import sys
import typing
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from socket import gethostname
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console

from fquant import tree
from fquant.compile import all_gather_text
from fquant.io import safetensors
from shard import agree

from . import launch
from .command_line import command_line

RUN, STATE, RESULT = "run.json", "state.safetensors", "result.json"


class Options(Protocol):
    """The fields and methods that the options of every program have."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def mesh(self) -> str | None: ...
    @property
    def out(self) -> Path | None: ...
    @property
    def resume(self) -> Path | None: ...

    def check(self) -> None: ...  # raises ValueError for values out of range
    def axes(self, world: int | None) -> dict[str, int]: ...  # axis -> size; no ``world``: this program starts it
    def shared(self) -> dict[str, Any]: ...  # must be equal on every rank and in a resumed run


T = TypeVar("T", bound=Options)


def command(name: str, default: T, args: list[str], prepare: Callable[[T], Any], work: Callable[[T], Any]) -> int:
    """Run the command line ``args`` of examples.``name`` and return its exit status.

    The status is 0, 1 if a rank failed, or 2 for bad input, which one line names. ``prepare`` checks all input before
    processes start. ``work`` runs on each rank, decorated with ``launch.record``; it returns a message for bad input.
    """
    try:
        options = parse(default, args, f"python -m examples.{name}")
        options.check()
        under_torchrun = "RANK" in os.environ
        axes = options.axes(int(os.environ["WORLD_SIZE"]) if under_torchrun else None)
        options = replace(options, mesh=",".join(f"{axis}={size}" for axis, size in axes.items()))
        if under_torchrun and options.out is None and options.resume is None:
            raise ValueError("under torchrun ranks cannot choose a folder each; give --out")
        if options.resume is not None:
            _check_resumed(options.resume, options)
        if not under_torchrun:
            prepare(options)
        if options.resume is None and os.environ.get("RANK", "0") == "0":
            options = replace(options, out=free_folder(options.out, f"runs/{name}"))
        ranks = math.prod(axes.values())
        if under_torchrun or ranks == 1:
            outcome = work(options)
        else:
            Console().print(f"[dim]starting {ranks} ranks[/]", highlight=False)
            outcome = launch.local(ranks, work, options)[0]
        if isinstance(outcome, str):
            raise ValueError(outcome)
    except ValueError as error:
        return _fail(name, str(error), 2)
    except launch.RankFailed as error:
        return _fail(name, str(error), 1)
    except (KeyboardInterrupt, launch.Stopped):
        return _fail(name, "stopped; continue with --resume and the folder of the run", 130)
    return 0


def parse(default: T, args: list[str], prog: str) -> T:
    """Return the options on the command line; others are those of the run to resume, or of ``default``."""
    options = command_line(default, args, prog)
    if options.resume is None or not (options.resume / RUN).is_file():
        return options
    return command_line(restored(type(default), options.resume / RUN), args, prog)


def restored(kind: type[T], path: Path) -> T:
    """Return the options in a run.json; raise ValueError for options that this release does not know."""
    try:
        run = json.loads(path.read_text())
        values: dict[str, Any] = {"mesh": run["mesh"], **_upgraded(kind, run["options"])}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: holds no options of a run ({error!r}); start a new one with --out") from error
    types = typing.get_type_hints(kind)
    if strange := sorted(values.keys() - {field.name for field in fields(kind)}):
        raise ValueError(f"{path}: option {strange[0]!r} is unknown; resume with the release that wrote it")
    for name, value in values.items():
        if value is not None and types[name] in (Path, Path | None):
            values[name] = Path(value)
    return kind(**values)


def _upgraded(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a run in today's names, if the program has renamed some (``kind.upgraded``)."""
    return getattr(kind, "upgraded", dict)(values)


def folder(options: Options) -> Path:
    """Return the folder of a run."""
    found = options.resume or options.out
    assert found is not None, "the command chooses a folder before ranks start"
    return found


def announce(options: Options) -> None:
    """Make the folder and write run.json, on rank 0; raise on every rank if that fails."""
    me = {"rank": dist.get_rank(), "pid": os.getpid(), "host": gethostname()}
    ranks = [json.loads(rank) for rank in all_gather_text(json.dumps(me))]
    content = {"options": options.shared(), "mesh": options.mesh, "torch": torch.__version__, "ranks": ranks}

    def begin() -> None:
        folder(options).mkdir(parents=True, exist_ok=True)
        write(folder(options) / RUN, content)

    agree.attempt("start", begin if dist.get_rank() == 0 else lambda: None)


def save(options: Options, state: Any) -> None:
    """Write the state, from rank 0."""
    if dist.get_rank() == 0:
        safetensors.save(folder(options) / STATE, state)


def load(options: Options, like: Any) -> Any:
    """Return the state that :func:`save` wrote; raise ValueError on every rank if its structure is not ``like``'s."""
    path = folder(options) / STATE

    def read() -> Any:
        state = safetensors.load(path)
        if tree.structure(state) != tree.structure(like):
            raise ValueError(f"{path}: holds another tree than this run's; resume with the release that wrote it")
        return state

    return agree.attempt("resume", read)


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a file of JSON, whole or not at all."""
    with safetensors.replacing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def free_folder(out: Path | None, default: str) -> Path:
    """Return ``out``, or the first free of ``default``, ``default``-2, ...; raise ValueError if ``out`` has files."""
    if out is None:
        names = (Path(default if n == 1 else f"{default}-{n}") for n in itertools.count(1))
        return next(name for name in names if not name.exists())
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: is not empty; choose another folder, or --resume {out}")
    return out


def _check_resumed(resume: Path, options: Options) -> None:
    """Raise ValueError for a folder without a saved state, or of a run with other options."""
    for name in (STATE, RUN):
        if not (resume / name).is_file():
            raise ValueError(f"--resume {resume}: there is no {name}; wanted the folder of a run that saved its state")
    safetensors.header(resume / STATE)
    was = _upgraded(type(options), json.loads((resume / RUN).read_text())["options"])
    for name, now in options.shared().items():
        if was.get(name) != now:
            fault = f"--{name.replace('_', '-')} was {was.get(name)} and is now {now}"
            raise ValueError(f"{resume}: {fault}; resume with the options that the run was started with")


def _fail(name: str, message: str, status: int) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(f"{name}: {message}", file=sys.stderr)
    return status
