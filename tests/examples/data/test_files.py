"""examples.data.files: every kind of file gives the same records, and bad files are named."""

import csv
import json
import re

import pyarrow
import pytest
from pyarrow import parquet

from examples.data import files, sources

RECORDS = [{"instruction": f"say, “{i}”\n", "input": "", "output": f"{i}" * (i % 7)} for i in range(300)]


def read(path):
    """The records of a file, by line."""
    found = {}
    for chunk in files.chunks(path):
        for number, line in enumerate(chunk.lines.split(b"\n"), chunk.first):
            if line.strip():
                found[number] = json.loads(line)
    return found


@pytest.mark.parametrize("size", [64, 4096, 1 << 19])
def test_the_same_records_from_each_kind(tmp_path, monkeypatch, size):
    monkeypatch.setattr(files, "SIZE", size)
    lines = "\n".join(json.dumps(record, ensure_ascii=False) for record in RECORDS)
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines, "utf-8")
    (tmp_path / "lines.json").write_text("\n" + lines + "\n", "utf-8")
    (tmp_path / "list.json").write_text(json.dumps(RECORDS, ensure_ascii=False, indent=1), "utf-8")
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (tmp_path / name).open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, list(RECORDS[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(RECORDS)
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    for path in sorted(tmp_path.iterdir()):
        found = read(path)
        assert list(found.values()) == RECORDS, path
        assert list(found) == list(range(1, 301)) or path.name == "lines.json" and list(found) == list(range(2, 302))


def test_nested_columns_of_parquet(tmp_path):
    record = {"messages": [{"role": "user", "content": "hi", "name": None}], "label": True}
    parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == {1: record}


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ValueError, match="reading Parquet needs pyarrow; pip install pyarrow, or convert to JSONL"):
        read(tmp_path / "a.parquet")


def test_labels_of_a_table(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,completion,label\na,b,True\nc,d,false\n")
    assert [record["label"] for record in read(tmp_path / "a.csv").values()] == [True, False]


def test_plain_text_is_one_document_or_several(tmp_path, monkeypatch):
    text = "".join(f"line {i} é\n" for i in range(99))
    (tmp_path / "a.txt").write_text("\ufeff" + text, "utf-8")
    assert read(tmp_path / "a.txt") == {1: {"text": text}}
    monkeypatch.setattr(files, "TEXT", 200)
    found = list(read(tmp_path / "a.txt").values())
    assert "".join(part["text"] for part in found) == text and len(found) > 3
    assert all(part["text"].endswith("\n") for part in found)


BAD = {
    "empty": ("a.txt", b"", "is empty; wanted records or text"),
    "blank": ("a.jsonl", b" \n\n", "is empty; wanted records or text"),
    "blank text": ("a.txt", b" \n\n", "is empty; wanted records or text"),
    "no rows": ("a.csv", b"a,b\n", "is empty; wanted records or text"),
    "not UTF-8": ("a.txt", b"caf\xe9", "byte 3 is not UTF-8; convert it"),
    "table not UTF-8": ("a.csv", b"text\ncaf\xe9", "is not UTF-8; convert it"),
    "JSONL by another name": ("a.txt", b'\n{"text": "x"}\n', "looks like JSON; wanted one record a line in a file"),
    "a JSON value": ("a.json", b"3", "begins with '3'; wanted a list of records"),
    "a list that ends early": ("a.json", b'[{"text": "x"}', "not JSON: "),
    "two lists": ("a.json", b"[][]", "has more than one list; wanted a list of records"),
    "cells too many": ("a.csv", b"a,b\n1,2\n1,2,3\n", "3: more cells than the 2 names of the first row"),
    "cells too few": ("a.csv", b"a,b\n1\n", "2: fewer cells than the 2 names of the first row"),
    "quotes": ("a.csv", b'a\n"x" y\n', "2: not CSV: "),
    "no parquet": ("a.parquet", b"PAR1 no", "not a Parquet file: "),
    "compressed": ("a.jsonl.gz", b"x", "got a file of kind .gz; wanted .jsonl, .json, .csv, .tsv, .parquet or text"),
    "missing": ("a.jsonl", None, "no such file; wanted .jsonl, .json"),
}


@pytest.mark.parametrize("name, content, message", BAD.values(), ids=BAD)
def test_bad_file(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}:( )?{re.escape(message)}") as raised:
        read(path)
    assert "\n" not in str(raised.value)


def test_a_line_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SIZE", 10)
    monkeypatch.setattr(files, "LONGEST", 100)
    (tmp_path / "a.jsonl").write_text("x" * 200)
    with pytest.raises(ValueError, match="a line of more than 0 MiB; wanted a record a line"):
        read(tmp_path / "a.jsonl")


def test_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b:2.txt").touch()
    found = [(str(path), weight) for path, weight in sources.sources("a.jsonl,b.csv:0.5,c:2")]
    assert found == [("a.jsonl", 1.0), ("b.csv", 0.5), ("c", 2.0)]
    assert [str(source.path) for source in sources.sources("a,b:2.txt")] == ["a,b:2.txt"]
    for text, message in (
        ("a:x", "got the weight 'x'"),
        ("a:0", "got the weight 0; wanted more"),
        (",", "got no file"),
    ):
        with pytest.raises(ValueError, match=message):
            sources.sources(text)


def test_stdlib_sources():
    found = sources.stdlib_sources()
    names = [name for name, _ in found]
    assert names == sorted(names) and {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert not [n for n in names if re.search(r"(^|/)(tests?|idlelib|site-packages|dist-packages|encodings)/", n)]
    documents = [(str(i), "x" * 10) for i in range(100)]
    assert [name for name, _ in sources.some(documents, 200)] == [str(i) for i in range(0, 100, 5)]
    assert sources.some(documents, 10**9) == documents
