"""Tokenise records: each document as i32 numbers, a token and, in the highest bit, whether it counts.

A document of text begins and ends as the tokenizer's configuration says:

    begin   prompt   completion   eos      each piece is tokenised by itself, as the prompt is when the model is used
      -       -          x         x       eos is written once, though the text may end with it already

A chat is tokenised whole and has exactly the tokens of transformers' ``apply_chat_template``; nothing is added to it.
Special tokens that were typed, in a text or in a message, stay text, as with its ``sanitize_control_tokens``.
"""

import os
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
from tokenizers import Tokenizer

from .records import Piece, Record, Turns
from .sandbox import Span, Template
from .spans import Chat, chat
from .tokenizer_json import chosen
from .words import Encoder, Words, expression

COUNTS = np.int32(-(2**31))  # the highest bit
TOKEN = np.int32(2**31 - 1)  # the others

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Tools:
    """The means of tokenising: two encoders, compiled templates, and the ends of a text."""

    control: Encoder  # special tokens in the text are control tokens
    typed: Encoder  # special tokens in the text stay text
    templates: dict[str, Template]
    special: re.Pattern[str]
    mark: str  # is in each special token
    begin: Array
    eos: int
    eos_text: str


def tools(tokenizer: Tokenizer, setup: dict[str, Any], templates: dict[str, Template]) -> Tools:
    """Return the tools of a set-up, which ``workers.py`` writes."""
    words, cut = Words(tokenizer), expression(tokenizer)
    control, typed = (Encoder(tokenizer, typed, words, cut) for typed in (False, True))
    specials = sorted(setup["specials"], key=len, reverse=True)
    special = re.compile("|".join(map(re.escape, specials)) or "(?!)")
    begin, eos_text = np.array(setup["begin"], np.int32), setup["variables"]["eos_token"]
    typed = control if setup["parse_special"] else typed
    return Tools(control, typed, templates, special, os.path.commonprefix(specials), begin, setup["eos"], eos_text)


def templates(setup: dict[str, Any]) -> dict[str, Template]:
    """Return the compiled templates of a set-up. Raises jinja2.TemplateError for one that is none."""
    options = setup["variables"], setup["specials"], setup["characters"]
    found = {}
    for name, source in setup["templates"].items():
        try:
            found[name] = Template(name, source, *options)
        except jinja2.TemplateError as error:
            raise jinja2.TemplateError(f"the chat template {name!r}: {error}") from error
    return found


def encode(record: Record, tools: Tools, notes: Counter[str]) -> list[Array]:
    """Return the numbers of each document of a record, and count in ``notes`` what a person should know."""
    for name in record.ignored:
        notes[f"the column {name!r} is not read"] += 1
    return [said(d, tools, notes) if isinstance(d, Turns) else text(d, tools, notes) for d in record.documents]


def said(turns: Turns, tools: Tools, notes: Counter[str]) -> Array:
    """Return the numbers of a chat."""
    found = rendered(turns, tools, prompt=False)
    if found.skipped:
        notes["an assistant's turn does not count, because the template rewrites it when turns follow"] += found.skipped
    if not found.ended:
        notes["an assistant's turn has no special token at its end, so a model does not learn to stop"] += 1
    for piece, typed in found.pieces:
        if typed:
            notes[f"the special token {piece} was typed and stays text"] += 1
    return numbers(found, tools)


def rendered(turns: Turns, tools: Tools, prompt: bool) -> Chat:
    """Return a chat as text by the template that transformers chooses; with ``prompt`` an answer begins at its end."""
    template = tools.templates[chosen(tools.templates, turns.values.get("tools") is not None)]
    return chat(template, turns.messages, turns.first, prompt, **turns.values)


def numbers(found: Chat, tools: Tools) -> Array:
    """Return the numbers of a rendered chat."""
    out, at = [], 0
    for piece, typed in found.pieces:
        inside = [(a - at, b - at) for a, b in found.spans if a < at + len(piece) and b > at]
        out.append(flagged(tools.typed if typed else tools.control, piece, inside, at > 0))
        at += len(piece)
    return np.concatenate(out) if out else np.empty(0, np.int32)


def text(pieces: list[Piece], tools: Tools, notes: Counter[str]) -> Array:
    """Return the numbers of a text in pieces."""
    out = [tools.begin]
    for i, (piece, is_target) in enumerate(pieces):
        if i == len(pieces) - 1:
            piece = piece.removesuffix(tools.eos_text)
        if tools.typed is not tools.control and tools.mark in piece:
            for token in set(tools.special.findall(piece)):
                notes[f"the special token {token} was typed and stays text"] += 1
        found = np.frombuffer(tools.typed.encode(piece, inside=i > 0), np.int32)
        out.append(found | COUNTS if is_target else found)
    end = np.array([tools.eos], np.int32)
    return np.concatenate([*out, end | COUNTS if pieces[-1].is_target else end])


def flagged(encoder: Encoder, text: str, spans: list[Span], inside: bool) -> Array:
    """Return the numbers of a text, of which the tokens that have a character within ``spans`` count."""
    if (found := _by_words(encoder, text, spans)) is not None:
        return found
    start = "\n" if inside and encoder.line else ""
    encoding = encoder.tokenizer.encode(start + text, add_special_tokens=False)
    ids = np.array(encoding.ids, np.int32)
    if start and encoding.ids[: len(encoder.line)] != encoder.line:
        return flagged(encoder, text, spans, False)
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2) - len(start)
    for a, b in spans:
        ids[(offsets[:, 0] < b) & (offsets[:, 1] > a)] |= COUNTS
    return ids[len(encoder.line) :] if start else ids


def _by_words(encoder: Encoder, text: str, spans: list[Span]) -> Array | None:
    """Return what ``flagged`` does by the memory of words, or None if it cannot."""
    if (parts := encoder.parts(text)) is None:
        return None
    out, counted, total, at = [], [], 0, 0
    for number, part in enumerate(parts):
        edges = {edge - at for span in spans for edge in span if at < edge < at + len(part)}
        is_cut = edges and number % 2 == 0  # not an added token
        pieces = encoder.runs(part, edges) if is_cut else [(part, encoder.part(number, part))]
        for piece, ids in pieces:
            after = at + len(piece)
            out.append(ids)
            for a, b in spans:
                if a < after and b > at:
                    start, stop = 0, len(ids) // 4
                    if (a > at or b < after) and number % 2 == 0:
                        start, stop = encoder.within(piece, ids, a - at, b - at)
                    counted.append((total + start, total + stop))
            total, at = total + len(ids) // 4, after
    numbers = np.frombuffer(bytearray(b"".join(out)), np.int32)
    for start, stop in counted:
        numbers[start:stop] |= COUNTS
    return numbers
