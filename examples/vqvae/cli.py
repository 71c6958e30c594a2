"""Train a VQ-VAE on patches of photographs, on one process or over several.

    python -m examples.vqvae --quantiser fsq --codes 1000 --steps 4000        # default: a codebook of 512
    python -m examples.vqvae --mesh dp=2
    torchrun --nproc-per-node 4 -m examples.vqvae --out DIR
    python -m examples.vqvae --device cpu                        # default: cuda, where torch can use it
    python -m examples.vqvae --resume runs/vqvae                 # continue, to the bit

The photographs are those of scikit-image's wheel (pip install 'fquant[images]'); the middle fifth of each is held out.
A run writes reconstruction.png, codebook.png and the files of every run (examples/common/runs.py) to a new folder.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch.distributed as dist
from matplotlib.figure import Figure
from rich.table import Column, Table
from torch import Tensor

from fquant.device import HOST
from fquant.vq.composite.residual import Residual
from shard.device_mesh import device_of

from ..common import devices, run_folder, runs, terminal
from ..common.progress import METRICS, draw, metrics
from . import photographs, train
from .options import Options
from .train import Result, Run, Step, Training

COLOURS = ("#1f4e79", "#c55a11", "#548235", "#7f6000")  # of layers, in turn


def summary(x: Step) -> str:
    """Format the measurements of a step."""
    used = ", ".join(f"{number:.0f}" for number in x.perplexity)
    return f"loss {x.loss:.4f}  {x.psnr:.2f} dB  perplexity {used}  {x.images_per_second:,.0f} patches/s"


def title(run: Run) -> str:
    """Describe the quantiser in a few words."""
    options = run.options
    times = "".join(f"{number} x " for number in (options.groups, options.layers) if number > 1)
    return f"{options.quantiser} of {times}{options.codes} codes"


def show(run: Run, training: Training, measured: tuple[Result, Tensor, Residual]) -> None:
    """Write the result and two pictures, and print one table."""
    folder, console, (result, counts, books) = run.options.folder(), terminal.console(), measured
    run_folder.write(folder / runs.RESULT, dataclasses.asdict(result))
    images = reconstruction(folder, run, training, books, result), codebook(folder, counts)
    console.print(table(run, result, dist.get_world_size()))
    console.print(f"pictures {images[0]}\n         {images[1]}\nmetrics  {folder / METRICS}", soft_wrap=True)


def table(run: Run, result: Result, ranks: int) -> Table:
    """Return the table of results."""
    columns = (Column(name, justify="right") for name in ("bits a pixel", "PSNR, dB", "perplexity", "codes used"))
    out = Table("", *columns, title=f"Held-out patches: {title(run)}, {ranks} rank{'s' * (ranks > 1)}")
    rate = f"{result.bits_per_pixel:.3f}"
    out.add_row("mean colour of a patch", "", f"{result.psnr_mean:.2f}", "", "")
    out.add_row("k-means of pixels", rate, f"{result.psnr_kmeans:.2f}", "", "")
    usage = [", ".join(f"{x:.0f}" for x in result.perplexity), ", ".join(f"{x:.1%}" for x in result.used)]
    out.add_row("VQ-VAE", rate, f"{result.psnr:.2f}", *usage)
    return out


def reconstruction(folder: Path, run: Run, training: Training, books: Residual, result: Result) -> Path:
    """Draw held-out crops of the photographs, and their reconstructions by the autoencoder and by k-means."""
    figure = Figure(figsize=(1.9 * len(run.photographs) + 1, 11.5), dpi=120)
    grid: Any = figure.subplots(3, len(run.photographs))
    for column, (name, photograph) in zip(grid.T, run.photographs.items(), strict=True):
        original = photographs.portrait(photograph, run.cfg.scale)[None]
        _, *others = train.reconstructions(run, training, books, devices.to(original, device_of(run.mesh)))
        for axes, image in zip(column, (original, *(x.to(HOST) for x in others)), strict=True):
            axes.imshow(image[0].movedim(0, -1).clamp(0, 1).numpy(), interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        column[0].set_title(name, fontsize=10)
    names = "held-out part", f"VQ-VAE\n{result.psnr:.1f} dB", f"k-means of pixels\n{result.psnr_kmeans:.1f} dB"
    for axes, name in zip(grid[:, 0], names, strict=True):
        axes.set_ylabel(name)
    figure.suptitle(f"{title(run)}, {result.bits_per_pixel:.3f} bits a pixel", fontsize=11)
    return draw(figure, folder / "reconstruction.png")


def codebook(folder: Path, counts: Tensor) -> Path:
    """Draw the usage ``counts`` f32[layers codes] of codes on held-out patches, and the perplexity over steps."""
    steps = metrics(folder)
    figure = Figure(figsize=(11, 4), dpi=120)
    usage, perplexity = figure.subplots(1, 2)
    total = counts.shape[1]
    for i, (layer, colour) in enumerate(zip(counts, COLOURS * len(counts), strict=False)):
        share = layer.sort(descending=True).values / layer.sum().clamp(min=1)
        name = f"layer {i + 1}" if len(counts) > 1 else "codes"
        usage.step(range(1, total + 1), (share * total).tolist(), color=colour, label=name, where="mid")
        perplexity.plot([s["step"] + 1 for s in steps], [s["perplexity"][i] for s in steps], color=colour, label=name)
    usage.axhline(1, color="#999999", linewidth=1, linestyle="--", label="all as often")
    usage.set_yscale("symlog", linthresh=0.1)
    usage.set_ylim(0, 1.3 * max(1.0, total * float((counts / counts.sum(1, keepdim=True).clamp(min=1)).max())))
    usage.yaxis.set_major_formatter("{x:g}")
    usage.set_title(f"Usage on held-out patches, {(counts > 0).float().mean():.1%} of codes", loc="left", fontsize=10)
    usage.set(xlabel="codes, the most frequent first", ylabel="frequency, times the number of codes")
    perplexity.axhline(total, color="#999999", linewidth=1, linestyle="--", label="all codes")
    perplexity.set_title("Perplexity of the codes of a batch", loc="left", fontsize=10)
    perplexity.set(xlabel="step", ylabel="perplexity", ylim=(0, None))
    for axes in (usage, perplexity):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    return draw(figure, folder / "codebook.png")


def prepare(options: Options) -> bool:
    """Check all input; return False, because training follows."""
    train.prepare(options)
    return False


PROGRAM = runs.Program(
    "vqvae", Options(), prepare, train.start, train.take, train.measure, title, summary, show, train.placed
)


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``. Return 0, 1 if a rank failed, or 2 for bad input, with one line on stderr."""
    return runs.command(PROGRAM, args)
