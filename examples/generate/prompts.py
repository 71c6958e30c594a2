"""Prompts as tokens, tokens as text, and the settings of a model folder: stop tokens and sampling.

A plain prompt is encoded with the special tokens that the tokenizer adds. A chat is rendered by the tokenizer's own
template, which writes its special tokens itself. ``generation_config.json`` gives the defaults, as in transformers:
tokens that stop, the penalty of repetition, and with ``do_sample`` its temperature, top-k (50 if absent), top-p and
min-p. Without it, greedy.
"""

import dataclasses
import json
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fquant import tree
from models.generate import GREEDY, Sampling

from ..data.tokenizer import Text
from ..data.tokenizer import settings as settings_of
from ..data.workers import Worker, short

SAMPLING = ("temperature", "top_k", "top_p", "min_p")
PENALTY = "repetition_penalty"
TOP_K = 50  # of transformers, where a folder samples and names none
# What may change the text beside those: neutral values are passed over, others are refused by name.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "encoder_repetition_penalty": (1.0,), "no_repeat_ngram_size": (0,), "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": ([],), "typical_p": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "top_h": (),
    "num_beams": (1,), "penalty_alpha": (0.0,), "min_length": (0,), "min_new_tokens": (0,), "forced_bos_token_id": (),
    "forced_eos_token_id": (), "suppress_tokens": ([],), "begin_suppress_tokens": ([],), "sequence_bias": (),
    "guidance_scale": (1.0,), "exponential_decay_length_penalty": (), "stop_strings": ([],), "watermarking_config": (),
    "dola_layers": (), "num_beam_groups": (1,),
}  # fmt: skip


def settings(folder: Path) -> dict[str, Any]:
    """Return ``generation_config.json``, with the stop tokens of ``config.json`` if it names none."""
    found = settings_of(folder / "generation_config.json")
    path = folder / "generation_config.json"
    if found.get("eos_token_id") is None:
        path = folder / "config.json"
        found["eos_token_id"] = settings_of(path).get("eos_token_id")
    with tree.at(str(path)):
        stop_tokens(found)
    with tree.at(str(folder / "generation_config.json")):
        sampling(found, {})
    return found


def stop_tokens(settings: dict[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a text, of an integer or a list; raise ValueError for anything else."""
    found = settings.get("eos_token_id")
    many = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(token) is int and 0 <= token < 1 << 31 for token in many):
        raise ValueError(f"eos_token_id is {found!r:.80}; wanted the id of a token, or a list of ids")
    return tuple(many)


def unapplied(settings: dict[str, Any]) -> list[str]:
    """Return those settings that would change the text in transformers and are not implemented, as text."""
    changes = lambda name: settings.get(name) is not None and settings[name] not in NEUTRAL[name]
    return [f"{name} = {settings[name]!r:.80}" for name in NEUTRAL if changes(name)]


def sampling(settings: dict[str, Any], given: dict[str, Any]) -> Sampling:
    """Return how to draw tokens: by the options that are ``given``, else by the folder's settings.

    A given option asks for sampling, except for a temperature of 0. Raises ValueError for values out of range.
    """
    asked = {name: given[name] for name in SAMPLING if given.get(name) is not None}
    names = [x[PENALTY] for x in (given, settings) if x.get(PENALTY) is not None]
    penalty = _number(PENALTY, names[0] if names else 1.0)
    greedy = dataclasses.replace(GREEDY, repetition_penalty=penalty)
    if not asked and not settings.get("do_sample"):
        return greedy
    if asked.get("temperature") == 0:
        if len(asked) > 1:
            fault = f"{', '.join('--' + name.replace('_', '-') for name in asked if name != 'temperature')}"
            raise ValueError(f"{fault} beside --temperature 0, which is greedy; leave one out")
        return greedy
    defaults: dict[str, Any] = {}
    if settings.get("do_sample"):
        defaults = {"top_k": TOP_K} | {name: settings[name] for name in SAMPLING if settings.get(name) is not None}
    found = defaults | asked
    found["top_k"] = found.get("top_k") or None  # 0 keeps all tokens, as in transformers
    for name, value in found.items():
        if value is not None:
            _number(name, value)
    return Sampling(**found, repetition_penalty=penalty)


def _number(name: str, value: Any) -> Any:
    """Return a setting; raise ValueError if it is no number."""
    fits = type(value) in (int, float) and abs(value) <= sys.float_info.max
    if not fits or (name == "top_k" and type(value) is not int):
        raise ValueError(f"{name} is {value!r:.80}; wanted a number")
    return value


def encode(text: str, tokenizer: Tokenizer | Worker) -> list[int]:
    """Return the tokens of a plain prompt, with the special tokens of ``tokenizer.json``'s post-processor.

    transformers 5 follows the post-processor too, and ignores ``add_bos_token`` of ``tokenizer_config.json``.
    """
    return tokenizer.encode(text, add_special_tokens=True).ids


def encode_chats(chats: Sequence[tuple[str, list[dict[str, Any]]]], text: Text) -> list[list[int]]:
    """Return the tokens of each chat, a name and its messages, up to where the assistant answers.

    They are rendered in a process of bounded time and memory, as the data of a training are. Raises ValueError, with
    the name, for a tokenizer without a template, and for a template that fails.
    """
    with Worker(text, limits=short(text.path)) as worker:
        return [worker.chat(messages, prompt=True, name=name).tokens for name, messages in chats]


def chats(path: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the chats of a file, each with a name: JSON with a list of messages, or lines of ``{"messages": [...]}``.

    Raises ValueError, with the line, for anything else.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; wanted a chat as JSON")
    text = path.read_bytes().decode("utf-8-sig", errors="strict")
    lines = [(f"{path}:{n}", line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    found = []
    for name, line in lines if path.suffix == ".jsonl" else [(str(path), text)]:
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}: not JSON: {error}") from None
        messages = item["messages"] if isinstance(item, dict) and "messages" in item else item
        found.append((name, _messages(name, messages)))
    if not found:
        raise ValueError(f"{path}: is empty; wanted a chat as JSON")
    return found


def _messages(name: str, item: Any) -> list[dict[str, Any]]:
    fits = lambda turn: isinstance(turn, dict) and isinstance(turn.get("role"), str) and "content" in turn
    if not (isinstance(item, list) and item and all(map(fits, item))):
        raise ValueError(f"{name}: wanted a list of messages, each with role and content")
    return item


def pieces(tokenizer: Tokenizer | Worker) -> Generator[str, int | None, None]:
    """Receive tokens by ``send`` and yield the text that each completes; characters are never cut (UTF-8).

    A token may complete no text, if its bytes begin a character that later tokens end. ``send(None)`` yields the rest.
    """
    tokens: list[int] = []
    before = shown = 0  # tokens whose text is context, and tokens that have been shown
    out = ""
    while True:
        token = yield out
        if token is not None:
            tokens.append(token)
        old = tokenizer.decode(tokens[before:shown])
        text = tokenizer.decode(tokens[before:])
        out = ""
        if token is None or not text.endswith("\ufffd"):
            out, before, shown = text[len(old) :], shown, len(tokens)
