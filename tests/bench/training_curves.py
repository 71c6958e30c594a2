"""Training curves of every mode of quantised training, beside full precision, on real text.

    python -m tests.bench.training_curves --out docs/images/quantised_training.png      # minutes, on two cores

A small Llama is trained from random weights on the documentation of the Python standard library, in float32, with the
same batches for each mode. The projections of the layers are trained by the mode; embedding and norms are dense:

    full              dense products, AdamW with moments in float32
    again             the same from weights that are larger by 1e-5: how far two runs are apart for no reason
    int8, fp8_*       recipes of products (quantised_training.RECIPES); bitnet: ternary weights and int8 inputs
    qat_int4          fake quantisation to INT4 with int8 inputs
    int8_weights      int8 codes are the only copy, rounded stochastically
    adam8, adam4      dense products, moments of 8 and of 4 bits

Each mode has a stated distance: the mean loss of its last 50 steps is at most so much above that of ``full``. The exit
status is 0 if all hold or some do not, which the table says, and 2 for bad options.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import tyro
from torch import Tensor
from torch.func import grad_and_value

from examples import pretrain
from fquant import INT4, INT8_ROW, jit, optim, quantize, quantized_training, random, tree
from fquant.quantized_training import RECIPES, FakeQuantization, weights
from models import decoder
from models.config import Config
from tests.bench import report
from tests.bench.report import Row, at_most

CFG = Config(
    vocab=2048, dim=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, hidden=352, tied=True,
    max_positions=256,
)  # fmt: skip
PROJECTIONS = r"layers\.\d+\.(q|k|v|o|gate|up|down)"
LAST = 50  # steps whose mean loss is compared
DISTANCES = {  # of the mean loss of the last steps from that of full precision, at most, in nats
    "again": 0.001, "int8": 0.01, "fp8_rowwise": 0.01, "fp8_rowwise_hp": 0.01, "fp8_tensorwise": 0.01, "bitnet": 0.05,
    "qat_int4": 0.05, "int8_weights": 0.01, "adam8": 0.01, "adam4": 0.06,
}  # fmt: skip
Step = Callable[[Any, Tensor, Tensor], tuple[Any, Tensor]]  # (state, batch i64[rows seq+1], key) -> state, loss


@dataclass(frozen=True)
class Options:
    """Train a small Llama in every mode, print a table of losses, and draw the curves."""

    out: Path | None = None
    """Picture to write."""
    steps: int = 300
    rows: int = 8
    """Sequences in a step."""
    seq: int = 128
    """Tokens in a sequence."""
    lr: float = 1e-3
    """Peak of the learning rate."""
    modes: tuple[str, ...] = ("full", *DISTANCES)
    json: Path | None = None
    """File to write the figures to."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be run."""
        unknown = set(self.modes) - {"full", *DISTANCES}
        if unknown or "full" not in self.modes:
            raise ValueError(f"--modes: wanted full and some of {', '.join(DISTANCES)}")
        for name in ("steps", "rows", "seq"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; wanted at least 1")
        report.check_writable(self.json)
        report.check_writable(self.out)


def batches(options: Options) -> list[Tensor]:
    """Return the batches i64[rows seq+1] of a run, of the documents in a random order."""
    texts = pretrain.documents()
    tokenizer = pretrain.train_tokenizer(texts[::4], CFG.vocab)
    order = random.permutation(random.key(0), len(texts)).tolist()

    def stream() -> Iterator[int]:
        for i in order:
            yield from (0, *tokenizer.encode(texts[i]).ids)

    rows = options.steps * options.rows
    needed = rows * (options.seq + 1)
    tokens = torch.tensor(list(islice(stream(), needed)))
    if len(tokens) < needed:
        raise ValueError(f"--steps {options.steps}: the documents have {len(tokens)} tokens, wanted {needed}")
    mixed = tokens.view(rows, -1)[random.permutation(random.key(1), rows)]  # a step has rows of many documents
    return list(mixed.view(options.steps, options.rows, -1))


def loss(params: Any, batch: Tensor) -> Tensor:
    """Return the mean loss, in nats a token."""
    return decoder.loss(params, batch[:, :-1], batch[:, 1:], CFG)


def rate(options: Options) -> optim.Schedule:
    """Return the learning rate: a tenth of the steps warm up, then a cosine goes to a tenth of ``lr``."""
    return optim.cosine(options.lr, options.steps, options.steps // 10, 0.1 * options.lr)


def dense(
    options: Options, recipe: quantized_training.Recipe | None, moments: Any = None, scale: float = 1.0
) -> tuple[Any, Step]:
    """Return the first state and the step of a mode that keeps weights in full precision, from weights times scale."""
    params = decoder.init(CFG, random.key(0))
    params = tree.map(lambda w: w * scale, params)
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate(options), b2=0.98, moments=moments))

    def of(params: Any, batch: Tensor) -> Tensor:
        return loss(params if recipe is None else quantized_training.attach(params, PROJECTIONS, recipe), batch)

    def step(state: Any, batch: Tensor, key: Tensor) -> tuple[Any, Tensor]:
        params, moments = state
        grads, value = grad_and_value(of)(params, batch)
        updates, moments = opt.update(grads, moments, params)
        return (optim.apply_updates(params, updates), moments), value

    return (params, opt.init(params)), step


def int8_weights(options: Options) -> tuple[Any, Step]:
    """Return the first state and the step of the mode whose projections are int8 codes alone."""
    params = decoder.init(CFG, random.key(0))
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate(options), b2=0.98))
    packed: dict[str, Any] = {}
    matches = tree.map_at(PROJECTIONS, lambda w: quantize(w, INT8_ROW), params)
    is_packed = lambda x: hasattr(x, "codes")
    tree.map_with_path(lambda path, x: packed.update({path: x} if is_packed(x) else {}), matches, is_leaf=is_packed)
    rest = tree.map_at(PROJECTIONS, lambda w: torch.zeros(1), params)

    def of(trained: Any, packed: Any, batch: Tensor) -> Tensor:
        return loss(weights.attach(trained[0], packed, trained[1]), batch)

    def step(state: Any, batch: Tensor, key: Tensor) -> tuple[Any, Tensor]:
        rest, packed, moments = state
        grads, value = grad_and_value(of)((rest, weights.carriers(packed)), packed, batch)
        updates, moments = opt.update(grads, moments, (rest, weights.dense(packed)))
        packed = weights.apply_updates(packed, updates[1], key)
        return (optim.apply_updates(rest, updates[0]), packed, moments), value

    return (rest, packed, opt.init((rest, weights.dense(packed)))), step


def mode(name: str, options: Options) -> tuple[Any, Step]:
    """Return the first state and the step of a mode."""
    if name == "int8_weights":
        return int8_weights(options)
    moments = {"adam8": optim.DYNAMIC8, "adam4": optim.DYNAMIC4}.get(name)
    recipe = FakeQuantization(INT4, INT8_ROW) if name == "qat_int4" else RECIPES.get(name)
    return dense(options, recipe, moments, 1.0 + 1e-5 if name == "again" else 1.0)


def curve(name: str, data: list[Tensor], options: Options, done: Callable[[], None] = lambda: None) -> list[float]:
    """Return the loss of each step."""
    state, step = mode(name, options)
    captured, key, losses = jit(step, donate=("state",)), random.key(1), []
    for i, batch in enumerate(data):
        state, value = captured(state, batch, random.fold(key, i))
        losses.append(value)
        done()
    return [float(value) for value in losses]


def draw(path: Path, curves: dict[str, list[float]]) -> None:
    """Draw the curves, smoothed over 10 steps, and their distance from full precision."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    smooth = lambda y: torch.tensor(y).unfold(0, min(10, len(y)), 1).mean(1)
    for name, losses in curves.items():
        y = smooth(losses)
        left.plot(y, label=name, linewidth=1.8 if name == "full" else 1.0, color="black" if name == "full" else None)
        if name != "full":
            right.plot(y - smooth(curves["full"]), label=name, linewidth=1.0)
        else:
            right.axhline(0.0, color="black", linewidth=1.0)
    left.set(xlabel="step", ylabel="loss, nats a token", title="training loss")
    right.set(xlabel="step", ylabel="nats a token", title="distance from full precision")
    left.legend(fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(args: list[str] | None = None) -> int:
    """Run the command line ``args``; return 0, or 2 for bad options, which one line names."""
    program = "python -m tests.bench.training_curves"
    options = tyro.cli(Options, args=sys.argv[1:] if args is None else args, prog=program)
    try:
        options.check()
    except ValueError as error:
        print(f"training_curves: {error}", file=sys.stderr)
        return 2
    data, curves = batches(options), dict[str, list[float]]()
    with report.progress() as bar:
        task = bar.add_task("steps", total=len(options.modes) * len(data))
        for name in ("full", *(name for name in options.modes if name != "full")):
            bar.update(task, description=name)
            curves[name] = curve(name, data, options, lambda: bar.update(task, advance=1))
    last = {name: sum(y[-LAST:]) / len(y[-LAST:]) for name, y in curves.items()}
    rows = [
        Row(name, "nats", {"loss": last[name]}, [at_most("above full", last[name] - last["full"], DISTANCES[name])])
        for name in last
        if name != "full"
    ]
    out = report.console()
    out.print(report.table([Row("full", "nats", {"loss": last["full"]}, []), *rows], ["loss"]))
    if options.out is not None:
        draw(options.out, curves)
    if options.json is not None:
        report.write(options.json, {"last": last, "curves": curves})
    return 0


if __name__ == "__main__":
    sys.exit(main())
