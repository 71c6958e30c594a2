"""Show rows as a person reads them: token by token, those that count in colour.

    console.print(show.text(rows, tokenizer, 3))
    for line in show.lines(rows, tokenizer, 3): print(line)     # {"tokens": [...], "counts": [...]}

A token counts if its row predicts it. The row before predicts the first token, so that one does not count here. Without
colours, as in a file, brackets are around what counts.
"""

import json
from collections.abc import Iterator

from rich.text import Text
from tokenizers import Tokenizer

from fquant.tree import printable

from .dataset import IGNORED, Rows
from .workers import Worker

COUNTS, CONTEXT, BORDER = "bold green", "dim", "yellow"
BRACKETS = "⟦", "⟧"


def lines(rows: Rows, tokenizer: Tokenizer | Worker, n: int) -> Iterator[str]:
    """Yield a JSON object for each of the first ``n`` rows: token texts, and whether each counts."""
    for tokens, counts, _ in _rows(rows, n):
        yield json.dumps({"tokens": [_said(tokenizer, token) for token in tokens], "counts": counts})


def text(rows: Rows, tokenizer: Tokenizer | Worker, n: int, bracketed: bool = False) -> Text:
    """Return the first ``n`` rows as coloured text; a bar is between two documents, and brackets if asked for."""
    out = Text()
    for number, (tokens, counts, segments) in enumerate(_rows(rows, n)):
        out.append(f"row {number}: {sum(counts)} of {len(tokens)} tokens count\n", style="bold")
        for i, token in enumerate(tokens):
            if i and segments[i] != segments[i - 1]:
                out.append("|", style=BORDER)
            if bracketed and counts[i] and not counts[i - 1]:
                out.append(BRACKETS[0], style=COUNTS)
            said = _said(tokenizer, token)
            out.append(printable(said, "\n\t"), COUNTS if counts[i] else CONTEXT)
            if bracketed and counts[i] and not any(counts[i + 1 : i + 2]):
                out.append(BRACKETS[1], style=COUNTS)
        out.append("\n\n")
    return out


def _rows(rows: Rows, n: int) -> Iterator[tuple[list[int], list[bool], list[int]]]:
    for i in range(min(n, len(rows.tokens))):
        tokens = rows.tokens[i].tolist()
        counts = [False, *(target != IGNORED for target in rows.targets[i].tolist()[:-1])]
        yield tokens, counts, rows.segments[i].tolist() if rows.segments is not None else [0] * len(tokens)


def _said(tokenizer: Tokenizer | Worker, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)
