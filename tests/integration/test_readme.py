"""The README keeps its promises: its two commands are as CI runs them, and its program runs."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAIN = "python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/python -m examples.qlora"
TESTS = "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest"
PROGRAM_LINES = 30


@pytest.fixture(scope="module")
def readme():
    return (ROOT / "README.md").read_text("utf-8")


def blocks(text, language=r"\w*"):
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("command", [MAIN, TESTS])
def test_commands_are_printed_whole(readme, command):
    lines = [line.strip().removeprefix("$ ") for block in blocks(readme) for line in block.splitlines()]
    assert lines.count(command) == 1


def test_ci_runs_the_tests_command_of_the_readme():
    shown = subprocess.run([ROOT / ".ci" / "run", "--show"], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == TESTS + "\n"


def test_commands_are_possible():
    """What they name exists: the extra, the program, and the packages that installing brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert {"pytest", "pytest-xdist"} <= set(project["project"]["optional-dependencies"]["test"])
    assert (ROOT / "examples" / "qlora" / "__main__.py").is_file()
    help = subprocess.run(
        [sys.executable, "-m", "examples.qlora", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert help.returncode == 0, help.stderr
    assert "--steps" in help.stdout and "--out" in help.stdout


def test_program_runs(readme, tmp_path):
    """In a process of its own, from the repository's root as a reader would, with nothing left behind."""
    program = blocks(readme, "python")[0]
    assert len(program.splitlines()) <= PROGRAM_LINES
    path = tmp_path / "program.py"
    path.write_text(program)
    before = {p.name for p in ROOT.glob("[!.]*")}
    ran = subprocess.run(
        [sys.executable, "-c", "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", str(path)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {p.name for p in ROOT.glob("[!.]*")} == before
