"""Pure functions from documents to batches of packed token rows.

    tok    = data.tokenizer(folder)                       # tokenizer.json
    corpus = data.encode(data.documents(path, tok), tok, eos)
    train, held = data.split(data.pack(corpus, seq), holdout=16)
    rows   = data.batch(train, step, global_batch, seed)  # the Rows of a step: no state, so nothing to resume

Each piece of a document (examples/common/records.py) is tokenised by itself, as the prompt is when the model is used.

    stream       | bos  prompt  answer  eos | bos  prompt  answer  eos | ...     concatenated, then cut every seq tokens
    segment      | 0    0       0       0   | 1    1       1       1   | ...     attention stays within a segment
    target       | -    -       answer  eos | -    -       answer  eos | ...     predicted one position earlier

The last token of a row predicts the first of the next. The last row is padded with a segment of its own and no target.
"""

import json
from pathlib import Path

import torch
from einops import rearrange
from tokenizers import Tokenizer
from torch import Tensor

from fquant import random, tree
from fquant.tree import node, static

from .records import HEADERS, Document, records, stdlib_sources

IGNORED = -100  # the target of a position that predicts nothing, as in torch's cross_entropy


@node
class Corpus:
    """Tokenised documents, one after another: token ids, whether each is a target, and its document's number."""

    tokens: Tensor  # i32[n]
    targets: Tensor  # bool[n]
    segments: Tensor  # i32[n], 0 0 0 1 1 ...
    name: str = static(default="data")


@node
class Rows:
    """Rows of packed tokens, as in the module's docstring."""

    tokens: Tensor  # i64[n t]
    targets: Tensor  # i64[n t], the token after, or IGNORED
    segments: Tensor | None = None  # i64[n t], numbered from 0 in each row; absent: each row is one document


def tokenizer(folder: str | Path) -> Tokenizer:
    """Return the ``tokenizer.json`` in ``folder``, its truncation and padding switched off."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; wanted a tokenizer, copy it from where the model comes from")
    try:
        found = Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(f"{path}: not a tokenizer: {error}; copy it again from where the model comes from") from error
    found.no_truncation()
    found.no_padding()
    return found


def special(folder: str | Path) -> tuple[int, int | None]:
    """Return the ids of the end and, if there is one, the begin of a text, from ``config.json``."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text("utf-8"))
    eos, bos = config.get("eos_token_id"), config.get("bos_token_id")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if not isinstance(eos, int):
        raise ValueError(f"{path}: eos_token_id is {eos!r}; wanted the id of the token that ends a text")
    return eos, bos if isinstance(bos, int) else None


def some(documents: list[Document], characters: int) -> list[Document]:
    """Return every n-th document, which together have about ``characters`` characters."""
    total = sum(len(piece.text) for document in documents for piece in document.pieces)
    return documents[:: max(1, round(total / characters))]


def documents(path: str | Path | None, tokenizer: Tokenizer, characters: int) -> list[Document]:
    """Return the documents of a file (chats in Llama 3's template if the tokenizer has it), or some of the stdlib."""
    if path is None:
        return some(stdlib_sources(), characters)
    return records(path, headers=all(tokenizer.token_to_id(token) is not None for token in HEADERS))


def encode(documents: list[Document], tokenizer: Tokenizer, eos: int, bos: int | None = None) -> Corpus:
    """Tokenise documents. Each begins with ``bos`` unless None, and ends with ``eos``, a target if its last piece is.

    Raises ValueError if there is no document, no target, or a token that the tokenizer lacks.
    """
    if not documents:
        raise ValueError("data: no documents; wanted at least one")
    for what, token in (("eos", eos), ("bos", bos)):
        if token is not None and tokenizer.id_to_token(token) is None:
            wanted = f"wanted one below {tokenizer.get_vocab_size()}"
            raise ValueError(f"{what}: the tokenizer has no token {token}; {wanted}")
    name = documents[0].name if len(documents) == 1 else f"{documents[0].name} ... {documents[-1].name}"
    ids: list[int] = []
    flags = bytearray()
    lengths = []
    for document in documents:
        start = len(ids)
        parts = [([] if bos is None else [bos], False)]
        parts += [(tokenizer.encode(text, add_special_tokens=False).ids, target) for text, target in document.pieces]
        for more, is_target in [*parts, ([eos], parts[-1][1])]:
            ids += more
            flags += bytes([is_target]) * len(more)
        lengths.append(len(ids) - start)
    if not any(flags):
        raise ValueError(f"{name}: no targets among {len(ids)} tokens; wanted text, outputs or assistant turns")
    segments = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
    return Corpus(torch.tensor(ids, dtype=torch.int32), torch.tensor(list(flags), dtype=torch.bool), segments, name)


def pack(corpus: Corpus, seq: int) -> Rows:
    """Cut a corpus into rows of ``seq`` tokens [n t]; no token is dropped.

    A position predicts nothing if the token after it is no target or belongs to another document.
    """
    if seq < 1:
        raise ValueError(f"--seq: got {seq}, wanted at least 1")
    have = corpus.tokens.numel()
    if have <= seq:
        fix = f"use --seq {have - 1} or less, or more data" if have > 1 else "use more data"
        wanted = f"wanted at least {seq + 1} (--seq {seq} and one to predict)"
        raise ValueError(f"{corpus.name}: {have} tokens, {wanted}; {fix}")
    short = -(have - 1) % seq
    tokens = torch.cat([corpus.tokens, corpus.tokens.new_zeros(short)]).long()
    segments = torch.cat([corpus.segments, (corpus.segments[-1:] + 1).expand(short)]).long()
    learn = torch.cat([corpus.targets, corpus.targets.new_zeros(short)])[1:] & (segments[1:] == segments[:-1])
    if not learn.any():
        raise ValueError(f"{corpus.name}: none of {have} tokens can be predicted; wanted documents of 2 tokens or more")
    targets = torch.where(learn, tokens[1:], IGNORED)
    tokens, targets, segments = (rearrange(x, "(n t) -> n t", t=seq) for x in (tokens[:-1], targets, segments[:-1]))
    return Rows(tokens, targets, segments - segments[:, :1])


def split(rows: Rows, holdout: int) -> tuple[Rows, Rows]:
    """Return ``(train, held)``: ``holdout`` rows are taken out at even distances, so that they resemble the rest."""
    num_rows = len(rows.tokens)
    if not 0 < holdout < num_rows:
        wanted = "wanted at least 1 and some left to train on; use a smaller --seq or more data"
        raise ValueError(f"holdout: got {holdout} of {num_rows} rows, {wanted}")
    held = torch.zeros(num_rows, dtype=torch.bool)
    held[(2 * torch.arange(holdout) + 1) * num_rows // (2 * holdout)] = True
    return tree.map(lambda t: t[~held], rows), tree.map(lambda t: t[held], rows)


def batch(rows: Rows, step: int, global_batch: int, seed: int) -> Rows:
    """Return the ``global_batch`` rows of a step, the same for every run and world size.

    Every epoch visits all rows once; a batch may hold the end of one epoch and the start of the next.
    """
    key, num_rows = random.fold(random.key(seed), "data"), len(rows.tokens)
    first = step * global_batch
    epochs = range(first // num_rows, (first + global_batch - 1) // num_rows + 1)
    visited = torch.cat([random.permutation(random.fold(key, epoch), num_rows) for epoch in epochs])
    start = first - epochs[0] * num_rows
    return tree.map(lambda t: t[visited[start : start + global_batch]], rows)
