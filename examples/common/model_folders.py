"""Facts about a model folder that several programs need: which weights to quantise, their kinds, and losses."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fquant import Packed, dequantize
from fquant.io.files import locking
from fquant.io.files.reading import json_object
from fquant.io.files.replacing import replacing
from fquant.tree import expect
from models import hf
from models.hf.folder import headers

MIB = 2**20
CHUNK = 1 << 22  # elements that are compared at a time
PLACES = ("folders", "model", "out", "adapter", "resume")  # options that name no value of the result
READ = (".safetensors", ".json", ".jinja", ".txt", ".model")  # files of a model or an adapter
DENSE = re.compile(r"(embed|(.*\.)?head|.*norm|.*router|.*embed\w*|.*_bias)")  # paths of what stays dense


@dataclass(frozen=True)
class Loss:
    """The squared norms of an error and of what it is an error of; losses of several weights add."""

    error: float = 0.0
    size: float = 0.0

    def __add__(self, other: "Loss") -> "Loss":
        return Loss(self.error + other.error, self.size + other.size)

    def __str__(self) -> str:
        if not self.error:
            return "0"
        return f"{(self.error / self.size) ** 0.5:.2e}" if self.size else "inf"


@contextmanager
def output(out: Path, resume: bool, inputs: Mapping[str, str] | None = None) -> Iterator[None]:
    """Hold the file or folder ``out`` while it is written, by a lock next to it.

    An interrupted run leaves a record of its ``inputs`` (:func:`sources`) next to ``out``. Raises ValueError if another
    process holds ``out``, and if ``out`` exists and ``resume`` is False. Raises ValueError if ``resume`` is True and an
    input differs from the record.
    """
    place = out.resolve()  # so that two names of one place have one lock
    record = place.with_name(f".{place.name}.inputs")
    log = place.with_name(f"{place.name}.part.log")  # of a file; without a line in it, the file is written anew
    has_begun = lambda: any(place.iterdir()) if place.is_dir() else log.exists() and log.stat().st_size > 0
    with locking.held(place.with_name(f".{place.name}.lock")):
        fault = f"{out}: it exists already; choose another, or --resume an interrupted run"
        expect(not out.exists() or (resume and out.is_dir()), fault)
        if inputs is not None and has_begun():
            if resume:  # else what is written next refuses to begin
                _check_same(out, record, inputs)
        elif inputs is not None:
            with replacing(record) as file:
                file.write(json.dumps(dict(inputs), indent=2).encode())
        try:
            yield
        except BaseException:
            if not has_begun():
                record.unlink(missing_ok=True)
            raise
        record.unlink(missing_ok=True)


def _check_same(out: Path, record: Path, inputs: Mapping[str, str]) -> None:
    fix = f"or remove {out} and what was written of it, and begin again"
    expect(
        record.exists(), f"{record}: is not there, so nothing says what the interrupted run has read; restore it, {fix}"
    )
    was = {name: str(text) for name, text in json_object(record).items()}
    for name in [*inputs, *was]:
        fault = (
            f"{out}: {name} was {was.get(name, 'not there')} when the run began, and is {inputs.get(name, 'not there')}"
        )
        expect(was.get(name) == inputs.get(name), f"{fault}; restore it, {fix}")
    expect(
        list(was) == list(inputs), f"{out}: its inputs are in another order than when the run began; restore it, {fix}"
    )


def sources(options: Any, *folders: Path) -> dict[str, str]:
    """Return the inputs of a conversion by name: its options, and the size and time of each file in ``folders``."""
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name not in PLACES}
    found = {f"--{name}": str(value) for name, value in given.items()}
    for folder in folders:
        files = sorted(path.resolve() for path in folder.glob("*") if path.suffix in READ and path.is_file())
        found |= {str(path): f"{path.stat().st_size} bytes of {path.stat().st_mtime_ns} ns" for path in files}
    return found


def weight_files(*folders: Path | None) -> list[Path]:
    """Return the files of the weights of models, except files with digests, because stamps cover all their bytes."""
    many = [headers(folder) for folder in folders if folder is not None and not (folder / hf.PACKED).exists()]
    found = {header.path: header for each in many for header in each.values()}
    return [path for path, header in found.items() if not header.digests]


def is_quantised(path: str, like: Tensor | Packed) -> bool:
    """Return True for a weight that programs quantise: a matrix of a layer, or a stack of them, but no router."""
    return isinstance(like, Packed) or (len(like.shape) > 1 and not DENSE.fullmatch(path))


def kind_of(path: str) -> str:
    """Return the kind of a weight: "layers.7.q" is a "q"."""
    name = path.rpartition(".")[2]
    return "norms, biases" if name.endswith(("norm", "_bias")) else name


def loss(got: Tensor | Packed, wanted: Tensor | Packed, start: Tensor | None = None) -> Loss:
    """Return the loss of ``got`` against ``wanted``, or of the change from ``start`` to it, summed in float64."""
    parts = [dequantize(w).reshape(-1).split(CHUNK) for w in (got, wanted)]  # in their dtypes: half the memory
    starts = [0.0] * len(parts[0]) if start is None else start.reshape(-1).split(CHUNK)
    norm = lambda t: float(t.double().square().sum())
    total = Loss()
    for a, b, zero in zip(*parts, starts, strict=True):
        total += Loss(norm(a.float() - b.float()), norm(b.float() - zero))
    return total


def decoded(w: Tensor | Packed) -> Tensor:
    """Return a tensor as it is, and a Packed in float32."""
    return dequantize(w, torch.float32) if isinstance(w, Packed) else w


def count(w: Tensor | Packed) -> int:
    """Return the number of elements of a weight, of all matrices of a stack."""
    if isinstance(w, Tensor):
        return w.numel()
    stack = w.codes.ndim - (1 if w.format.flat and w.format.bits == 4 else len(w.shape))
    return torch.Size(w.codes.shape[:stack]).numel() * torch.Size(w.shape).numel()


def content(w: Tensor | Packed) -> str:
    """Return the dtype of a tensor or the format of a Packed, as tables show it."""
    if isinstance(w, Tensor):
        return str(w.dtype).removeprefix("torch.")
    name, block = w.format.name, w.format.block
    return name if w.format.text == name else f"{name} of {block}"


def companions(model: Path) -> dict[str, Any]:
    """Return the keys of the model's ``config.json`` that name special tokens, which do not change the model."""
    raw = json_object(model / hf.CONFIG)
    return {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if raw.get(key) is not None}


def size_of(folder: Path) -> int:
    """Return the bytes of the safetensors files in ``folder``."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file())
