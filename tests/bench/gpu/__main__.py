"""What a GPU is asked for, one command a section: right, fast, and as planned.

    python -m tests.bench.gpu check                  # every kernel against the reference; tests with --device cuda
    python -m tests.bench.gpu resources              # registers and memory of kernels, compiled without a device
    python -m tests.bench.gpu table --out table.md   # kernels beside bf16, bitsandbytes and torch
    python -m tests.bench.gpu sweep                  # candidate plans of products
    python -m tests.bench.gpu job                    # losses of examples.qlora beside the host's
    python -m tests.bench.gpu step                   # the step of Llama-3.1-8B beside the plan and PEFT
    python -m tests.bench.gpu large                  # the step of Llama-3-70B, on one card
    python -m tests.bench.gpu mesh                   # a mesh of one rank

Each command ends by itself within ``--minutes``, and prints one table (lines.py). Without a CUDA device the table has
predictions alone. The exit status is 0 for bounds met or missed, 1 if a line failed, and 2 for bad options.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import tyro

from fquant.compile.roofline import DEVICES, Device, of
from fquant.device import parse, why_no_cuda
from models.presets import PRESETS

from . import integers, lines, resources, step, table, whole


@dataclass(frozen=True)
class Command:
    """The options that all commands have."""

    minutes: float = 9.0
    """Time for the whole command; what does not fit says so."""
    out: Path | None = None
    """File for the table in Markdown, written again after each line."""
    card: str = "h100"
    """Card to predict for where there is no device: b200, h200, h100, a100-80, l40s, rtx4090 and others."""
    seed: int = 0
    """Of the random numbers."""

    def items(self, device: torch.device | None, card: Device) -> Iterator[lines.Item]:
        """Yield the lines of the command."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        if not self.minutes > 0:
            raise ValueError(f"--minutes is {self.minutes}; wanted a number above 0")
        if self.card not in DEVICES:
            raise ValueError(f"--card {self.card} is unknown; wanted one of {', '.join(DEVICES)}")
        if self.out is not None and (self.out.is_dir() or not self.out.absolute().parent.is_dir()):
            raise ValueError(f"--out {self.out}: wanted a file, in a folder that exists")


@dataclass(frozen=True)
class Check(Command):
    """Compare every kernel with the reference, then run the tests of devices."""

    sanitizer: bool = False
    """Run small cases under compute-sanitizer's memcheck instead."""

    def items(self, device: torch.device | None, card: Device) -> Iterator[lines.Item]:
        """Yield the lines of the command."""
        return whole.checks(device, self.seed, self.sanitizer)


@dataclass(frozen=True)
class Times(Command):
    """Time kernels beside bf16, bitsandbytes and torch."""

    sizes: tyro.conf.OmitArgPrefixes[table.Sizes] = field(default_factory=table.Sizes)
    """What to time."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        super().check()
        self.sizes.check()

    def items(self, device: torch.device | None, card: Device) -> Iterator[lines.Item]:
        """Yield the lines of the command."""
        return chain(table.items(self.sizes, device, card), integers.items(self.sizes, device, card))


@dataclass(frozen=True)
class Resources(Times):
    """Compile kernels ahead of time for the card, which need not be there, and show what they take."""

    minutes: float = 30.0
    """Time for the whole command; what does not fit says so."""

    def items(self, device: torch.device | None, card: Device) -> Iterator[lines.Item]:
        """Yield the lines of the command."""
        return resources.items(card, self.sizes.out_dim, self.sizes.in_dim, self.sizes.rows)


@dataclass(frozen=True)
class Sweep(Times):
    """Time every candidate plan of decoding and of products."""

    def items(self, device: torch.device | None, card: Device) -> Iterator[lines.Item]:
        """Yield the lines of the command."""
        return chain(table.sweep(self.sizes, device), integers.sweep(self.sizes, device, table.generation(device)))


@dataclass(frozen=True)
class Job(Command):
    """Compare the losses of examples.qlora on the device with those on the host."""

    steps: int = 10
    """Steps of the optimiser."""

    def items(self, device: torch.device | None, card: Device) -> Iterator[lines.Item]:
        """Yield the lines of the command."""
        return whole.job(device, self.steps)


@dataclass(frozen=True)
class Step(Command):
    """Time the step of a model's shapes beside the plan, and beside PEFT with bitsandbytes."""

    model: str = "llama3-8b"
    """A preset of examples.plan."""
    batch: int = 4
    """Rows of a step."""
    seq: int = 2048
    """Tokens of a row."""
    steps: int = 5
    """Timed steps."""
    checkpoint: step.Checkpoint = "selective"
    """Activations kept for the backward."""
    ways: tuple[step.Way, ...] = ("captured", "ordered", "without graph", "uncaptured", "inductor")
    """How the step is run."""
    top: int = 20
    """Kernels of the captured step to show, those that take most time."""
    peft: bool = True
    """Time PEFT with bitsandbytes too."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        super().check()
        if self.model not in PRESETS:
            raise ValueError(f"--model {self.model} is unknown; wanted one of {', '.join(PRESETS)}")
        for name, least in (("batch", 1), ("seq", 1), ("steps", 1), ("top", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} is {getattr(self, name)}; wanted at least {least}")

    def case(self, **more: Any) -> step.Case:
        """Return the step."""
        return step.Case(PRESETS[self.model], self.batch, self.seq, self.checkpoint, **more)

    def items(self, device: torch.device | None, card: Device) -> Iterator[lines.Item]:
        """Yield the lines of the command."""
        yield from step.items(self.case(), device, card, self.ways, 15_000, None, self.steps, self.top, self.peft)
        if self.ways == Step.ways:
            one, most = replace(self.case(), batch=1, checkpoint="full"), 7.4 if self.model == "llama3-8b" else None
            yield from step.items(one, device, card, ("captured",), 0, most, self.steps)


@dataclass(frozen=True)
class Large(Step):
    """Time the step of Llama-3-70B's shapes on one card, and its peak beside the plan's."""

    model: str = "llama3-70b"
    """A preset of examples.plan."""
    batch: int = 1
    """Rows of a step."""
    steps: int = 2
    """Timed steps."""
    checkpoint: step.Checkpoint = "full"
    """Activations kept for the backward."""
    ways: tuple[step.Way, ...] = ("captured",)
    """How the step is run."""
    peft: bool = False
    """Time PEFT with bitsandbytes too."""
    offload: bool = False
    """Keep the blocks in the host's memory."""

    def items(self, device: torch.device | None, card: Device) -> Iterator[lines.Item]:
        """Yield the lines of the command."""
        for checkpoint in dict.fromkeys((self.checkpoint, "selective")):
            case = replace(self.case(offload="block" if self.offload else None), checkpoint=checkpoint)
            yield from step.items(case, device, card, self.ways, 1500, None, self.steps, self.top, self.peft)


@dataclass(frozen=True)
class Mesh(Command):
    """Compare a mesh of one rank with no mesh."""

    def items(self, device: torch.device | None, card: Device) -> Iterator[lines.Item]:
        """Yield the lines of the command."""
        return whole.meshes(device)


COMMANDS: dict[str, Any] = {
    "check": Check, "resources": Resources, "table": Times, "sweep": Sweep, "job": Job, "step": Step,
    "large": Large, "mesh": Mesh,
}  # fmt: skip


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args`` and return its exit status."""
    chosen: Any = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, args=sys.argv[1:] if args is None else args, prog="python -m tests.bench.gpu", description=__doc__
    )
    try:
        chosen.check()
    except ValueError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    device = None if why_no_cuda() else parse("cuda")
    if device is not None:
        torch.cuda.set_device(device)
        torch.manual_seed(chosen.seed)
    card = DEVICES[chosen.card] if device is None else of(device)
    name = next(name for name, kind in COMMANDS.items() if type(chosen) is kind)
    session = lines.Session(device, chosen.minutes, chosen.out)
    return lines.status(lines.run(name, chosen.items(device, card), session))


if __name__ == "__main__":
    sys.exit(main())
