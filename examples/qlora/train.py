"""The training that examples/qlora/cli.py starts on every rank: quantise, place, take steps, measure.

All of it is functions of a frozen Run and a State, a tree. The heart is five lines:

    comm, gradient = capture(options, mesh, rules)                       # jit(grad_and_value(loss), ...)
    grads, value = gradient(adapters, local(base), share(batch), count, keys, cfg, comm)
    grads        = reduce(grads)
    updates, moments = opt.update(grads, moments, adapters)
    adapters     = apply(adapters, updates)

What differs between one process and many is ``place``, ``local``, ``share`` and ``reduce``. The batch of a step is a
function of the step, dropout is a function of (key, row), and ``count`` is of the whole batch: so a run on any mesh
computes the same sums, and a resumed one continues to the bit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.func import grad_and_value

import shard
from fquant import LOCAL, Comm, format, jit, lora, optim, quantize, random, tree
from models import decoder, hf
from models.config import Config
from shard import agree

from ..common import data, runs
from .options import TARGETS, Options


@dataclass(frozen=True)
class Work:
    """What a rank knows before it meets the others; making it checks all input."""

    cfg: Config
    dense: Any  # the base as it is in the files, Lazy
    packed: Any  # the base quantised, Lazy
    adapters: lora.Adapters
    train: data.Rows
    held: data.Rows


@dataclass(frozen=True)
class Run:
    """What stays the same from step to step; ``base`` is placed."""

    options: Options
    work: Work
    mesh: DeviceMesh
    rules: shard.Rules
    comm: Comm
    base: Any
    schedule: optim.Schedule
    opt: optim.Optimizer
    gradient: Callable[..., tuple[Any, Tensor]]  # of loss, captured


@tree.node
class State:
    """What a step changes: adapters, the optimiser's moments, and the number of steps done i64[]."""

    adapters: lora.Adapters
    moments: Any
    done: Tensor


@dataclass(frozen=True)
class Step:
    """What one step measured; a line of metrics.jsonl."""

    step: int
    loss: float  # nats a token, over the global batch
    lr: float
    grad_norm: float
    tokens: int  # that counted towards the loss, over all ranks
    tokens_per_second: float  # of all that went through the model
    memory: int  # bytes resident on this rank
    wire: int  # bytes that one rank sent


@dataclass(frozen=True)
class Result:
    """What a run found: bytes of the whole base, bytes one rank sends in a step, held-out perplexity."""

    bytes_bf16: int
    bytes_packed: int
    wire_bf16: int
    wire_packed: int
    perplexity_bf16: float
    perplexity_packed: float
    perplexity_adapted: float


def prepare(options: Options) -> Work:
    """Open what ``options`` name and check all of it; nothing is written. One ValueError names what is wrong."""
    cfg, dense = hf.lazy(options.model)
    fmt = format.parse(options.format, options.block)
    check_blocks(fmt, decoder.shapes(cfg))
    if options.seq > cfg.max_positions:
        raise ValueError(
            f"--seq is {options.seq}; wanted at most {cfg.max_positions}, the positions of {options.model}"
        )
    packed = tree.map_at(rf"layers\.\d+\.({'|'.join(TARGETS)})", partial(quantize, format=fmt), dense)
    targets = rf"layers\.\d+\.({'|'.join(options.target_names())})"
    adapters = lora.init(packed, targets, options.rank, options.alpha, options.seed, dropout=options.dropout)
    tokenizer = data.tokenizer(options.model)
    documents = data.documents(options.data, tokenizer)
    if options.data is None:
        documents = data.some(documents, options.characters)
    rows = data.pack(data.encode(documents, tokenizer, *data.special(options.model)), options.seq)
    return Work(cfg, dense, packed, adapters, *data.split(rows, options.holdout))


def check_blocks(fmt: format.Format, shapes: Any) -> None:
    """Raise ValueError for a weight whose width the block does not divide.

    fquant can quantise it, with a short last block a row; but bitsandbytes lets blocks straddle rows there, so an
    adapter trained beside our base would meet another one in PEFT.
    """
    for path, w in tree.items(shapes):
        if fmt.block is not None and path.split(".")[-1] in TARGETS and w.shape[1] % fmt.block:
            fits = [block for block in format.BLOCKS if w.shape[1] % block == 0]
            fix = f"use --block {fits[-1]}" if fits else "use --format int8"
            raise ValueError(f"{path}: dim 1 = {w.shape[1]} is not a multiple of {fmt.name}'s block {fmt.block}; {fix}")


def start(options: Options) -> tuple[Run, State]:
    """Meet the other ranks, compare what was given to each, place the base and make or load the state.

    Raises ValueError on every rank when one cannot, or when they disagree.
    """
    axes = options.axes(int(os.environ.get("WORLD_SIZE", "1")))
    mesh, rules = shard.mesh(dp=axes.get("dp", 1), fsdp=axes.get("fsdp", 1)), shard.Rules()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    work = agree.attempt("prepare", partial(prepare, options))
    agree.same("start", {"options": repr(options.shared()), "data": data.digest((work.train, work.held))})
    base, adapters = shard.place((work.packed, work.adapters), decoder.dims(work.cfg), rules, mesh, work.cfg)
    schedule = options.learning_rate()
    opt = optim.chain(optim.clip_by_global_norm(options.clip), optim.adamw(schedule, weight_decay=0.0))
    comm, gradient = capture(options, mesh, rules)
    run = Run(options, work, mesh, rules, comm, base, schedule, opt, gradient)
    state = State(adapters, opt.init(adapters), torch.tensor(0))
    return run, state if options.resume is None else runs.load(options, state)


def capture(options: Options, mesh: DeviceMesh, rules: shard.Rules) -> tuple[Comm, Callable[..., tuple[Any, Tensor]]]:
    """How blocks are loaded, and the captured gradient of :func:`loss`, where blocks keep the inputs, selected or all.

    What is kept of gathered weights is nothing in either case: they are gathered again, ahead of the block.
    """
    keep, tokens = options.keep, shard.max_local_rows(options.batch, mesh, rules) * options.seq
    comm = shard.comm(mesh, rules, recompute=keep == "inputs", tokens=tokens)
    passes = (
        (shard.passes.prefetch_gathers(),)
        if keep == "inputs"
        else (shard.passes.regather_blocks(), shard.passes.prefetch_gathers())
    )
    return comm, jit(grad_and_value(loss), passes=passes, recompute=keep == "selected")


def loss(
    adapters: lora.Adapters,
    base: Any,
    batch: data.Rows,
    count: Tensor,
    keys: Tensor | None,
    cfg: Config,
    comm: Comm = LOCAL,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Summed loss of the rows of ``batch`` over ``count``, the tokens of the whole batch that count: f32[].

    ``dtype`` is that of the residual stream.
    """
    params = lora.attach(base, adapters, keys)
    return decoder.loss(params, batch.tokens, batch.targets, cfg, comm, batch.segments, dtype, count)


def gradients(run: Run, base: Any, adapters: lora.Adapters, step: int) -> tuple[Any, Tensor, Tensor]:
    """Gradients and loss of the whole batch of ``step``, and how many tokens counted; the same on every rank."""
    options = run.options
    batch = data.batch(run.work.train, step, options.batch * options.accumulate, options.seed)
    keys = random.fold(random.fold(random.key(options.seed), step), torch.arange(len(batch.tokens)))  # one a row
    count = (batch.targets >= 0).sum()
    total = None
    for first in range(0, len(batch.tokens), options.batch):
        micro = tree.map(lambda t, i=first: t[i : i + options.batch], (batch, keys))
        rows, row_keys = shard.share(micro, run.mesh, run.rules)
        dropout = row_keys if options.dropout else None
        one = run.gradient(adapters, base, rows, count, dropout, run.work.cfg, run.comm)
        total = one if total is None else tree.map(torch.add, total, one)
    grads, value = shard.reduce(total, run.mesh, run.rules)
    return grads, value, count


def take(run: Run, base: Any, state: State) -> tuple[State, Step]:
    """One step of the optimiser. Raises ValueError when the loss is no longer finite."""
    began, step = time.perf_counter(), int(state.done)
    with shard.traffic() as traffic:
        grads, value, count = gradients(run, base, state.adapters, step)
    if not torch.isfinite(value):
        raise ValueError(f"step {step}: the loss is {value.item()}; use a smaller --lr")
    updates, moments = run.opt.update(grads, state.moments, state.adapters)
    after = State(optim.apply_updates(state.adapters, updates), moments, state.done + 1)
    through = run.options.batch * run.options.accumulate * run.options.seq / (time.perf_counter() - began)
    lr, norm = float(run.schedule(state.done)), float(optim.global_norm(grads))
    return after, Step(step, value.item(), lr, norm, int(count), through, resident(), traffic.sent)


def measure(run: Run, state: State, say: Callable[[str], None]) -> Result:
    """Bytes and held-out perplexity of the base in bf16, of the packed base, and of that with the adapter."""
    say("measuring the packed base with its adapter")
    adapted = perplexity(run, run.base, state.adapters)
    say("measuring the packed base")
    packed = perplexity(run, run.base, {})
    say("measuring the bf16 base")
    dense = shard.place(run.work.dense, decoder.dims(run.work.cfg), run.rules, run.mesh, run.work.cfg)
    return Result(
        bytes_bf16=size(dense),
        bytes_packed=size(run.base),
        wire_bf16=wire(run, dense, state),
        wire_packed=wire(run, run.base, state),
        perplexity_bf16=perplexity(run, dense, {}),
        perplexity_packed=packed,
        perplexity_adapted=adapted,
    )


def size(base: Any) -> int:
    """Bytes of a placed base over all ranks, without padding and copies."""
    return sum(bundle.layout.nbytes for bundle in tree.leaves(base, is_leaf=lambda x: isinstance(x, shard.Bundle)))


def wire(run: Run, base: Any, state: State) -> int:
    """Bytes that one rank sends for the gradients of a batch, counted while it does."""
    with shard.traffic() as traffic:
        gradients(run, shard.local(base), state.adapters, 0)
    return traffic.sent


def perplexity(run: Run, base: Any, adapters: lora.Adapters) -> float:
    """exp of the mean loss of all held-out tokens."""
    total, local = torch.zeros(2, dtype=torch.float64), shard.local(base)
    for rows in zip(*(t.split(run.options.batch) for t in tree.leaves(run.work.held)), strict=True):
        mine = shard.share(data.Rows(*rows), run.mesh, run.rules)
        with torch.no_grad():
            nats = loss(adapters, local, mine, torch.tensor(1), None, run.work.cfg, run.comm)
        total += torch.stack([nats.double(), (mine.targets >= 0).sum().double()])
    nats, tokens = shard.psum(total, run.mesh, run.rules.batch)
    return float(torch.exp(nats / tokens))


def resident() -> int:
    """Bytes of memory resident in this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
