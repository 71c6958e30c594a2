"""Tokenise records in a process of bounded time and memory; ``workers.py`` starts it.

A tokenizer and a chat template come with a model, so they are a stranger's programs. jinja2's sandbox does not bound
nested loops, ``9**9**9`` or ``'x' * 10**12``; the kernel does. Each record has a few seconds of processor time, after
which SIGPROF ends the process, inside C code too. The process has a limit of memory. It imports no torch, so it starts
fast.

Standard input has JSON lines: the set-up, then requests, each with one answer on standard output.

    {"name": FILE, "first": N, "nbytes": B}  and B bytes, a JSON record a line    -> the numbers of all documents
    {"turns": [...], "prompt": true, "values": {}}                                -> text, tokens and counts of a chat
    {"text": "...", "special": true}                                              -> ids
    {"ids": [...], "skip": true}                                                  -> text

The number of the current record is in a shared file, so that the one at fault can be named.
"""

import json
import mmap
import resource
import signal
import sys
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from .encode import TOKEN, Tools, encode, numbers, rendered, templates, tools
from .records import Turns, messages, record
from .tokenizer_json import facts, read


class Fault(NamedTuple):
    """Why a request has no answer."""

    error: str


def serve() -> None:
    """Answer each request until the input ends."""
    setup = json.loads(sys.stdin.buffer.readline())
    resource.setrlimit(resource.RLIMIT_AS, (setup["memory"], setup["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    current = mmap.mmap(setup["current"], 8)
    tokenizer = _tried(lambda: read(setup["folder"], setup["variables"]), setup)
    if isinstance(tokenizer, Fault):
        return _answer(tokenizer)
    if "asked" in setup:
        asked = setup["asked"]
        return _answer(
            _tried(lambda: facts(tokenizer, asked) if asked else {"vocabulary": tokenizer.get_vocab()}, setup)
        )
    compiled = _tried(lambda: templates(setup), setup)
    found = compiled if isinstance(compiled, Fault) else _tried(lambda: tools(tokenizer, setup, compiled), setup)
    if isinstance(found, Fault):
        return _answer(found)
    _answer({})
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        if "nbytes" in request:
            lines = sys.stdin.buffer.read(request["nbytes"]).split(b"\n")
            _answer(*_records(lines, request, found, setup, current))
        else:
            _answer(_tried(lambda request=request: answer(request, tokenizer, found), setup))


def answer(request: dict[str, Any], tokenizer: Tokenizer, tools: Tools) -> dict[str, Any]:
    """Return the answer to a request for a chat, a text or tokens."""
    if "turns" in request:
        return answer_chat(request, tools)
    if "ids" in request:
        return {"text": tokenizer.decode(request["ids"], skip_special_tokens=request["skip"])}
    return {"ids": tokenizer.encode(request["text"], add_special_tokens=request["special"]).ids}


def _records(lines: list[bytes], request: dict[str, Any], tools: Tools, setup: dict[str, Any], current: mmap.mmap):
    """Return an answer and its payload: the numbers of all documents, then their lengths, each i32."""
    notes, kinds, labels, documents = Counter[str](), set(), [], []
    for number, line in enumerate(lines, request["first"]):
        if not line.strip():
            continue
        current[:] = number.to_bytes(8, "little")
        result = _tried(lambda line=line: _record(line, tools, notes), setup)
        if isinstance(result, Fault):
            return {"error": result.error, "number": number}, b""
        kind, label, arrays = result
        kinds.add(kind)
        labels += [] if label is None else [label]
        documents += arrays
    payload = b"".join(map(np.ndarray.tobytes, documents))
    lengths = np.array([len(x) for x in documents], np.int32).tobytes()
    answer = {"kinds": sorted(kinds), "labels": labels, "notes": notes, "documents": len(documents)}
    return answer | {"nbytes": len(payload) + len(lengths)}, payload + lengths


def _record(line: bytes, tools: Tools, notes: Counter[str]):
    try:
        item = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} of the line is not UTF-8; convert it, as with iconv -t utf-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}; wanted one record a line") from None
    found = record(item)
    return found.kind, found.label, encode(found, tools, notes)


def answer_chat(request: dict[str, Any], tools: Tools) -> dict[str, Any]:
    """Return text, tokens, counts and skipped turns of a chat."""
    found = rendered(Turns(messages(request["turns"], "messages"), 0, request["values"]), tools, request["prompt"])
    ids, text = numbers(found, tools), "".join(piece for piece, _ in found.pieces)
    return {"text": text, "tokens": (ids & TOKEN).tolist(), "counts": (ids < 0).tolist(), "skipped": found.skipped}


def _tried(function: Any, setup: dict[str, Any]) -> Any:
    """Return what a function returns within its time, or an error; a stranger's program may raise anything."""
    signal.setitimer(signal.ITIMER_PROF, setup["seconds"])
    try:
        return function()
    except (MemoryError, RecursionError) as error:
        return Fault(f"took more memory or depth than a record may ({type(error).__name__})")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of tokenizers is no Exception
        return Fault(" ".join(str(error).split())[:500] or type(error).__name__)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _answer(answer: dict[str, Any] | Fault, payload: bytes = b"") -> None:
    answer = answer._asdict() if isinstance(answer, Fault) else answer
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n" + payload)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
