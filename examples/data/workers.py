"""Processes that tokenise records, and what they are started with.

    with workers.Worker(text) as worker:
        worker.chat([{"role": "user", "content": "hello"}], prompt=True).tokens

    for part in workers.parts(chunks, text): ...     # in the order of chunks, as many processes as cores

A process is asked and answers; no more chunks are under way than twice the number of processes, so memory is bounded.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

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


class Worker:
    """A process that tokenises. Entering it starts the process; leaving it ends the process."""

    def __init__(self, text: Text, parse_special: bool = False, limits: Limits | None = None) -> None:
        limits = limits or Limits()
        self.text, self.limits = text, limits
        values = {"templates": text.templates, "variables": text.variables, "specials": text.specials}
        values |= {"folder": str(text.path.parent), "eos": text.eos, "begin": text.begin}
        self.setup = values | {"parse_special": parse_special} | limits.__dict__
        self._open = ExitStack()

    def __enter__(self) -> "Worker":
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
            self._ask(self.setup | {"current": number}, b"", f"{self.text.path.parent}: the chat template")
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()

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
            return f"took more than {self.limits.seconds:g} s; wanted a chat template that ends, or a shorter record"
        return f"its process ended with {code}; wanted a record that takes less than {self.limits.memory >> 20} MiB"


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


def _part(idle: "SimpleQueue[Worker]", chunk: Chunk) -> Part:
    worker = idle.get()
    try:
        return worker.part(chunk)
    finally:
        idle.put(worker)
