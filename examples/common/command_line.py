"""Options that several programs have, parsed from text: formats, weights to adapt, meshes; and command lines."""

import contextlib
import dataclasses
import difflib
import io
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
import tyro

from fquant import FP4, NF4, Packed, format, optim, quantize, tree
from fquant.format import Format
from fquant.lazy import Lazy
from fquant.tree import expect
from models import decoder
from models.config import Config
from shard.device_mesh import check_axes

from . import terminal

LINEARS = ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down")  # of a layer; each family has some of them
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}  # of the residual stream
MomentsName = Literal["f32", "dynamic8", "fp8", "dynamic4"]
MOMENTS: dict[MomentsName, optim.Moments | None] = {
    "f32": None, "dynamic8": optim.DYNAMIC8, "fp8": optim.FP8, "dynamic4": optim.DYNAMIC4
}  # fmt: skip
FormatName = Literal[
    "nf4", "nf4_dq", "fp4", "af4", "int8", "int8_row", "int8_group", "int8_tensor", "int4", "int4_zero", "int3",
    "int3_zero", "int2", "int2_zero", "ternary", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_tensor", "mxfp8", "mxfp4", "nvfp4",
    "aq_2x8", "aq_3x8", "none",
]  # fmt: skip
T = TypeVar("T")


def parse_format(name: str, block: int | None) -> Format | None:
    """Return the format called ``name``, or None for a base as it is; raise ValueError for a block it cannot have."""
    if name != "none":
        return format.parse(name, block)
    if block is not None:
        raise ValueError(f"--block is {block} with --format none, which packs nothing; leave one out")
    return None


def quantised(base: Any, fmt: Format | None) -> Any:
    """Return the tree ``base`` with the linears of every layer packed in ``fmt``, or as it is without one.

    A weight that is packed in ``fmt`` already is kept. Raises ValueError, with the path, for another format.
    """
    if fmt is None:
        return base

    def pack(w: Any) -> Any:
        like = w.like if isinstance(w, Lazy) else w
        if not isinstance(like, Packed):
            return quantize(w, fmt)
        fault = f"is packed in {like.format.text:.80} already, and --format is {fmt.text:.80}"
        expect(like.format == fmt, f"{fault}; use --format none, which keeps it")
        return w

    return tree.map_at(pattern(LINEARS), pack, base)


def pattern(targets: tuple[str, ...]) -> str:
    """Return the regular expression of the paths of ``targets`` in all layers."""
    return rf"layers\.\d+\.({'|'.join(targets)})"


def parse_targets(targets: str, cfg: Config | None = None) -> tuple[str, ...]:
    """Return the names in a value of --targets, "all" for every linear of a layer.

    Raises ValueError for one that is no linear of a layer, of ``cfg`` if it is given.
    """
    known = LINEARS
    if cfg is not None:
        found = {name for block in decoder.dims(cfg).values() for name in block}
        known = tuple(name for name in LINEARS if name in found)
    if targets == "all":
        return known
    names = tuple(name.strip() for name in targets.split(","))
    for name in names:
        if name not in known:
            raise ValueError(f"--targets: {name!r} is no weight of a layer; wanted all, or some of {','.join(known)}")
    return names


def check(cfg: Config, fmt: Format | None, seq: int, model: Any) -> None:
    """Raise ValueError for rows that end in a part of a bitsandbytes block, and for more tokens than positions.

    bitsandbytes lets blocks straddle rows, so PEFT would load the adapter beside another base. Other formats have short
    blocks at the ends of rows.
    """
    block = fmt.block if fmt is not None and fmt.table in (NF4.table, FP4.table) else None
    for path, w in tree.items(decoder.shapes(cfg)):
        if fmt is not None and block and path.split(".")[-1] in LINEARS and w.shape[-1] % block:
            fits = [size for size in format.BLOCKS if w.shape[-1] % size == 0]
            fix = f"use --block {fits[-1]}" if fits else "use --format int8"
            fault = f"dim {w.ndim - 1} = {w.shape[-1]} is not a multiple of {fmt.name}'s block {block}"
            raise ValueError(f"{path}: {fault}; {fix}")
    if seq > cfg.max_positions:
        raise ValueError(f"--seq is {seq}; wanted at most {cfg.max_positions}, the positions of {model}")


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
    """Raise ValueError for an option that is given and below its least value, or is no finite number."""
    for name, low in least.items():
        if (value := getattr(options, name)) is not None and not low <= value < math.inf:
            wanted = "at least" if math.isfinite(value) else "a finite number of at least"
            raise ValueError(f"--{name.replace('_', '-')} is {value}; wanted {wanted} {low}")


Ignored = dict[str, tuple[Callable[[Any], bool], str]]  # of an option: when it does nothing, and why


def check_used(options: Any, ignored: Ignored) -> None:
    """Raise ValueError for an option that is given, and does nothing beside the others."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for name, (does_nothing, why) in ignored.items():
        if (value := getattr(options, name)) != defaults[name] and does_nothing(options):
            raise ValueError(f"{spelled(name, value, isinstance(defaults[name], bool))} {why}")


def spelled(name: str, value: Any, is_flag: bool = False) -> str:
    """Return an option and its value as on the command line."""
    text = name.replace("_", "-")
    if is_flag:
        return f"--{text}" if value else f"--no-{text}"
    return f"--{text} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def _one_line(said: str) -> str:
    """Return what tyro says of a command line, a title over sections with rules between them, as one line."""
    lines = [line.strip("│╭╮╰╯ ") for line in said.splitlines()[1:]]
    sections = [[*section] for is_text, section in itertools.groupby(lines, lambda x: bool(x.strip("─-"))) if is_text]
    found = " ".join(" ".join(sections[0]).split()) if sections else said
    return f"{found.split(' Got errors:')[0].rstrip('.')}; see --help"


def command_line(default: T, args: list[str] | None, prog: str) -> T:
    """Return the options on the command line, else those of ``default``; raise ValueError for one that is wrong."""
    terminal.guard()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options, unknown = tyro.cli(type(default), args=args, default=default, prog=prog, return_unknown_args=True)
    except SystemExit as error:
        if not error.code:  # --help
            raise
        raise ValueError(_one_line(said.getvalue())) from None
    if unknown:
        names = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(type(default))]  # type: ignore
        close = difflib.get_close_matches(unknown[0].split("=")[0], names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(f"{unknown[0]} is no option; {hint}see --help")
    return options
