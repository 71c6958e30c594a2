"""--show-data of examples.qlora: rows as a person and as a program reads them, before anything is trained."""

import json
import re

import pytest

from examples.data import dataset, show
from examples.data import tokenizer as tokenizers
from examples.qlora import cli

CHATS = [
    [("user", "What is two and two?"), ("assistant", "Four.")],
    [("system", "Be brief."), ("user", "A colour."), ("assistant", "Blue."), ("user", "More."), ("assistant", "Red.")],
]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in CHATS * 8]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def flags(model, chats, *more):
    given = ["--model", model, "--data", chats, "--chat-template", "zephyr", "--seq", "32", "--holdout", "2", *more]
    return [str(flag) for flag in given]


def test_objects_of_rows_and_nothing_is_trained(model, chats, tmp_path, capsys):
    assert cli.main(flags(model, chats, "--show-data", "4", "--json", "--out", tmp_path / "run")) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 4 and not (tmp_path / "run").exists()
    assert all(row.keys() == {"tokens", "counts"} and len(row["tokens"]) == len(row["counts"]) == 32 for row in found)
    learnt = "".join(t for t, counts in zip(found[0]["tokens"], found[0]["counts"], strict=True) if counts)
    assert learnt == "Four." + tokenizers.text(model).variables["eos_token"]
    whole = "".join(t for row in found for t in row["tokens"])
    assert "What is two and two?" in whole and "<|assistant|>" in whole
    train, _ = dataset.split(dataset.prepare(chats, model, 32, template="zephyr"), 2)
    rows = dataset.read(train)
    tokenizer = tokenizers.read(model)
    assert found[1]["tokens"] == [tokenizer.decode([t], skip_special_tokens=False) for t in rows.tokens[1].tolist()]


def test_rows_are_printed_before_training(model, chats, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("examples.common.runs.work", lambda program, options: None)
    args = flags(model, chats, "--show-data", "2", "--mesh", "fsdp=1", "--out", tmp_path / "run")
    assert cli.main(args) == 0
    printed = capsys.readouterr().out
    assert "row 0: " in printed and "of 32 tokens count" in printed and "What is two" in printed
    assert f"⟦Four.{tokenizers.text(model).variables['eos_token']}⟧" in printed.replace("\n", "")  # without colours


def test_colours_or_brackets(model, chats):
    rows = dataset.read(dataset.split(dataset.prepare(chats, model, 32, template="zephyr"), 2)[0])
    plain, marked = (show.text(rows, tokenizers.read(model), 2, bracketed) for bracketed in (False, True))
    assert "⟦" not in plain.plain and marked.plain.replace("⟦", "").replace("⟧", "") == plain.plain
    coloured = [plain.plain[span.start : span.end] for span in plain.spans if span.style == show.COUNTS]
    assert "".join(re.findall("⟦(.*?)⟧", marked.plain, re.DOTALL)) == "".join(coloured)


REFUSED = {
    "no template": (["--chat-template", ""], "no such file"),
    "json alone": (["--json"], "--json without --show-data, which it prints; give both"),
    "negative": (["--show-data", "-1"], "--show-data is -1; wanted at least 0"),
}


@pytest.mark.parametrize(("more", "said"), REFUSED.values(), ids=REFUSED)
def test_refused(model, chats, capsys, more, said):
    assert cli.main(flags(model, chats, *more)) == 2
    printed = capsys.readouterr().err
    assert said in printed


def test_under_torchrun_it_is_refused(model, chats, capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(flags(model, chats, "--show-data", "1")) == 2
    assert "--show-data under torchrun" in capsys.readouterr().err


def test_a_chat_without_a_template_says_what_to_pass(model, chats, capsys):
    assert cli.main(["--model", str(model), "--data", str(chats), "--seq", "32"]) == 2
    printed = capsys.readouterr().err
    assert "chats.jsonl:1: the tokenizer has no chat template; pass one with --chat-template" in printed
