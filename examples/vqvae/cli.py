"""Train a VQ-VAE on patches of photographs, on one process or over several.

    python -m examples.vqvae --quantiser fsq --codes 1000 --steps 4000        # default: a codebook of 512
    python -m examples.vqvae --mesh dp=2
    torchrun --nproc-per-node 4 -m examples.vqvae --out DIR
    python -m examples.vqvae --resume runs/vqvae                 # continue, to the bit

The photographs are those of scikit-image's wheel (pip install 'fquant[images]'); the middle fifth of each is held out.
A run writes reconstruction.png, codebook.png and the files of every run (examples/common/runs.py) to a new folder.
"""

import dataclasses

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fquant.vq.composite.residual import Residual

from ..common import runs
from ..common.progress import METRICS
from . import pictures, train
from .options import Options
from .train import Result, Run, Step, Training, title


def summary(x: Step) -> str:
    """Format the measurements of a step."""
    used = ", ".join(f"{number:.0f}" for number in x.perplexity)
    return f"loss {x.loss:.4f}  {x.psnr:.2f} dB  perplexity {used}  {x.images_per_second:,.0f} patches/s"


def show(run: Run, training: Training, measured: tuple[Result, Tensor, Residual]) -> None:
    """Write the result and two pictures, and print one table."""
    folder, console, (result, counts, books) = run.options.folder(), Console(), measured
    runs.write(folder / runs.RESULT, dataclasses.asdict(result))
    images = pictures.reconstruction(folder, run, training, books, result), pictures.codebook(folder, counts)
    console.print(table(run, result, dist.get_world_size()))
    console.print(f"pictures {images[0]}\n         {images[1]}\nmetrics  {folder / METRICS}", soft_wrap=True)


def table(run: Run, result: Result, ranks: int) -> Table:
    """Return the table of results."""
    out = Table(title=f"Held-out patches: {title(run)}, {ranks} rank{'s' * (ranks > 1)}")
    for name in ("", "bits a pixel", "PSNR, dB", "perplexity", "codes used"):
        out.add_column(name, justify="right" if name else "left")
    rate = f"{result.bits_per_pixel:.3f}"
    out.add_row("mean colour of a patch", "", f"{result.psnr_mean:.2f}", "", "")
    out.add_row("k-means of pixels", rate, f"{result.psnr_kmeans:.2f}", "", "")
    usage = [", ".join(f"{x:.0f}" for x in result.perplexity), ", ".join(f"{x:.1%}" for x in result.used)]
    out.add_row("VQ-VAE", rate, f"{result.psnr:.2f}", *usage)
    return out


PROGRAM = runs.Program("vqvae", Options(), train.prepare, train.start, train.take, train.measure, title, summary, show)


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``. Return 0, 1 if a rank failed, or 2 for bad input, with one line on stderr."""
    return runs.command(PROGRAM, args)
