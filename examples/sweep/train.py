"""The captured step of a sweep: gradients of many adapters over one base by ``vmap``, and an update of each.

    states, measured = sweep_step(states, base, micros, counts, setups, groups)

Experiments whose adapters have the same structure form a group. Their adapters and rows are stacked. So a product with
a packed weight of the base has the rows of all of them, and decodes the weight once. Sums over ranks, clipping and the
optimiser are those of each experiment alone.

A sweep promises the bits of each experiment trained alone. A product keeps them if its rows do not depend on the number
of rows. That is a property of a kernel at a shape, and not of values. So at the start the gradients of the first batch
are compared with those of each experiment alone, bit by bit. A group that differs is split.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fquant import jit, tree
from fquant.compile import all_gather_text
from shard.device_mesh import device_of

from ..common import devices, finite, run_folder, training_step, verification
from ..common.training_step import Measured, Micro, Setup, State
from ..qlora import measure as measurement
from ..qlora import train
from .options import Options

Groups = tuple[tuple[int, ...], ...]  # of experiments that are stacked, by number


@tree.node
class States:
    """The state of every experiment, and the number of steps done, i64[]."""

    many: list[State]
    done: Tensor


@dataclass(frozen=True)
class Run:
    """The constants of a sweep; each experiment is a run of examples.qlora over the same base."""

    options: Options
    runs: tuple[train.Run, ...]
    groups: Groups
    step: Callable[..., tuple[list[State], list[Measured]]]  # sweep_step, captured
    inputs: dict[str, str]  # digests of what the experiments read (run_folder.digests)


@dataclass(frozen=True)
class Step:
    """The figures of one step; a line of metrics.jsonl."""

    step: int
    loss: float  # the lowest
    losses: list[float]  # of each experiment, in nats a token
    rates: list[float]
    tokens_per_second: float  # of all experiments
    share: float | None  # of the limit (fquant/compile/roofline/prediction.py)
    memory: int  # bytes of this rank (devices.Memory.used)
    held: int  # bytes that this rank's allocator has for them
    validation: float | None = None  # the lowest
    validations: list[float] | None = None


@dataclass(frozen=True)
class Result:
    """The result of an experiment: its held-out loss in nats a token, and that of the base on the same rows."""

    name: str
    loss: float
    base: float


def sweep_step(
    states: list[State], base: Any, micros: Sequence[Sequence[Micro]], counts: Sequence[Tensor],
    setups: Sequence[Setup], groups: Groups, teacher: Any = None,
) -> tuple[list[State], list[Measured]]:  # fmt: skip
    """Take one step of every experiment: ``micros``, ``counts`` and ``setups`` are those of each."""
    found: dict[int, tuple[State, Measured]] = {}
    for group in groups:
        totals = gradients([(states[i].trained, counts[i], micros[i]) for i in group], base, setups[group[0]], teacher)
        for i, (grads, value) in zip(group, totals, strict=True):
            found[i] = training_step.update(states[i], grads, value, setups[i])
    return [found[i][0] for i in range(len(states))], [found[i][1] for i in range(len(states))]


def gradients(
    many: Sequence[tuple[Any, Tensor, Sequence[Micro]]], base: Any, setup: Setup, teacher: Any = None
) -> list[Any]:
    """Return the gradients and the loss of each experiment: tuples of adapters, count and micro-batches."""

    def f(adapters: Any, count: Tensor, micros: Sequence[Micro]) -> Any:
        return training_step.gradients(adapters, base, micros, count, setup, teacher)

    if len(many) == 1:
        return [f(*many[0])]
    leaves, structures = zip(*(tree.flatten(each) for each in many), strict=True)
    stacked = [None if t[0] is None else torch.stack(t) for t in zip(*leaves, strict=True)]  # there may be no keys
    dims = tuple(None if t is None else 0 for t in stacked)
    found = vmap(lambda *one: f(*tree.unflatten(structures[0], list(one))), dims)(*stacked)
    return [tree.map(lambda t, n=n: t[n], found) for n in range(len(many))]


def start(options: Options) -> tuple[Run, States]:
    """Start every experiment over one base, and find the groups that keep the bits of each alone."""
    resolved = lambda many: dataclasses.replace(
        options, steps=many[0].steps, epochs=None, save_every=many[0].save_every
    )
    begun = train.start_many(options.experiments(), resolved)
    runs, states = tuple(run for run, _ in begun), [state for _, state in begun]
    options, inputs = resolved([runs[0].options]), {}
    for one in runs:
        inputs |= one.inputs
    groups = equal_groups(runs, states)
    capture: dict[str, Any] = {**runs[0].setup.capture(), "donate": ("states",)}
    training = States(states, torch.tensor(0, device=device_of(runs[0].setup.mesh)))
    run = Run(options, runs, groups, jit(sweep_step, **capture), inputs)
    return run, run_folder.resumed(options, training, *placed(run)[:2])


def placed(run: Run) -> verification.Placed:
    """Return what is compared between ranks: the states, and the base of all."""
    return train.placed(run.runs[0])


def weights(run: Run) -> tuple[Any, ...]:
    """Return what the first losses depend on."""
    return *train.weights(run.runs[0]), *(one.work.adapters for one in run.runs[1:])


def equal_groups(runs: Sequence[train.Run], states: Sequence[State]) -> Groups:
    """Return the groups of experiments of one structure, split where the first gradients differ from those alone."""
    by_kind: dict[Any, list[int]] = {}
    for i, state in enumerate(states):
        shapes = [tuple(t.shape) for t in tree.leaves(state.trained)]
        by_kind.setdefault(repr((tree.structure(state.trained), shapes)), []).append(i)
    groups: list[tuple[int, ...]] = []
    for group in by_kind.values():
        many = []
        for i in group:
            micros, count = train.micro_batches(runs[i], 0)
            many.append((states[i].trained, count, micros))
        f = jit(gradients, passes=runs[0].setup.gathering())
        constants = runs[0].local, runs[group[0]].setup, runs[0].teacher
        together, alone = f(many, *constants), [f([one], *constants)[0] for one in many]
        same = all(map(torch.equal, tree.leaves(together), tree.leaves(alone)))
        is_equal = set(all_gather_text(str(same))) == {"True"}  # on every rank
        groups += [tuple(group)] if is_equal else [(i,) for i in group]
    return tuple(groups)


def take(run: Run, training: States) -> tuple[States, Step]:
    """Take one step of every experiment."""
    began, step, options = time.perf_counter(), int(training.done), run.options
    found = [train.micro_batches(one, step) for one in run.runs]
    micros, counts, setups = [m for m, _ in found], [c for _, c in found], [one.setup for one in run.runs]
    first = run.runs[0]
    states, measured = run.step(training.many, first.local, micros, counts, setups, run.groups, first.teacher)
    figures = [one.loss for one in measured], [one.lr for one in measured]
    losses, rates = torch.stack([torch.stack(each) for each in figures]).tolist()  # one wait for the device
    tokens = len(run.runs) * options.batch * options.accumulate * options.seq
    seconds = time.perf_counter() - began
    speed = tokens / seconds, training_step.share(run.step, first.card, seconds)
    worst = next((x for x in losses if not math.isfinite(x)), min(losses))
    memory = devices.memory(device_of(first.setup.mesh))
    return States(states, training.done + 1), Step(step, worst, losses, rates, *speed, *memory)


def validate(run: Run, training: States) -> dict[str, Any]:
    """Return the mean loss of the held-out tokens in nats: the lowest, and that of each experiment."""
    each = zip(run.runs, training.many, strict=True)
    found = [measurement.mean_loss(one, one.local, state.trained) for one, state in each]
    return {"validation": min(found), "validations": found}


def measure(run: Run, training: States, say: Callable[[str], None]) -> list[Result]:
    """Return the held-out perplexity of each experiment, and of the base on the same rows."""
    say("measuring every adapter")
    losses = validate(run, training)["validations"]
    bases: dict[Any, float] = {}
    for one in run.runs:
        key = one.options.sources()
        if key not in bases:
            bases[key] = measurement.mean_loss(one, one.local, {})
    named = zip(run.options.names(), run.runs, losses, strict=True)
    results = [Result(name, x, bases[one.options.sources()]) for name, one, x in named]
    for x in results if run.options.objective == "sft" else ():
        _ = finite.perplexity(x.loss, x.name), finite.perplexity(x.base, "the base")
    return results
