"""The training that examples/vqvae/cli.py starts on every rank: crop patches, take steps, measure.

One captured step is the same on one process and on many, except for its sums over ranks: of the losses' counts before
the gradient, then of gradients, losses, statistics and usage. A patch and its random draws are functions of the seed,
the step and its number in the batch. Every mesh therefore computes the same sums.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.func import grad_and_value

import shard
from fquant import jit, optim, random, tree, vq
from models import autoencoder
from models.autoencoder import Autoencoder, AutoencoderConfig
from shard import agree

from ..common import data
from . import photographs, quantisers
from .photographs import Part, Photograph
from .quantisers import Name, Quantiser

START_ROWS = 8  # rows a code, for k-means of the first latents
BASELINE_ROWS = 64  # rows a code, for k-means of pixels


@dataclass(frozen=True)
class Job:
    """The options that define a training; equal on every rank."""

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

    def check(self) -> None:
        """Raise ValueError for values out of range, before anything is started or read."""
        for name, least in (("dim", 1), ("patch", 1), ("steps", 1), ("batch", 1), ("hidden", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} is {getattr(self, name)}; wanted at least {least}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"--lr is {self.lr}; wanted a number above 0")


@tree.node
class Weights:
    """The differentiated leaves: the autoencoder, and some of the quantiser's state, by path."""

    net: Autoencoder
    quantiser: dict[str, Tensor]


@tree.node
class Training:
    """The state that a step changes; ``moments`` are the optimiser's, of :class:`Weights`."""

    net: Autoencoder
    quantiser: Any
    moments: Any
    done: Tensor  # i64[], the number of steps


@dataclass(frozen=True)
class Run:
    """The constants of a run."""

    job: Job
    mesh: DeviceMesh
    photographs: list[Photograph]
    parts: list[Part]
    quantiser: Quantiser
    schedule: optim.Schedule
    step: Callable[..., Any]  # captured


@dataclass(frozen=True)
class Step:
    """The measurements of one step; a line of metrics.jsonl."""

    step: int
    loss: float
    psnr: float  # of the batch, in dB
    perplexity: list[float]  # of the codes of each layer in the batch
    used: list[float]  # share of the codes of each layer that the batch uses
    lr: float
    images_per_second: float


@dataclass(frozen=True)
class Result:
    """The measurements on the held-out parts of the photographs."""

    bits_per_pixel: float
    psnr: float
    psnr_kmeans: float  # of k-means of pixels, at as many bits
    psnr_mean: float  # of the mean colour of each patch
    perplexity: list[float]
    used: list[float]


def prepare(job: Job) -> tuple[list[Photograph], list[Part], Quantiser]:
    """Return the photographs, their training parts and the quantiser of ``job``; ValueError for bad options."""
    images = photographs.load()
    parts = photographs.parts(images, job.patch)
    scale = config(job).scale
    if job.patch % scale:
        raise ValueError(f"--patch is {job.patch}; wanted a multiple of {scale}, the pixels that a code stands for")
    key = random.fold(random.key(job.seed), "quantiser")
    return images, parts, quantisers.make(job.quantiser, job.codes, job.layers, job.dim, key, job.groups)


def config(job: Job) -> AutoencoderConfig:
    """Return the sizes of the autoencoder."""
    return AutoencoderConfig(dim=job.dim, hidden=job.hidden, inner=max(1, job.hidden // 2))


def start(job: Job, axes: dict[str, int]) -> tuple[Run, Training]:
    """Join the other ranks, compare options and photographs, and initialise, except for :func:`initialise_books`.

    Raises ValueError on every rank if one fails or if they disagree.
    """
    mesh = shard.mesh(dp=axes.get("dp", 1), fsdp=axes.get("fsdp", 1))
    images, parts, quantiser = agree.attempt("prepare", partial(prepare, job))
    agree.same("start", {"options": repr(job), "photographs": data.digest([x.pixels for x in images])})
    net, state = autoencoder.init(config(job), random.fold(random.key(job.seed), "autoencoder")), quantiser.state
    weights = Weights(net, quantisers.trained_leaves(quantiser, state))
    schedule = optim.cosine(job.lr, job.steps + 1, warmup=job.steps // 20)
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedule, weight_decay=0.0))
    step = jit(make_step(quantiser, opt, mesh, photographs.variance(parts)), donate=("net", "state", "moments"))
    run = Run(job, mesh, images, parts, quantiser, schedule, step)
    return run, Training(net, state, opt.init(weights), torch.tensor(0))


def initialise_books(run: Run, training: Training) -> Training:
    """Return ``training`` with its books at the k-means of the untrained autoencoder's latents of some patches."""
    job, key = run.job, random.fold(random.key(run.job.seed), "kmeans")
    if not run.quantiser.learns:
        return training
    positions = (job.patch // config(job).scale) ** 2
    images, _, row_offset = batch(run, key, max(job.batch, -(-START_ROWS * job.codes // positions)))
    with torch.no_grad():
        latents = autoencoder.encode(training.net, images)
    quantiser = quantisers.books_at_kmeans(training.quantiser, latents, key, row_offset, psum(run.mesh))
    return replace(training, quantiser=quantiser)


def batch(run: Run, key: Tensor, size: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return this rank's share of ``size`` patches of ``key``, their numbers, and the offset of their latents.

    The offset is that of a Book: the number of the first row, and the number of rows on all ranks.
    """
    numbers = shard.share(torch.arange(size), run.mesh, shard.Rules())
    images = photographs.patches(run.parts, random.fold(key, numbers), run.job.patch)
    positions = (run.job.patch // config(run.job).scale) ** 2
    return images, numbers, (numbers[0] * positions, torch.tensor(size * positions))


def psum(mesh: DeviceMesh) -> Callable[[Any], Any]:
    """Return the function that sums a tree over all ranks."""
    return partial(shard.psum, mesh=mesh, axes=shard.Rules().batch)


def make_step(quantiser: Quantiser, opt: optim.Optimizer, mesh: DeviceMesh, variance: float) -> Callable[..., Any]:
    """Return the step: a function of the state that it changes, this rank's images, their numbers and the key."""
    summed, verbs = psum(mesh), quantiser.verbs
    scale = {"reconstruction": 1 / variance, **quantiser.weights}

    def step(
        net: Autoencoder, state: Any, moments: Any, images: Tensor, numbers: Tensor, row_offset: Any, key: Tensor
    ) -> tuple[Autoencoder, Any, Any, dict[str, Tensor]]:
        if quantiser.learns:
            options: dict[str, Any] = {"key": key, "draw": True, "row_offset": row_offset}
        else:
            options = {"key": random.fold(key, numbers)} | ({"psum": summed} if quantiser.inside else {})

        def objective(weights: Weights) -> tuple[Tensor, Any]:
            new = quantisers.replace_leaves(state, weights.quantiser)
            losses, out = autoencoder.loss(weights.net, new, images, verbs=verbs, **options)
            counts = summed({name: loss.count for name, loss in losses.items()})
            # A loss has a number for each layer.
            each = [scale[name] * (loss.sum / counts[name].clamp(min=1)).sum() for name, loss in losses.items()]
            usage = quantisers.usage(out.codes, quantiser)
            return torch.stack(each).sum(), (losses["reconstruction"], out.stats, usage)

        weights = Weights(net, quantisers.trained_leaves(quantiser, state))
        grads, (value, aux) = grad_and_value(objective, has_aux=True)(weights)
        grads = shard.reduce(grads, mesh)
        value, (reconstruction, stats, counts) = summed((value, aux))
        updates, moments = opt.update(grads, moments, weights)
        measured = {"loss": value, "mse": vq.mean(reconstruction), "counts": counts}
        weights = optim.apply_updates(weights, updates)
        state = verbs.update(quantisers.replace_leaves(state, weights.quantiser), stats, **quantiser.update)
        return weights.net, state, moments, measured

    return step


def take_step(run: Run, training: Training) -> tuple[Training, Step]:
    """Take one step. Raises ValueError if the loss is not finite."""
    began, done = time.perf_counter(), int(training.done)
    key = random.fold(random.fold(random.key(run.job.seed), "step"), done)
    inputs = batch(run, key, run.job.batch)
    net, state, moments, measured = run.step(training.net, training.quantiser, training.moments, *inputs, key)
    if not torch.isfinite(measured["loss"]):
        raise ValueError(f"step {done}: the loss is {measured['loss'].item()}; use a smaller --lr")
    counts, lr = measured["counts"], float(run.schedule(training.done))
    after = Training(net, state, moments, training.done + 1)
    return after, Step(
        done, measured["loss"].item(), psnr(measured["mse"]), vq.perplexity(counts).tolist(),
        quantisers.share_used(counts), lr, run.job.batch / (time.perf_counter() - began),
    )  # fmt: skip


def measure(run: Run, training: Training) -> tuple[Result, Tensor, list[vq.Book]]:
    """Measure held-out tiles: return results, usage counts f32[layers codes], and the books of pixels."""
    cfg, net, state, verbs = config(run.job), training.net, training.quantiser, run.quantiser.verbs
    books = pixel_books(run)
    tiles = shard.share(photographs.tiles(run.photographs, run.job.patch), run.mesh, shard.Rules())
    errors, counts = torch.zeros(3, dtype=torch.float64), torch.zeros(run.quantiser.num_layers, run.job.codes)
    for images in tiles.split(run.job.batch):
        with torch.no_grad():
            codes = autoencoder.to_codes(net, state, images, verbs)
            decoded = autoencoder.from_codes(net, state, codes, verbs)
        each = decoded, quantisers.from_pixels(books, images, cfg.scale), images.mean((2, 3), keepdim=True)
        errors += torch.stack([(x.expand_as(images) - images).double().square().sum() for x in each])
        counts += quantisers.usage(codes, run.quantiser)
    errors, counts, number = psum(run.mesh)((errors, counts, torch.tensor(tiles.numel())))
    bits = run.quantiser.num_layers * math.log2(run.job.codes) / cfg.scale**2
    ours, kmeans, mean = (psnr(error / number) for error in errors)
    result = Result(bits, ours, kmeans, mean, vq.perplexity(counts).tolist(), quantisers.share_used(counts))
    return result, counts, books


def pixel_books(run: Run) -> list[vq.Book]:
    """Return the k-means of blocks of pixels, with as many codes and layers as the quantiser."""
    job, scale, key = run.job, config(run.job).scale, random.fold(random.key(run.job.seed), "pixels")
    images, _, row_offset = batch(run, key, -(-BASELINE_ROWS * job.codes // (job.patch // scale) ** 2))
    rest, books = quantisers.blocks(images, scale), []
    for i in range(run.quantiser.num_layers):
        book = vq.init(random.fold(key, i), job.codes, rest.shape[-1])
        books.append(vq.kmeans(book, rest, random.fold(key, i), row_offset=row_offset, psum=psum(run.mesh)))
        rest = rest - vq.decode(books[-1], vq.encode(books[-1], rest))
    return books


def psnr(mse: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB for values in [0, 1]."""
    return -10 * math.log10(float(mse))
