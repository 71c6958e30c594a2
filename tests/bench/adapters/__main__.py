"""Many adapters over one base in one captured step, beside one adapter, runs one by one, and PEFT.

    python -m tests.bench.adapters                        # 32 adapters, 64 tokens each
    python -m tests.bench.adapters --batch 64 --seq 32 --dtype f32
    python -m tests.bench.adapters --batch 64 --seq 32 --ranks 4 8 16 32 64    # slots of mixed rank (fquant.lora.slots)
    python -m tests.bench.adapters --batch 64 --seq 32 --in-order              # inside fquant.batch_invariant()

Adapters of all linears of a Llama are stacked, and ``vmap`` of the gradient takes a row of tokens for each.
A product with a packed weight of the base has the rows of all. With ``--ranks`` the adapters are slots, whose ranks are
these in turn, and each has a learning rate of its own. One adapter takes the same tokens. Runs one by one take
the row of each adapter in a step of its own. PEFT has the same adapters over the dense base, one after another
(``set_adapter``), since it has no step of many. All are on the threads given, in one process, and take turns.

Shown are the median step, its time over that of one adapter, the peak that ``fquant.cost`` predicts over it, and how
many of the adapters have the bits of their runs alone after some steps. The exit status is 0, or 2 for bad options.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from itertools import groupby
from typing import Any, Literal

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor
from torch.func import grad_and_value, vmap

from examples.common.command_line import DTYPES, pattern
from fquant import batch_invariant, cost, jit, lora, optim, tree
from fquant.lora import slots
from fquant.optim import apply_updates
from models import decoder
from models.config import Config
from tests.bench import peers, report, timing
from tests.bench.step_sides import TARGETS, Shape, weights

ONE, MANY, ALONE, PEFT = "one adapter", "many adapters", "one by one", "PEFT, one by one"
RATE = 1e-3
OPT = optim.adamw(RATE)
STEPS = 3  # after which bits are compared
MOST = 1.10  # of the time of one adapter
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Options:
    """Time a captured step of many adapters over one base beside one adapter, runs one by one, and PEFT."""

    shape: tyro.conf.OmitArgPrefixes[Shape] = Shape(layers=2, seq=64, batch=32)
    """The model; ``batch`` is the number of adapters, each of which has a row of ``seq`` tokens."""
    dtype: Literal["bf16", "f32"] = "bf16"
    """Of the residual stream."""
    repeats: int = 5
    """Timed turns."""
    threads: int = 2
    """Threads of a step."""
    peft: bool = True
    """Time PEFT too."""
    ranks: tuple[int, ...] = ()
    """Ranks of slots, in turn; without them all adapters are of --rank, and stacked."""
    in_order: bool = False
    """Take our steps inside ``fquant.batch_invariant()``, where a row's bits do not depend on other rows."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        if self.repeats < 1:
            raise ValueError(f"--repeats is {self.repeats}; wanted at least 1")
        if self.ranks and (min(self.ranks) < 1 or len(self.ranks) > self.shape.batch):
            raise ValueError(f"--ranks is {self.ranks}; wanted at most {self.shape.batch}, the batch, of at least 1")
        timing.check_threads(self.threads)


def loss(adapters: Any, base: Any, tokens: Tensor, cfg: Config, dtype: torch.dtype) -> Tensor:
    """Return the loss of tokens i64[rows t + 1]."""
    return decoder.loss(lora.attach(base, adapters), tokens[:, :-1], tokens[:, 1:], cfg, dtype=dtype)


def step_of_one(adapters: Any, state: Any, base: Any, tokens: Tensor, cfg: Config, dtype: torch.dtype) -> Any:
    """Take a step of one adapter on all rows of tokens."""
    grads, value = grad_and_value(loss)(adapters, base, tokens, cfg, dtype)
    updates, state = OPT.update(grads, state, adapters)
    return apply_updates(adapters, updates), state, value


def step_of_many(adapters: Any, state: Any, base: Any, tokens: Tensor, cfg: Config, dtype: torch.dtype) -> Any:
    """Take a step of stacked adapters, each on its row of tokens."""
    of_one = lambda adapters, row: grad_and_value(loss)(adapters, base, row[None], cfg, dtype)
    grads, values = vmap(of_one)(adapters, tokens)
    updates, state = OPT.update(grads, state, adapters)
    return apply_updates(adapters, updates), state, values


def in_order(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``step`` inside :func:`batch_invariant`."""

    @wraps(step)
    def inside(*args: Any) -> Any:
        with batch_invariant():
            return step(*args)

    return inside


class Run:
    """A captured step with its state."""

    def __init__(self, step: Callable[..., Any], adapters: Any, base: Any, tokens: Tensor, *rest: Any) -> None:
        self.plain, self.step = step, jit(step, donate=("adapters", "state"))
        self.adapters, self.state, self.rest = adapters, OPT.init(adapters), (base, tokens, *rest)

    def __call__(self, *_: Any) -> None:
        self.adapters, self.state, _ = self.step(self.adapters, self.state, *self.rest)

    def peak(self) -> int:
        """Return the predicted bytes at the peak."""
        return cost(self.plain, self.adapters, self.state, *self.rest, donate=("adapters", "state")).peak


def runs(shape: Shape, dtype: torch.dtype, wrap: Wrap = lambda step: step) -> tuple[Run, Run, list[Run]]:
    """Return the runs of one adapter, of many in one step, and of each of the many alone."""
    cfg, tokens, base = shape.config(), shape.sample(), weights(shape)
    make = partial(lora.init, base, pattern(TARGETS), shape.rank, shape.rank)
    each = [make(key=i) for i in range(shape.batch)]
    stacked = tree.map(lambda *leaves: torch.stack(leaves), *each)
    rest = cfg, dtype
    one = Run(wrap(step_of_one), make(key=0), base, tokens, *rest)
    many = Run(wrap(step_of_many), stacked, base, tokens, *rest)
    alone = [Run(wrap(step_of_one), adapters, base, tokens[i : i + 1], *rest) for i, adapters in enumerate(each)]
    for other in alone[1:]:
        other.step = alone[0].step  # one trace
    return one, many, alone


def optimizer(own: dict[str, Tensor]) -> optim.Optimizer[Any]:
    """Return the optimiser of a slot, with the rate that is its own."""
    return optim.adamw(own["lr"])


def step_of_slots(bank: slots.Bank, base: Any, tokens: Tensor, cfg: Config, dtype: torch.dtype) -> Any:
    """Take a step of slots, each on its rows of tokens i64[slots rows t + 1]."""

    def losses(adapters: Any, key: Tensor, base: Any, tokens: Tensor) -> Tensor:
        params = lora.attach(base, adapters)
        return decoder.token_losses(params, tokens[..., :-1], tokens[..., 1:], cfg, dtype=dtype).mean((1, 2))

    return slots.step(bank, losses, optimizer, base, tokens)


class SlotsRun:
    """A captured step of slots with its bank; the adapters of each are in their order."""

    def __init__(self, step: Callable[..., Any], each: list[Any], base: Any, tokens: Tensor, *rest: Any) -> None:
        by_rank = [list(group) for _, group in groupby(each, lambda adapters: len(next(iter(adapters.values())).a))]
        bank = slots.init([(group[0], len(group)) for group in by_rank], optimizer, {"lr": 0.0})
        for adapters in each:
            bank = slots.fill(bank, slots.free(bank, adapters), adapters, optimizer, {"lr": RATE})
        self.bank, self.rest = bank, (base, tokens[:, None], *rest)
        self.plain, self.step = step, jit(step, donate=("bank",))

    def __call__(self, *_: Any) -> None:
        self.bank, _ = self.step(self.bank, *self.rest)

    def peak(self) -> int:
        """Return the predicted bytes at the peak."""
        return cost(self.plain, self.bank, *self.rest, donate=("bank",)).peak


def mixed_runs(
    shape: Shape, dtype: torch.dtype, ranks: tuple[int, ...], wrap: Wrap = lambda step: step
) -> tuple[Run, SlotsRun, list[Run]]:
    """Return the runs of one adapter, of slots whose ranks are ``ranks`` in turn, and of each of these alone."""
    cfg, tokens, base = shape.config(), shape.sample(), weights(shape)
    make = lambda rank, key: lora.init(base, pattern(TARGETS), rank, rank, key)
    each = [make(rank, i) for i, rank in enumerate(ranks_of(shape, ranks))]
    one = Run(wrap(step_of_one), make(shape.rank, 0), base, tokens, cfg, dtype)
    alone = [Run(wrap(step_of_one), adapters, base, tokens[i : i + 1], cfg, dtype) for i, adapters in enumerate(each)]
    for other in alone[1:]:
        other.step = alone[0].step  # one trace a rank
    return one, SlotsRun(wrap(step_of_slots), each, base, tokens, cfg, dtype), alone


def ranks_of(shape: Shape, ranks: tuple[int, ...]) -> list[int]:
    """Return the rank of each adapter."""
    return sorted(ranks[i % len(ranks)] for i in range(shape.batch)) if ranks else [shape.rank] * shape.batch


def each_of(many: Run | SlotsRun) -> list[Any]:
    """Return the adapters of a run one by one."""
    stacks = [many.adapters] if isinstance(many, Run) else [stack.adapters for stack in many.bank]
    return [tree.map(lambda t, i=i: t[i], stack) for stack in stacks for i in range(len(tree.leaves(stack)[0]))]


def equal_bits(many: Run | SlotsRun, alone: list[Run]) -> int:
    """Return how many of the stacked adapters have the bits of those alone."""
    same = 0
    for own, run in zip(each_of(many), alone, strict=True):
        same += all(map(torch.equal, tree.leaves(own), tree.leaves(run.adapters)))
    return same


def peft_steps(shape: Shape, dtype: torch.dtype, ranks: list[int]) -> Callable[..., None]:
    """Return a function that takes a step of every adapter with PEFT over the dense model."""
    warnings.filterwarnings("ignore")
    with peers.quiet():
        import peft
        import transformers

    names = {
        "hidden_size": shape.dim, "num_hidden_layers": shape.layers, "intermediate_size": shape.hidden,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocab,
        "tie_word_embeddings": False, "attn_implementation": "sdpa",
    }  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**names)).to(dtype)
    modules = [f"{name}_proj" for name in TARGETS]
    given = [peft.LoraConfig(r=r, lora_alpha=r, lora_dropout=0.0, target_modules=modules) for r in ranks]
    model = peft.get_peft_model(model, given[0], adapter_name="0")
    for i in range(1, shape.batch):
        model.add_adapter(str(i), given[i])
    tokens, optimisers = shape.sample()[:, :-1], list[torch.optim.Optimizer]()
    for i in range(shape.batch):
        model.set_adapter(str(i))
        optimisers.append(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3))

    def take(*_: Any) -> None:
        for i, optimiser in enumerate(optimisers):
            model.set_adapter(str(i))
            model(input_ids=tokens[i : i + 1], labels=tokens[i : i + 1]).loss.backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    return take


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; see the module's docstring."""
    options, console = tyro.cli(Options, args=args, description=Options.__doc__), report.console()
    try:
        options.check()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    shape, dtype = options.shape, DTYPES[options.dtype]
    with timing.threads(options.threads):
        wrap = in_order if options.in_order else lambda step: step
        if options.ranks:
            one, many, alone = mixed_runs(shape, dtype, options.ranks, wrap)
        else:
            one, many, alone = runs(shape, dtype, wrap)
        for _ in range(STEPS):
            for run in (many, *alone):
                run()
        same = equal_bits(many, alone)
        takes: dict[str, Callable[..., Any]] = {ONE: one, MANY: many, ALONE: lambda _: [run() for run in alone]}
        if options.peft:
            takes[PEFT] = peft_steps(shape, dtype, ranks_of(shape, options.ranks))
        times = timing.medians(takes, options.repeats)
    peaks = {ONE: one.peak(), MANY: many.peak(), ALONE: alone[0].peak()}
    out = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "step, ms", "over one adapter", "peak, MiB"):
        out.add_column(name, justify="right" if name else "left")
    for name, took in times.items():
        peak = f"{peaks[name] / 2**20:,.0f}" if name in peaks else ""
        out.add_row(name, f"{took:,.0f}", f"{took / times[ONE]:.2f}", peak)
    console.print(out)
    state = (many.adapters, many.state) if isinstance(many, Run) else many.bank
    held = tree.nbytes(state) - tree.nbytes((one.adapters, one.state))
    console.print(f"{same} of {shape.batch} adapters have the bits of their runs alone after {STEPS} steps")
    console.print(f"{held / 2**20:,.0f} MiB are adapters and moments beyond those of one")
    console.print(report.verdict(report.at_most("of the time of one adapter", times[MANY] / times[ONE], MOST)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
