"""Parse command lines from dataclasses, and meshes from text."""

import dataclasses
import difflib
from typing import Any, TypeVar

import tyro

from shard.device_mesh import check_axes

T = TypeVar("T")


def axes_in(mesh: str) -> dict[str, int]:
    """Return the axes and sizes of a value of --mesh; raise ValueError if it cannot be read or made."""
    axes: dict[str, int] = {}
    for part in mesh.split(","):
        name, _, size = part.partition("=")
        if not size.strip().isdigit() or name.strip() in axes:
            raise ValueError(f"--mesh {mesh}: cannot read {part!r}; wanted axes and sizes such as dp=1,fsdp=2")
        axes[name.strip()] = int(size)
    check_axes(axes)
    return axes


def check_least(options: Any, least: dict[str, int]) -> None:
    """Raise ValueError for an option below its least value."""
    for name, low in least.items():
        if getattr(options, name) < low:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(options, name)}; wanted at least {low}")


def command_line(default: T, args: list[str] | None, prog: str) -> T:
    """Return the options on the command line, else those of ``default``; raise ValueError for an unknown one."""
    options, unknown = tyro.cli(type(default), args=args, default=default, prog=prog, return_unknown_args=True)
    if unknown:
        names = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(type(default))]  # type: ignore
        close = difflib.get_close_matches(unknown[0].split("=")[0], names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"{unknown[0]} is no option; {hint}see --help")
    return options
