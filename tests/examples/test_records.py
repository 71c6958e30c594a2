"""examples.common.records: what each kind of file says, what is a target in it, and how bad ones are refused."""

import json
import re
import sysconfig
from pathlib import Path

import pytest

from examples.common import records

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nadd\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nadd\n\n### Input:\n1 2\n\n### Response:\n"
)
TURNS = [("system", "be brief"), ("user", " hi "), ("assistant", " ho "), ("user", "and?"), ("assistant", "no")]
MESSAGES = {"messages": [{"role": role, "content": text} for role, text in TURNS]}
SHAREGPT = {"user": "human", "assistant": "gpt", "system": "system"}
CONVERSATIONS = {"conversations": [{"from": SHAREGPT[role], "value": text} for role, text in TURNS]}
HEADINGS = [
    ("### System\n\nbe brief\n\n### User\n\n hi \n\n### Assistant\n\n", False),
    (" ho \n\n", True),
    ("### User\n\nand?\n\n### Assistant\n\n", False),
    ("no\n\n", True),
]
HEADERS = [
    (
        "<|start_header_id|>system<|end_header_id|>\n\nbe brief<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        False,
    ),
    ("ho<|eot_id|>", True),
    (
        "<|start_header_id|>user<|end_header_id|>\n\nand?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        False,
    ),
    ("no<|eot_id|>", True),
]
GOOD = {
    "text": ({"text": "a\nb\u2028c"}, False, [("a\nb\u2028c", True)]),
    "alpaca": ({"instruction": "add", "output": "3"}, False, [(ALPACA, False), ("3", True)]),
    "alpaca with input": (
        {"instruction": "add", "input": "1 2", "output": "3"},
        False,
        [(ALPACA_INPUT, False), ("3", True)],
    ),
    "alpaca with empty input": (
        {"instruction": "add", "input": "", "output": ""},
        False,
        [(ALPACA, False), ("", True)],
    ),
    "messages": (MESSAGES, False, HEADINGS),
    "ShareGPT": (CONVERSATIONS, False, HEADINGS),
    "messages with headers": (MESSAGES, True, HEADERS),
    "ShareGPT with headers": (CONVERSATIONS, True, HEADERS),
}


@pytest.mark.parametrize("record, headers, wanted", GOOD.values(), ids=GOOD)
@pytest.mark.parametrize("ascii", [True, False])
def test_record(tmp_path, record, headers, wanted, ascii):
    path = tmp_path / "data.jsonl"
    line = json.dumps(record, ensure_ascii=ascii)
    path.write_text(f"{line}\n\n  \r\n{line}", "utf-8")
    one, two = records.records(path, headers)
    assert (one.name, two.name) == (f"{path}:1", f"{path}:4")
    assert one.pieces == two.pieces == wanted


def test_same_messages_as_transformers():
    """The peer's own renderer, with the template that Llama 3 ships."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (
        "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
        "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    )
    wanted = render_jinja_template([MESSAGES["messages"]], chat_template=template)[0][0]
    assert "".join(text for text, _ in HEADERS) == wanted


@pytest.mark.parametrize("name, start", [("a.txt", ""), ("a.md", "\ufeff"), ("a", "")])
def test_plain_text_is_one_document(tmp_path, name, start):
    path = tmp_path / name
    path.write_bytes((start + '{x} = "é"\n\nsecond\n').encode())
    assert records.records(path) == [records.Document(str(path), [records.Piece('{x} = "é"\n\nsecond\n', True)])]


FILES = {
    "empty": ("a.txt", b"", "is empty; wanted text or JSONL records"),
    "blank": ("a.jsonl", b" \n\n", "is empty; wanted text or JSONL records"),
    "not UTF-8": ("a.txt", b"caf\xe9", "byte 3 is not UTF-8; convert it"),
    "not UTF-8 in JSONL": ("a.jsonl", b'{"text": "\xff"}', "byte 10 is not UTF-8; convert it"),
    "JSONL by another name": (
        "a.txt",
        b'\n{"text": "x"}\n',
        "looks like JSON; wanted one record a line in a file named *.jsonl",
    ),
    "a JSON array": ("a.json", b'[{"text": "x"}]', "looks like JSON; wanted one record a line in a file named *.jsonl"),
}


@pytest.mark.parametrize("name, content, message", FILES.values(), ids=FILES)
def test_bad_file(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {message}')}"):
        records.records(path)


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.txt: no such file; wanted a text or JSONL file$"):
        records.records(tmp_path / "nothing.txt")
    with pytest.raises(ValueError, match=r": is a folder; wanted a text or JSONL file$"):
        records.records(tmp_path)


SAID = {"role": "assistant", "content": "ho"}
LINES = {
    "not JSON": ('{"text": "x"', "not JSON: .*; wanted one record a line"),
    "deeper than the reader goes": ("[" * 100_000, "not JSON: .*recursion"),
    "no object": ("[1]", "got list, wanted an object with text, instruction"),
    "no keys": ({}, r"got the keys \(none\); wanted exactly one of text, instruction with output, messages, or conv"),
    "unknown keys": ({"prompt": "x", "completion": "y"}, "got the keys completion, prompt; wanted exactly one of text"),
    "both kinds": ({"text": "x", "messages": [SAID]}, "got the keys messages, text; wanted exactly one of text"),
    "a key too many": ({"text": "x", "id": 3}, "unknown key 'id' beside 'text'; remove it"),
    "no output": ({"instruction": "x"}, "instruction without output; wanted both"),
    "text is no text": ({"text": 3}, "text: got int, wanted text"),
    "input is null": ({"instruction": "x", "input": None, "output": "y"}, "input: got NoneType, wanted text"),
    "messages is no list": ({"messages": "x"}, "messages: wanted a list of objects with role and content"),
    "a turn without content": ({"messages": [{"role": "user"}]}, "messages: wanted a list of objects with role and"),
    "a turn with a name": ({"messages": [{**SAID, "name": "x"}]}, "messages: wanted a list of objects .* nothing else"),
    "an unknown role": (
        {"messages": [{"role": "bot", "content": ""}]},
        "messages.0.role: got 'bot', wanted one of system",
    ),
    "content is no text": ({"messages": [SAID, {**SAID, "content": []}]}, "messages.1.content: got list, wanted text"),
    "nobody": ({"messages": []}, "messages: no turn is the assistant's"),
    "no assistant": ({"conversations": [{"from": "human", "value": "x"}]}, "conversations: no turn is the assistant's"),
    "a control token": (
        {"messages": [{**SAID, "content": "x<|eot_id|>"}]},
        r"holds the control token <\|eot_id\|>; remove",
    ),
}


@pytest.mark.parametrize("record, message", LINES.values(), ids=LINES)
def test_bad_line_is_named(tmp_path, record, message):
    path = tmp_path / "data.jsonl"
    line = record if isinstance(record, str) else json.dumps(record)
    path.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}:3: .*{message}") as raised:
        records.records(path, headers=True)
    assert "\n" not in str(raised.value)


def test_stdlib_sources():
    found = records.stdlib_sources()
    names = [document.name for document in found]
    assert names == sorted(names) and found == records.stdlib_sources()
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert not [n for n in names if re.search(r"(^|/)(tests?|idlelib|site-packages|dist-packages|encodings)/", n)]
    root = Path(sysconfig.get_paths()["stdlib"])
    assert dict(found)["argparse.py"] == [((root / "argparse.py").read_text("utf-8"), True)]
    assert all(len(pieces) == 1 and pieces[0].is_target and pieces[0].text for _, pieces in found)


def test_stdlib_without_sources(tmp_path, monkeypatch):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.py").write_text("x = 1")
    (tmp_path / "empty.py").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ValueError, match="no source files of the standard library here; use --data FILE"):
        records.stdlib_sources()
    (tmp_path / "b.py").write_bytes("# -*- coding: latin-1 -*-\n# é".encode("latin-1"))
    assert records.stdlib_sources() == [("b.py", [("# -*- coding: latin-1 -*-\n# é", True)])]
