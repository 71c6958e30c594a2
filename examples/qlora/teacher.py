"""The teacher of a distillation: another model of the same tokenizer, or the base before it was packed.

Models of one family often pad the rows of their tables to different sizes. A student and its teacher must have one
vocabulary, so rows of the teacher that are beyond the student's are left out. They belong to no token.
"""

import dataclasses
from typing import Any, NamedTuple

import torch

from fquant import lazy, tree
from fquant.device import HOST
from models import hf
from models.config import Config

from ..common.command_line import check
from ..data import tokenizer
from .options import Options

TABLES = r"embed|final\.head"  # paths of weights with a row a token


class Teacher(NamedTuple):
    """A teacher's configuration, and its weights as they are in the files, Lazy."""

    cfg: Config
    weights: Any


def find(options: Options, cfg: Config, dense: Any, device: torch.device = HOST) -> Teacher | None:
    """Return the teacher that ``options`` name, of a student of ``cfg``; None if the objective has none.

    ``dense`` is the student before it is packed. Weights will be read to ``device``. Raises ValueError for a teacher of
    another tokenizer.
    """
    if options.objective != "distill":
        return None
    if options.teacher is None:
        return Teacher(cfg, dense)
    found, weights = hf.lazy(options.teacher, device)
    check(found, None, options.seq, options.teacher)
    texts = [tokenizer.vocabulary(folder) for folder in (options.model, options.teacher)]
    if texts[0] != texts[1]:
        token = min(token for token, _ in texts[0].items() ^ texts[1].items())
        fault = f"its tokenizer has another number for {token!r} than that of {options.model}, or none"
        raise ValueError(f"--teacher {options.teacher}: {fault}; wanted a model of the same tokenizer")
    if found.vocab < cfg.vocab:
        fault = f"has {found.vocab} rows for tokens, and {options.model} has {cfg.vocab}"
        raise ValueError(f"--teacher {options.teacher}: {fault}; wanted at least as many")
    if found.vocab > cfg.vocab:
        weights = tree.map_at(TABLES, lambda w: _first_rows(w, cfg.vocab, options), weights)
        found = dataclasses.replace(found, vocab=cfg.vocab)
    return Teacher(found, weights)


def _first_rows(w: lazy.Lazy, rows: int, options: Options) -> lazy.Lazy:
    """Return the first ``rows`` of a table."""
    if not isinstance(w.like, torch.Tensor):
        fault = f"a table is packed in {w.like.format.text:.80} and has more rows than {options.model}"
        raise ValueError(f"--teacher {options.teacher}: {fault}; wanted dense tables, or as many rows")
    return lazy.map(lambda t: t[:rows].clone(), w)
