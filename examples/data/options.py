"""The options of programs that read data, and the rows that follow from them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..common.command_line import Ignored
from . import dataset
from .dataset import Preferences, Rows, Stored
from .store import Progress

HOLDOUT = 32  # rows
Note: TypeAlias = Callable[[str], None]  # is called with what a person should know about the data

NAMED = {  # kinds of data
    "documents": "texts, instructions or chats", "pairs": "pairs of chosen and rejected answers",
    "labelled": "answers with a label",
}  # fmt: skip


OF_FILES = "is of files, and no --data names any; give --data"
IGNORED: Ignored = {
    "characters": (lambda x: x.data is not None, "is of the standard library's source, and --data is given"),
    "holdout": (lambda x: x.eval_data is not None, "is of --data, and --eval-data is what is held out"),
    "chat_template": (lambda x: x.data is None and x.eval_data is None, OF_FILES),
    "parse_special": (lambda x: x.data is None and x.eval_data is None, OF_FILES),
}


@dataclass(frozen=True)
class DataOptions:
    """The options of data for training and validation."""

    data: str | None = None
    """FILE or FILE:WEIGHT, with commas between: JSONL, JSON, CSV, Parquet or text. Of chats and instructions the
    answers are learnt. Default: the standard library's source."""
    eval_data: str | None = None
    """Files to validate and to measure perplexity on, in place of --holdout rows of --data."""
    chat_template: str | None = None
    """Jinja template of chats in place of the tokenizer's: a file, chatml or zephyr."""
    parse_special: bool = False
    """Make control tokens of special tokens in texts, for texts that are formatted already."""
    seq: int = 256
    """Tokens in a row."""
    holdout: int | None = None
    """Rows kept out of training, to validate and to measure perplexity on; default: 32, or a tenth of fewer rows."""
    characters: int = 1_500_000
    """How much of the standard library's source to use, when no data is given."""
    show_data: int = 0
    """Print so many rows before anything is trained, token by token, and coloured by whether they count."""
    json: bool = False
    """With --show-data: print the rows as objects with tokens and counts, a line each, and do not train."""

    def check_data(self) -> None:
        """Raise ValueError for values out of range."""
        if self.show_data < 0:
            raise ValueError(f"--show-data is {self.show_data}; wanted at least 0")
        if self.show_data and "RANK" in os.environ:
            raise ValueError(
                "--show-data under torchrun, whose ranks would print at once; show the data without it first"
            )
        if self.json and not self.show_data:
            raise ValueError("--json without --show-data, which it prints; give both")

    def rows(
        self, folder: Path, note: Note | None, progress: Progress | None, kind: str = "documents"
    ) -> tuple[Stored, Rows | Preferences]:
        """Tokenise the data by the tokenizer in ``folder``; return the rows to train on and those held out.

        Raises ValueError for data of another kind than ``kind``, which is documents, pairs or labelled.
        """
        more: dict[str, Any] = {"template": self.chat_template, "parse_special": self.parse_special}
        more |= {"note": note, "progress": progress}
        train = dataset.prepare(self.data, folder, self.seq, characters=self.characters, **more)
        held = None if self.eval_data is None else dataset.prepare(self.eval_data, folder, self.seq, **more)
        for stored, option in ((train, "--data"), (held, "--eval-data")):
            if stored is not None and stored.kind != kind:
                raise ValueError(f"{option}: got {NAMED[stored.kind]}, wanted {NAMED[kind]} for this --objective")
        if held is None:
            few = max(1, len(train.rows.unique()) // 10)
            train, held = dataset.divide(train, min(HOLDOUT, few) if self.holdout is None else self.holdout)
        return train, dataset.read(held)

    def sources(self) -> tuple[Any, ...]:
        """Return the options that decide which rows are trained on and held out."""
        more = self.chat_template, self.parse_special, self.characters
        return self.data, self.eval_data, self.seq, self.holdout, *more
