"""Read files as documents: text, and the parts of it that a model should learn to write (targets).

Files are UTF-8. A file named *.jsonl has a record a line, each of one kind and with no other keys:

    {"text": ...}                                            all text is target
    {"instruction": ..., "input": ..., "output": ...}        Alpaca: the output is target; ``input`` may be absent
    {"messages": [{"role": ..., "content": ...}, ...]}       the assistant's turns are targets
    {"conversations": [{"from": ..., "value": ...}, ...]}    the same in ShareGPT's words

Any other file is one document of plain text. Alpaca records get the template of github.com/tatsu-lab/stanford_alpaca.
Chats get Llama 3's headers, without the dates of 3.1's system turn, or headings like "### User".
"""

import itertools
import json
import sysconfig
import tokenize
from pathlib import Path
from typing import Any, NamedTuple

from fquant import tree

# Folders of the standard library with tests, generated files (tables, documentation, settings) or installed packages.
SKIPPED = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__", "__phello__"}
SKIPPED |= {"encodings", "pydoc_data", "turtledemo"}

KINDS = ("text", "instruction", "messages", "conversations")  # the key that decides the kind of a record
TURNS = {"messages": ("role", "content"), "conversations": ("from", "value")}
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

ALPACA = "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
ALPACA_INPUT = ", paired with an input that provides further context"


class Piece(NamedTuple):
    """A stretch of a document, and whether the model should learn to write it."""

    text: str
    is_target: bool


class Document(NamedTuple):
    """Pieces in order, and their source: a file, or file:line."""

    name: str
    pieces: list[Piece]


def stdlib_sources() -> list[Document]:
    """Return the source files of the interpreter's standard library by name, without tests and generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        inside = path.relative_to(root)
        generated = inside.parts[0].startswith(("config-", "_sysconfigdata"))
        if generated or SKIPPED & set(inside.parts) or not path.stat().st_size:
            continue
        with tokenize.open(path) as file:  # a source file may declare its encoding
            found.append(Document(inside.as_posix(), [Piece(file.read(), True)]))
    if not found:
        raise ValueError(f"{root}: no source files of the standard library here; use --data FILE")
    return found


def records(path: str | Path, headers: bool = False) -> list[Document]:
    """Return the documents of a file, as in the module's docstring; ``headers`` writes chats in Llama 3's template.

    Raises ValueError for a file that is missing, empty or not UTF-8, and for a bad record, naming its line.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}; wanted a text or JSONL file")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fix = "convert it, for example with iconv -t utf-8"
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; {fix}") from None
    if not text.strip():
        raise ValueError(f"{path}: is empty; wanted text or JSONL records")
    if path.suffix != ".jsonl":
        if path.suffix == ".json" or _is_record(text.lstrip().split("\n", 1)[0]):
            raise ValueError(f"{path}: looks like JSON; wanted one record a line in a file named *.jsonl")
        return [Document(str(path), [Piece(text, True)])]
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            with tree.at(name := f"{path}:{number}"):
                found.append(Document(name, _joined(_record(line, headers))))
    return found


def _is_record(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _record(line: str, headers: bool) -> list[Piece]:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}; wanted one record a line") from None
    kinds = "text, instruction with output, messages, or conversations"
    if not isinstance(item, dict):
        raise ValueError(f"got {type(item).__name__}, wanted an object with {kinds}")
    found = [kind for kind in KINDS if kind in item]
    if len(found) != 1:
        raise ValueError(f"got the keys {', '.join(sorted(item)) or '(none)'}; wanted exactly one of {kinds}")
    kind = found[0]
    need, may = ({kind, "output"}, {"input"}) if kind == "instruction" else ({kind}, set())
    if missing := need - item.keys():
        raise ValueError(f"{kind} without {', '.join(sorted(missing))}; wanted both")
    if unknown := item.keys() - need - may:
        raise ValueError(f"unknown key {', '.join(map(repr, sorted(unknown)))} beside {kind!r}; remove it")
    if kind in TURNS:
        return _chat(item[kind], kind, headers)
    for name, text in item.items():
        _expect_text(name, text)
    if kind == "text":
        return [Piece(item["text"], True)]
    context = item.get("input", "")
    prompt = ALPACA.format(ALPACA_INPUT if context else "") + f"\n\n### Instruction:\n{item['instruction']}\n\n"
    prompt += (f"### Input:\n{context}\n\n" if context else "") + "### Response:\n"
    return [Piece(prompt, False), Piece(item["output"], True)]


def _chat(turns: Any, kind: str, headers: bool) -> list[Piece]:
    speaker, content = TURNS[kind]
    if not isinstance(turns, list) or not all(isinstance(t, dict) and t.keys() == {speaker, content} for t in turns):
        raise ValueError(f"{kind}: wanted a list of objects with {speaker} and {content} and nothing else")
    pieces = []
    for i, turn in enumerate(turns):
        role, text = ROLES.get(str(turn[speaker])), turn[content]
        _expect_text(f"{kind}.{i}.{content}", text)
        if role is None:
            raise ValueError(f"{kind}.{i}.{speaker}: got {turn[speaker]!r}, wanted one of {', '.join(ROLES)}")
        if headers and (marks := [token for token in HEADERS if token in text]):
            raise ValueError(f"{kind}.{i}.{content}: holds the control token {marks[0]}; remove it")
        head, body = f"### {role.title()}\n\n", text + "\n\n"
        if headers:
            head, body = f"{HEADERS[0]}{role}{HEADERS[1]}\n\n", text.strip() + HEADERS[2]
        pieces += [Piece(head, False), Piece(body, role == "assistant")]
    if not any(piece.is_target for piece in pieces):
        raise ValueError(f"{kind}: no turn is the assistant's; wanted at least one turn to learn from")
    return pieces


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Join neighbours of one kind, so that tokens may cross their boundary."""
    groups = itertools.groupby(pieces, lambda piece: piece.is_target)
    return [Piece("".join(piece.text for piece in group), is_target) for is_target, group in groups]


def _expect_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{name}: got {type(text).__name__}, wanted text")
