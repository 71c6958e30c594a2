"""The QLoRA step of a model's shapes on a device: its speed and memory beside the plan's, by way of running it.

Weights are random, made on the device one at a time and packed there. PEFT with bitsandbytes takes the same step in a
process of its own (peft_side.py).
"""

import gc
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

import shard
from examples.common import training_step
from examples.common.command_line import pattern, quantised
from examples.common.pricing import FEW, Job, Price, arguments, price
from examples.common.training_step import Checkpoint, Offload, Setup
from examples.data.dataset import Rows
from fquant import NF4_DQ, jit, lora, optim, tree
from fquant.compile import trace
from fquant.compile.cuda_graph import synchronises
from fquant.compile.passes.donate import written_over
from fquant.compile.roofline import Device
from fquant.lazy import Lazy
from models import decoder
from models.config import Config

from .lines import ROOT, Item, Result, alone, at_least

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
RANK, GIB = 16, 2**30
Way = Literal["captured", "ordered", "without graph", "inductor", "uncaptured"]


@dataclass(frozen=True)
class Case:
    """A step to measure: the model, the tokens, and how it is run."""

    cfg: Config
    batch: int
    seq: int
    checkpoint: Checkpoint = "selective"
    offload: Offload | None = None

    @property
    def tokens(self) -> int:
        """Return the tokens of a step."""
        return self.batch * self.seq


class Running:
    """A step on a device, with its state."""

    def __init__(self, case: Case, device: torch.device, how: Way = "captured") -> None:
        gc.collect()
        mesh, rules, cfg = shard.mesh(device, fsdp=1), training_step.rules(case.offload), case.cfg
        opt = optim.adamw(1e-4)
        base = quantised(random_weights(cfg, device), NF4_DQ)
        adapters = lora.init(base, pattern(TARGETS), RANK, RANK, key=0)
        placed, adapters = shard.place((base, adapters), decoder.dims(cfg), rules, mesh, cfg)
        mode: Checkpoint = "full" if how == "uncaptured" else case.checkpoint
        ordered = case.batch if how == "ordered" else None
        sizes = case.batch, case.seq, mode
        setup = Setup(cfg, mesh, opt, optim.constant(1e-4), *sizes, rules=rules, ordered=ordered)
        step: Any = training_step.train_step
        if how != "uncaptured":
            step = jit(step, compile=how == "inductor", cuda_graph=how != "without graph" and "auto", **setup.capture())
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, cfg.vocab, (case.batch, case.seq + 1), generator=generator).to(device)
        rows = Rows(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        count = torch.tensor(case.tokens, device=device)
        self.case, self.device, self.step = case, device, step
        self.rest = shard.local(placed), ((rows, None),), count, setup
        self.state = training_step.initial(adapters, opt)

    def take(self) -> Tensor:
        """Take one step and return its loss; wait for nothing."""
        self.state, measured = self.step(self.state, *self.rest)
        return measured.loss

    def measured(self, steps: int) -> "Ran":
        """Return the figures of the median step, and of one more whose waits are counted and kernels listed.

        The peak is that of the second step on: while that is recorded as a CUDA graph, the allocator sees its tensors.
        """
        cuda = self.device.type == "cuda"
        self.take()
        wait = partial(torch.cuda.synchronize, self.device) if cuda else lambda: None
        with alone(self.device):
            wait()
            if cuda:
                torch.cuda.reset_peak_memory_stats(self.device)
            for _ in range(2):  # the first is recorded
                self.take()
            wait()
            seconds = list[float]()
            for _ in range(steps):
                began = time.perf_counter()
                loss = float(self.take())
                wait()
                seconds.append(time.perf_counter() - began)
            peak = torch.cuda.max_memory_allocated(self.device) if cuda else 0
            return Ran(median(seconds), peak, loss, self.waits() if cuda else [], self.kernels())

    def waits(self) -> list[str]:
        """Return the places in which the host waits for the device in a step."""
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self.take()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [one for one in seen if "called a synchronizing" in str(one.message).lower()]
        return [f"{Path(one.filename).name}:{one.lineno}" for one in waits]

    def kernels(self) -> "list[Kernel]":
        """Return the device's kernels in a step, those that take most time first."""
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as seen:
            float(self.take())
        time_of: Callable[[Any], float] = lambda e: getattr(e, "self_device_time_total", 0.0)
        events = sorted(seen.key_averages(), key=time_of, reverse=True)
        return [Kernel(e.key, time_of(e), e.count) for e in events if time_of(e)]


class Kernel(NamedTuple):
    """A kernel of a step: its name, the microseconds of all its calls, and their number."""

    name: str
    us: float
    calls: int


class Ran(NamedTuple):
    """Figures of a step that ran: its seconds, its peak in bytes, its loss, the host's waits, and its kernels."""

    seconds: float
    peak: int
    loss: float
    waits: list[str]
    kernels: list[Kernel]


def ran(case: Case, device: torch.device, how: Way, steps: int) -> Ran:
    """Run a case and return its figures."""
    with shard_closed():
        return Running(case, device, how).measured(steps)


class shard_closed:
    """End the process group behind the block, so that the next begins with none."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        shard.close()
        gc.collect()


def random_weights(cfg: Config, device: torch.device) -> Any:
    """Return a tree of Lazy weights in bf16, drawn on ``device`` when they are read."""

    def leaf(path: str, like: Tensor) -> Lazy:
        def read() -> Tensor:
            if like.ndim == 1:
                return torch.ones(like.shape, dtype=like.dtype, device=device)
            return torch.randn(like.shape, dtype=like.dtype, device=device).mul_(0.02)

        return Lazy(read, like, lambda: f"random {path}", device=device)

    return tree.map_with_path(leaf, decoder.shapes(cfg, torch.bfloat16))


@cache
def planned(case: Case, card: Device) -> Price:
    """Return the plan's price of a case on ``card``."""
    sizes = TARGETS, RANK, case.batch, case.seq
    job = Job(case.cfg, NF4_DQ, *sizes, checkpoint=case.checkpoint, offload=case.offload)
    return price(job, {"fsdp": 1}, device=card)


def predicted(case: Case, card: Device) -> str:
    """Return the plan's speed, share of the limit and peak in words."""
    found = planned(case, card)
    assert found.predicted is not None
    speed = case.tokens / found.predicted.seconds
    return f"{speed:,.0f} tokens/s, {100 * found.predicted.share:.0f} % of the limit, {found.peak / GIB:.2f} GiB"


def items(
    case: Case, device: torch.device | None, card: Device, ways: Sequence[Way], least: float, most: float | None,
    steps: int, top: int = 0, beside: bool = False,
) -> Iterator[Item]:  # fmt: skip
    """Yield the lines of a step: speeds by way; of the captured one its peak, waits and ``top`` kernels; and PEFT's."""
    found, name = dict[Way, Ran](), f"{case.batch} x {case.seq}, {case.checkpoint}"

    def speed(how: Way) -> Result:
        assert device is not None
        found[how] = ran(case, device, how, steps)
        seconds, plan = found[how].seconds, planned(case, card).predicted
        assert plan is not None
        share, peak = f"{100 * plan.limit / seconds:.0f} % of the limit", f"{found[how].peak / GIB:.2f} GiB"
        text = f"tokens/s, {share}, {peak}, loss {found[how].loss:.4f}"
        return at_least(case.tokens / seconds, least if how == "captured" else 0, text, "{:,.0f}")

    for how in ways:
        if how != "captured":
            yield Item(f"{name}: {how}", measure=partial(speed, how), minutes=1)
            continue
        wanted, guess = f"at least {least:,.0f} tokens/s" if least else "", partial(predicted, case, card)
        yield Item(f"{name}: {how}", wanted, partial(speed, how), guess, minutes=1)
        wanted = "within 5 %" + (f", at most {most} GiB" if most else "")
        measure = lambda: peak(captured(found), planned(case, card), most)
        yield Item(f"{name}: peak", wanted, measure, lambda: f"{planned(case, card).peak / GIB:.2f} GiB")
        count, guess = lambda: waited(captured(found).waits), lambda: str(len(waiting_nodes(case)))
        yield Item(f"{name}: host synchronisations in a replayed step", "0", count, guess)
        for i in range(top):
            yield Item(f"{name}: kernel {i + 1}", measure=lambda i=i: kernel(captured(found).kernels, i))
    if beside:
        ours = lambda: case.tokens / found["captured"].seconds if "captured" in found else None
        yield Item(f"{name}: PEFT with bitsandbytes", "at most half", lambda: peft(case, steps, ours()), minutes=1)


def captured(found: dict[Way, Ran]) -> Ran:
    """Return the figures of the captured step; raise RuntimeError if it did not run."""
    if "captured" not in found:
        raise RuntimeError("the step did not run")
    return found["captured"]


def peak(ran: Ran, price: Price, most: float | None) -> Result:
    """Return the peak of a step beside the plan's."""
    off = ran.peak / price.peak - 1
    return Result(
        f"{ran.peak / GIB:.2f} GiB, {100 * off:+.1f} %", abs(off) <= 0.05 and (most is None or ran.peak <= most * GIB)
    )


def kernel(kernels: list[Kernel], i: int) -> Result:
    """Return the share of the ``i``-th kernel of a step."""
    if i >= len(kernels):
        return Result("none")
    name, us, calls = kernels[i]
    total = sum(each.us for each in kernels)
    return Result(f"{us:,.0f} us, {100 * us / total:.1f} %, {calls} calls of {name[:90]}")


def waited(places: list[str]) -> Result:
    """Return the number of waits, and their places."""
    return Result(" ".join([str(len(places)), *dict.fromkeys(places)]), not places)


def waiting_nodes(case: Case) -> list[Node]:
    """Return the nodes of a step of ``FEW`` layers for which the host waits."""
    cfg = replace(case.cfg, num_layers=min(FEW, case.cfg.num_layers))
    job, cuda = Job(cfg, NF4_DQ, TARGETS, RANK, case.batch, case.seq, checkpoint=case.checkpoint), torch.device("cuda")
    with shard.abstract_mesh(cuda, fsdp=1) as mesh:
        args = arguments(job, mesh)
        options = args["setup"].capture()
        donated = written_over(args, options.pop("donate"))
        run = partial(trace.apply, training_step.train_step)
        return synchronises(trace.trace(run, args, donated, **options, device=cuda).module.graph)


def peft(case: Case, steps: int, ours: float | None) -> Result:
    """Take the step of PEFT with bitsandbytes in a process of its own, beside ``ours`` in tokens/s if it ran."""
    cfg = case.cfg
    sizes = cfg.num_layers, cfg.dim, cfg.hidden, cfg.vocab, cfg.num_heads, cfg.num_kv_heads
    sizes = (*sizes, case.batch, case.seq, steps)
    command = [sys.executable, "-m", "tests.bench.gpu.peft_side", *map(str, sizes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
    found = json.loads(done.stdout.strip().splitlines()[-1])
    theirs = case.tokens / found["seconds"]
    text = f"{theirs:,.0f} tokens/s, {found['peak'] / GIB:.2f} GiB"
    return Result(text, None if ours is None else theirs <= ours / 2)
