"""Read a record: what it says, what of it a model should learn to write, and which of its columns are not read.

The first kind whose columns a record has decides; its other columns are ignored, and named in a note.

    chosen, rejected              preference, with ``prompt`` or with a common beginning (TRL's formats)
    prompt, completion, label     preference without pairs, as for KTO
    prompt, completion            the completion is target
    messages                      a chat: [{"role": ..., "content": ...}, ...], also with tools and tool_calls
    conversations                 a chat in ShareGPT's words: [{"from": ..., "value": ...}, ...]
    instruction, output           Alpaca, also with ``input``: the output is target
    text                          all of it is target

``prompt``, ``completion``, ``chosen`` and ``rejected`` are texts or lists of messages. Chats go through the tokenizer's
template. Alpaca records get the template of github.com/tatsu-lab/stanford_alpaca.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}  # ShareGPT's
KNOWN = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
EXTRA = ("tools", "documents", "chat_template_kwargs")  # columns that a chat's template is given

ALPACA = "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
ALPACA_INPUT = ", paired with an input that provides further context"


class Piece(NamedTuple):
    """A stretch of a document, and whether the model should learn to write it."""

    text: str
    is_target: bool


class Turns(NamedTuple):
    """A chat: its assistant's turns from number ``first`` on are targets; ``values`` are variables of the template."""

    messages: list[dict[str, Any]]
    first: int
    values: dict[str, Any]


Said = list[Piece] | Turns


class Record(NamedTuple):
    """The documents of a record: one, or a chosen and a rejected one; a label; and the columns that are not read."""

    kind: str  # documents, pairs or labelled
    documents: Sequence[Said]
    label: bool | None
    ignored: tuple[str, ...]


def record(item: Any) -> Record:
    """Return what a record says. Raises ValueError for a kind that is not in the module's docstring, or a bad value."""
    if not isinstance(item, dict):
        raise ValueError(f"got {type(item).__name__}, wanted an object with the columns of a record")
    item = {key: value for key, value in item.items() if value is not None}
    label, kind = None, "documents"
    documents: Sequence[Said]
    if {"chosen", "rejected"} <= item.keys():
        kind, read, documents = "pairs", {"chosen", "rejected"}, _pair(item)
        read |= {"prompt"} if isinstance(item.get("prompt"), list) == isinstance(item["chosen"], list) else set()
    elif {"prompt", "completion"} <= item.keys():
        read, documents = {"prompt", "completion"}, [_completed(item, "prompt", "completion")]
        if "label" in item:
            kind, label = "labelled", item["label"]
            read |= {"label"}
            if not isinstance(label, bool):
                raise ValueError(f"label: got {label!r}, wanted true or false")
    elif "messages" in item or "conversations" in item:
        name = "messages" if "messages" in item else "conversations"
        read, documents = {name}, [Turns(messages(item[name], name), 0, _values(item))]
    elif {"instruction", "output"} <= item.keys():
        read, documents = {"instruction", "input", "output"}, [_alpaca(item)]
    elif "text" in item:
        read, documents = {"text"}, [[Piece(_text(item, "text"), True)]]
    else:
        kinds = "text, instruction and output, messages, conversations, prompt and completion, or chosen and rejected"
        have = ", ".join(sorted(map(str, item))[:8]) or "(none)"
        raise ValueError(f"got the columns {have}; wanted {kinds}")
    if any(isinstance(document, Turns) for document in documents):
        read = read | set(EXTRA)
    return Record(kind, documents, label, tuple(sorted(item.keys() - read)))


def messages(turns: Any, name: str) -> list[dict[str, Any]]:
    """Return turns as messages with role and content; those of ShareGPT are renamed."""
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{name}: got {type(turns).__name__}, wanted a list of turns, one at least")
    found = []
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise ValueError(f"{name}.{i}: got {type(turn).__name__}, wanted an object with role and content")
        if "from" in turn and "value" in turn and "role" not in turn:
            turn = {"role": ROLES.get(str(turn["from"]), turn["from"]), "content": turn["value"]} | {
                key: value for key, value in turn.items() if key not in ("from", "value")
            }
        if turn.get("role") not in KNOWN:
            raise ValueError(f"{name}.{i}: got the role {turn.get('role')!r}, wanted one of {', '.join(KNOWN)}")
        content = turn.get("content")
        if not isinstance(content, str | list) and not (content is None and turn.keys() - {"role", "content", "name"}):
            raise ValueError(f"{name}.{i}.content: got {type(content).__name__}, wanted text or a list of parts")
        found.append(turn)
    return found


def _values(item: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of a template that a record gives; tools may be JSON in a text, as in LLaMA-Factory."""
    found: dict[str, Any] = {}
    for name in EXTRA:
        value = item.get(name)
        if isinstance(value, str) and value.strip():
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ValueError(f"{name}: not JSON: {error}") from None
        if value is None or value == "":
            continue
        wanted = dict if name == "chat_template_kwargs" else list
        if not isinstance(value, wanted) or (wanted is list and not all(isinstance(x, dict) for x in value)):
            raise ValueError(
                f"{name}: got {type(value).__name__}, wanted {'an object' if wanted is dict else 'objects'}"
            )
        if wanted is dict:
            if bad := set(value) & {"messages", "prompt", "first", "add_generation_prompt"}:
                raise ValueError(f"{name}: got {', '.join(sorted(bad))}, which the chat decides; remove it")
            found.update(value)
        else:
            found[name] = value
    return found


def _pair(item: dict[str, Any]) -> Sequence[Said]:
    chosen, rejected = item["chosen"], item["rejected"]
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise ValueError("chosen, rejected: wanted two texts or two lists of messages")
    if "prompt" in item and isinstance(item["prompt"], list) == isinstance(chosen, list):
        return [_completed(item, "prompt", "chosen"), _completed(item, "prompt", "rejected")]
    differ = (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
    same = next(differ, min(len(chosen), len(rejected)))
    if isinstance(chosen, list):
        same = max(0, min(same, len(chosen) - 1, len(rejected) - 1))
    elif same and chosen[same - 1] == " ":  # as in TRL's extract_prompt
        same -= 1
    parts = {"prompt": chosen[:same]} | {"chosen": chosen[same:], "rejected": rejected[same:]}
    if isinstance(chosen, list) and not same:
        return [Turns(messages(item[name], name), 0, _values(item)) for name in ("chosen", "rejected")]
    parts |= {key: item[key] for key in EXTRA if key in item}
    return [_completed(parts, "prompt", "chosen"), _completed(parts, "prompt", "rejected")]


def _completed(item: dict[str, Any], prompt: str, completion: str) -> Said:
    if isinstance(item[prompt], list) != isinstance(item[completion], list):
        raise ValueError(f"{prompt}, {completion}: wanted two texts or two lists of messages")
    if isinstance(item[prompt], list):
        before = messages(item[prompt], prompt)
        return Turns(before + messages(item[completion], completion), len(before), _values(item))
    return [Piece(_text(item, prompt), False), Piece(_text(item, completion), True)]


def _alpaca(item: dict[str, Any]) -> list[Piece]:
    context = _text(item, "input") if "input" in item else ""
    prompt = ALPACA.format(ALPACA_INPUT if context else "")
    prompt += f"\n\n### Instruction:\n{_text(item, 'instruction')}\n\n"
    prompt += (f"### Input:\n{context}\n\n" if context else "") + "### Response:\n"
    return [Piece(prompt, False), Piece(_text(item, "output"), True)]


def _text(item: dict[str, Any], name: str) -> str:
    if not isinstance(item[name], str):
        raise ValueError(f"{name}: got {type(item[name]).__name__}, wanted text")
    return item[name]
