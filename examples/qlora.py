"""Fine-tune LoRA adapters beside a quantised Llama, on one process or sharded over several.

    python -m examples.qlora                                     # offline, on the model and data shipped here
    python -m examples.qlora --model DIR --data FILE --mesh dp=2,fsdp=2
    torchrun --nproc-per-node 4 -m examples.qlora --model DIR --data FILE
    python -m examples.qlora --resume runs/qlora                 # continue, to the bit

Writes, to a folder of its own: adapter/ for PEFT, metrics.jsonl with a line a step, loss.png, run.json with the options
and the processes, state.safetensors to resume from. The training itself is in examples/finetune.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import shard
from examples import finetune, launch, report
from examples.finetune import RUN, STATE, Result, prepare
from examples.options import Options, command_line, free_folder, restored
from examples.progress import METRICS, Report
from fquant.io import peft, safetensors
from models import hf
from shard import agree

ADAPTER = "adapter"


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``. Exit status 0, 1 when a rank failed, 2 for bad input, which one line names."""
    try:
        options = parse(sys.argv[1:] if args is None else args)
        options.check()
        if "RANK" in os.environ:
            return _under_torchrun(options)
        axes = options.axes(None)
        options = dataclasses.replace(options, mesh=",".join(f"{name}={size}" for name, size in axes.items()))
        ranks, console = math.prod(axes.values()), Console()
        console.print(f"[dim]reading {options.model} and the text[/]", highlight=False, soft_wrap=True)
        prepare(options)  # all input is checked here, before processes are started and anything is written
        options = _with_folder(options)
        console.print(f"[dim]starting {ranks} ranks[/]" if ranks > 1 else "[dim]starting[/]", highlight=False)
        outcomes = launch.local(ranks, work, options) if ranks > 1 else [work(options)]
        for outcome in outcomes[:1]:
            if isinstance(outcome, str):
                raise ValueError(outcome)
    except ValueError as error:
        return _fail(str(error), 2)
    except launch.RankFailed as error:
        return _fail(str(error), 1)
    except (KeyboardInterrupt, launch.Stopped):
        return _fail("stopped; continue with --resume and the folder of the run", 130)
    return 0


@launch.record
def work(options: Options) -> Result | str:
    """What one rank does; a message in place of the result when the input was at fault."""
    try:
        run, state = finetune.start(options)
        folder, total = options.folder(), options.steps
        first, ranks = dist.get_rank() == 0, dist.get_world_size()
        processes = agree.exchange(json.dumps({"rank": dist.get_rank(), "pid": os.getpid(), "host": gethostname()}))
        agree.attempt("start", lambda: _announce(options, processes) if first else None)
        with Report(folder, first, total, int(state.done), report.told) as shown:
            adapters = f"{len(state.adapters)} adapters of rank {options.rank}"
            shown.say(f"{ranks} ranks, mesh {options.mesh}; base in {options.format}, {adapters}; writing {folder}")
            base = shard.local(run.base)
            while (done := int(state.done)) < total:
                state, step = finetune.take(run, base, state)
                if (done + 1) % options.save_every == 0 or done + 1 == total:
                    finetune.save(run, state)
                shown.step(step)
            result = finetune.measure(run, state, shown.say)
        if first:
            peft.save(folder / ADAPTER, state.adapters, hf.module_name, base_model=str(options.model))
            _write(folder / "result.json", dataclasses.asdict(result))
            curve = report.curve(folder, result)
            console = Console()
            console.print(report.table(result, options, ranks))
            console.print(f"adapter {folder / ADAPTER}\nmetrics {folder / METRICS}\ncurve   {curve}", soft_wrap=True)
        shard.close()
        return result
    except ValueError as error:
        return str(error)


def parse(args: list[str]) -> Options:
    """The options on the command line, the rest being those of the run to resume, or the defaults.

    Raises ValueError naming an option that is unknown.
    """
    options = _parse(args, Options())
    if options.resume is None or not (options.resume / RUN).is_file():
        return options
    return _parse(args, restored(options.resume / RUN))


def _parse(args: list[str], default: Options) -> Options:
    return command_line(default, args, "python -m examples.qlora")


def _with_folder(options: Options) -> Options:
    """``options`` with ``out`` settled: given and free, or the first free of the defaults; or that of ``resume``."""
    if options.resume is not None:
        if not (options.resume / STATE).exists():
            raise ValueError(
                f"--resume {options.resume}: there is no {STATE}; wanted the folder of a run that saved its state"
            )
        safetensors.header(options.resume / STATE)
        return options
    out = free_folder(options.out, "runs/qlora", f", or --resume {options.out}")
    return dataclasses.replace(options, out=out)


def _announce(options: Options, ranks: list[str]) -> None:
    folder = options.folder()
    folder.mkdir(parents=True, exist_ok=True)
    content = {"options": options.shared(), "mesh": options.mesh, "torch": torch.__version__}
    _write(folder / RUN, content | {"ranks": [json.loads(rank) for rank in ranks]})


def _under_torchrun(options: Options) -> int:
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    axes = options.axes(world)
    options = dataclasses.replace(options, mesh=",".join(f"{name}={size}" for name, size in axes.items()))
    if options.out is None and options.resume is None:
        raise ValueError("under torchrun ranks cannot choose a folder each; give --out")
    outcome = work(_with_folder(options) if rank == 0 else options)
    if isinstance(outcome, str):
        return _fail(outcome, 2) if rank == 0 else 2
    return 0


def _write(path: Path, content: dict[str, Any]) -> None:
    with safetensors.replacing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def _fail(message: str, status: int) -> int:
    print(f"qlora: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
