"""The training that every rank runs: quantise, place, take steps, measure.

Everything is a function of a frozen ``Run`` and a ``State``, which is a tree. A batch is a function of the step's
number, and dropout of (key, row). The token count is that of the global batch. So a run on any mesh computes the same
sums, and a resumed run continues to the bit.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import shard
from fquant import jit, lazy, lora, optim, random, tree
from fquant.compile import all_gather_text
from fquant.compile.cost import Cost, cost
from fquant.kernels.cpu import usable_cores
from models import decoder, hf
from models.config import Config
from shard import agree

from ..common import launch, pricing, runs, training_step
from ..common.command_line import DTYPES, check, parse_format, parse_targets, pattern, quantised
from ..common.training_step import MODES, Checkpoint, Measured, Micro, Setup, State
from ..data import dataset as data
from .options import Options

ROOM = 0.9  # of the memory that is available: a step that is predicted to take more is recomputed instead


@dataclass(frozen=True)
class Work:
    """The input of a run, opened and checked, before ranks meet."""

    cfg: Config
    dense: Any  # the base as it is in the files, Lazy; quantised folders have packed weights
    packed: Any  # the base quantised, Lazy; ``dense`` itself with --format none
    adapters: lora.Adapters
    train: data.Stored
    held: data.Rows


@dataclass(frozen=True)
class Run:
    """The constants of a run; ``base`` is placed."""

    options: Options
    work: Work
    setup: Setup
    base: Any
    local: Any  # shard.local(base)
    step: Callable[..., tuple[State, Measured]]  # train_step, captured


@dataclass(frozen=True)
class Step:
    """The figures of one step; a line of metrics.jsonl."""

    step: int
    loss: float  # nats a token, over the global batch
    lr: float
    grad_norm: float
    tokens: int  # targets in the global batch
    tokens_per_second: float  # of all tokens that went through the model
    memory: int  # bytes resident on this rank
    wire: int  # bytes that one rank sent


@dataclass(frozen=True)
class Result:
    """The results of a run: bytes of the whole base, bytes one rank sends in a step, held-out perplexity."""

    bytes_bf16: int
    bytes_packed: int
    wire_bf16: int
    wire_packed: int
    perplexity_bf16: float
    perplexity_packed: float
    perplexity_adapted: float


def prepare(options: Options, note: Callable[[str], None] | None = None) -> Work:
    """Open and check everything that ``options`` name, and tokenise the data; a ValueError names the fault.

    ``note`` is called with each line that a person should know about the data.
    """
    cfg, dense = hf.lazy(options.model)
    fmt = parse_format(options.format, options.block)
    check(cfg, fmt, options.seq, options.model)
    packed = quantised(dense, fmt)
    targets = pattern(parse_targets(options.targets, cfg))
    adapters = lora.init(packed, targets, options.rank, options.alpha, options.seed, dropout=options.dropout)
    if options.dropout and any(adapter.a.ndim > 2 for adapter in adapters.values()):
        fix = "leave it out, or use --targets q,k,v,o"
        raise ValueError(f"--dropout is {options.dropout}, but PEFT has none for adapters of experts; {fix}")
    stored = data.prepare(options.data, options.model, options.seq, characters=options.characters, note=note)
    return Work(cfg, dense, packed, adapters, *data.split(stored, options.holdout))


def start(options: Options) -> tuple[Run, State]:
    """Meet the other ranks, compare their input, place the base, and make or load the state.

    Raises ValueError on every rank if one fails or if they disagree.
    """
    axes = options.axes()
    torch.set_num_threads(usable_cores(launch.local_ranks()))
    mode = options.checkpoint or choose_checkpoint(options, axes)
    mesh = shard.mesh(dp=axes.get("dp", 1), fsdp=axes.get("fsdp", 1))
    chosen = all_gather_text(mode)
    mode = MODES[max(i for i, name in enumerate(MODES) if name in chosen)]  # the mode that fits on every rank
    work = agree.attempt("prepare", partial(prepare, options))
    agree.same("start", {"options": repr(options.shared())} | agree.fingerprint({"data": (work.train, work.held)}))
    schedule = options.learning_rate()
    opt = optim.chain(optim.clip_by_global_norm(options.clip), optim.adamw(schedule, weight_decay=0.0))
    rows = shard.max_local_rows(options.batch, mesh, shard.Rules())
    setup = Setup(work.cfg, mesh, opt, schedule, rows, options.seq, mode, DTYPES[options.dtype])
    placed, adapters = shard.place((work.packed, work.adapters), decoder.dims(work.cfg), setup.rules, mesh, work.cfg)
    run = Run(options, work, setup, placed, shard.local(placed), jit(training_step.train_step, **setup.capture()))
    state = training_step.initial(adapters, setup.opt)
    return run, state if options.resume is None else runs.load(options, state)


def choose_checkpoint(options: Options, axes: dict[str, int]) -> Checkpoint:
    """Return the fastest checkpointing mode whose predicted peak fits into this rank's memory; else "full".

    Has to be called before the ranks meet, because the step is priced on an abstract mesh.
    """
    cfg, found = hf.lazy(options.model)
    fmt, targets = parse_format(options.format, options.block), parse_targets(options.targets, cfg)
    sizes = options.rank, -(-options.batch // math.prod(axes.values())), options.seq
    base = lazy.like(quantised(found, fmt))
    job = pricing.Job(cfg, fmt, targets, *sizes, stream=DTYPES[options.dtype], accumulate=options.accumulate, base=base)
    peak = lambda mode: pricing.price(dataclasses.replace(job, checkpoint=mode), axes).peak
    room = ROOM * launch.available_memory()
    return next(mode for mode in MODES if mode == "full" or peak(mode) <= room)


def micro_batches(run: Run, step: int) -> tuple[tuple[Micro, ...], Tensor]:
    """Return this rank's rows of every micro-batch of ``step``, and the number of targets in the global batch i64[]."""
    options, setup = run.options, run.setup
    batch = data.batch(run.work.train, step, options.batch * options.accumulate, options.seed)
    keys = random.fold(random.fold(random.key(options.seed), step), torch.arange(len(batch.tokens)))  # one a row
    micros: list[Micro] = []
    for first in range(0, len(batch.tokens), options.batch):
        micro = tree.map(lambda t, i=first: t[i : i + options.batch], (batch, keys))
        rows, row_keys = shard.share(micro, setup.mesh, setup.rules)
        micros.append((rows, row_keys if options.dropout else None))
    return tuple(micros), (batch.targets >= 0).sum()


def predict(run: Run, state: State, placed: Any) -> Cost:
    """Return the cost of a step beside the base ``placed``, read off its graph."""
    args = state, shard.local(placed), *micro_batches(run, 0), run.setup
    return cost(training_step.train_step, *args, **run.setup.capture())


def take(run: Run, state: State) -> tuple[State, Step]:
    """Take one step."""
    began, step, options = time.perf_counter(), int(state.done), run.options
    micros, count = micro_batches(run, step)
    state, found = run.step(state, run.local, micros, count, run.setup)
    value, norm, lr = found.loss.item(), found.grad_norm.item(), found.lr.item()
    through = options.batch * options.accumulate * options.seq / (time.perf_counter() - began)
    return state, Step(step, value, lr, norm, int(count), through, launch.resident(), training_step.sent(run.step))


def measure(run: Run, state: State, say: Callable[[str], None]) -> Result:
    """Return bytes and held-out perplexity of the dense base, of the packed base, and of that with the adapter."""
    say("measuring the base with its adapter")
    adapted = perplexity(run, run.base, state.adapters)
    say("measuring the base")
    packed = perplexity(run, run.base, {})
    dense, plain = run.base, packed
    if run.work.packed is not run.work.dense:
        say("measuring the dense base")
        dense = shard.place(run.work.dense, decoder.dims(run.work.cfg), run.setup.rules, run.setup.mesh, run.work.cfg)
        plain = perplexity(run, dense, {})
    bundles = lambda x: tree.leaves(x, is_leaf=lambda x: isinstance(x, shard.Bundle))
    size = lambda x: sum(bundle.layout.nbytes for bundle in bundles(x))  # over all ranks, without padding and copies
    sent = partial(bytes_sent, run, state)
    return Result(size(dense), size(run.base), sent(dense), sent(run.base), plain, packed, adapted)


def bytes_sent(run: Run, state: State, placed: Any) -> int:
    """Return the bytes that one rank sends in a step beside the base ``placed``: of the step that ran, or predicted."""
    if placed is run.base and run.step.traced:
        return training_step.sent(run.step)
    return sum(collective.sent for collective in predict(run, state, placed).collectives)


def perplexity(run: Run, placed: Any, adapters: lora.Adapters) -> float:
    """Return exp of the mean loss of all held-out tokens."""
    total, local, setup = torch.zeros(2, dtype=torch.float64), shard.local(placed), run.setup
    for rows in zip(*(t.split(run.options.batch) for t in tree.leaves(run.work.held)), strict=True):
        mine = shard.share(data.Rows(*rows), setup.mesh, setup.rules)
        with torch.no_grad():
            nats = training_step.loss(adapters, local, mine, torch.tensor(1), None, setup)
        total += torch.stack([nats.double(), (mine.targets >= 0).sum().double()])
    nats, tokens = shard.psum(total, setup.mesh, setup.rules.batch)
    return float(torch.exp(nats / tokens))
