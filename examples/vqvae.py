"""Train a VQ-VAE on patches of photographs, on one process or over several.

    python -m examples.vqvae                                     # a codebook of 512
    python -m examples.vqvae --quantiser fsq --codes 1000 --steps 4000
    python -m examples.vqvae --mesh dp=2
    torchrun --nproc-per-node 4 -m examples.vqvae --out DIR

The photographs are those of scikit-image's wheel (pip install 'fquant[images]'); the middle fifth of each is held out.
Writes, to a folder of its own: reconstruction.png and codebook.png, metrics.jsonl with a line a step, result.json,
run.json with the options and the processes, state.safetensors. The training itself is in examples/reconstruct.py.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import shard
from examples import launch, pictures, reconstruct
from examples.options import axes_of, command_line, free_folder
from examples.progress import METRICS, Report
from examples.reconstruct import STATE, Job, Result
from fquant.io import safetensors
from shard import agree

RUN, RESULT = "run.json", "result.json"


@dataclass(frozen=True)
class Options(Job):
    """Train a VQ-VAE on patches of the photographs that scikit-image carries.

    Without arguments: a codebook of 512 for each 4 x 4 pixels, on one process.

    Start it under torchrun to use more machines: torchrun --nproc-per-node 4 -m examples.vqvae --out DIR
    """

    mesh: str | None = None
    """As in dp=2 or fsdp=2, which both split a batch; default: all of torchrun's ranks, or 1."""
    out: Path | None = None
    """Empty folder to write to; default: the first free of runs/vqvae, runs/vqvae-2, ..."""

    def job(self) -> Job:
        """What must be the same on every rank."""
        return Job(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Job)})


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``. Exit status 0, 1 when a rank failed, 2 for bad input, which one line names."""
    try:
        options = command_line(Options(), sys.argv[1:] if args is None else args, "python -m examples.vqvae")
        options.check()
        under_torchrun = "RANK" in os.environ
        axes = axes_of(options.mesh, int(os.environ["WORLD_SIZE"]) if under_torchrun else None, alone=1)
        ranks = math.prod(axes.values())
        if options.batch < ranks:
            raise ValueError(f"--batch is {options.batch} over {ranks} ranks; wanted at least a patch for each")
        if under_torchrun and options.out is None:
            raise ValueError("under torchrun ranks cannot choose a folder each; give --out")
        reconstruct.prepare(options.job())  # all input is checked before processes are started or anything is written
        if not under_torchrun or os.environ["RANK"] == "0":
            options = dataclasses.replace(options, out=free_folder(options.out, "runs/vqvae"))
        options = dataclasses.replace(options, mesh=",".join(f"{name}={size}" for name, size in axes.items()))
        outcomes = [work(options)] if under_torchrun or ranks == 1 else launch.local(ranks, work, options)
        if isinstance(outcomes[0], str):
            raise ValueError(outcomes[0])
    except ValueError as error:
        return _fail(str(error), 2)
    except launch.RankFailed as error:
        return _fail(str(error), 1)
    except (KeyboardInterrupt, launch.Stopped):
        return _fail("stopped", 130)
    return 0


@launch.record
def work(options: Options) -> Result | str:
    """What one rank does; a message in place of the result when the input was at fault."""
    assert options.mesh is not None and options.out is not None, "the command chooses both before ranks start"
    try:
        folder, job = options.out, options.job()
        run, training = reconstruct.start(job, axes_of(options.mesh, None, alone=1))
        first, ranks = dist.get_rank() == 0, dist.get_world_size()
        processes = agree.exchange(json.dumps({"rank": dist.get_rank(), "pid": os.getpid(), "host": gethostname()}))
        agree.attempt("start", lambda: _announce(options, processes) if first else None)
        with Report(folder, first, job.steps, 0, pictures.told) as shown:
            shown.say(f"{ranks} rank{'s' * (ranks > 1)}, mesh {options.mesh}; {pictures.title(job)}; writing {folder}")
            while int(training.done) < job.steps:
                training, step = reconstruct.take(run, training)
                shown.step(step)
            shown.say("measuring held-out patches, and k-means of their pixels")
            result, counts, books = reconstruct.measure(run, training)
        if first:
            safetensors.save(folder / STATE, training)
            _write(folder / RESULT, dataclasses.asdict(result))
            drawn = pictures.reconstruction(folder, run, training, books, result), pictures.codebook(folder, counts)
            console = Console()
            console.print(pictures.table(job, result, ranks))
            console.print(f"pictures {drawn[0]}\n         {drawn[1]}\nmetrics  {folder / METRICS}", soft_wrap=True)
        shard.close()
        return result
    except ValueError as error:
        return str(error)


def _announce(options: Options, ranks: list[str]) -> None:
    assert options.out is not None
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"options": dataclasses.asdict(options.job()), "mesh": options.mesh, "torch": torch.__version__}
    _write(options.out / RUN, content | {"ranks": [json.loads(rank) for rank in ranks]})


def _write(path: Path, content: dict[str, Any]) -> None:
    with safetensors.replacing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def _fail(message: str, status: int) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(f"vqvae: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
