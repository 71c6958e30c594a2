"""The output of ``python -m examples.qlora``: a line a step, one table, a loss curve."""

from pathlib import Path
from typing import Any

from rich.table import Table

from fquant.io.safetensors import replacing

from ..common.progress import metrics
from .train import Result, Step


def summary(x: Step) -> str:
    """Return the figures of a step as one line."""
    speed, memory = f"{x.tokens_per_second:,.0f} tok/s", f"{x.memory / 2**20:.0f} MiB a rank"
    return f"loss {x.loss:.4f}  lr {x.lr:.1e}  {speed}  {memory}"


def table(result: Result, options: Any, ranks: int) -> Table:
    """Return the one table at the end; a dense base (--format none) has two columns instead of three."""
    out = Table(title=f"{options.model.name}: {options.format} base, rank {options.rank} adapters, {ranks} ranks")
    packed = options.format != "none"
    names = ("bf16 base", "packed base", "packed + adapter") if packed else ("bf16 base", "bf16 base + adapter")
    out.add_column("")
    for name in names:
        out.add_column(name, justify="right")
    smaller = f"{result.bytes_bf16 / result.bytes_packed:.2f}x smaller"
    perplexities = result.perplexity_bf16, result.perplexity_packed, result.perplexity_adapted
    rows = {
        "bytes of the base": (f"{result.bytes_bf16:,}", f"{result.bytes_packed:,}", smaller),
        "bytes a rank sends in a step": (f"{result.wire_bf16:,}", f"{result.wire_packed:,}", ""),
        "held-out perplexity": tuple(f"{p:.2f}" for p in perplexities),
    }
    for name, (dense, quantised, adapted) in rows.items():
        out.add_row(name, dense, *((quantised, adapted) if packed else (adapted.replace(smaller, ""),)))
    return out


def curve(folder: Path, result: Result) -> Path:
    """Draw the loss of every step in metrics.jsonl to loss.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = metrics(folder)
    x, y = [s["step"] + 1 for s in steps], [s["loss"] for s in steps]
    mean = [sum(y[max(0, i - 4) : i + 1]) / len(y[max(0, i - 4) : i + 1]) for i in range(len(y))]
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot(x, y, color="#9db8d2", linewidth=1, label="training loss of a step")
    axes.plot(x, mean, color="#1f4e79", linewidth=2, label="mean of five steps")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.set_title(
        "Low-rank adapters beside a frozen packed base\n"
        f"held-out perplexity: bf16 base {result.perplexity_bf16:.1f}, as trained {result.perplexity_packed:.1f}, "
        f"with the adapter {result.perplexity_adapted:.1f}",
        loc="left", fontsize=10,
    )  # fmt: skip
    axes.legend(frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    with replacing(folder / "loss.png") as file:
        figure.savefig(file, format="png")
    plt.close(figure)
    return folder / "loss.png"
