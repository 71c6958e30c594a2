"""Command lines that are wrong, and options that would do nothing: one line that names the option, and status 2."""

import runpy
import sys

import pytest

from examples import export, inspect, merge, quantize
from examples.evaluate import cli as evaluate
from examples.generate import cli as generate
from examples.plan import cli as plan
from examples.qlora import cli as qlora
from examples.sweep import cli as sweep
from examples.vqvae import cli as vqvae

PROGRAMS = {
    "qlora": qlora.main, "sweep": sweep.main, "vqvae": vqvae.main, "plan": plan.main, "evaluate": evaluate.main,
    "generate": generate.main, "quantize": quantize.main, "merge": merge.main, "export": export.main,
    "inspect": inspect.main,
}  # fmt: skip
IDLE = [  # options that would do nothing beside others
    ("qlora --dither 2", "--dither 2.0 is of --merge-aware"),
    ("qlora --dither 2 --merge-aware --adapter DIR", "--dither 2.0 is of --merge-aware, and of new adapters"),
    ("qlora --characters 9 --data a.txt", "--characters 9 is of the standard library's source, and --data is given"),
    ("qlora --holdout 4 --data a --eval-data b", "--holdout 4 is of --data, and --eval-data is"),
    ("qlora --chat-template chatml", "--chat-template chatml is of files, and no --data names any"),
    ("qlora --parse-special", "--parse-special is of files"),
    ("qlora --show-data 2 --objective dpo --data a", "--show-data 2 shows texts, and this --objective has preferences"),
    (
        "qlora --compare-dense True --format none",
        "--compare-dense True measures the perplexity of a base before it is packed",
    ),
    ("qlora --compare-dense True --objective kto --data a", "--compare-dense True measures"),
    ("qlora --json", "--json without --show-data"),
    ("qlora --patience 2", "--patience is 2 without --validate-every"),
    ("qlora --block 64 --format none", "--block is 64 with --format none"),
    ("qlora --teacher DIR", "--teacher and --temperature are of --objective distill"),
    ("sweep --lr 1e-3 --vary lr=1e-4,1e-3", "--lr 0.001 with --vary lr=..., which has its own values; leave one out"),
    ("sweep --rank 8", "--rank 8 with --vary rank=..."),
    ("sweep --dither 2 --vary lr=1,2", "--dither 2.0 is of --merge-aware"),
    ("sweep --holdout 4 --eval-data b --vary data=a.jsonl,b.jsonl", "--holdout 4 is of --data"),
    ("sweep --compare-dense True", "--compare-dense True measures the base of one run"),
    ("plan --model qwen3-0.6b --link 5 --mesh fsdp=1 dp=1", "--link is 5.0, and one rank sends nothing"),
    ("plan --wire int8", "--wire is int8 with --train lora"),
    ("merge a b c --shard 1 --format nf4", "--shard 1.0 is of a plain folder"),
    ("export a b --to gguf --shard 1", "--shard 1.0 is of a folder of weights"),
    ("export a b --to merged --no-tokenizer", "--no-tokenizer is of --to gguf"),
    ("evaluate --chat-template chatml", "--chat-template chatml is of chats, and no --data has any"),
    ("evaluate --rows 3 --choices a.jsonl", "--rows 3 is of texts, and --choices alone is measured"),
    ("generate --model DIR --prompt a --chat-template chatml", "--chat-template chatml is of chats"),
]
NUMBERS = [
    (f"{line} {number}", f"{line.split()[-1]} is {number}; wanted ")
    for line in (
        "qlora --weight-decay", "qlora --merge-aware --dither", "qlora --alpha", "qlora --lr", "qlora --epochs",
        "qlora --clip", "qlora --objective distill --temperature", "vqvae --lr", "plan --model llama3-8b --reserve",
    )
    for number in ("nan", "inf", "-inf")
] + [
    ("qlora --objective dpo --data a --beta nan", "--beta is nan, and --objective dpo wants a number above 0"),
    ("qlora --objective kto --data a --beta inf", "--beta is inf, and --objective kto wants a number above 0"),
    ("merge a b c --scales nan", "--scales nan: wanted finite numbers"),
]  # fmt: skip
WRONG = [  # values that cannot be read, and what is not given
    ("qlora --lr 1e-4x", "qlora: Error parsing --lr: "),
    ("qlora --lr 1e-4x", "1e-4x"),
    ("qlora --lr 1e-4x", "FLOAT"),
    ("sweep --steps 1.5", "--steps"),
    ("vqvae --codes many", "'many'"),
    ("vqvae --quantiser none", "invalid choice 'none' for argument '--quantiser'"),
    ("qlora --lr", "Missing value for argument '--lr'"),
    ("evaluate --formats nf5", "'nf5'"),
    ("plan --seq x", "plan: Error parsing --seq: "),
    ("plan --format nf5", "invalid choice 'nf5' for argument '--format'"),
    ("merge a b c --scales x", "--scales"),
    ("export a b --to zip", "'zip'"),
    ("quantize a b --block x", "--block"),
    ("generate --prompt a --top-k x", "--top-k"),
    ("qlora --lrr 1", "--lrr is no option; did you mean --lr?"),
    ("quantize a", "there is no OUT"),
    ("evaluate --adapters a b a", "--adapters a b a: wanted each once"),
    ("evaluate --out /dev/null", "--out /dev/null: is a file; wanted a folder"),
    ("plan --model qwen3-0.6b --plot /", "--plot /: is a folder; wanted a file"),
    ("export a", "a: no such folder; wanted that of a model, of a run or of a checkpoint"),
    ("quantize", "there is no IN"),
    ("inspect", "there is no DIR|FILE"),
    ("generate --prompt a", "there is no --model"),
    ("merge a b", "got 2 folders; wanted BASE ADAPTER... OUT"),
]


@pytest.mark.parametrize(("line", "wanted"), IDLE + NUMBERS + WRONG)
def test_a_line(line, wanted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program, *args = line.split()
    assert PROGRAMS[program](args) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"{program}: ") and wanted in printed.err and printed.err.count("\n") == 1
    assert not printed.out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--lr", "x"], "pretrain: Error parsing --lr: could not convert string to float: 'x'; see --help"),
        ([], "there is no --out; wanted --out DIR"),
        (["--out", "a", "--steps", "2", "--minutes", "3"], "--minutes 3.0 is in place of --steps; leave one out"),
        (["--out", "a", "--held-out", "1"], "--held-out is 1; wanted at least 2"),
    ],
)
def test_pretrain(args, wanted, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pretrain", *args])
    monkeypatch.delitem(sys.modules, "examples.pretrain", raising=False)  # of another test; runpy warns of it
    with pytest.raises(SystemExit, match="^2$"):
        runpy.run_module("examples.pretrain", run_name="__main__")
    printed = capsys.readouterr().err
    assert printed.startswith("pretrain: ") and wanted in printed and printed.count("\n") == 1


def test_restarts_under_torchrun(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert vqvae.main(["--restarts", "1"]) == 2
    assert "vqvae: --restarts 1 under torchrun" in capsys.readouterr().err


def test_help_is_whole(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        qlora.main(["--help"])
    assert "--lr" in capsys.readouterr().out
