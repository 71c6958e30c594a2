"""examples.common.checkpoints: what a run keeps, which validation is the best, and when it is over."""

import json

import pytest
import torch
import torch.distributed as dist

import shard
from examples.common import checkpoints
from fquant import tree
from shard.checkpoint import MANIFEST
from shard.checkpoint import steps as steps_in
from tests.helpers import ranks

pytestmark = pytest.mark.xdist_group("ranks")


def written(folder, keep, steps, verified=0):
    """Save after each of ``steps``; return the steps of the checkpoints that are left, and their states."""
    mesh, rules, writing = shard.mesh(fsdp=dist.get_world_size()), shard.Rules(), None
    for done in steps:
        state = {"done": torch.tensor(done), "w": torch.full((2,), float(done))}
        writing = checkpoints.begin(folder, state, done, keep, verified, mesh, rules, writing)
    checkpoints.finish(folder, writing, keep, verified)
    found = checkpoints.load(folder, tree.map(torch.zeros_like, state), mesh, rules)
    assert int(found["done"]) == steps[-1] == checkpoints.newest(folder) and bool((found["w"] == steps[-1]).all())
    kept = steps_in(checkpoints.folder_of(folder))
    return kept, [int(shard.checkpoint.read(checkpoints.step_folder(folder, done))["done"]) for done in kept]


@pytest.mark.parametrize(("keep", "kept"), [(1, [40]), (2, [30, 40]), (9, [10, 20, 30, 40])])
def test_the_last_states_are_kept(tmp_path, keep, kept):
    assert ranks.run(2, written, tmp_path, keep, (10, 20, 30, 40)) == [(kept, kept)] * 2


def test_the_state_of_the_last_comparison_is_kept(tmp_path):
    assert ranks.run(2, written, tmp_path, 1, (10, 20, 30, 40), 20) == [([20, 40], [20, 40])] * 2


def dropped(folder):
    written(folder, 3, (10, 20, 30, 40), 20)
    return checkpoints.drop(folder, None, 20), steps_in(checkpoints.folder_of(folder))[:1]


def test_states_behind_the_last_comparison_are_dropped(tmp_path):
    assert ranks.run(2, dropped, tmp_path) == [(20, [20])] * 2
    assert steps_in(checkpoints.folder_of(tmp_path)) == [20]


def resumed(folder, device):
    """Load a state on the devices of each tensor, and refuse that of another run."""
    on, mesh, rules = lambda t: t.to(device), shard.mesh(fsdp=1), shard.Rules()
    state = {"done": torch.tensor(3), "w": on(torch.ones(2)), "k": on(torch.arange(3))}
    zeros = tree.map(torch.zeros_like, state)
    checkpoints.finish(folder, checkpoints.begin(folder, state, 3, 1, 0, mesh, rules, None, "5d"), 1, 0)
    assert checkpoints.newest(folder) == 3
    found = checkpoints.load(folder, zeros, mesh, rules, "5d")
    assert all(found[name].device == t.device and torch.equal(found[name], t) for name, t in state.items())
    with pytest.raises(ValueError, match="holds another tree"):
        checkpoints.load(folder, {"done": state["done"]}, mesh, rules, "5d")
    with pytest.raises(ValueError, match="step-3: is a checkpoint of run '5d', wanted one of 'e7'; put back those"):
        checkpoints.load(folder, zeros, mesh, rules, "e7")
    checkpoints.finish(folder, checkpoints.begin(folder, state, 4, 1, 0, mesh, rules, None), 1, 0)
    with pytest.raises(ValueError, match="step-4: is a checkpoint of run None, wanted one of '5d'"):
        checkpoints.load(folder, zeros, mesh, rules, "5d")


def test_a_state_comes_back_to_its_devices(tmp_path, device):
    ranks.run(1, resumed, tmp_path, device)


LOSSES = {  # losses, the best so far at each, and over with a patience of 2
    "falls": ([3, 2, 1], [True, True, True], False),
    "rises": ([3, 2, 2.5, 2.25], [True, True, False, False], True),
    "equal is no better": ([2, 2, 2], [True, False, False], True),
    "one of two is better": ([3, 2, 2.5, 1], [True, True, False, True], False),
    "too few": ([1, 2], [True, False], False),
}


@pytest.mark.parametrize(("losses", "best", "over"), LOSSES.values(), ids=LOSSES)
def test_best_and_over(losses, best, over):
    history = [(10 * (i + 1), loss) for i, loss in enumerate(losses)]
    assert [checkpoints.is_best(history[: i + 1]) for i in range(len(history))] == best
    assert checkpoints.is_over(history, 2) == over
    assert not checkpoints.is_over(history, None) and not checkpoints.is_best([])


def test_validations_are_those_of_the_steps_that_are_done(tmp_path):
    found = [None, 5.0, None, 4.0, None, 3.0]
    steps = [{"step": i, "loss": 1.0, "validation": x} for i, x in enumerate(found)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert checkpoints.validations(tmp_path, 4) == [(2, 5.0), (4, 4.0)]
    assert checkpoints.validations(tmp_path / "new", 0) == []


def test_the_run_of_a_path(tmp_path):
    """Of the run, and of each checkpoint."""
    run = tmp_path / "run"
    old, new = (run / "checkpoints" / f"step-{done}" for done in (20, 30))
    for folder in (old, new):
        folder.mkdir(parents=True)
    with pytest.raises(ValueError, match="got no checkpoint there, wanted the folder of a run or of one of its"):
        checkpoints.run_of(run)
    assert not checkpoints.is_state(run)
    for folder in (old, new):
        (folder / MANIFEST).write_text("{}")
    with pytest.raises(ValueError, match="outside a run, wanted run.json in a folder above"):
        checkpoints.run_of(run)
    (run / "run.json").write_text("{}")
    assert checkpoints.run_of(old) == (run, old) and checkpoints.is_state(old)
    assert checkpoints.run_of(run) == checkpoints.run_of(new) == (run, new) and checkpoints.is_state(run)
