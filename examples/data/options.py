"""The options of programs that read data, and the rows that follow from them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from . import dataset
from .dataset import Rows, Stored
from .store import Progress

Note: TypeAlias = Callable[[str], None]  # is called with what a person should know about the data


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
    holdout: int = 32
    """Rows kept out of training, to validate and to measure perplexity on."""
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
        if self.json and not self.show_data:
            raise ValueError("--json without --show-data, which it prints; give both")

    def rows(self, folder: Path, note: Note | None, progress: Progress | None) -> tuple[Stored, Rows]:
        """Tokenise the data by the tokenizer in ``folder``; return the rows to train on and those held out."""
        more: dict[str, Any] = {"template": self.chat_template, "parse_special": self.parse_special}
        more |= {"note": note, "progress": progress}
        stored = dataset.prepare(self.data, folder, self.seq, characters=self.characters, **more)
        if self.eval_data is None:
            return dataset.split(stored, self.holdout)
        return stored, dataset.read(dataset.prepare(self.eval_data, folder, self.seq, **more))

    def sources(self) -> tuple[Any, ...]:
        """Return the options that decide which rows are trained on and held out."""
        more = self.chat_template, self.parse_special, self.characters
        return self.data, self.eval_data, self.seq, self.holdout, *more
