"""Convert a Hugging Face folder for another program: llama.cpp, transformers with bitsandbytes, or vLLM.

    python -m examples.export DIR model.gguf --to gguf --kind q4_k
    python -m examples.export DIR OUT --to bnb-nf4                     # also bnb-nf4-dq, bnb-fp4, bnb-int8
    python -m examples.export DIR OUT --to compressed-tensors --kind int4
    python -m examples.export DIR OUT --to merged --adapter ADAPTER    # a plain 16-bit folder
    python -m examples.export RUN/checkpoints/step-40                  # what a run of examples.qlora has trained

Weights are read, converted and written one at a time, so memory is that of the largest. ``--adapter`` merges a PEFT
adapter into the weights on the way. At the end a sample of rows is read back and compared. An interrupted export
continues with ``--resume``: what is finished, tensors of a GGUF or files of a folder, is compared by sample and kept.
The tokenizer goes into the GGUF, or beside the weights.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

import shard
from fquant import FP4, INT8, NF4, NF4_DQ, lora, tree
from fquant.format import Format
from fquant.io import gguf as gguf_file
from fquant.io import peft, safetensors
from fquant.lazy import Lazy
from fquant.tree import expect
from models import hf
from models.config import Config
from models.export import bitsandbytes, compressed_tensors, dense, folder, gguf

from .common import checkpoints, run_folder, terminal
from .common.command_line import DTYPES, Ignored, check_used, command_line
from .common.model_folders import MIB, companions, output, size_of, sources
from .common.progress import bar
from .common.training_step import State
from .qlora import full_training
from .qlora import options as qlora

Target = Literal["gguf", "bnb-nf4", "bnb-nf4-dq", "bnb-fp4", "bnb-int8", "compressed-tensors", "merged", "adapter"]
NOT_GIVEN = Path()
BNB: dict[str, Format] = {"bnb-nf4": NF4, "bnb-nf4-dq": NF4_DQ, "bnb-fp4": FP4, "bnb-int8": INT8}
KINDS: dict[str, tuple[str, ...]] = {  # of each target, its default first
    "gguf": ("q4_k", *(kind for kind in gguf.FILE_TYPES if kind != "q4_k")),
    "compressed-tensors": tuple(compressed_tensors.KINDS),
    "merged": tuple(DTYPES),
}


IGNORED: Ignored = {
    "shard": (lambda x: x.to in ("gguf", "adapter"), "is of a folder of weights; leave it out"),
    "tokenizer": (lambda x: x.to != "gguf", "is of --to gguf; folders have the tokenizer beside the weights"),
}


@dataclass(frozen=True)
class Options:
    """Convert a Hugging Face folder for llama.cpp, for transformers with bitsandbytes, or for vLLM."""

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="IN", help_behavior_hint="(required)")]
    """Folder with config.json and safetensors; for an adapter that of a run, or of one of its checkpoints."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUT", help_behavior_hint="")] = NOT_GIVEN
    """File (gguf) or folder to write; of an adapter by default IN-adapter."""
    to: Target | None = None
    """Format to write; merged: a plain folder in 16 or 32 bits; adapter: what a run has trained, for PEFT, or of full
    training for transformers. Default: adapter of the folder of a run, gguf of any other."""
    kind: str | None = None
    """Of gguf: q4_k (default), q8_0, q6_k, q4_0, bf16, f16, f32; of compressed-tensors: int8 (default), int4, fp8; of
    merged: bf16 (default), f16, f32."""
    adapter: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """PEFT adapter to merge into the weights; quantising the sum rounds small updates away."""
    shard: float = 5.0
    """GiB in a file of a folder, at most; a larger tensor has a file of its own."""
    tokenizer: bool = True
    """Put the tokenizer into a GGUF, if there is one; --no-tokenizer leaves out one that llama.cpp does not have."""
    resume: bool = False
    """Continue an interrupted export."""

    def checked(self) -> "Options":
        """Return these options with nothing left open; raise ValueError for options that do not fit together."""
        if self.model == NOT_GIVEN:
            raise ValueError("there is no IN; wanted a folder to convert, and OUT; see --help")
        if self.to is None:
            fault = f"{self.model}: no such folder; wanted that of a model, of a run or of a checkpoint"
            expect(self.out != NOT_GIVEN or self.model.exists(), fault)
            return replace(self, to="adapter" if checkpoints.is_state(self.model) else "gguf").checked()
        if self.out == NOT_GIVEN:
            if self.to != "adapter":
                raise ValueError(f"there is no OUT; wanted where to write {self.to}; see --help")
            return replace(self, out=self.model.parent / f"{self.model.name}-adapter").checked()
        kinds = KINDS.get(self.to, ())
        fix = f"; wanted {' or '.join(kinds)}" if kinds else ", which has none; leave it out"
        if self.kind is not None and self.kind not in kinds:
            raise ValueError(f"--kind is {self.kind} with --to {self.to}{fix}")
        if self.to == "adapter" and (self.adapter is not None or self.resume):
            raise ValueError("--to adapter has neither --adapter nor --resume; leave them out")
        if not 0 < self.shard <= 1 << 20:
            raise ValueError(f"--shard is {self.shard}; wanted GiB above 0")
        check_used(self, IGNORED)
        return replace(self, kind=self.kind or (kinds[0] if kinds else None))


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args`` and return its exit status: 0, or 2 for bad input, which one line names."""
    console = terminal.console()
    try:
        options = command_line(Options(NOT_GIVEN), args, "python -m examples.export").checked()
        start = time.monotonic()
        with output(options.out, options.resume, sources(options, options.model, *filter(None, [options.adapter]))):
            if options.to == "adapter":
                console.print(adapter_of(options), highlight=False, soft_wrap=True)
                return 0
            compared = converted(options, console)
    except (ValueError, TypeError, OSError) as error:
        terminal.complain("export", error)
        return 2
    show(console, options, compared, time.monotonic() - start)
    return 0


def converted(options: Options, console: Console) -> int:
    """Read the model, with its adapter if there is one, and :func:`export` it under a progress bar."""
    cfg, params = hf.lazy(options.model)
    if options.adapter is not None:
        wide = {"gguf": torch.float32, "merged": DTYPES.get(options.kind or "")}  # rounded once, when it is written
        adapters = peft.load(options.adapter, partial(hf.path_of, cfg=cfg), hf.tied_modules(cfg))
        params = merged(params, adapters, wide.get(options.to or ""))
    with bar(console, console.is_terminal) as progress:
        task = progress.add_task(f"writing {options.out}", total=None)
        done = lambda finished, total: progress.update(task, completed=finished, total=total)
        return export(options, cfg, params, done)


def merged(params: Any, adapters: dict[str, lora.Lora], dtype: torch.dtype | None = None) -> Any:
    """Return the lazy tree ``params`` with each adapter added to its weight when that is read, in ``dtype``.

    Raises ValueError for an adapter of another model.
    """
    if unknown := sorted(adapters.keys() - set(tree.paths(params))):
        raise ValueError(f"--adapter: {unknown[0]} is no weight of this model; use the adapter's own base")

    def leaf(path: str, w: Lazy) -> Lazy:
        if path not in adapters:
            return w
        read = lambda: lora.merge({"w": w.read()}, {"w": adapters[path]}, dtype)["w"]
        return Lazy(read, w.like.to(dtype=dtype), w.stamp)

    return tree.map_with_path(leaf, params)


def export(options: Options, cfg: Config, params: Any, done: Callable[[int, int], None]) -> int:
    """Write the output and compare a sample of it with its source; return the number of rows compared."""
    out, kind, shard = options.out, options.kind or "", int(options.shard * 2**30)
    extra = companions(options.model)
    more: dict[str, Any] = {"max_shard_bytes": shard, "extra": extra, "resume": options.resume, "done": done}
    if options.to == "gguf":
        has_tokenizer = options.tokenizer and (options.model / "tokenizer.json").is_file()
        out.parent.mkdir(parents=True, exist_ok=True)
        gguf.save(out, cfg, params, kind, options.model if has_tokenizer else None, done, options.resume)
        return gguf.verify(out, cfg, params, kind)
    if options.to in BNB:
        bitsandbytes.save(out, cfg, params, BNB[options.to], **more)
        tensors = bitsandbytes.tensors(cfg, params, BNB[options.to])
    elif options.to == "compressed-tensors":
        compressed_tensors.save(out, cfg, params, kind, **more)
        tensors = compressed_tensors.tensors(cfg, params, kind)
    else:
        dense.save(out, cfg, params, DTYPES[kind], **more)
        tensors = dense.tensors(cfg, params, DTYPES[kind])
    folder.copy_companions(options.model, out)
    return folder.verify_all(out, tensors, shard)


def adapter_of(options: Options) -> str:
    """Write the adapter, or the model, of a run or of one of its checkpoints; return a line about it."""
    run, file = checkpoints.run_of(options.model)
    base = Path(run_folder.restored(qlora.Options, run / checkpoints.RUN).model)
    state = shard.checkpoint.read(file)
    if not isinstance(state, State):
        raise ValueError(f"{file}: got a {type(state).__name__}, wanted the state of a run of examples.qlora")
    cfg = hf.read_config(base)
    if not isinstance(state.trained, dict):
        full_training.write(options.out, base, cfg, state.trained)
        return f"written {options.out}: the model after {int(state.done)} steps, of {base}"
    names = partial(hf.module_name, cfg=cfg)
    peft.save(options.out, state.trained, names, base_model=str(base), tied=hf.tied_modules(cfg))
    return f"written {options.out}: {len(state.trained)} adapters after {int(state.done)} steps, of {base}"


def contents(out: Path) -> dict[str, list[int]]:
    """Return the bytes of all tensors of the output by their kind or dtype."""
    found: dict[str, list[int]] = defaultdict(list)
    if out.is_file():
        for entry in gguf_file.header(out).tensors.values():
            found[entry.kind].append(entry.stop - entry.start)
    else:
        for file in sorted(out.glob("*.safetensors")):
            for entry in safetensors.header(file).tensors.values():
                found[str(entry.dtype).removeprefix("torch.")].append(entry.stop - entry.start)
    return found


def show(console: Console, options: Options, compared: int, seconds: float) -> None:
    """Print what was written, by kind, and the sizes of both sides."""
    right = [Column(name, justify="right") for name in ("tensors", "MiB", "share")]
    title = f"{options.model} as {options.to}" + (f" {options.kind}" if options.kind else "")
    table = Table("kind", *right, box=SIMPLE_HEAD, pad_edge=False)
    found = contents(options.out)
    total = sum(map(sum, found.values()))
    for kind, sizes in sorted(found.items(), key=lambda item: -sum(item[1])):
        table.add_row(kind, f"{len(sizes)}", f"{sum(sizes) / MIB:,.1f}", f"{100 * sum(sizes) / total:.1f} %")
    before = size_of(options.model)
    sizes = f"{before / MIB:,.1f} MiB before, {total / MIB:,.1f} MiB now"
    console.print(title, highlight=False, soft_wrap=True)
    console.print(table, f"{sizes}, {seconds:.1f} s; {compared} rows read back are right", highlight=False)
    console.print(f"written {options.out}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
