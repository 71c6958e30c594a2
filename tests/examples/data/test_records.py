"""examples.data.records: what each kind of record says, what is a target in it, and how bad ones are refused."""

import json
import re

import pytest
from trl.data_utils import extract_prompt

from examples.data import encode, records, tokenizer, workers
from examples.data.records import Piece, Turns
from tests.helpers.data.chats import FAMILIES

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nadd\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\nadd\n\n### Input:\n1 2\n\n### Response:\n"
)
ASK, SAY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
OTHER = {"role": "assistant", "content": "no"}
HUMAN = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CALLS = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
pieces = lambda *parts: [Piece(*part) for part in parts]
GOOD = {
    "text": ({"text": "a\nb\u2028c"}, [pieces(("a\nb\u2028c", True))], ()),
    "text with columns": ({"text": "a", "id": 3, "source": "x"}, [pieces(("a", True))], ("id", "source")),
    "alpaca": ({"instruction": "add", "output": "3"}, [pieces((ALPACA, False), ("3", True))], ()),
    "alpaca with text": (
        {"instruction": "add", "input": "1 2", "output": "3", "text": "all"},
        [pieces((ALPACA_INPUT, False), ("3", True))],
        ("text",),
    ),
    "alpaca, empty input": (
        {"instruction": "add", "input": "", "output": ""},
        [pieces((ALPACA, False), ("", True))],
        (),
    ),
    "alpaca, null input": (
        {"instruction": "add", "input": None, "output": "3"},
        [pieces((ALPACA, False), ("3", True))],
        (),
    ),
    "messages": ({"messages": [ASK, SAY], "id": 1}, [Turns([ASK, SAY], 0, {})], ("id",)),
    "ShareGPT": ({"conversations": HUMAN}, [Turns([ASK, SAY], 0, {})], ()),
    "ShareGPT in roles": ({"conversations": [ASK, SAY]}, [Turns([ASK, SAY], 0, {})], ()),
    "tools": (
        {"messages": [ASK, CALLS], "tools": json.dumps([TOOL])},
        [Turns([ASK, CALLS], 0, {"tools": [TOOL]})],
        (),
    ),
    "template's variables": (
        {"messages": [ASK, SAY], "chat_template_kwargs": {"enable_thinking": False}},
        [Turns([ASK, SAY], 0, {"enable_thinking": False})],
        (),
    ),
    "prompt": ({"prompt": "a", "completion": "b", "score": 1}, [pieces(("a", False), ("b", True))], ("score",)),
    "prompt of messages": ({"prompt": [ASK], "completion": [SAY]}, [Turns([ASK, SAY], 1, {})], ()),
    "pair of texts": (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        [pieces(("a", False), ("b", True)), pieces(("a", False), ("c", True))],
        (),
    ),
    "pair of messages": (
        {"prompt": [ASK], "chosen": [SAY], "rejected": [OTHER]},
        [Turns([ASK, SAY], 1, {}), Turns([ASK, OTHER], 1, {})],
        (),
    ),
    "pair and messages": (  # as in ultrafeedback_binarized
        {"prompt": "hi", "chosen": [ASK, SAY], "rejected": [ASK, OTHER], "messages": [ASK, SAY], "score_chosen": 5.0},
        [Turns([ASK, SAY], 1, {}), Turns([ASK, OTHER], 1, {})],
        ("messages", "prompt", "score_chosen"),
    ),
    "label": ({"prompt": "a", "completion": "b", "label": False}, [pieces(("a", False), ("b", True))], ()),
}


@pytest.mark.parametrize("item, documents, ignored", GOOD.values(), ids=GOOD)
def test_record(item, documents, ignored):
    found = records.record(item)
    assert found.documents == documents and found.ignored == ignored
    assert found.kind == ("pairs" if "chosen" in item else "labelled" if "label" in item else "documents")
    assert found.label is item.get("label")


@pytest.mark.parametrize(
    "chosen, rejected",
    [("A: b c", "A: b d"), ("x", "y"), ([ASK, SAY], [ASK, OTHER]), ("same a", "same b")],
)
def test_implicit_prompts_against_trl(chosen, rejected):
    wanted = extract_prompt({"chosen": chosen, "rejected": rejected})
    found = records.record({"chosen": chosen, "rejected": rejected}).documents
    for document, name in zip(found, ("chosen", "rejected"), strict=True):
        if isinstance(document, Turns):
            assert document.messages == [*wanted["prompt"], *wanted[name]] and document.first == len(wanted["prompt"])
        else:
            assert [piece.text for piece in document] == [wanted["prompt"], wanted[name]]


BAD = {
    "no object": ([1], "got list, wanted an object with the columns of a record"),
    "no columns": ({}, "got the columns (none); wanted text, instruction and output, messages, conversations, prompt"),
    "unknown columns": ({"question": "x", "answer": "y"}, "got the columns answer, question; wanted text, instruction"),
    "no output": ({"instruction": "x"}, "got the columns instruction; wanted text, instruction and output"),
    "text is no text": ({"text": 3}, "text: got int, wanted text"),
    "input is a number": ({"instruction": "x", "input": 1, "output": "y"}, "input: got int, wanted text"),
    "messages is no list": ({"messages": "x"}, "messages: got str, wanted a list of turns, one at least"),
    "no turns": ({"messages": []}, "messages: got list, wanted a list of turns, one at least"),
    "a turn is no object": ({"messages": ["x"]}, "messages.0: got str, wanted an object with role and content"),
    "a turn without content": ({"messages": [{"role": "user"}]}, "messages.0.content: got NoneType, wanted text or"),
    "an unknown role": (
        {"messages": [SAY, {"role": "asistant", "content": ""}]},
        "messages.1: got the role 'asistant',",
    ),
    "ShareGPT's unknown role": ({"conversations": [{"from": "x", "value": ""}]}, "conversations.0: got the role 'x'"),
    "content is a number": ({"messages": [SAY, {**SAY, "content": 3}]}, "messages.1.content: got int, wanted text or"),
    "tools are no JSON": ({"messages": [SAY], "tools": "{"}, "tools: not JSON: "),
    "tools are one": ({"messages": [SAY], "tools": {"a": 1}}, "tools: got dict, wanted objects"),
    "variables": ({"messages": [SAY], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: got messages"),
    "mixed": ({"prompt": "a", "completion": [SAY]}, "prompt, completion: wanted two texts or two lists of messages"),
    "mixed pair": ({"chosen": "a", "rejected": [SAY]}, "chosen, rejected: wanted two texts or two lists of messages"),
    "label": ({"prompt": "a", "completion": "b", "label": "yes"}, "label: got 'yes', wanted true or false"),
}


@pytest.mark.parametrize("item, message", BAD.values(), ids=BAD)
def test_bad_record(item, message):
    with pytest.raises(ValueError, match="^" + re.escape(message)) as raised:
        records.record(item)
    assert "\n" not in str(raised.value)


HOSTILE = {
    "not JSON": (b'{"text": "x"', "not JSON: .*; wanted one record a line"),
    "not UTF-8": (b'{"text": "\xff"}', "byte 10 of the line is not UTF-8; convert it"),
    "deeper than the reader goes": (b"[" * 100_000, "not JSON: .*recursion|more memory or depth"),
    "a lone surrogate": (b'{"text": "\\ud800"}', "surrogates not allowed"),
    "NaN": (b"NaN", "got float, wanted an object"),
    "no assistant": (b'{"messages": [{"role": "user", "content": "x"}]}', "no turn is the assistant's"),
}


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    with workers.Worker(tokenizer.text(FAMILIES["ChatML"].folder(tmp_path_factory.mktemp("chatml")))) as found:
        yield found


@pytest.mark.parametrize("line, message", HOSTILE.values(), ids=HOSTILE)
def test_hostile_line_is_named(worker, line, message):
    with pytest.raises(ValueError, match=f"^data.jsonl:8: .*({message})") as raised:
        worker.part(workers.Chunk("data.jsonl", 6, b'{"text": "fine"}\n\n' + line + b"\n"))
    assert "\n" not in str(raised.value)


def test_answers_of_a_prompt_alone_count(worker):
    """An assistant's turns in the prompt do not count, those of the completion do."""
    prompt = [ASK, {"role": "assistant", "content": "said before"}, ASK]
    lines = [{"prompt": prompt, "completion": [SAY]}, {"messages": [*prompt, SAY]}]
    part = worker.part(workers.Chunk("f", 1, b"\n".join(json.dumps(line).encode() for line in lines)))
    first, second = part.tokens[: part.lengths[0]], part.tokens[part.lengths[0] :]
    assert (first & encode.TOKEN).tolist() == (second & encode.TOKEN).tolist()
    assert 0 < (first < 0).sum() < (second < 0).sum() and (first < 0)[-4:].any()
