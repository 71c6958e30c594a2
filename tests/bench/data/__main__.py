"""Prepare a file of records: MB/s from JSONL to a store of tokens, beside tokenizers' own encode_batch.

    python -m tests.bench.data                  # 100 MB of JSONL from the standard library's sources, 2 processes
    python -m tests.bench.data --megabytes 20 --chats

The floor is encode_batch alone on a tenth of the text, on all cores, without reading, masks or writing. Seconds of the
processor are what the programs used; two idle cores give two of them in a second. Memory is the largest of any process,
and what this process grew by.
"""

import json
import resource
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from examples.data import store, tokenizer
from examples.data.sources import stdlib_sources
from fquant.kernels.cpu import usable_cores

MODEL = Path(__file__).parents[3] / "examples" / "model"
WANTED = 20.0  # MB/s on two cores


@dataclass(frozen=True)
class Options:
    """Time the preparation of data."""

    megabytes: int = 100
    """size of the JSONL"""
    chats: bool = False
    """chats of two turns instead of texts"""
    model: Path = MODEL
    """folder with a tokenizer"""


def records(chats: bool) -> list[bytes]:
    """Return a record of each source file, or of each 40 lines of it, half of them the answer."""
    out = []
    for name, text in stdlib_sources():
        if not chats:
            out.append({"text": text})
            continue
        lines = text.splitlines(keepends=True)
        for i in range(0, len(lines) - 20, 40):
            question, answer = "".join(lines[i : i + 20]), "".join(lines[i + 20 : i + 40])
            turns = [{"role": "user", "content": f"{name}\n{question}"}, {"role": "assistant", "content": answer}]
            out.append({"messages": turns})
    return [json.dumps(record).encode() + b"\n" for record in out]


def processor() -> float:
    """Return the seconds of processor time of this process and of children that have ended."""
    mine, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return mine.ru_utime + mine.ru_stime + children.ru_utime + children.ru_stime


def main(options: Options) -> None:
    """Write the file, time both, and print a table."""
    text = tokenizer.text(options.model, "zephyr")
    found = records(options.chats)
    with tempfile.TemporaryDirectory() as folder:
        path, size = Path(folder) / "data.jsonl", 0
        with path.open("wb") as file:
            while size < options.megabytes * 10**6:
                for line in found:
                    size += file.write(line)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began, used = time.perf_counter(), processor()
        about = store.about(store.of_file(path, text, Path(folder)))
        seconds, used = time.perf_counter() - began, processor() - used
        largest = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        again = time.perf_counter()
        store.of_file(path, text, Path(folder))
        again = time.perf_counter() - again
    texts, nbytes = [], 0
    for line in found:
        item = json.loads(line)
        texts += [turn["content"] for turn in item["messages"]] if options.chats else [item["text"]]
        nbytes += len(texts[-1].encode())
        if nbytes > options.megabytes * 10**5:
            break
    nbytes, tok = sum(len(text.encode()) for text in texts), text.tokenizer()
    floor, spent = time.perf_counter(), processor()
    tok.encode_batch(texts, add_special_tokens=False)
    floor, spent = time.perf_counter() - floor, processor() - spent
    table = Table(
        "",
        "MB/s",
        "MB a second of processor",
        title=f"{size / 1e6:.0f} MB of JSONL, {about.tokens:,} tokens, {usable_cores()} cores",
    )
    judged = f"{size / 1e6 / used:.1f} (wanted {WANTED / 2:.0f})"  # other programs disturb this less
    table.add_row("prepared", f"{size / 1e6 / seconds:.1f} (wanted {WANTED:.0f})", judged)
    table.add_row("tokenizers' encode_batch alone", f"{nbytes / 1e6 / floor:.1f}", f"{nbytes / 1e6 / spent:.1f}")
    table.add_row("found again", f"{size / 1e6 / again:.0f}")
    memory = f"{(largest[0] - before) / 1024:.0f} MiB more, and {largest[1] / 1024:.0f} MiB in each child"
    table.add_row("memory", memory)
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
