"""examples.common.runs: what a run leaves is enough to go on from, to the bit."""

import contextlib
import dataclasses
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shard
from examples.common import checkpoints, run_folder, runs
from examples.common.progress import metrics
from examples.qlora import cli
from examples.sweep import cli as sweep
from examples.vqvae import cli as vqvae
from examples.vqvae import train
from examples.vqvae.options import Options
from fquant import tree
from tests.helpers import ranks
from tests.helpers.cases import slow_after
from tests.helpers.files.full_disk import limited
from tests.helpers.sharding.checkpoints import last_bytes, last_state

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
    run_folder.announce(options, run.inputs)
    training = some_steps(run, training, 3)
    name = run_folder.run_name(options.folder())
    shard.checkpoint.save(checkpoints.step_folder(options.folder(), 3), training, *train.placed(run)[:2], name)
    whole = some_steps(run, training, options.steps)
    run, resumed = train.start(dataclasses.replace(options, out=None, resume=options.out))
    assert int(resumed.done) == 3
    return whole, some_steps(run, resumed, options.steps)


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
    shard.checkpoint.save(checkpoints.step_folder(options.folder(), 1), training.net, *train.placed(run)[:2])
    return checkpoints.load(options.folder(), training, *train.placed(run)[:2])


def test_a_state_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ranks.RankFailure, match="holds another tree"):
        ranks.run(1, another, dataclasses.replace(TINY, out=tmp_path))


def hindered(limit, options):
    """Run; after two steps the folder is removed, or files can no longer grow; return the fault and the steps."""
    taken, stack = list[int](), contextlib.ExitStack()

    def take(run, training):
        taken.append(int(training.done))
        if len(taken) == 3 and limit is None and dist.get_rank() == 0:
            shutil.rmtree(options.out, ignore_errors=True)
        elif len(taken) == 3 and limit is not None:
            stack.enter_context(limited(limit))
        return train.take(run, training)

    with stack:
        return runs.work(vqvae.PROGRAM._replace(take=take), options), len(taken)


HINDRANCES = {  # bytes of a file, None if the folder is removed; the fault; the most steps
    "removed": (None, r"run/run.json: was removed or replaced since the run began", 4),
    "metrics": (10, r"File too large: '.*run/metrics.jsonl'", 3),
    # A checkpoint is written while steps go on, so its first file may be whole before files can no longer grow.
    "checkpoint": (
        4000, r"run/checkpoints/step-\d: .*File too large: '.*(rank-\d-of-2.safetensors|manifest.json)'", 6,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("limit", "fault", "most"), HINDRANCES.values(), ids=HINDRANCES)
def test_a_run_that_cannot_write_ends_at_its_next_checkpoint(limit, fault, most, tmp_path):
    """On all ranks, with the name of the file; nothing of the removed folder is made again."""
    out = tmp_path / "run"
    options = dataclasses.replace(TINY, out=out, mesh="dp=2", steps=20, save_every=2, verify_every=None)
    for found, steps in ranks.run(2, hindered, limit, options):
        assert found.status == 2 and re.search(fault, found.message) and steps <= most
    assert (limit is None) != (out / "run.json").exists()


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
    while not checkpoints.newest(cut) and time.monotonic() < deadline:
        time.sleep(0.02)
    ranks_of = json.loads((cut / runs.RUN).read_text())["ranks"]
    os.kill(ranks_of[1]["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "rank 1" in err and "SIGKILL" in err
    assert 0 < int(last_state(cut).done) < 60 and not (cut / runs.RESULT).exists()
    for args in (["--resume", cut], [*tiny, "--out", whole]):
        process = start(*args)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    assert last_bytes(whole) == last_bytes(cut)
    for name in (runs.RESULT, "reconstruction.png"):
        assert (whole / name).read_bytes() == (cut / name).read_bytes(), name
    lines = [[step | {"images_per_second": 0} for step in metrics(folder)] for folder in (whole, cut)]
    assert lines[0] == lines[1] and len(lines[0]) == 60


@pytest.mark.slow
def test_a_run_that_is_killed_before_its_first_state_begins_again(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    tiny = "--codes 8 --dim 4 --hidden 8 --patch 8 --batch 7 --steps 60 --save-every 60 --mesh dp=1".split()
    process = start(*tiny, "--out", cut)
    deadline = time.monotonic() + 120
    while not ((cut / "metrics.jsonl").exists() and metrics(cut)) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert (cut / runs.RUN).exists() and checkpoints.newest(cut) is None
    process = start(*tiny, "--out", cut)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and f"choose another folder, or --resume {cut}" in err
    for args in (["--resume", cut], [*tiny, "--out", whole]):
        process = start(*args)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    assert last_bytes(whole) == last_bytes(cut)
    assert (whole / runs.RESULT).read_bytes() == (cut / runs.RESULT).read_bytes()
    assert len(metrics(cut)) == 60
