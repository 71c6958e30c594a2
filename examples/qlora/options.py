"""The options of ``python -m examples.qlora``, and the values that follow from them.

Some are left open (None) until the model and the data are known: :meth:`Options.resolved`. Those of the model that is
shipped suit that model alone. Otherwise a run has three epochs, and its peak learning rate is that of QLoRA (Dettmers
et al. 2023, appendix B): 2e-4, and 1e-4 from 33 B parameters on. It does not depend on the rank, because adapters are
scaled by alpha / rank. That of full training is 2e-5, as of Llama 2's chat models (Touvron et al. 2023).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from fquant import optim
from fquant.device import HOST, parse
from models.losses import preference

from ..common import objectives, runs
from ..common.command_line import MOMENTS, FormatName, Ignored, MomentsName, check_used, parse_format
from ..common.devices import DeviceName
from ..common.tracking import Tracker
from ..common.training_step import Checkpoint, Offload
from ..data.options import IGNORED as OF_DATA
from ..data.options import DataOptions
from . import full_training
from .adapters import AdapterOptions

SHIPPED = Path(__file__).parent.parent / "model"
DEMO: dict[str, Any] = {"lr": 1e-2, "steps": 60, "compare_dense": True}  # for the model that is shipped
DEMO_FULL = {"lr": 1e-3, "compare_dense": False}
EPOCHS = 3.0
LARGE = 30_000_000_000  # parameters
RATE, RATE_LARGE, RATE_FULL = 2e-4, 1e-4, 2e-5


IGNORED: Ignored = {
    "dither": (lambda x: not x.merge_aware or x.adapter is not None, "is of --merge-aware, and of new adapters"),
    "compare_dense": (
        lambda x: x.compare_dense and (x.format == "none" or x.objective not in objectives.ON_DOCUMENTS),
        "measures the perplexity of a base before it is packed; give a --format, and an --objective on texts",
    ),
    "show_data": (
        lambda x: x.objective not in objectives.ON_DOCUMENTS, "shows texts, and this --objective has preferences",
    ),
}  # fmt: skip


CHANGEABLE = ("compare_dense", "show_data")  # of these, when a run is resumed


@dataclass(frozen=True)
class Options(AdapterOptions, DataOptions, runs.Options):
    """Fine-tune LoRA adapters beside a quantised decoder, on one process or sharded over several.

    Without arguments it quantises the small Llama shipped here to NF4 with double quantisation and shards it over two
    local processes. It trains on the standard library's source and writes an adapter that PEFT loads. Start it under
    torchrun to use more machines: torchrun --nproc-per-node 8 -m examples.qlora --model DIR --data FILE
    """

    ALONE = 2
    LEAST = dict.fromkeys(("rank", "seq", "accumulate", "holdout", "characters"), 1) | {"weight_decay": 0, "dither": 0}
    POSITIVE = ("alpha", "lr", "clip", "epochs", "temperature")

    model: Path = SHIPPED
    """Folder of a decoder in Hugging Face layout: config.json, safetensors, tokenizer.json."""
    train: Literal["lora", "full"] = "lora"
    """full: train every weight, with its moments spread over the ranks of fsdp; of a dense base (--format none), or of
    one in codes (int8_row), which then are the only copy."""
    wire: Literal["int8", "fp8", "ternary"] | None = None
    """Of --train full: quantise the matrices of layers when they are gathered; gradients are of what was gathered."""
    format: FormatName = "nf4_dq"
    """How base weights are packed; none: as they are in the folder, dense or quantised. aq_2x8 and aq_3x8 learn 16 and
    24 KiB of vectors a weight, slowly."""
    block: int | None = None
    """Weights that share a scale; default: the format's own, of int8, aq_2x8 and aq_3x8 a row."""
    mesh: str | None = None
    """As in dp=1,fsdp=2: dp replicates the base, fsdp splits it; default: fsdp over all of torchrun's ranks, or over
    all CUDA devices, or over 2 processes on the host."""
    device: DeviceName = "auto"
    checkpoint: Checkpoint | None = None
    """Activations kept for the backward: full recomputes each block, selective recomputes cheap operations, none keeps
    all; default: the fastest that is predicted to fit into memory."""
    offload: Offload | None = None
    """block: keep the base in the host's memory, but for its embedding, and fetch each block ahead of its use."""
    offload_activations: bool = False
    """Stash activations in the host's memory until the backward, as far as the link to it has time, and more if the
    step would not fit; give --checkpoint too, because to find the mode all layers are traced."""
    dtype: Literal["bf16", "f32"] = "bf16"
    """Of the residual stream, and so of all products with the base and the adapters."""
    steps: int | None = None
    """Steps of the optimiser; with --resume, more of them extend the run."""
    epochs: float | None = None
    """Passes over the data, in place of --steps; default: 3, and 60 steps for the model that is shipped."""
    batch: int = 8
    """Rows in a micro-batch, over all processes."""
    accumulate: int = 1
    """Micro-batches in a step."""
    ordered: bool | None = None
    """Add the gradients of rows in one order, so that adapters have the same bits on any mesh and with any
    --accumulate; default: yes on the host, but for --objective kto and --train full, which cannot, and no with CUDA."""
    objective: objectives.Name = "sft"
    """sft learns texts and answers; dpo and orpo learn from pairs (chosen, rejected), kto from answers with a label.
    The base without adapters is the reference of dpo and kto. distill learns the probabilities of --teacher on texts
    and answers."""
    teacher: Path | None = None
    """Of distill: folder of a model with the same tokenizer; default: the model itself before it was packed."""
    temperature: float = 1.0
    """Of distill: logits of both models are divided by it."""
    kind: str = "sigmoid"
    """Of dpo: sigmoid, hinge, ipo, robust, exo_pair, nca_pair, bco_pair, sppo_hard, apo_zero, apo_down or
    sigmoid_norm."""
    beta: float | None = None
    """Of dpo and kto: how closely to keep to the reference; of orpo: the weight of the odds; default: 0.1. Of distill:
    0, the default, is the forward divergence, 1 the reverse one, and between is the Jensen-Shannon divergence."""
    smoothing: float = 0.0
    """Of dpo: the share of pairs whose label is wrong."""
    merge_aware: bool = False
    """Train with the packed weights that the adapters will be merged into; they are written to RUN/merged."""
    dither: float = 3.0
    """Of --merge-aware: the size of a random start of the adapters, in rounding errors of the format."""
    optimizer: Literal["adamw", "lion", "sgd"] = "adamw"
    """Rule of the updates; sgd has a momentum of 0.9."""
    moments: MomentsName = "f32"
    """How its moments are stored: in 32 bits, 8 or 4, beside a scale for each 256 or 128."""
    weight_decay: float = 0.0
    """Decay of what is trained towards 0, times the learning rate."""
    lr: float | None = None
    """Peak learning rate; default: 2e-4, of 33 B parameters or more 1e-4, of --train full 2e-5, and 1e-2 for the model
    that is shipped, in full 1e-3."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after its warm-up."""
    warmup: int | None = None
    """Steps of warm-up; default: a tenth."""
    clip: float = 1.0
    """Largest norm of a gradient."""
    seed: int = 0
    """Of initial values, the order of the data, and dropout."""
    validate_every: int | None = None
    """Steps between validations; the adapter of the lowest loss is kept in RUN/best."""
    patience: int | None = None
    """Stop after so many validations that were no better."""
    verify_every: int | None = 20
    """Steps between comparisons of bits: of the state on all ranks, and of an eighth of the base with what was placed;
    None: never."""
    keep: int = 1
    """Checkpoints to keep, in RUN/checkpoints."""
    track: Tracker | None = None
    """Write the figures of each step for TensorBoard or Weights & Biases too."""
    compare_dense: bool | None = None
    """Measure the perplexity of the base before it was packed too, which takes its memory; default: no, and yes for
    the model that is shipped."""
    out: Path | None = None
    """Folder to write to, not holding a run yet; default: the first free of runs/qlora, runs/qlora-2, ..."""
    save_every: int | None = None
    """Steps between checkpoints; default: 1 of adapters, 20 of --train full."""
    publish_every: int = 20
    """Steps after which RUN/adapter, or RUN/model, is written anew; it is at the end, too."""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of a run to continue, to the bit; its options need not be given again."""
    elastic: bool = False
    """Begin in --out, or go on there from the last checkpoint; for a command line that torchrun starts again."""
    restarts: int = 0
    """Times that all local processes begin again from the last checkpoint after one of them died."""

    def check(self) -> None:
        """Raise ValueError for values out of range, before anything is started or read."""
        super().check()
        self.check_adapters()
        self.check_data()
        self.check_objective()
        full_training.check(self)
        self.check_used()
        if self.ordered and not self.can_be_ordered():
            fault = "--train full" if self.train == "full" else f"--objective {self.objective}"
            raise ValueError(f"--ordered with {fault}, whose gradients are not sums of those of rows; leave it out")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"--steps is {self.steps} and --epochs is {self.epochs}; leave one out")
        if self.steps is not None:
            self.check_warmup(self.steps)
        parse_format(self.format, self.block)

    def check_used(self) -> None:
        """Raise ValueError for an option that does nothing, of a resumed run among those that may change."""
        ignored = IGNORED | OF_DATA
        check_used(self, ignored if self.resume is None else {name: ignored[name] for name in CHANGEABLE})

    def check_objective(self) -> None:
        """Raise ValueError for options of another objective, and for adapters that cannot be merged."""
        if self.objective != "dpo" and (self.kind, self.smoothing) != ("sigmoid", 0.0):
            raise ValueError(
                f"--kind and --smoothing are of --objective dpo, and this is {self.objective}; leave them out"
            )
        if self.beta is not None and (
            self.objective == "sft" or self.objective != "distill" and not 0 < self.beta < math.inf
        ):
            fault = "has none; leave it out" if self.objective == "sft" else "wants a number above 0"
            raise ValueError(f"--beta is {self.beta}, and --objective {self.objective} {fault}")
        if self.objective == "distill":
            if not 0 <= (self.beta or 0) <= 1:
                raise ValueError(f"--beta is {self.beta}; wanted 0 (forward) to 1 (reverse) of --objective distill")
            if self.teacher is None and self.format == "none":
                raise ValueError("--objective distill with --format none, which packs nothing; give a --teacher")
        elif self.teacher is not None or self.temperature != 1.0:
            raise ValueError(
                f"--teacher and --temperature are of --objective distill, and this is {self.objective}; leave them out"
            )
        pair = torch.zeros(2, device=HOST)
        if self.objective == "dpo":
            preference.dpo(pair, pair, self.minimised().beta, self.smoothing, self.kind, pair)
        if self.merge_aware and (self.dora or self.dropout):
            raise ValueError(
                "--merge-aware with --dora or --dropout, which a merged weight cannot have; leave them out"
            )
        if self.merge_aware and self.format in ("none", "aq_2x8", "aq_3x8"):
            raise ValueError(f"--merge-aware with --format {self.format}; wanted a format with fixed values")

    def can_be_ordered(self) -> bool:
        """Return True if the loss of a row depends on no other, and a gradient of each row is not too much to hold."""
        return self.train == "lora" and self.objective != "kto"

    def adds_in_order(self, device: torch.device) -> bool:
        """Return ``ordered`` or its default: on CUDA it takes a tenth of a step and promises less."""
        return self.can_be_ordered() and device == HOST if self.ordered is None else self.ordered

    def minimised(self) -> objectives.Objective:
        """Return what a step minimises."""
        beta = {"distill": 0.0}.get(self.objective, 0.1) if self.beta is None else self.beta
        return objectives.Objective(self.objective, self.kind, beta, self.smoothing, temperature=self.temperature)

    def answers(self) -> int:
        """Return the rows that a row of the batch has: two of a pair, and of kto the mismatched one."""
        return 1 if self.objective in objectives.ON_DOCUMENTS else 2

    def check_warmup(self, steps: int) -> None:
        """Raise ValueError for a warm-up that is longer than the run."""
        if self.warmup is not None and not 0 <= self.warmup < steps:
            raise ValueError(f"--warmup is {self.warmup}; wanted 0 <= warmup < --steps {steps}")

    def resolved(self, rows: int, parameters: int) -> "Options":
        """Return these options with nothing left open, for ``rows`` of data and a model of ``parameters``."""
        is_full = self.train == "full"
        shipped = (DEMO | (DEMO_FULL if is_full else {})) if self.model == SHIPPED else {}
        steps = self.steps or (None if self.epochs else shipped.get("steps"))
        steps = steps or math.ceil((self.epochs or EPOCHS) * rows / (self.batch * self.accumulate))
        self.check_warmup(steps)
        rate = self.lr or shipped.get("lr") or (RATE_FULL if is_full else RATE_LARGE if parameters >= LARGE else RATE)
        compares = shipped.get("compare_dense", False) if self.compare_dense is None else self.compare_dense
        compares = compares and self.format != "none" and self.objective in objectives.ON_DOCUMENTS
        more = {
            "ordered": self.adds_in_order(parse(self.device)),
            "save_every": self.save_every or (20 if is_full else 1),
        }
        return replace(self, steps=steps, epochs=None, lr=rate, compare_dense=compares, **more)

    @staticmethod
    def upgraded(values: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a run.json in today's names and values; runs before --dtype were in float32."""
        values = dict(values)
        if isinstance(values.get("keep"), str):  # of activations, before it was --checkpoint
            modes = {"inputs": "full", "selected": "selective", "all": "none"}
            values |= {"checkpoint": modes[values.pop("keep")], "dtype": "f32"}
        former = {"vq2": "aq_2x8", "vq3": "aq_3x8"}
        was = {"ordered": False} | values
        return was | {"format": former.get(values.get("format", ""), values.get("format"))}

    def learning_rate(self) -> optim.Schedule:
        """Return the schedule of the learning rate."""
        assert self.steps is not None and self.lr is not None, "resolve the options first"
        warmup = self.steps // 10 if self.warmup is None else self.warmup
        if self.schedule == "constant":
            return optim.constant(self.lr, warmup)
        return {"cosine": optim.cosine, "linear": optim.linear}[self.schedule](self.lr, self.steps, warmup)

    def optimiser(self, norm: Callable[[Any], torch.Tensor] | None = None) -> optim.Optimizer:
        """Return the optimiser, behind the clipping of gradients, whose norm is that of ``optim`` by default."""
        rate, more = self.learning_rate(), {"weight_decay": self.weight_decay, "moments": MOMENTS[self.moments]}
        made = {"adamw": optim.adamw, "lion": optim.lion}.get(self.optimizer)
        rule = made(rate, **more) if made else optim.sgd(rate, momentum=0.9, **more)
        return optim.chain(optim.clip_by_global_norm(self.clip, norm), rule)
