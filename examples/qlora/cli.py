"""Fine-tune LoRA adapters beside a quantised Llama, on one process or sharded over several.

    python -m examples.qlora                                     # offline, on the model and data shipped here
    python -m examples.qlora --model DIR --data FILE --mesh dp=2,fsdp=2
    torchrun --nproc-per-node 4 -m examples.qlora --model DIR --data FILE
    python -m examples.qlora --resume runs/qlora                 # continue, to the bit

Writes to a folder of its own: adapter/ for PEFT, metrics.jsonl with a line a step, loss.png, run.json with the options
and processes, state.safetensors to resume from. The training is in examples/qlora/train.py.
"""

import dataclasses
import sys

import torch.distributed as dist
from rich.console import Console

import shard
from fquant.io import peft
from models import hf

from ..common import launch, runs
from ..common.progress import METRICS, Report
from . import report, train
from .options import Options
from .train import Result

ADAPTER = "adapter"


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; return 0, 1 if a rank failed, or 2 for bad input, which one line names."""
    return runs.command("qlora", Options(), sys.argv[1:] if args is None else args, prepare, work)


def prepare(options: Options) -> None:
    """Check all input."""
    Console().print(f"[dim]reading {options.model} and the text[/]", highlight=False, soft_wrap=True)
    train.prepare(options)


@launch.record
def work(options: Options) -> Result | str:
    """Run one rank and return the result, or a message if the input was at fault."""
    try:
        run, state = train.start(options)
        folder, total = runs.folder(options), options.steps
        first, ranks = dist.get_rank() == 0, dist.get_world_size()
        runs.announce(options)
        with Report(folder, first, total, int(state.done), report.summary) as shown:
            adapters = f"{len(state.adapters)} adapters of rank {options.rank}"
            how = f"{run.setup.checkpoint} checkpointing, {options.dtype}"
            what = f"{how}; base in {options.format}, {adapters}"
            shown.say(f"{ranks} ranks, mesh {options.mesh}; {what}; writing {folder}")
            base = shard.local(run.base)
            while (done := int(state.done)) < total:
                state, step = train.take(run, base, state)
                shown.step(step)
                if (done + 1) % options.save_every == 0 or done + 1 == total:
                    runs.save(options, state)
            result = train.measure(run, state, shown.say)
        if first:
            peft.save(folder / ADAPTER, state.adapters, hf.module_name, base_model=str(options.model))
            runs.write(folder / runs.RESULT, dataclasses.asdict(result))
            curve = report.curve(folder, result)
            console = Console()
            console.print(report.table(result, options, ranks))
            console.print(f"adapter {folder / ADAPTER}\nmetrics {folder / METRICS}\ncurve   {curve}", soft_wrap=True)
        shard.close()
        return result
    except ValueError as error:
        return str(error)
