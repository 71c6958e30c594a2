"""The training that every rank runs: quantise, place, take steps.

Everything is a function of a frozen ``Run`` and a ``State``, which is a tree. A batch is a function of the step's
number, and dropout of (key, row). The token count is that of the global batch. So a run on any mesh computes the same
sums, and a resumed run continues to the bit.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shard
from fquant import jit, lora, random, tree
from fquant.compile import all_gather_text, roofline
from fquant.device import HOST
from fquant.io import peft_config
from fquant.kernels.cpu import usable_cores
from models import decoder, hf
from models.config import Config
from shard import agree
from shard.device_mesh import device_of
from shard.host_memory import local_ranks

from ..common import devices, objectives, run_folder, training_step, verification
from ..common.command_line import DTYPES, check, parse_format, quantised
from ..common.model_folders import weight_files
from ..common.objectives import KINDS
from ..common.training_step import MODES, Measured, Micro, Setup, State
from ..data import dataset as data
from ..data import tokenizer
from ..data.options import Note
from ..data.store import Progress
from . import adapters, full_training, teacher
from .fitting import choose_checkpoint
from .options import Options
from .teacher import Teacher


@dataclass(frozen=True)
class Work:
    """The input of a run, opened and checked, before ranks meet."""

    options: Options  # resolved
    cfg: Config
    parameters: int
    dense: Any  # the base as it is in the files, Lazy; quantised folders have packed weights
    packed: Any  # the base quantised, Lazy; ``dense`` itself with --format none
    adapters: lora.Adapters  # none with --train full
    train: data.Stored
    held: data.Rows | data.Preferences
    teacher: Teacher | None = None


@dataclass(frozen=True)
class Run:
    """The constants of a run; ``base`` is placed, and nothing with --train full."""

    options: Options
    work: Work
    setup: Setup
    base: Any
    local: Any  # shard.local(base)
    step: Callable[..., tuple[State, Measured]]  # train_step, captured
    evaluate: Callable[..., Tensor]  # training_step.evaluate, captured
    teacher: Any  # placed, this rank's part; None without one
    card: roofline.Device  # of this rank, in figures
    inputs: dict[str, str]  # digests of what it reads (run_folder.digests)


@dataclass(frozen=True)
class Step:
    """The figures of one step; a line of metrics.jsonl."""

    step: int
    loss: float  # nats a token, over the global batch
    lr: float
    grad_norm: float
    tokens: int  # targets in the global batch; of preferences, what the loss is divided by
    tokens_per_second: float  # of the rows of the batch
    share: float | None  # of the limit (fquant/compile/roofline/prediction.py); None if that cannot be right
    memory: int  # bytes of this rank (devices.Memory.used)
    held: int  # bytes that this rank's allocator has for them
    wire: int  # bytes that one rank sent
    validation: float | None = None  # nats a token of held-out rows, after the step


def prepare(
    options: Options, note: Note | None = None, progress: Progress | None = None, device: torch.device = HOST
) -> Work:
    """Open and check everything that ``options`` name, and tokenise the data; a ValueError names the fault.

    ``note`` is called with each line that a person should know about the data. Weights will be read to ``device``; the
    process that starts the ranks uses none.
    """
    cfg, dense = hf.lazy(options.model, device)
    fmt = parse_format(options.format, options.block)
    check(cfg, fmt, options.seq, options.model)
    packed = quantised(dense, fmt)
    full_training.check_base(options, packed)
    taught = teacher.find(options, cfg, dense, device)
    begun = adapters.start(options, cfg, packed, options.seed) if options.train == "lora" else {}
    train, held = options.rows(options.model, note, progress, KINDS[options.objective])
    parameters = sum(t.numel() for t in tree.leaves(decoder.shapes(cfg)))
    options = options.resolved(len(train.rows), parameters)
    return Work(options, cfg, parameters, dense, packed, begun, train, held, taught)


def start(options: Options) -> tuple[Run, State]:
    """Meet the other ranks, compare their input, place the base, and make or load the state.

    Raises ValueError on every rank if one fails or if they disagree.
    """
    ((run, state),) = start_many([options])
    return run, run_folder.resumed(run.options, state, *placed(run)[:2])


def start_many(
    many: Sequence[Options], together: Callable[[Sequence[Options]], Options] | None = None
) -> list[tuple[Run, State]]:
    """Start runs over one base, which the first of ``many`` names; they differ in data, adapters and optimisers.

    They are one run of the options that ``together`` makes of those with nothing left open, if it is given. Before the
    base is placed, the input of a resumed run is compared with that of its start.
    """
    options = many[0]
    axes = options.axes()
    torch.set_num_threads(usable_cores(local_ranks()))
    try:
        mode, fault = choose_checkpoint(options, axes, len(many)), None
    except ValueError as error:  # of this rank alone perhaps: the others wait in the mesh
        mode, fault = MODES[-1], error
    mesh = shard.mesh(options.device, dp=axes.get("dp", 1), fsdp=axes.get("fsdp", 1))
    device = device_of(mesh)
    agree.attempt("start", lambda: _raise(fault))
    card = roofline.of(device)
    chosen = all_gather_text(mode)
    mode = MODES[max(i for i, name in enumerate(MODES) if name in chosen)]  # the mode that fits on every rank
    works = agree.attempt("prepare", lambda: prepare_many(many, device=device))
    large = run_folder.split_files(lambda: weight_files(options.model, options.teacher))
    digests = agree.attempt("prepare", lambda: [inputs(work) | large for work in works])
    for work, read in zip(works, digests, strict=True):
        facts = {"options": repr(work.options.shared())} | read
        agree.same("start", facts | agree.fingerprint({"data": (work.train, work.held)}))
    resolved = together([work.options for work in works]) if together else works[0].options
    run_folder.check_same(resolved, {name: digest for found in digests for name, digest in found.items()})
    rules = training_step.rules(options.offload)
    rows = shard.max_local_rows(options.batch, mesh, rules) * options.answers()
    norm = partial(shard.global_norm, mesh=mesh, rules=rules)
    setups = [
        Setup(
            its.cfg, mesh, its.options.optimiser(norm), its.options.learning_rate(), rows, options.seq, mode,
            DTYPES[options.dtype], rules, minimised(its), options.merge_aware,
            card if options.offload_activations else None, full_training.precision(options), its.options.seed,
            options.batch * options.accumulate if its.options.ordered else None,
        )
        for its in works
    ]  # fmt: skip
    first, setup = works[0], setups[0]
    placed, begun = place(works, setup)
    taught = None
    if first.teacher is not None:
        dims = decoder.dims(first.teacher.cfg)
        taught = shard.local(shard.place(first.teacher.weights, dims, setup.rules, mesh, first.teacher.cfg))
    is_text = setup.objective.name in objectives.ON_DOCUMENTS
    judged: Any = training_step.evaluate if is_text else training_step.judge
    # Batches have two sizes. Adapters of each run are measured, and bases: packed, merged, dense, a teacher.
    evaluate = jit(judged, passes=setup.gathering(), max_traces=4 * len(works) + 8)
    step = jit(training_step.train_step, **setup.capture())
    return [
        (
            Run(work.options, work, its, placed, shard.local(placed), step, evaluate, taught, card, read),
            training_step.initial(a, its.opt),
        )
        for work, its, a, read in zip(works, setups, begun, digests, strict=True)
    ]


def place(works: Sequence[Work], setup: Setup) -> tuple[Any, list[Any]]:
    """Return the placed base, and what each run trains: adapters, or this rank's part of all parameters.

    Raises ValueError for full training of several runs, whose parameters would be as many times the model.
    """
    first, device = works[0], device_of(setup.mesh)
    where = decoder.dims(first.cfg), setup.rules, setup.mesh, first.cfg
    if setup.train is not None:
        if len(works) > 1:
            raise ValueError("--train full of several experiments at once; run examples.qlora for each")
        return [], [shard.local(shard.place(first.packed, *where, setup.train))]  # nothing else holds their memory
    beside = lambda w: adapters.beside(w.options, devices.to(w.adapters, device), w.packed)
    begun = agree.attempt("norms", lambda: [beside(w) for w in works])
    return shard.place((first.packed, begun), *where)


def _raise(fault: ValueError | None) -> None:
    if fault is not None:
        raise fault


def minimised(work: Work) -> objectives.Objective:
    """Return what a step minimises."""
    cfg = work.teacher.cfg if work.teacher else None
    return dataclasses.replace(work.options.minimised(), teacher=cfg)


def inputs(work: Work) -> dict[str, str]:
    """Return a digest of each file, by its path, and of each option's tensors that a run reads; causes come first."""
    options = work.options
    files = [options.model / hf.CONFIG, *tokenizer.files(options.model)]
    files += [] if options.teacher is None else [options.teacher / hf.CONFIG]
    files += [] if options.adapter is None else [options.adapter / peft_config.CONFIG]
    if options.chat_template is not None and options.chat_template not in tokenizer.BUILT_IN:
        files.append(Path(options.chat_template))
    rows: dict[str, Any] = {"rows": work.train.rows}
    named: dict[str, Any] = {f"--model {options.model}": work.dense}
    if options.eval_data is None:
        rows["held"] = work.held
    else:
        named[f"--eval-data {options.eval_data}"] = work.held
    if work.teacher is not None and options.teacher is not None:
        named[f"--teacher {options.teacher}"] = work.teacher.weights
    if options.adapter is not None:
        named[f"--adapter {options.adapter}"] = work.adapters
    read = run_folder.digests(rows) | {"files": [part.digest for part in work.train.parts]}
    data = {f"--data {options.data or '(that of the demo)'}": run_folder.digest(read)}
    return run_folder.files(*files) | run_folder.digests(named) | data


def placed(run: Run) -> verification.Placed:
    """Return what is compared between ranks: the state, the base and a teacher."""
    teacher = {} if run.teacher is None else {"the teacher": run.teacher}
    return verification.Placed(run.setup.mesh, run.setup.rules, {"the base": run.local} | teacher)


def weights(run: Run) -> tuple[Any, ...]:
    """Return what the first loss depends on: the base, a teacher, and adapters as they begin."""
    return run.work.packed, run.work.adapters, run.work.teacher and run.work.teacher.weights


def prepare_many(
    many: Sequence[Options], note: Note | None = None, progress: Progress | None = None, device: torch.device = HOST
) -> list[Work]:
    """Return the input of runs over one base; data that several name are read once."""
    works: list[Work] = []
    for options in many:
        if works:  # as many steps as the first takes
            options = dataclasses.replace(options, steps=works[0].options.steps, epochs=None)
        same = next((w for w in works if w.options.sources() == options.sources()), None)
        if same is None:
            works.append(prepare(options, note, progress, device))
            continue
        begun = adapters.start(options, same.cfg, same.packed, options.seed)
        resolved = options.resolved(len(same.train.rows), same.parameters)
        works.append(dataclasses.replace(same, options=resolved, adapters=begun))
    return works


def micro_batches(run: Run, step: int) -> tuple[tuple[Micro, ...], Tensor]:
    """Return this rank's rows of every micro-batch of ``step``, and the counts of the global batch i64[...].

    They are on the device of the mesh. The rows of a rank are consecutive, as ordered sums need them. Those of KTO are
    so in each micro-batch, because its loss is one of a micro-batch over all ranks.
    """
    options, setup = run.options, run.setup
    size, count, device = options.batch * options.accumulate, options.accumulate, device_of(setup.mesh)
    batch = data.batch(run.work.train, step, size, options.seed)
    keys = random.fold(random.fold(random.key(options.seed), step), torch.arange(size))  # one a row
    share = lambda x: shard.share(x, setup.mesh, setup.rules)
    if setup.objective.name == "kto":
        wholes = [(objectives.complete(setup.objective, rows), each) for rows, each in _cut((batch, keys), count)]
        total = torch.stack([objectives.counts(setup.objective, rows) for rows, _ in wholes]).sum(0)
        parts = [share(whole) for whole in wholes]
    else:
        total, parts = objectives.counts(setup.objective, batch), _cut(share((batch, keys)), count)
    micros = tuple((rows, each if options.dropout else None) for rows, each in devices.to(parts, device))
    return micros, devices.to(total, device)


def _cut(x: Any, count: int) -> list[Any]:
    """Cut every tensor of ``x`` along dim 0 into ``count`` parts, which differ by at most one row."""
    return [tree.map(lambda t, i=i: t.tensor_split(count)[i], x) for i in range(count)]


def take(run: Run, state: State) -> tuple[State, Step]:
    """Take one step."""
    began, step, options = time.perf_counter(), int(state.done), run.options
    micros, count = micro_batches(run, step)
    state, found = run.step(state, run.local, micros, count, run.setup, run.teacher)
    figures = found.loss, found.grad_norm, found.lr, count.max()
    value, norm, lr, tokens = torch.stack([t.double() for t in figures]).tolist()  # one wait for the device
    seconds = time.perf_counter() - began
    through = options.batch * options.accumulate * options.seq / seconds
    share, memory = training_step.share(run.step, run.card, seconds), devices.memory(device_of(run.setup.mesh))
    return state, Step(step, value, lr, norm, int(tokens), through, share, *memory, training_step.sent(run.step))
