"""Read files of records in chunks, in bounded memory.

    .jsonl .ndjson     a record a line
    .json              a list of records, or a record a line
    .csv .tsv          a record a row, under a row of names; a cell of messages is JSON
    .parquet           a record a row; needs pyarrow
    anything else      text: one document, or one for every 8 MiB of a longer file, cut at the end of a line

Files are UTF-8. A chunk of any kind of file has a JSON record a line, so that only ``serve.py`` looks into it.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from .workers import Chunk

SIZE = 1 << 19  # bytes of a chunk
LONGEST = 1 << 26  # bytes of a record
TEXT = 1 << 23  # bytes of a document of plain text
REFUSED = (".gz", ".zip", ".zst", ".bz2", ".xz", ".arrow", ".feather", ".xlsx", ".xls", ".pkl", ".pt", ".safetensors")
ALL = "wanted .jsonl, .json, .csv, .tsv, .parquet or text"


def chunks(path: str | Path) -> Iterator[Chunk]:
    """Yield the records of a file, as in the module's docstring.

    Raises ValueError for a file that is missing, empty, not UTF-8 or malformed, naming the place.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}; {ALL}")
    suffix = path.suffix.lower()
    if suffix in REFUSED:
        raise ValueError(f"{path}: got a file of kind {suffix}; {ALL}")
    found = _chunks(path, suffix)
    if (first := next(found, None)) is None:
        raise ValueError(f"{path}: is empty; wanted records or text")
    yield first
    yield from found


def _chunks(path: Path, suffix: str) -> Iterator[Chunk]:
    if suffix == ".parquet":
        yield from gathered(path, _parquet(path))
        return
    if suffix in (".csv", ".tsv"):
        yield from gathered(path, _table(path, "\t" if suffix == ".tsv" else ","))
        return
    with path.open("rb") as file:
        if file.read(3) != b"\xef\xbb\xbf":
            file.seek(0)
        begin = file.tell()
        start = next((block for block in iter(lambda: file.read(4096).lstrip(), b"") if block), b"")
        file.seek(begin)
        if not start and not file.read(1):
            return
        file.seek(begin)
        if suffix in (".jsonl", ".ndjson") or (suffix == ".json" and start.startswith(b"{")):
            yield from _lines(path, file)
        elif suffix == ".json":
            yield from gathered(path, _list(path, file))
        elif start:
            yield from _texts(path, file)


def gathered(path: str | Path, records: Iterable[Any]) -> Iterator[Chunk]:
    """Yield the chunks of ``records``, which are numbered from 1."""
    lines, nbytes, first, number = [], 0, 1, 0
    for number, record in enumerate(records, 1):
        lines.append(json.dumps(record, default=str).encode())
        nbytes += len(lines[-1])
        if nbytes >= SIZE:
            yield Chunk(str(path), first, b"\n".join(lines))
            lines, nbytes, first = [], 0, number + 1
    if lines:
        yield Chunk(str(path), first, b"\n".join(lines))


def _lines(path: Path, file: IO[bytes]) -> Iterator[Chunk]:
    first, any_record = 1, False
    while block := file.read(SIZE):
        if not block.endswith(b"\n"):
            block += (end := file.readline(LONGEST))
            if len(end) == LONGEST:
                raise ValueError(f"{path}: a line of more than {LONGEST >> 20} MiB; wanted a record a line")
        if not block.isspace():
            any_record = True
            yield Chunk(str(path), first, block)
        first += block.count(b"\n")
    if not any_record:
        return


def _list(path: Path, file: IO[bytes]) -> Iterator[Any]:
    text, at, decoder, opened = "", 0, json.JSONDecoder(), False
    decode = _decoder(path)
    while True:
        block = file.read(SIZE)
        text, at = text[at:] + decode(block), 0
        if len(text) > LONGEST:
            raise ValueError(f"{path}: a record of more than {LONGEST >> 20} MiB; wanted a list of records")
        while True:
            while at < len(text) and text[at] in " \t\r\n,":
                at += 1
            if not opened and at < len(text):
                if text[at] != "[":
                    raise ValueError(f"{path}: begins with {text[at]!r}; wanted a list of records")
                opened, at = True, at + 1
                continue
            if at < len(text) and text[at] == "]":
                if (text[at + 1 :] + decode(file.read())).strip():
                    raise ValueError(f"{path}: has more than one list; wanted a list of records")
                return
            try:
                item, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                if not block:
                    raise ValueError(f"{path}: not JSON: {error}; wanted a list of records") from None
                break
            yield item


def _decoder(path: Path):
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")()

    def decode(block: bytes) -> str:
        try:
            return decoder.decode(block, final=not block)
        except UnicodeDecodeError:
            raise ValueError(f"{path}: is not UTF-8; convert it, for example with iconv -t utf-8") from None

    return decode


def _texts(path: Path, file: IO[bytes]) -> Iterator[Chunk]:
    number = 1
    while block := file.read(TEXT):
        block += file.readline(LONGEST) if len(block) == TEXT else b""
        try:
            text = block.decode()
        except UnicodeDecodeError as error:
            at = file.tell() - len(block) + error.start
            raise ValueError(f"{path}: byte {at} is not UTF-8; convert it, for example with iconv -t utf-8") from None
        if number == 1 and _is_record(text.lstrip().split("\n", 1)[0]):
            raise ValueError(f"{path}: looks like JSON; wanted one record a line in a file named *.jsonl")
        yield Chunk(str(path), number, json.dumps({"text": text}).encode())
        number += 1


def _is_record(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _table(path: Path, delimiter: str) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(LONGEST)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter, strict=True)
        try:
            if not rows.fieldnames:
                return
            for row in rows:
                where = f"{path}:{rows.line_num}"
                if None in row or None in row.values():
                    got = "more" if None in row else "fewer"
                    raise ValueError(f"{where}: {got} cells than the {len(rows.fieldnames)} names of the first row")
                label = row.get("label", "").strip().lower()
                yield row | ({"label": label == "true"} if label in ("true", "false") else {})
        except csv.Error as error:
            raise ValueError(f"{path}:{rows.line_num + 1}: not CSV: {error}") from None
        except UnicodeDecodeError:
            raise ValueError(f"{path}: is not UTF-8; convert it, for example with iconv -t utf-8") from None


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ValueError(f"{path}: reading Parquet needs pyarrow; pip install pyarrow, or convert to JSONL") from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                yield from batch.to_pylist()
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a Parquet file: {' '.join(str(error).split())[:200]}") from None
