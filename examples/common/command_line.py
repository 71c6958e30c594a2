"""Parse command lines from dataclasses, and meshes from text."""

import dataclasses
import difflib
import math
from typing import TypeVar

import tyro

from shard.device_mesh import check_axes

T = TypeVar("T")


def axes_of(mesh: str | None, world: int | None, alone: int) -> dict[str, int]:
    """Return the axes of --mesh; without one, fsdp over all ``world`` processes, or over ``alone`` local ones.

    Raises ValueError for a mesh that is not of the world's size.
    """
    if mesh is None:
        return {"fsdp": world or alone}
    axes = axes_in(mesh)
    if world is not None and (ranks := math.prod(axes.values())) != world:
        fix = f"wanted sizes that multiply to {world}, such as fsdp={world}"
        raise ValueError(f"--mesh {mesh} has {ranks} ranks, and there are {world} processes; {fix}")
    return axes


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


def command_line(default: T, args: list[str], prog: str) -> T:
    """Return the options on the command line, else those of ``default``; raise ValueError for an unknown one."""
    options, unknown = tyro.cli(type(default), args=args, default=default, prog=prog, return_unknown_args=True)
    if unknown:
        names = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(type(default))]  # type: ignore
        close = difflib.get_close_matches(unknown[0].split("=")[0], names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"{unknown[0]} is no option; {hint}see --help")
    return options
