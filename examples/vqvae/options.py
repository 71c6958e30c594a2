"""The options of ``python -m examples.vqvae``."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..common import runs
from ..common.devices import DeviceName
from ..common.tracking import Tracker
from .quantisers import Name


@dataclass(frozen=True)
class Options(runs.Options):
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

    ALONE = 1
    LEAST = {"dim": 1, "patch": 1, "hidden": 2}
    POSITIVE = ("lr",)

    quantiser: Name = "vq"
    """Method of quantisation; see above."""
    codes: int = 512
    """Codes a layer: any number in a codebook; a product of 3 to 8 for fsq, fsp, latent; 2^n for lfq, bsq."""
    layers: int = 1
    """Layers, each quantising what those before it leave (residual): vq, learnt, simvq, implicit, fsq, lfq."""
    groups: int = 1
    """Parts of a latent, each with layers of its own (grouped residual), for the same quantisers."""
    dim: int = 32
    """Numbers in a latent, one for each 4 x 4 pixels."""
    hidden: int = 64
    """Channels in the middle of the autoencoder."""
    patch: int = 32
    """Pixels of a side of a training patch, a multiple of 4."""
    steps: int = 2000
    """Steps of the optimiser."""
    batch: int = 64
    """Patches in a step, over all processes."""
    lr: float = 2e-3
    """Peak learning rate; it rises over a twentieth of the steps, and falls along a cosine."""
    seed: int = 0
    """Seed of initial values and of the places of patches."""
    mesh: str | None = None
    """As in dp=2 or fsdp=2, which both split a batch; default: all of torchrun's ranks, or all CUDA devices, or 1."""
    device: DeviceName = "auto"
    out: Path | None = None
    """Empty folder to write to; default: the first free of runs/vqvae, runs/vqvae-2, ..."""
    save_every: int = 200
    """Steps between checkpoints."""
    verify_every: int | None = 20
    """Steps between comparisons of bits: of the state on all ranks; None: never."""
    keep: int = 1
    """Checkpoints to keep, in RUN/checkpoints."""
    track: Tracker | None = None
    """Write the figures of each step for TensorBoard or Weights & Biases too."""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of a run to continue, to the bit; its options need not be given again."""
    elastic: bool = False
    """Begin in --out, or go on there from the last checkpoint; for a command line that torchrun starts again."""
    restarts: int = 0
    """Times that all local processes begin again from the last checkpoint after one of them died."""

    def axes(self, world: int | None = None) -> dict[str, int]:
        """Return the mesh as axis -> size. ``world`` is the number of processes, None if this one starts them."""
        axes = super().axes(world)
        if self.batch < (ranks := math.prod(axes.values())):
            raise ValueError(f"--batch is {self.batch} over {ranks} ranks; wanted at least a patch for each")
        return axes
