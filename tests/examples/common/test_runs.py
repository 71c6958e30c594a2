"""examples.common.runs: what a run leaves is enough to go on from, to the bit."""

import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from examples.common import checkpoints, runs
from examples.common.progress import metrics
from examples.qlora import cli, options
from examples.sweep import cli as sweep
from examples.vqvae import cli as vqvae
from examples.vqvae import train
from examples.vqvae.options import Options
from fquant import tree
from fquant.io import safetensors
from tests.helpers import ranks
from tests.helpers.cases import slow_after

pytestmark = pytest.mark.xdist_group("ranks")
ROOT = Path(__file__).parents[3]
TINY = Options(codes=8, dim=4, hidden=8, patch=8, steps=5, batch=7)


def some_steps(run, training, until):
    while int(training.done) < until:
        training, _ = train.take(run, training)
    return training


def twice(options):
    """What is trained after all steps, without an interruption after the third and with one."""
    run, training = train.start(options)
    runs.announce(options)
    training = some_steps(run, training, 3)
    checkpoints.save(options.folder(), training, int(training.done), 1, lambda folder: None)
    whole = some_steps(run, training, options.steps)
    run, fresh = train.start(options)
    return whole, some_steps(run, checkpoints.load(options.folder(), fresh), options.steps)


@pytest.mark.parametrize(
    "name", slow_after(1, ["vq", "lfq", *(pytest.param(n, marks=pytest.mark.slow) for n in ("learnt", "latent"))])
)
def test_a_resumed_run_is_one_without_an_interruption(name, tmp_path):
    ((whole, resumed),) = ranks.run(1, twice, dataclasses.replace(TINY, quantiser=name, out=tmp_path))
    assert int(whole.done) == int(resumed.done) == TINY.steps
    for (path, a), b in zip(tree.items(whole), tree.leaves(resumed), strict=True):
        assert torch.equal(a, b), path


def another(options):
    """Load a state of another kind than was saved."""
    run, training = train.start(options)
    safetensors.save(options.folder() / checkpoints.STATE, training.net)
    return checkpoints.load(options.folder(), training)


def test_a_state_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ranks.RankFailure, match="holds another tree than this"):
        ranks.run(1, another, dataclasses.replace(TINY, out=tmp_path))


@pytest.mark.parametrize(("program", "kind"), [(vqvae, Options), (cli, options.Options)], ids=["vqvae", "qlora"])
def test_a_run_of_other_options_is_not_continued(program, kind, tmp_path, capsys):
    runs.write(tmp_path / runs.RUN, {"mesh": "dp=1", "options": kind(seed=7).shared()})
    safetensors.save(tmp_path / runs.STATE, {"done": torch.tensor(0)})
    assert program.main(["--resume", str(tmp_path), "--seed", "8"]) == 2
    assert "--seed was 7 and is now 8; resume with the options" in capsys.readouterr().err


@pytest.mark.parametrize("kind, name", [(Options, "vqvae"), (options.Options, "qlora")], ids=["vqvae", "qlora"])
def test_options_come_back(kind, name, tmp_path):
    given = kind(seed=7, steps=9, mesh="dp=2")
    runs.write(tmp_path / runs.RUN, {"mesh": given.mesh, "options": given.shared()})
    assert runs.restored(kind, tmp_path / runs.RUN) == given
    folder = ["--resume", str(tmp_path)]
    again = runs.parse(kind(), folder, name)
    assert again == dataclasses.replace(given, resume=tmp_path)
    assert runs.parse(kind(), [*folder, "--steps", "11"], name).steps == 11


@pytest.mark.parametrize("program", [vqvae, cli], ids=["vqvae", "qlora"])
def test_a_folder_without_a_state_is_refused(program, tmp_path, capsys):
    assert program.main(["--resume", str(tmp_path)]) == 2
    assert "there is no state.safetensors; wanted the folder of a run that saved its state" in capsys.readouterr().err


def test_the_first_free_folder(tmp_path):
    wanted = str(tmp_path / "a")
    for name in ("a", "a-2", "a-3"):
        found = runs.free_folder(None, wanted)
        assert found == tmp_path / name
        found.mkdir()


@pytest.mark.parametrize("program", [cli.PROGRAM, vqvae.PROGRAM, sweep.PROGRAM], ids=lambda program: program.name)
def test_processes_can_be_started_with_it(program):
    """Several local ranks are spawned, which pickles the program."""
    assert pickle.loads(pickle.dumps(program)) == program


def start(*args):
    return subprocess.Popen(
        [sys.executable, "-m", "examples.vqvae", *map(str, args)], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_bit(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    tiny = "--codes 8 --dim 4 --hidden 8 --patch 8 --batch 7 --steps 60 --save-every 2 --mesh dp=2".split()
    process = start(*tiny, "--out", cut)
    deadline = time.monotonic() + 120
    while not (cut / runs.STATE).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    ranks_of = json.loads((cut / runs.RUN).read_text())["ranks"]
    os.kill(ranks_of[1]["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "rank 1" in err and "SIGKILL" in err
    assert 0 < int(safetensors.load(cut / runs.STATE).done) < 60 and not (cut / runs.RESULT).exists()
    for args in (["--resume", cut], [*tiny, "--out", whole]):
        process = start(*args)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    for name in (runs.STATE, runs.RESULT, "reconstruction.png"):
        assert (whole / name).read_bytes() == (cut / name).read_bytes(), name
    lines = [[step | {"images_per_second": 0} for step in metrics(folder)] for folder in (whole, cut)]
    assert lines[0] == lines[1] and len(lines[0]) == 60
