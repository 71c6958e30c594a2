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
from fquant.device import HOST
from fquant.vq.composite import residual
from fquant.vq.composite.residual import Residual
from models import autoencoder
from models.autoencoder import Autoencoder, AutoencoderConfig
from shard import agree
from shard.device_mesh import device_of

from ..common import devices, run_folder, verification
from . import photographs, quantisers
from .options import Options
from .quantisers import Quantiser

START_ROWS = 8  # rows a code, for k-means of the first latents
BASELINE_ROWS = 64  # rows a code, for k-means of pixels


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

    options: Options
    cfg: AutoencoderConfig
    mesh: DeviceMesh
    photographs: dict[str, Tensor]
    parts: list[Tensor]
    quantiser: Quantiser
    schedule: optim.Schedule
    step: Callable[..., Any]  # captured
    positions: int  # codes of a patch
    psum: Callable[[Any], Any]  # the sum of a tree over all ranks
    inputs: dict[str, str]  # digests of what it reads (run_folder.digests)


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


def prepare(options: Options) -> tuple[AutoencoderConfig, dict[str, Tensor], list[Tensor], Quantiser]:
    """Return sizes, photographs, their training parts and the quantiser; raise ValueError for bad options."""
    cfg = AutoencoderConfig(dim=options.dim, hidden=options.hidden, inner=max(1, options.hidden // 2))
    images = photographs.load()
    parts = photographs.parts(list(images.values()), options.patch)
    if options.patch % cfg.scale:
        wanted = f"wanted a multiple of {cfg.scale}, the pixels that a code stands for"
        raise ValueError(f"--patch is {options.patch}; {wanted}")
    key = random.fold(random.key(options.seed), "quantiser")
    sizes = options.codes, options.layers, options.dim
    return cfg, images, parts, quantisers.make(options.quantiser, *sizes, key, options.groups)


def start(options: Options) -> tuple[Run, Training]:
    """Join the other ranks, compare options and photographs, and make or load the state.

    Books begin at the k-means of the untrained autoencoder's latents of some patches. Raises ValueError on every rank
    if one fails or if they disagree.
    """
    axes, seed = options.axes(), random.key(options.seed)
    mesh = shard.mesh(options.device, dp=axes.get("dp", 1), fsdp=axes.get("fsdp", 1))
    device = device_of(mesh)
    cfg, images, parts, quantiser = agree.attempt("prepare", partial(prepare, options))
    agree.same("start", {"options": repr(options.shared())} | agree.fingerprint({"photographs": images}))
    inputs = run_folder.digests({"the set of photographs": images})
    run_folder.check_same(options, inputs)
    net = autoencoder.init(cfg, random.fold(seed, "autoencoder"))  # on the host, so that devices begin alike
    net, state = devices.to((net, quantiser.state), device)
    weights = Weights(net, quantisers.trained_leaves(quantiser, state))
    psum = partial(shard.psum, mesh=mesh, axes=shard.Rules().batch)
    schedule = optim.cosine(options.lr, options.steps + 1, warmup=options.steps // 20)
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedule, weight_decay=0.0))
    step = jit(make_step(quantiser, opt, mesh, psum, photographs.variance(parts)), donate=("training",))
    positions = (options.patch // cfg.scale) ** 2
    run = Run(options, cfg, mesh, images, parts, quantiser, schedule, step, positions, psum, inputs)
    training = Training(net, state, opt.init(weights), torch.tensor(0, device=device))
    if run_folder.is_saved(options):
        return run, run_folder.resumed(options, training, *placed(run)[:2])
    if quantiser.learns:
        key = random.fold(seed, "kmeans")
        patches, _, row_offset = batch(run, key, max(options.batch, -(-START_ROWS * options.codes // positions)))
        with torch.no_grad():
            latents = autoencoder.encode(net, patches)
        state = quantisers.books_at_kmeans(state, latents, devices.to(key, device), row_offset, psum)
    return run, replace(training, quantiser=state)


def placed(run: Run) -> verification.Placed:
    """Return what is compared between ranks: the state, of which each has all."""
    return verification.Placed(run.mesh, shard.Rules())


def batch(run: Run, key: Tensor, size: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return this rank's share of ``size`` patches of ``key``, their numbers, and the offset of their latents.

    The offset is that of a Book: the number of the first row, and the number of rows on all ranks. Patches are cut on
    the host, and all three are on the device of the mesh.
    """
    numbers = shard.share(torch.arange(size, device=HOST), run.mesh, shard.Rules())
    images = photographs.patches(run.parts, random.fold(key, numbers), run.options.patch)
    row_offset = numbers[0] * run.positions, torch.tensor(size * run.positions, device=HOST)
    return devices.to((images, numbers, row_offset), device_of(run.mesh))


def make_step(quantiser: Quantiser, opt: optim.Optimizer, mesh: DeviceMesh, psum: Any, variance: float) -> Any:
    """Return the step: next state; loss, mean squared error and usage of codes in the batch."""
    verbs, scale = quantiser.verbs, {"reconstruction": 1 / variance, **quantiser.weights}

    def step(training: Training, images: Tensor, numbers: Tensor, row_offset: Any, key: Tensor) -> Any:
        state = training.quantiser
        if quantiser.learns:
            options: dict[str, Any] = {"key": key, "draw": True, "row_offset": row_offset}
        else:
            options = {"key": random.fold(key, numbers)} | ({"psum": psum} if quantiser.inside else {})

        def objective(weights: Weights) -> tuple[Tensor, Any]:
            new = quantisers.replace_leaves(state, weights.quantiser)
            losses, out = autoencoder.loss(weights.net, new, images, verbs=verbs, **options)
            counts = psum({name: loss.count for name, loss in losses.items()})
            # A loss has a number for each layer.
            each = [scale[name] * (loss.sum / counts[name].clamp(min=1)).sum() for name, loss in losses.items()]
            usage = quantisers.usage(out.codes, quantiser)
            return torch.stack(each).sum(), (losses["reconstruction"], out.stats, usage)

        weights = Weights(training.net, quantisers.trained_leaves(quantiser, state))
        grads, (value, aux) = grad_and_value(objective, has_aux=True)(weights)
        grads = shard.reduce(grads, mesh)
        value, (reconstruction, stats, counts) = psum((value, aux))
        updates, moments = opt.update(grads, training.moments, weights)
        weights = optim.apply_updates(weights, updates)
        how = quantisers.UPDATE if quantiser.learns else {}
        state = verbs.update(quantisers.replace_leaves(state, weights.quantiser), stats, **how)
        return Training(weights.net, state, moments, training.done + 1), (value, vq.mean(reconstruction), counts)

    return step


def take(run: Run, training: Training) -> tuple[Training, Step]:
    """Take one step."""
    began, done = time.perf_counter(), int(training.done)
    lr = float(run.schedule(torch.tensor(done, device=HOST)))
    key = random.fold(random.fold(random.key(run.options.seed), "step"), done)
    given = *batch(run, key, run.options.batch), devices.to(key, device_of(run.mesh))
    training, measured = run.step(training, *given)
    value, mse, counts = (t.to(HOST) for t in measured)
    figures = value.item(), psnr(mse), vq.perplexity(counts).tolist(), quantisers.share_used(counts)
    return training, Step(done, *figures, lr, run.options.batch / (time.perf_counter() - began))


def measure(run: Run, training: Training, say: Callable[[str], None]) -> tuple[Result, Tensor, Residual]:
    """Measure held-out tiles: return results, usage counts f32[layers codes], and the k-means of pixels."""
    say("measuring held-out patches, and k-means of their pixels")
    key = random.fold(random.key(run.options.seed), "pixels")
    patches, _, row_offset = batch(run, key, -(-BASELINE_ROWS * run.options.codes // run.positions))
    pixels = quantisers.blocks(patches, run.cfg.scale)
    key = devices.to(key, pixels.device)
    books = residual.init_books(key, run.options.codes, pixels.shape[-1], run.quantiser.num_layers)
    books = quantisers.books_at_kmeans(books, pixels, key, row_offset, run.psum)
    tiles = shard.share(photographs.tiles(list(run.photographs.values()), run.options.patch), run.mesh, shard.Rules())
    device = device_of(run.mesh)
    errors = torch.zeros(3, dtype=torch.float64, device=device)
    counts = torch.zeros(run.quantiser.num_layers, run.options.codes, device=device)
    for images in devices.to(tiles, device).split(run.options.batch):
        codes, *each = reconstructions(run, training, books, images)
        each.append(images.mean((2, 3), keepdim=True))
        errors += torch.stack([(x.expand_as(images) - images).double().square().sum() for x in each])
        counts += quantisers.usage(codes, run.quantiser)
    errors, counts, number = run.psum((errors, counts, torch.tensor(tiles.numel(), device=device)))
    counts = counts.to(HOST)
    bits = run.quantiser.num_layers * math.log2(run.options.codes) / run.cfg.scale**2
    ours, kmeans, mean = (psnr(error / number) for error in errors)
    result = Result(bits, ours, kmeans, mean, vq.perplexity(counts).tolist(), quantisers.share_used(counts))
    return result, counts, books


def reconstructions(run: Run, training: Training, books: Residual, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of ``images`` f[b c h w], and the images from these codes and from the books of pixels."""
    state, verbs = training.quantiser, run.quantiser.verbs
    with torch.no_grad():
        codes = autoencoder.to_codes(training.net, state, images, verbs)
        decoded = autoencoder.from_codes(training.net, state, codes, verbs)
    return codes, decoded, quantisers.from_pixels(books.layers, images, run.cfg.scale)


def psnr(mse: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB for values in [0, 1]."""
    return -10 * math.log10(float(mse))
