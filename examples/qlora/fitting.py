"""The checkpointing mode of a run: the fastest whose step fits into the memory of a rank, priced before ranks meet.

    choose_checkpoint(options, {"fsdp": 2})       # "none", "selective" or "full"

On the host the last resort is "full": the system may have more memory than it says. A CUDA device has no
more than it says. So a run that cannot fit ends here, before a weight is read. Its error names what would fit.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from fquant import lazy, tree
from fquant.compile import roofline
from fquant.device import HOST, parse
from models import hf

from ..common import devices, pricing
from ..common.command_line import DTYPES, MOMENTS, parse_format, quantised
from ..common.training_step import MODES, ROOM, Checkpoint, Offload
from . import adapters, full_training, teacher
from .options import Options

GIB = 2**30
RANKS = (2, 4, 8, 16, 32, 64)  # that are tried for a base that does not fit

Axes = dict[str, int]


def choose_checkpoint(options: Options, axes: Axes, count: int = 1) -> Checkpoint:
    """Return the fastest checkpointing mode whose predicted peak fits into this rank's memory, or the one asked for.

    A step of ``count`` runs at once is priced as one of so many batches. Call it before the ranks meet, because the
    step is priced on an abstract mesh. Raises ValueError if nothing fits on a CUDA device.
    """
    device = parse(options.device)
    modes: tuple[Checkpoint, ...] = MODES if options.checkpoint is None else (options.checkpoint,)
    last = modes[-1] if device == HOST else None
    if modes[0] == last:
        return modes[0]
    peak = peaks(options, count)
    room = int(ROOM * devices.available_memory(device))
    for mode in modes:
        if mode == last or peak(mode, axes).total <= room:
            return mode
    raise ValueError(_too_big(options, peak, axes, modes[-1], room, device))


@dataclasses.dataclass(frozen=True)
class Peak:
    """The predicted bytes of a rank at its peak: of a step, and of what is split over fsdp among them.

    That are frozen weights, or with full training the parameters and their moments.
    """

    total: int
    frozen: int


def peaks(options: Options, count: int = 1) -> Callable[..., Peak]:
    """Return a function from a mode, a mesh, and perhaps other offload than that of ``options``, to the peak of a rank.

    The weights of a teacher count, and its activations do not.
    """
    cfg, found = hf.lazy(options.model)
    fmt, names = parse_format(options.format, options.block), adapters.targets_in(options.targets, cfg)
    targets = tuple(name for name in names if name not in adapters.PATHS) or names[:1]
    base = lazy.like(quantised(found, fmt))
    more: dict[str, Any] = {"stream": DTYPES[options.dtype], "accumulate": options.accumulate, "base": base}
    more |= {"offload_activations": options.offload_activations, "train": full_training.precision(options)}
    more |= {"moments": MOMENTS[options.moments]}
    more["ordered"] = options.adds_in_order(parse(options.device))
    taught = teacher.find(options, cfg, found)
    card = None if (device := parse(options.device)) == HOST else roofline.of(device)

    def peak(mode: Checkpoint, axes: Axes, offload: Offload | None = options.offload) -> Peak:
        rows = count * options.answers() * -(-options.batch // math.prod(axes.values()))
        job = pricing.Job(cfg, fmt, targets, options.rank, rows, options.seq, checkpoint=mode, offload=offload, **more)
        price = pricing.price(job, axes, device=card)
        held = tree.nbytes(lazy.like(taught.weights)) // axes.get("fsdp", 1) if taught else 0
        split = price.base if options.train == "lora" else price.adapters + price.moments
        return Peak(price.peak + held, split + held)

    return peak


def _too_big(options: Options, peak: Callable[..., Peak], axes: Axes, mode: Checkpoint, room: int, device: Any) -> str:
    """Return what a step needs on ``axes``, and what would fit into ``room`` bytes of a rank."""
    needs = peak(mode, axes)
    got = f"--model {options.model}: a step needs {needs.total / GIB:.2f} GiB a rank"
    fault = f"{got}, and {device} has {room / GIB:.2f} GiB for it"
    full = needs if mode == "full" else peak("full", axes)
    if full.total <= room:
        return f"{fault}; use --checkpoint full"
    if needs.frozen <= room / 2:
        return f"{fault}; use a smaller --batch or --seq"
    now, rest, fixes = axes.get("fsdp", 1), full.total - full.frozen, list[str]()
    meshes = (axes | {"fsdp": n} for n in RANKS if n > now and rest + full.frozen * now / n <= room)  # at the least
    if fits := next((mesh for mesh in meshes if peak("full", mesh).total <= room), None):
        fixes.append(f"--mesh {','.join(f'{axis}={size}' for axis, size in fits.items())}")
    if (
        options.offload is None
        and options.train == "lora"
        and rest <= room
        and peak("full", axes, "block").total <= room
    ):
        fixes.append("--offload block")
    return f"{fault}; use {', or '.join(fixes) or 'more fsdp, and a smaller --batch or --seq'}"
