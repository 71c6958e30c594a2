"""Losses of rows beside one base after another, each placed, measured and dropped.

The forward pass is captured: it is traced once for a base and a kind of adapter. The loss of each row is that of
``decoder.loss``, mapped over rows, so a packed weight is decoded once for a batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fquant import jit, lazy, lora, tree
from fquant.device import HOST
from fquant.format import Format
from models import decoder
from models.config import Config

from ..common import finite
from ..common.command_line import quantised
from ..common.devices import to
from ..data.dataset import Rows
from . import choices


@dataclass(frozen=True)
class Variant:
    """A base and an adapter to compare: the format of the base, None for what is in the folder, and adapters."""

    format: Format | None
    format_name: str
    adapter_name: str
    adapters: lora.Adapters

    @property
    def name(self) -> str:
        """The format and the adapter in words."""
        return f"{self.format_name} {self.adapter_name}".strip()


@dataclass(frozen=True)
class Figures:
    """The figures of a variant; those that were not asked for are None."""

    format: str
    adapter: str
    nbytes: int  # of the base
    bits: float  # of an element of the weights that are packed
    perplexity: float | None
    accuracy: float | None
    accuracy_by_bytes: float | None


def losses(
    cfg: Config,
    base: Any,
    adapters: lora.Adapters,
    rows: Rows,
    batch: int,
    dtype: torch.dtype,
    done: Callable[[], None],
) -> Tensor:
    """Return the summed loss of each row in nats, f64[rows] on the host; ``done()`` is called after each batch.

    Rows are on the host, and are brought to the device of the base a batch at a time.
    """
    device = tree.leaves(base)[0].device

    def summed(adapters: Any, base: Any, rows: Rows) -> Tensor:
        params = lora.attach(base, adapters)
        count = torch.ones((), device=rows.tokens.device)

        def one(row: Rows) -> Tensor:
            return decoder.loss(params, row.tokens, row.targets, cfg, segments=row.segments, dtype=dtype, count=count)

        with torch.no_grad():
            return vmap(one)(rows)

    f, found = jit(summed), []
    for first in range(0, len(rows.tokens), batch):
        some = tree.map(lambda t, i=first: t[i : i + batch], rows)
        found.append(f(adapters, base, to(some, device)).double().to(HOST))
        done()
    return torch.cat(found)


def measure(
    cfg: Config, dense: Any, variant: Variant, text: Rows | None, task: choices.Task | None, batch: int,
    dtype: torch.dtype, done: Callable[[], None],
) -> Figures:  # fmt: skip
    """Read and pack the base, and return its figures on the rows of a text and of a task."""
    base = lazy.read(quantised(dense, variant.format))
    perplexity, found = None, (None, None)
    if text is not None:
        nats = losses(cfg, base, variant.adapters, text, batch, dtype, done).sum()
        nats = _finite(float(nats / (text.targets >= 0).sum()), variant, base)
        perplexity = finite.perplexity(nats, variant.name)
    if task is not None:
        scores = -losses(cfg, base, variant.adapters, task.rows, batch, dtype, done)
        _finite(float(scores.sum()), variant, base)
        found = choices.accuracies(task, scores)
    weights = [(w, like) for w, like in zip(_matrices(base), _matrices(decoder.shapes(cfg)), strict=True)]
    bits = 8 * sum(tree.nbytes(w) for w, _ in weights) / sum(like.numel() for _, like in weights)
    return Figures(variant.format_name, variant.adapter_name, tree.nbytes(base), bits, perplexity, *found)


def _finite(nats: float, variant: Variant, base: Any) -> float:
    """Return the loss of a variant; raise ValueError that names a weight for one that is not finite."""
    if not math.isfinite(nats):
        raise ValueError(f"{variant.name}: the loss is {nats}; {finite.culprit(base, variant.adapters)}")
    return nats


def _matrices(params: Any) -> list[Any]:
    """Return the matrices of the layers, in the order of their paths."""
    shapes = tree.items(params, is_leaf=lambda x: hasattr(x, "codes"))
    return [w for path, w in shapes if path.startswith("layers") and len(w.shape) > 1]
