"""examples.common.verification: a run whose ranks have other bits ends on all of them, before it saves or publishes."""

import dataclasses
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shard
from examples.common import run_folder, training_loop, verification
from examples.common.checkpoints import folder_of
from examples.common.progress import Report
from examples.common.training_step import State
from examples.qlora import cli, train
from examples.qlora.options import Options
from fquant import optim, tree
from shard import bundle
from tests.helpers import ranks

pytestmark = pytest.mark.xdist_group("ranks")
ADAMW = optim.adamw(0.01)


@dataclasses.dataclass(frozen=True)
class Step:
    """The figures of a step."""

    step: int
    loss: float = 1.0
    grad_norm: float = 1.0


@dataclasses.dataclass(frozen=True)
class Run:
    """Constants of a run that trains one weight to be zero."""

    options: Options
    base: dict[str, torch.Tensor]
    fault: str = ""  # of the last rank, in the fourth step


def take(run, state):
    rank, step = dist.get_rank(), int(state.done)
    is_bad = rank == dist.get_world_size() - 1 and step == 3
    if run.fault == "overflow" and step == 3:
        return dataclasses.replace(state, done=state.done + 1), Step(step, grad_norm=math.inf)
    if is_bad and run.fault == "skips":
        return dataclasses.replace(state, done=state.done + 1), Step(step)
    updates, moments = ADAMW.update(state.trained, state.moments, state.trained)
    state = State(state.trained + updates, moments, state.done + 1)
    if is_bad and run.fault:
        where = {"base": run.base["block"], "state": state.trained, "moment": moments.square}[run.fault]
        bundle.raw(where)[5] ^= 4
    return state, Step(step)


def trained(folder, fault, given):
    """Train; return the error, or the steps that are done."""
    mesh = shard.mesh(fsdp=dist.get_world_size())
    options = dataclasses.replace(Options(out=folder, steps=8), **given)
    run = Run(options, {"block": torch.ones(5, device="cpu")}, fault)
    weight = torch.ones(3, 4, device="cpu")
    state = State(weight, ADAMW.init(weight), torch.tensor(0, device="cpu"))
    place = lambda run: verification.Placed(mesh, shard.Rules(), {"the base": run.base})
    program = cli.PROGRAM._replace(take=take, publish=lambda *_: None, placed=place)
    if dist.get_rank() == 0:
        run_folder.record(folder / run_folder.RUN, {"options": {}, "mesh": None, "run": "a run"})
    dist.barrier()
    with Report(folder, dist.get_rank() == 0, 8, 0, lambda x: "") as shown:
        try:
            return int(training_loop.train(program, run, state, [], shown)[0].done)
        except shard.integrity.Diverged as error:
            return str(error)


@pytest.mark.parametrize(
    ("n", "fault", "given", "wanted"),
    [
        (3, "state", {}, "after step 4: the state: rank 2 has other bits than ranks 0, 1 at trained, the first of 1"),
        (
            2,
            "moment",
            {},
            "after step 4: the state: ranks 0, 1 have different bits, and none is in the minority, at mo",
        ),
        (2, "skips", {"verify_every": 3}, "after step 6: the state: ranks 0, 1 have different bits"),
        (2, "skips", {"verify_every": 4, "save_every": 6}, "after step 4: the state: ranks 0, 1 have different bits"),
        (2, "skips", {"verify_every": 3, "save_every": 2}, "after step 4: the state: ranks 0, 1 have different bits"),
        (2, "skips", {"verify_every": 3, "save_every": 1}, "after step 6: the state: ranks 0, 1 have different bits"),
        (2, "base", {"verify_every": 1}, "after step 9: the base: rank 1 has other bits than were placed in block; co"),
        (2, "skips", {"verify_every": None, "save_every": 8}, 8),
        (2, "", {"verify_every": 1}, 8),
    ],
    ids=str,
)
def test_a_run_ends_before_it_saves_what_differs(n, fault, given, wanted, tmp_path):
    given = {"verify_every": 2, "save_every": 20} | given | ({"steps": 9} if fault == "base" else {})
    for found in ranks.run(n, trained, tmp_path, fault, given, timeout=30):
        assert found == wanted if isinstance(wanted, int) else str(found).startswith(wanted), found
    behind = 3 if given["verify_every"] == 3 and given["save_every"] == 1 else 0  # the last step that was equal
    kept = [8] if isinstance(wanted, int) else [behind] if behind else []
    assert shard.checkpoint.steps(folder_of(tmp_path)) == kept
    if not isinstance(wanted, int):
        assert found.endswith(f"; --resume goes on behind step {behind}")


def test_a_gradient_that_is_not_finite_ends_the_run(tmp_path):
    wanted = "step 3: the norm of the gradient is inf; use a smaller --lr, or --dtype f32"
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, trained, tmp_path, "overflow", {"verify_every": None, "save_every": 1}, timeout=30)
    assert [(f.type, f.message) for f in caught.value.failures.values()] == [("ValueError", wanted)] * 2


def flipped(run, state, path):
    """Take a step of examples.qlora; the second spoils a bit on rank 1."""
    state, step = train.take(run, state)
    if dist.get_rank() == 1 and step.step == 1:
        bundle.raw(tree.get({"base": run.local, "state": state}, path))[7] ^= 1
    return state, step


def spoilt(options, path):
    program = cli.PROGRAM._replace(take=partial(flipped, path=path))
    return training_loop.work(program, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "named"),
    [
        (
            "state.trained.layers.0.q.a",
            "after step 2: the state: rank 1 has other bits than ranks 0, 2 at trained.laye",
        ),
        ("state.moments.1.mean.layers.0.q.a", "after step 2: the state: rank 1 has other bits than ranks 0, 2 at mom"),
        ("base.layers.1.bytes", "the base: rank 1 has other bits than were placed in layers.1; continue"),
    ],
)
def test_a_flipped_bit_of_a_job_is_named(path, named, model, text, tmp_path):
    options = Options(
        model=model, data=str(text), lr=0.01, steps=12, rank=4, seq=32, batch=4, holdout=8, dtype="f32",
        checkpoint="none", mesh="fsdp=3", out=tmp_path / "run", verify_every=1,
    )  # fmt: skip
    for fault in ranks.run(3, spoilt, options, path, timeout=240):
        assert fault.status == 1 and named in fault.message, fault


PROGRAM = """
import os, sys, torch
from examples.qlora import cli, train
from fquant import tree

def take(run, state):
    state, step = train.take(run, state)
    if os.environ["RANK"] == "1":
        tree.leaves(state.trained)[0].view(-1)[0] += 1
    return state, step

program = cli.PROGRAM._replace(take=take)
if __name__ == "__main__":
    sys.exit(cli.runs.command(program, sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_command_prints_one_line_and_fails(model, text, tmp_path):
    (tmp_path / "job.py").write_text(PROGRAM)
    options = "--rank 4 --seq 32 --batch 4 --holdout 8 --dtype f32 --checkpoint none --mesh fsdp=2 --steps 2"
    args = [*options.split(), "--model", model, "--data", text, "--out", tmp_path / "run", "--verify-every", "1"]
    done = subprocess.run(
        [sys.executable, tmp_path / "job.py", *map(str, args)], capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("qlora: ")]
    assert done.returncode == 1 and line.startswith("qlora: after step 1: the state: ranks 0, 1 have different bits"), (
        done.stderr
    )
