"""The two pictures of a run of examples/vqvae/cli.py."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from fquant.vq.composite.residual import Residual

from ..common.progress import draw, metrics
from . import photographs, train
from .train import Result, Run, Training

COLOURS = ("#1f4e79", "#c55a11", "#548235", "#7f6000")  # of layers, in turn


def reconstruction(folder: Path, run: Run, training: Training, books: Residual, result: Result) -> Path:
    """Draw held-out crops of the photographs, and their reconstructions by the autoencoder and by k-means."""
    rows: dict[str, list[Tensor]] = {
        "held-out part": [],
        f"VQ-VAE\n{result.psnr:.1f} dB": [],
        f"k-means of pixels\n{result.psnr_kmeans:.1f} dB": [],
    }
    for photograph in run.photographs:
        original = photographs.portrait(photograph, run.cfg.scale)[None]
        _, *others = train.reconstructions(run, training, books, original)
        for row, image in zip(rows.values(), (original, *others), strict=True):
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
    figure.suptitle(f"{train.title(run)}, {result.bits_per_pixel:.3f} bits a pixel", fontsize=11)
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
