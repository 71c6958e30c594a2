"""README and docs keep their promises: commands are as CI runs them, every block of code runs, every link leads on."""

import importlib
import os
import re
import shlex
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.func import grad_and_value

import shard
from examples.qlora import cli
from fquant import LOCAL, tree
from fquant.communication import identity
from models import decoder
from tests.helpers import ranks

ROOT = Path(__file__).parents[2]
MAIN = "python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/python -m examples.qlora"
TESTS = "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest"
PROGRAM_LINES = 30
PACKAGES = ("examples", "fquant", "models", "shard", "tests")
PICTURES = {f"training_{name}.png": f"{name}.png" for name in ("loss", "evaluation", "sweep")}  # page: program
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def blocks(page, language):
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)


def commands(page):
    """The commands of a page's console blocks, each as one line."""
    lines = [line for block in blocks(page, "console") for line in re.sub(r"\\\n\s*", "", block).splitlines()]
    return [line[2:] for line in lines if line.startswith("$ ")]


@pytest.mark.parametrize("command", [MAIN, TESTS])
def test_commands_are_printed_whole(command):
    assert commands("README.md").count(command) == 1


def test_ci_runs_the_tests_command_of_the_readme():
    shown = subprocess.run([ROOT / ".ci" / "run", "--show"], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout == TESTS + "\n"


def test_commands_are_possible(capsys):
    """What they name exists: the extra, the program, and the packages that installing brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert {"pytest", "pytest-xdist"} <= set(project["project"]["optional-dependencies"]["test"])
    with pytest.raises(SystemExit) as exit:
        cli.main(["--help"])
    assert exit.value.code == 0
    help = capsys.readouterr().out
    assert "--steps" in help and "--out" in help


def run(command, folder, seconds=120):
    """Run it as a reader would from the repository's root, but in ``folder``, which has links to the packages."""
    for name in PACKAGES:
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    env = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=seconds)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


RUN_ALL = """
import runpy, sys
for path in sys.argv[1:]:
    print(path, flush=True)
    runpy.run_path(path, run_name="__main__")
"""


def programs(page, folder):
    """Write the page's Python blocks to files."""
    paths = []
    for i, program in enumerate(blocks(page, "python")):
        assert len(program.splitlines()) <= PROGRAM_LINES, page
        paths.append(folder / f"{Path(page).stem}_{i}.py")
        paths[-1].write_text(program)
    return [str(path) for path in paths]


def test_every_program_runs(tmp_path):
    """Each block on its own, as a file; one process runs all of them, because importing torch takes seconds."""
    paths = [path for page in PAGES for path in programs(page, tmp_path)]
    assert len(paths) >= len(PAGES) - 1  # of all pages only that on benchmarks has none
    run([sys.executable, "-c", RUN_ALL, *paths], tmp_path)


def on_two_ranks():
    """Add to the README's program on two ranks what a mesh needs; compare gradients and loss with one process."""
    found, program = {}, blocks("README.md", "python")[0]
    tokens = next(line for line in program.splitlines() if line.startswith("tokens ="))
    exec(program.partition("@jit")[0] + tokens, found)
    cfg, loss, tokens = (found[name] for name in ("cfg", "loss", "tokens"))
    adapters = tree.map(lambda t: t + 0.01, found["adapters"])  # those of a start have zero gradients
    mesh, rules = shard.mesh(fsdp=2), shard.Rules()
    base, adapters = shard.place((found["base"], adapters), decoder.dims(cfg), rules, mesh)
    mine, comm = shard.share(tokens[:3], mesh, rules), shard.comm(mesh, rules)
    whole = replace(LOCAL, total=identity)  # of a rank that has the whole batch
    wanted = grad_and_value(loss)(adapters, found["base"], tokens[:3], whole)
    got = shard.reduce(grad_and_value(loss)(adapters, shard.local(base), mine, comm), mesh, rules)
    for a, b in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.xdist_group("ranks")
def test_the_program_on_two_ranks_equals_one_process():
    ranks.run(2, on_two_ranks)


COMMANDS = {page: found for page in PAGES if (found := [c for c in commands(page) if c not in (MAIN, TESTS)])}


@pytest.mark.slow
@pytest.mark.parametrize("page", COMMANDS)
def test_every_command_runs(page, tmp_path):
    """Those of a page one after another in one folder, because one reads what another wrote; first its programs."""
    run([sys.executable, "-c", RUN_ALL, *programs(page, tmp_path)], tmp_path)
    for command in COMMANDS[page]:
        program, *args = shlex.split(command.replace("HOST", "127.0.0.1"), comments=True)
        assert program in ("python", "torchrun")
        hosts = int((re.findall(r"--nnodes=(\d+)", command) or [1])[0])
        args = args if program == "python" else ["-m", "torch.distributed.run", *args]
        with ThreadPoolExecutor(hosts) as pool:
            printed = list(pool.map(lambda args: run([sys.executable, *args], tmp_path, seconds=600), [args] * hosts))
        assert any(printed)  # of several hosts one prints
    for name in re.findall(r"!\[[^\]]*\]\(images/([\w.]+)\)", (ROOT / page).read_text("utf-8")):
        assert any(tmp_path.glob(f"*/{PICTURES[name]}")), name


def test_commands_have_known_options(capsys):
    """Each option of a command, and of those in a sentence, is one of its program."""
    found = {c for page in PAGES for c in commands(page) if c not in (MAIN, TESTS)}
    found |= {c for page in PAGES for c in re.findall(r"`python -m (examples\.\w+[^`]*)`", (ROOT / page).read_text())}
    used = {}
    for command in found:
        words = command.rpartition("-m ")[2].split()
        used.setdefault(words[0], set()).update(word.split("=")[0] for word in words if word.startswith("--"))
    assert {"examples.qlora", "examples.evaluate", "examples.merge", "examples.export"} <= used.keys()
    for name, options in used.items():
        is_folder = (ROOT / name.replace(".", "/")).is_dir()
        with pytest.raises(SystemExit) as exit:
            importlib.import_module(f"{name}.cli" if is_folder else name).main(["--help"])
        help = capsys.readouterr().out
        assert exit.value.code == 0
        assert options <= set(re.findall(r"(?<![\w-])--[\w-]+", help)), name


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_is_a_picture(page):
    text = (ROOT / page).read_text("utf-8")
    assert len(re.findall(r"^```\w*$", text, re.MULTILINE)) % 2 == 0
    assert set(re.findall(r"^```(\w+)$", text, re.MULTILINE)) <= {"python", "console", "text"}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file(page):
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text("utf-8")):
        assert target.startswith("http") or (ROOT / page).parent.joinpath(target).is_file(), target
    for name in re.findall(r"`((?:fquant|shard|models|examples|tests|docs)/[\w/.]+\.\w+)`", (ROOT / page).read_text()):
        assert (ROOT / name).is_file(), name
