"""Every program that reads a model, with its default options, on models of many depths, families, heads and widths.

The width is that of SmolLM: 576, no multiple of the block of four formats. A whole program takes seconds, so the
product of all is marked slow.
"""

import dataclasses
import json

import pytest

from examples import export, inspect, merge, quantize
from examples.evaluate import cli as evaluate
from examples.generate import cli as generate
from examples.plan import cli as plan
from examples.qlora import cli as qlora
from examples.sweep import cli as sweep
from tests.helpers.hf_models import CONFIGS
from tests.helpers.model_folders import tiny_model

SIZES = {"vocab": 4096, "dim": 576, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "hidden": 192}
DATA = ["--characters", "20000", "--steps", "1"]  # less of the data, and of the time
ODD_BLOCKS = ("int4", "int4_zero", "fp8", "int8_group")


def model(folder, family, count, tied):
    full = tuple(i for i in range(count) if i % 6 == 5) if family == "gemma3" else ()
    of_family = {"num_layers": count, "tied": tied, "max_positions": 2048, "full_layers": full}
    return tiny_model(folder, dataclasses.replace(CONFIGS[family], **SIZES, **of_family))


def test_every_format_of_an_odd_width(tmp_path, text, capsys):
    at = str(model(tmp_path / "model", "grouped", 1, True))
    formats = ["none", *ODD_BLOCKS, "nf4"]
    args = ["--formats", *formats, "--data", str(text), "--rows", "1", "--seq", "16", "--json"]
    assert evaluate.main(["--model", at, *args]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [x["format"] for x in found] == formats
    assert all(0.9 < x["perplexity"] / found[0]["perplexity"] < 1.1 for x in found)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("count", [1, 7, 8, 14])
@pytest.mark.parametrize("family", ["grouped", "qwen3", "gemma3"])
def test_default_options(family, count, tied, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    at = str(model(tmp_path / "model", family, count, tied))
    runs = (
        (qlora, "--model", at, *DATA, "--out", "run"),
        (sweep, "--model", at, *DATA, "--vary", "lr=1e-4,1e-3", "--out", "sweep"),
        (qlora, "--model", at, *DATA, "--train", "full", "--format", "none", "--out", "full"),
        *((qlora, "--model", at, *DATA, "--format", x, "--out", x) for x in ODD_BLOCKS[: 4 if count == 1 else 1]),
        (plan, "--model", at),
        (quantize, at, "packed"),
        (plan, "--model", "packed", "--format", "none"),
        (qlora, "--model", "packed", "--format", "none", *DATA, "--out", "again"),
        (inspect, at),
        (inspect, "packed", "--against", at),
        (merge, at, "run/adapter", "merged"),
        (export, at, "model.gguf", "--kind", "q8_0"),
        (export, "run"),
        (evaluate, "--model", at),
        (evaluate, "--model", at, "--formats", *ODD_BLOCKS, "--rows", "2", "--adapters", "run/adapter"),
        (generate, "--model", at, "--prompt", "def f(x):"),
    )
    for program, *args in runs:
        assert program.main(args) == 0, (program.__name__, args, capsys.readouterr())
