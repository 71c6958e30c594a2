"""The options of ``python -m examples.qlora``, and the values that follow from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fquant import optim

from ..common import runs
from ..common.command_line import FormatName, parse_format, parse_targets
from ..common.training_step import Checkpoint

HERE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Options(runs.Options):
    """Fine-tune LoRA adapters beside a quantised decoder, on one process or sharded over several.

    Without arguments it quantises the small Llama shipped here to NF4 with double quantisation and shards it over two
    local processes. It trains on the standard library's source and writes an adapter that PEFT loads. Start it under
    torchrun to use more machines: torchrun --nproc-per-node 8 -m examples.qlora --model DIR --data FILE
    """

    ALONE = 2
    LEAST = dict.fromkeys(("rank", "seq", "accumulate", "holdout", "characters"), 1)
    POSITIVE = ("alpha", "lr", "clip")

    model: Path = HERE / "model"
    """Folder of a decoder in Hugging Face layout: config.json, safetensors, tokenizer.json."""
    data: str | None = None
    """FILE or FILE:WEIGHT, with commas between: JSONL, JSON, CSV, Parquet or text. Of chats and instructions the
    answers are learnt. Default: the standard library's source."""
    format: FormatName = "nf4_dq"
    """How base weights are packed; none: as they are in the folder, dense or quantised. aq_2x8 and aq_3x8 learn 16 and
    24 KiB of vectors a weight, slowly."""
    block: int | None = None
    """Weights that share a scale; default: the format's own, of int8, aq_2x8 and aq_3x8 a row."""
    rank: int = 16
    """Rank of the adapters."""
    alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    targets: str = "all"
    """Weights to adapt, comma-separated, of q k v o gate up down (of a Phi-3: qkv o gate_up down); or all of them."""
    dropout: float = 0.0
    """Share of an adapter's inputs that is dropped."""
    mesh: str | None = None
    """As in dp=1,fsdp=2: dp replicates the base, fsdp splits it; default: fsdp over all of torchrun's ranks, or 2."""
    checkpoint: Checkpoint | None = None
    """Activations kept for the backward: full recomputes each block, selective recomputes cheap operations, none keeps
    all; default: the fastest that is predicted to fit into memory."""
    dtype: Literal["bf16", "f32"] = "bf16"
    """Of the residual stream, and so of all products with the base and the adapters."""
    steps: int = 60
    """Steps of the optimiser."""
    seq: int = 256
    """Tokens in a row."""
    batch: int = 8
    """Rows in a micro-batch, over all processes."""
    accumulate: int = 1
    """Micro-batches in a step."""
    lr: float = 1e-2
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after its warm-up."""
    warmup: int | None = None
    """Steps of warm-up; default: a tenth."""
    clip: float = 1.0
    """Largest norm of a gradient."""
    seed: int = 0
    """Of initial values, the order of the data, and dropout."""
    holdout: int = 32
    """Rows kept out of training, to measure perplexity on."""
    characters: int = 1_500_000
    """How much of the standard library's source to use, when no data is given."""
    out: Path | None = None
    """Folder to write to, not holding a run yet; default: the first free of runs/qlora, runs/qlora-2, ..."""
    save_every: int = 20
    """Steps between saved states."""
    resume: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of a run to continue, to the bit; its options need not be given again."""

    def check(self) -> None:
        """Raise ValueError for values out of range, before anything is started or read."""
        super().check()
        if not 0 <= self.dropout < 1:
            raise ValueError(f"--dropout is {self.dropout}; wanted 0 <= dropout < 1")
        if self.warmup is not None and not 0 <= self.warmup < self.steps:
            raise ValueError(f"--warmup is {self.warmup}; wanted 0 <= warmup < --steps {self.steps}")
        parse_format(self.format, self.block)
        parse_targets(self.targets)

    @staticmethod
    def upgraded(values: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a run.json in today's names and values; runs before --dtype were in float32."""
        values = dict(values)
        if "keep" in values:
            modes = {"inputs": "full", "selected": "selective", "all": "none"}
            values |= {"checkpoint": modes[values.pop("keep")], "dtype": "f32"}
        former = {"vq2": "aq_2x8", "vq3": "aq_3x8"}
        return values | {"format": former.get(values.get("format", ""), values.get("format"))}

    def learning_rate(self) -> optim.Schedule:
        """Return the schedule of the learning rate."""
        warmup = self.steps // 10 if self.warmup is None else self.warmup
        if self.schedule == "constant":
            return optim.constant(self.lr, warmup)
        return {"cosine": optim.cosine, "linear": optim.linear}[self.schedule](self.lr, self.steps, warmup)
