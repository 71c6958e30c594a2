"""Train a VQ-VAE on patches of photographs, on one process or over several.

    python -m examples.vqvae --quantiser fsq --codes 1000 --steps 4000        # default: a codebook of 512
    python -m examples.vqvae --mesh dp=2
    torchrun --nproc-per-node 4 -m examples.vqvae --out DIR
    python -m examples.vqvae --resume runs/vqvae                 # continue, to the bit

The photographs are those of scikit-image's wheel (pip install 'fquant[images]'); the middle fifth of each is held out.
A run writes reconstruction.png, codebook.png and the files of every run (examples/common/runs.py) to a new folder.
"""

import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import tyro
from rich.console import Console

import shard

from ..common import launch, runs
from ..common.command_line import axes_of
from ..common.progress import METRICS, Report
from . import pictures, train
from .train import Job, Result


@dataclass(frozen=True)
class Options(Job):
    """Train a VQ-VAE on patches of the photographs that scikit-image carries.

    Without arguments: a codebook of 512 for each 4 x 4 pixels, on one process.

    With --quantiser: vq, the nearest vector of a codebook that follows its rows; cosine, that of the smallest angle;
    learnt, a codebook trained by gradients; simvq, a trained linear map of fixed vectors; implicit, a network makes
    each layer's codebook from the layers before (QINCo; slow, try --layers 2 --codes 64).

    Without vectors: fsq, each of a few numbers rounded to a few levels; fsp, its quantile, with noise in training; lfq,
    its sign, with entropies that keep all codes in use; bsq, the same on a sphere; latent, the nearest of a few learnt
    values.

    Start it under torchrun to use more machines: torchrun --nproc-per-node 4 -m examples.vqvae --out DIR
    """

    mesh: str | None = None
    """As in dp=2 or fsdp=2, which both split a batch; default: all of torchrun's ranks, or 1."""
    out: Path | None = None
    """Empty folder to write to; default: the first free of runs/vqvae, runs/vqvae-2, ..."""
    save_every: int = 200
    """Steps between saved states."""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of a run to continue, to the bit; its options need not be given again."""

    def check(self) -> None:
        """Raise ValueError for values out of range, before anything is started or read."""
        super().check()
        if self.save_every < 1:
            raise ValueError(f"--save-every is {self.save_every}; wanted at least 1")
        if self.resume is not None and self.out is not None:
            raise ValueError("--resume continues in its own folder; leave out --out")

    def axes(self, world: int | None) -> dict[str, int]:
        """Return the mesh as axis -> size. ``world`` is the number of processes, None if this one starts them."""
        axes = axes_of(self.mesh, world, alone=1)
        if self.batch < (ranks := math.prod(axes.values())):
            raise ValueError(f"--batch is {self.batch} over {ranks} ranks; wanted at least a patch for each")
        return axes

    def job(self) -> Job:
        """Return the options that define the training."""
        return Job(**self.shared())

    def shared(self) -> dict[str, Any]:
        """Return the options that must agree on all ranks and on resumption, because they change the result."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Job)}


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``. Return 0, 1 if a rank failed, or 2 for bad input, with one line on stderr."""
    prepare = lambda options: train.prepare(options.job())
    return runs.command("vqvae", Options(), sys.argv[1:] if args is None else args, prepare, work)


@launch.record
def work(options: Options) -> Result | str:
    """Run one rank. Return its result, or a message if the input is at fault."""
    try:
        folder, job = runs.folder(options), options.job()
        run, training = train.start(job, options.axes(None))
        resumed = options.resume is not None
        training = runs.load(options, training) if resumed else train.initialise_books(run, training)
        first, ranks = dist.get_rank() == 0, dist.get_world_size()
        runs.announce(options)
        with Report(folder, first, job.steps, int(training.done), pictures.describe) as shown:
            shown.say(f"{ranks} rank{'s' * (ranks > 1)}, mesh {options.mesh}; {pictures.title(job)}; writing {folder}")
            while (done := int(training.done)) < job.steps:
                training, step = train.take_step(run, training)
                shown.step(step)
                if (done + 1) % options.save_every == 0 or done + 1 == job.steps:
                    runs.save(options, training)
            shown.say("measuring held-out patches, and k-means of their pixels")
            result, counts, books = train.measure(run, training)
        if first:
            runs.write(folder / runs.RESULT, dataclasses.asdict(result))
            images = pictures.reconstruction(folder, run, training, books, result), pictures.codebook(folder, counts)
            console = Console()
            console.print(pictures.table(job, result, ranks))
            console.print(f"pictures {images[0]}\n         {images[1]}\nmetrics  {folder / METRICS}", soft_wrap=True)
        shard.close()
        return result
    except ValueError as error:
        return str(error)
