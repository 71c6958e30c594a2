"""What a stranger's file says, on a terminal: in errors and tables of every program, and in tracebacks."""

import io
import itertools
import json
import sys

import pytest
import torch
from rich.progress import Progress, TextColumn
from rich.table import Table

from examples import export, inspect, merge, quantize
from examples.common import terminal
from examples.evaluate import cli as evaluate
from examples.generate import cli as generate
from examples.plan import cli as plan
from examples.qlora import cli as qlora
from fquant.io import safetensors
from fquant.tree import at, expect, printable
from models import hf
from tests.helpers import tokenizers
from tests.helpers.hf_models import GQA, random_params

SIGNS = "\x1b[31m \x9b0m \u202e \u2066 \x00 \r \x08 \x7f \u2028 \ud800 \U000e0041"
NAME = f"w{SIGNS}\n[red]:smile:[/]"


def obeys(text):
    """Return the characters of a text that a terminal obeys or hides, lines and tabs aside."""
    return {c for c in text if not c.isprintable() and c not in "\n\t"}


def test_texts_are_printed_as_they_are():
    """By a console, in tables and bars, in colour and without; markup and emoji codes are text."""
    for plain in (True, False):
        out = io.StringIO()
        console = terminal.console(file=out, force_terminal=not plain, width=300, color_system=None)
        table = Table(NAME, title=NAME, box=None)
        table.add_row(NAME)
        with Progress(TextColumn("{task.description}", markup=False), console=console, auto_refresh=False) as bar:
            bar.add_task(NAME)
            console.print(NAME, style="bold")
            console.print(table)
        text = out.getvalue()
        assert text.count("[red]:smile:[/]") >= 4 and "\\x1b[31m" in text
        if plain:
            assert not obeys(text)
        else:  # rich itself moves the cursor
            assert obeys(text) <= {"\x1b", "\r"} and "\x1b[31m" not in text


def test_errors_are_one_line(capsys):
    for error in (NAME, ValueError(NAME), "x" * 10**6, "\n" * 10**6):
        terminal.complain("merge", error)
        said = capsys.readouterr().err
        assert said.startswith("merge: ") and said.count("\n") == 1 and not obeys(said) and len(said) < 4200


def test_messages_of_the_library_are_printable():
    for text in (NAME, "ü 漢字 😀", "a\nb"):
        with pytest.raises(ValueError) as raised, at(text):
            expect(False, text)
        assert not obeys(str(raised.value))
    assert printable("ü 漢字 😀 \\ '") == "ü 漢字 😀 \\ '"
    for sign in map(chr, itertools.chain(range(0x3000), range(0xD800, 0xE010), range(0xE0000, 0xE0080))):
        assert printable(sign) == (sign if sign.isprintable() else repr(sign)[1:-1])


def test_tracebacks_are_printable(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", None)
    terminal.guard()
    try:
        raise RuntimeError(NAME)
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and "RuntimeError: w\\x1b[31m" in said and not obeys(said)


MODEL = {
    "a key of the config": lambda f: change(f / "config.json", **{NAME: 1}),
    "a value of the config": lambda f: change(f / "config.json", hidden_act=NAME),
    "a type": lambda f: change(f / "config.json", model_type=NAME),
    "a method": lambda f: change(f / "config.json", quantization_config={"quant_method": NAME}),
    "a tensor": lambda f: safetensors.write(f / "model.safetensors", {NAME.replace("\ud800", ""): torch.zeros(3)}),
    "a shard": lambda f: (
        (f / "model.safetensors").unlink(),
        (f / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": NAME}})),
    ),
    "a token": lambda f: change(f / "tokenizer_config.json", eos_token=NAME),
    "a template": lambda f: change(
        f / "tokenizer_config.json", chat_template="{{ raise_exception(" + repr(NAME.replace("\ud800", "")) + ") }}"
    ),
    "a setting": lambda f: change(f / "generation_config.json", eos_token_id=NAME),
}
PROGRAMS = {
    "generate": lambda f, chat: generate.main(["--model", f, "--chat", chat, "--max-new-tokens", "1"]),
    "evaluate": lambda f, chat: evaluate.main(["--model", f, "--data", chat, "--seq", "8"]),
    "quantize": lambda f, chat: quantize.main([f, f"{f}-out"]),
    "export": lambda f, chat: export.main([f, f"{f}.gguf"]),
    "merge": lambda f, chat: merge.main([f, f, f"{f}-merged"]),
    "inspect": lambda f, chat: inspect.main([f]),
    "plan": lambda f, chat: plan.main(["--model", f, "--seq", "8", "--batch", "1"]),
    "qlora": lambda f, chat: qlora.main(["--model", f, "--data", chat, "--seq", "8", "--show-data", "1"]),
}


def change(path, **values):
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


@pytest.mark.parametrize("fault", MODEL)
def test_programs_print_no_sign_of_a_file(tmp_path, fault, capsys):
    """On a folder with a name that means harm: errors and tables have no sign that a terminal obeys."""
    found = tokenizers.byte_level()
    folder = tokenizers.write(tmp_path / "model", found, eos_token="<|end|>", chat_template="{{ messages[0].content }}")
    hf.save(folder, GQA, random_params(GQA))
    MODEL[fault](folder)
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}] * 2}))
    for name, run in PROGRAMS.items():
        status = run(str(folder), str(tmp_path / "chat.jsonl"))
        said = "".join(capsys.readouterr())
        assert status in (0, 2) and not obeys(said), name
        assert status == 0 or said.strip().startswith(f"{name}: ") or "\n" in said
