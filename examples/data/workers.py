"""Processes that tokenise records, and what they are started with.

    with workers.Worker(text) as worker:
        worker.chat([{"role": "user", "content": "hello"}], prompt=True).tokens
        worker.decode(worker.encode("hello").ids)           # as of tokenizers.Tokenizer

    for part in workers.parts(chunks, text): ...     # in the order of chunks, as many processes as cores

A process is asked and answers; no more chunks are under way than twice the number of processes, so memory is bounded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

if TYPE_CHECKING:
    from .tokenizer import Text


ROOT = Path(__file__).parents[2]
SIGPROF = 27


class Chunk(NamedTuple):
    """Consecutive records of a file: JSON, a record a line, and the number of the first line."""

    name: str
    first: int
    lines: bytes


class Part(NamedTuple):
    """A tokenised chunk: numbers of tokens as in ``encode.py``, lengths of documents, and what was found."""

    tokens: np.ndarray[Any, Any]  # i32[n]
    lengths: np.ndarray[Any, Any]  # i32[documents]
    kinds: tuple[str, ...]
    labels: list[bool]
    notes: dict[str, int]


class Said(NamedTuple):
    """A rendered chat: its text and tokens, which of them count, and assistant turns that cannot count."""

    text: str
    tokens: list[int]
    counts: list[bool]
    skipped: int


@dataclass(frozen=True)
class Limits:
    """The most that a record may take."""

    seconds: float = 10.0  # of processor time
    characters: int = 1 << 24  # of a chat's text
    memory: int = 3 << 30  # bytes of a process, with the tokenizer


class Encoded(NamedTuple):
    """The tokens of a text, as a ``tokenizers.Encoding`` has them."""

    ids: list[int]


class Process:
    """A process with a tokenizer. Entering it starts the process; leaving it ends the process."""

    ends, fits = "a tokenizer that ends", "a tokenizer"

    def __init__(self, path: Path, values: dict[str, Any], limits: Limits, name: str) -> None:
        self.path, self.limits, self.name = path, limits, name
        self.setup = values | {"folder": str(path.parent)} | limits.__dict__
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._current = self._open.enter_context(tempfile.TemporaryFile())
        self._current.truncate(8)
        number = self._current.fileno()
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        one = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = self._open.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "examples.data.serve"],
                env=os.environ | one | {"PYTHONPATH": paths},
                pass_fds=(number,),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
        self._open.callback(self._process.kill)
        try:
            self.ready, _ = self._ask(self.setup | {"current": number}, b"", self.name)
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()

    def _ask(self, request: dict[str, Any], payload: bytes, name: str) -> tuple[dict[str, Any], bytes]:
        pipes: Any = self._process
        try:
            pipes.stdin.write(json.dumps(request).encode() + b"\n" + payload)
            pipes.stdin.flush()
            line = pipes.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self._current.seek(0)
            number = int.from_bytes(self._current.read(8), "little")
            raise ValueError(f"{name}{f':{number}' if payload else ''}: {self._end()}")
        answer = json.loads(line)
        if "error" in answer:
            place = f"{name}:{answer['number']}" if "number" in answer else name
            raise ValueError(f"{place}: {answer['error']}")
        return answer, pipes.stdout.read(answer["nbytes"]) if "nbytes" in answer else b""

    def _end(self) -> str:
        code = self._process.wait()
        if code == -SIGPROF:
            return f"took more than {self.limits.seconds:g} s; wanted {self.ends}"
        return f"its process ended with {code}; wanted {self.fits} that takes less than {self.limits.memory >> 20} MiB"


class Worker(Process):
    """A process that tokenises records, chats and texts."""

    ends, fits = "a chat template that ends, or a shorter record", "a record"

    def __init__(self, text: Text, parse_special: bool = False, limits: Limits | None = None) -> None:
        values = {"templates": text.templates, "variables": text.variables, "specials": text.specials}
        values |= {"eos": text.eos, "begin": text.begin, "parse_special": parse_special}
        super().__init__(text.path, values, limits or Limits(), str(text.path.parent))

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoded:
        """Return the tokens of a text."""
        return Encoded(self._ask({"text": text, "special": add_special_tokens}, b"", str(self.path))[0]["ids"])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        return self._ask({"ids": list(ids), "skip": skip_special_tokens}, b"", str(self.path))[0]["text"]

    def chat(self, messages: list[dict[str, Any]], prompt: bool, name: str = "chat", **values: Any) -> Said:
        """Render and tokenise a chat; with ``prompt`` an answer begins at its end, and nothing counts.

        ``values`` are variables of the template: tools, documents, enable_thinking and the like.
        """
        return Said(**self._ask({"turns": messages, "prompt": prompt, "values": values}, b"", name)[0])

    def part(self, chunk: Chunk) -> Part:
        """Tokenise a chunk. Raises ValueError for the first record at fault, naming its line."""
        request = {"name": chunk.name, "first": chunk.first, "nbytes": len(chunk.lines)}
        answer, payload = self._ask(request, chunk.lines, chunk.name)
        found = np.frombuffer(payload, np.int32)
        cut = len(found) - answer["documents"]
        return Part(found[:cut], found[cut:], tuple(answer["kinds"]), answer["labels"], answer["notes"])


def short(path: Path) -> Limits:
    """Return the limits of texts of a few pages by the tokenizer at ``path``, which takes memory by its size."""
    return Limits(memory=(1 << 30) + 40 * path.stat().st_size)


@lru_cache(maxsize=16)
def facts(path: Path, digest: bytes, variables: tuple[tuple[str, str], ...], eos: str | int, names: tuple[str, ...]):
    """Return ``tokenizer_json.facts`` of the tokenizer at ``path``, whose bytes have the ``digest``."""
    asked = {"variables": dict(variables), "asked": {"eos": eos, "names": names}}
    with Process(path, asked, short(path), str(path)) as process:
        return process.ready


def vocabulary(path: Path) -> dict[str, int]:
    """Return the number of each token of the tokenizer at ``path``."""
    with Process(path, {"variables": {}, "asked": None}, short(path), str(path)) as process:
        return process.ready["vocabulary"]


def parts(chunks: Iterable[Chunk], text: Text, processes: int, **options: Any) -> Iterator[Part]:
    """Yield the tokenised chunks in their order."""
    with ExitStack() as stack:
        idle: SimpleQueue[Worker] = SimpleQueue()
        for _ in range(processes):
            idle.put(stack.enter_context(Worker(text, **options)))
        pool = stack.enter_context(ThreadPoolExecutor(processes))
        waiting: deque[Any] = deque()
        try:
            for chunk in chunks:
                if len(waiting) >= 2 * processes:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(_part, idle, chunk))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _part(idle: SimpleQueue[Worker], chunk: Chunk) -> Part:
    worker = idle.get()
    try:
        return worker.part(chunk)
    finally:
        idle.put(worker)
