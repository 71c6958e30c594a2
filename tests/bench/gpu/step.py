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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

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

from .lines import ROOT, Item, Result, at_least, at_most

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
RANK, GIB = 16, 2**30
NODES = "captured, without a CUDA graph"


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

    def __init__(self, case: Case, device: torch.device, how: str = "captured") -> None:
        gc.collect()
        mesh, rules, cfg = shard.mesh(device, fsdp=1), training_step.rules(case.offload), case.cfg
        opt = optim.adamw(1e-4)
        base = quantised(random_weights(cfg, device), NF4_DQ)
        adapters = lora.init(base, pattern(TARGETS), RANK, RANK, key=0)
        placed, adapters = shard.place((base, adapters), decoder.dims(cfg), rules, mesh, cfg)
        mode: Checkpoint = "full" if how == "uncaptured" else case.checkpoint
        setup = Setup(cfg, mesh, opt, optim.constant(1e-4), case.batch, case.seq, mode, rules=rules)
        step: Any = training_step.train_step
        if how != "uncaptured":
            step = jit(step, compile=how == "inductor", cuda_graph=how != NODES and "auto", **setup.capture())
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

    def timed(self, steps: int) -> tuple[float, int, float]:
        """Return the seconds of a step, the peak of tensors in bytes, and the last loss.

        The peak is that of the second step on: while that is recorded as a CUDA graph, the allocator sees its tensors.
        """
        on = self.device.type == "cuda"
        self.take()
        if on:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(2):
            self.take()
        if on:
            torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        for _ in range(steps):
            loss = self.take()
        value = float(loss)
        seconds = (time.perf_counter() - began) / steps
        return seconds, torch.cuda.max_memory_allocated(self.device) if on else 0, value

    def synchronisations(self) -> int:
        """Return how often a replayed step waits for the device."""
        for _ in range(2):  # the second is recorded
            self.take()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self.take()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(one.message).lower() for one in seen)


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


def measured(
    case: Case, device: torch.device, card: Device, how: str, least: float, steps: int,
    speeds: dict[str, float] | None = None,
) -> Result:  # fmt: skip
    """Return the speed, share of the limit and peak of a case; its tokens/s are written to ``speeds``."""
    with shard_closed():
        seconds, peak, loss = Running(case, device, how).timed(steps)
    speed, plan = case.tokens / seconds, planned(case, card)
    if speeds is not None:
        speeds[how] = speed
    assert plan.predicted is not None
    share = 100 * plan.predicted.limit / seconds
    text = f"tokens/s, {share:.0f} % of the limit, {peak / GIB:.2f} GiB, loss {loss:.4f}"
    return at_least(speed, least, text, "{:,.0f}") if least else Result(f"{speed:,.0f} {text}")


class shard_closed:
    """End the process group behind the block, so that the next begins with none."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        shard.close()
        gc.collect()


def peak_item(case: Case, device: torch.device | None, card: Device, most: float | None = None) -> Item:
    """Return the line of the peak beside the plan's, which should be within 5 %, and below ``most`` GiB."""

    def measure() -> Result:
        assert device is not None
        with shard_closed():
            _, peak, _ = Running(case, device).timed(1)
        off = peak / planned(case, card).peak - 1
        met = abs(off) <= 0.05 and (most is None or peak <= most * GIB)
        return Result(f"{peak / GIB:.2f} GiB, {100 * off:+.1f} %", met)

    wanted = "within 5 %" + (f", at most {most} GiB" if most else "")
    name = f"peak, {case.batch} x {case.seq}, {case.checkpoint}"
    return Item(name, wanted, measure, lambda: f"{planned(case, card).peak / GIB:.2f} GiB", minutes=0.5)


def items(case: Case, device: torch.device | None, card: Device, least: float, steps: int) -> Iterator[Item]:
    """Yield the lines of the step: by way of running it, the peer's, peaks, and synchronisations."""
    speeds = dict[str, float]()
    for how, wanted in (("captured", least), (NODES, 0.0), ("inductor", 0.0), ("uncaptured", 0.0)):
        run = partial(measured, case, device, card, how, wanted, steps, speeds)  # type: ignore[arg-type]
        text = f"at least {wanted:,.0f} tokens/s" if wanted else ""
        yield Item(f"step, {how}", text, run, partial(predicted, case, card) if wanted else lambda: "", minutes=1)
        if how == "captured":
            name, count = "host synchronisations in a replayed step", lambda: str(len(waiting_nodes(case)))
            yield Item(name, "0", partial(syncs, case, device), count, minutes=0.5)
            yield peak_item(case, device, card)
            one = Case(case.cfg, 1, case.seq, "full")
            yield peak_item(one, device, card, 7.4 if case.cfg.num_layers == 32 else None)
            beside = partial(peft, case, steps, speeds)
            yield Item("PEFT with bitsandbytes", "at most half of ours", beside, minutes=1)


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


def syncs(case: Case, device: torch.device | None) -> Result:
    """Count the host synchronisations of a replayed step."""
    assert device is not None
    with shard_closed():
        return at_most(Running(case, device).synchronisations(), 0, "", "{:.0f}")


def peft(case: Case, steps: int, speeds: dict[str, float]) -> Result:
    """Take the step of PEFT with bitsandbytes in a process of its own."""
    cfg = case.cfg
    sizes = [
        cfg.num_layers,
        cfg.dim,
        cfg.hidden,
        cfg.vocab,
        cfg.num_heads,
        cfg.num_kv_heads,
        case.batch,
        case.seq,
        steps,
    ]
    command = [sys.executable, "-m", "tests.bench.gpu.peft_side", *map(str, sizes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])
    found = json.loads(done.stdout.strip().splitlines()[-1])
    speed, ours = case.tokens / found["seconds"], speeds.get("captured")
    text = f"{speed:,.0f} tokens/s, {found['peak'] / GIB:.2f} GiB"
    return Result(text, None if ours is None else speed <= ours / 2)


def profiled(case: Case, device: torch.device | None, top: int) -> Iterator[Item]:
    """Yield a line for each of the kernels of a replayed step that take most of it."""

    @cache
    def kernels() -> list[tuple[str, float, int]]:
        assert device is not None
        with shard_closed():
            running = Running(case, device)
            running.timed(1)
            with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as seen:
                float(running.take())
        time_of: Callable[[Any], float] = lambda e: getattr(e, "self_device_time_total", 0.0)
        events = sorted(seen.key_averages(), key=time_of, reverse=True)
        return [(e.key, time_of(e), e.count) for e in events if time_of(e)]

    def measure(i: int) -> Result:
        found = kernels()
        if i >= len(found):
            return Result("none")
        name, us, count = found[i]
        total = sum(each for _, each, _ in found)
        return Result(f"{us:,.0f} us, {100 * us / total:.1f} %, {count} calls", beside={"kernel": name[:90]})

    for i in range(top):
        yield Item(f"kernel {i + 1}", measure=partial(measure, i), minutes=0.0 if i else 2.0)
