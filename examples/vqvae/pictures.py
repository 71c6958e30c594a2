"""The output of examples/vqvae/cli.py: a line a step, one table, two pictures."""

from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from fquant import vq
from fquant.io.safetensors import replacing
from models import autoencoder

from ..common.progress import metrics
from . import photographs, quantisers, train
from .train import Job, Result, Run, Step, Training

COLOURS = ("#1f4e79", "#c55a11", "#548235", "#7f6000")  # of layers, in turn


def describe(x: Step) -> str:
    """Format the measurements of a step."""
    used = ", ".join(f"{number:.0f}" for number in x.perplexity)
    return f"loss {x.loss:.4f}  {x.psnr:.2f} dB  perplexity {used}  {x.images_per_second:,.0f} patches/s"


def title(job: Job) -> str:
    """Describe the quantiser in a few words."""
    times = "".join(f"{number} x " for number in (job.groups, job.layers) if number > 1)
    return f"{job.quantiser} of {times}{job.codes} codes"


def table(job: Job, result: Result, ranks: int) -> Table:
    """Return the table of results."""
    out = Table(title=f"Held-out patches: {title(job)}, {ranks} rank{'s' * (ranks > 1)}")
    for name in ("", "bits a pixel", "PSNR, dB", "perplexity", "codes used"):
        out.add_column(name, justify="right" if name else "left")
    rate = f"{result.bits_per_pixel:.3f}"
    out.add_row("mean colour of a patch", "", f"{result.psnr_mean:.2f}", "", "")
    out.add_row("k-means of pixels", rate, f"{result.psnr_kmeans:.2f}", "", "")
    usage = [", ".join(f"{x:.0f}" for x in result.perplexity), ", ".join(f"{x:.1%}" for x in result.used)]
    out.add_row("VQ-VAE", rate, f"{result.psnr:.2f}", *usage)
    return out


def reconstruction(folder: Path, run: Run, training: Training, books: list[vq.Book], result: Result) -> Path:
    """Draw held-out crops of the photographs, and their reconstructions by the autoencoder and by k-means."""
    scale, verbs = train.config(run.job).scale, run.quantiser.verbs
    net, state = training.net, training.quantiser
    rows: dict[str, list[Tensor]] = {
        "held-out part": [],
        f"VQ-VAE\n{result.psnr:.1f} dB": [],
        f"k-means of pixels\n{result.psnr_kmeans:.1f} dB": [],
    }
    for photograph in run.photographs:
        original = photographs.portrait(photograph, scale)[None]
        with torch.no_grad():
            codes = autoencoder.to_codes(net, state, original, verbs)
            decoded = autoencoder.from_codes(net, state, codes, verbs)
        each = original, decoded, quantisers.from_pixels(books, original, scale)
        for row, image in zip(rows.values(), each, strict=True):
            row.append(image[0].movedim(0, -1).clamp(0, 1))
    figure = Figure(figsize=(1.9 * len(run.photographs) + 1, 11.5), dpi=120)
    grid: Any = figure.subplots(len(rows), len(run.photographs))
    for line, (name, row) in zip(grid, rows.items(), strict=True):
        line[0].set_ylabel(name)
        for axes, image in zip(line, row, strict=True):
            axes.imshow(image.numpy(), interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
    for axes, photograph in zip(grid[0], run.photographs, strict=True):
        axes.set_title(photograph.name, fontsize=10)
    figure.suptitle(f"{title(run.job)}, {result.bits_per_pixel:.3f} bits a pixel", fontsize=11)
    return _save(figure, folder / "reconstruction.png")


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
    return _save(figure, folder / "codebook.png")


def _save(figure: Figure, path: Path) -> Path:
    figure.tight_layout()
    with replacing(path) as file, matplotlib.rc_context({"savefig.dpi": "figure"}):
        figure.savefig(file, format="png")
    return path
