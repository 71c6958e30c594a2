"""examples.common.checkpoints: what a run keeps, which validation is the best, and when it is over."""

import json

import pytest
import torch

from examples.common import checkpoints
from fquant.io import safetensors
from tests.helpers import ranks


def written(folder, keep, steps):
    """Save after each of ``steps``; return the files and what was published."""
    for done in steps:
        state = {"done": torch.tensor(done), "w": torch.full((2,), float(done))}
        checkpoints.save(
            folder, state, done, keep, lambda at, done=done: (at / "adapter").write_text(str(done)) and None
        )
    states = {path.parent.name: int(safetensors.load(path)["done"]) for path in folder.glob("**/state.safetensors")}
    return states, (folder / "adapter").read_text(), checkpoints.steps_in(folder)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("keep", "kept"), [(1, []), (2, [30]), (3, [20, 30]), (9, [10, 20, 30])])
def test_the_last_states_are_kept(tmp_path, keep, kept):
    ((states, published, steps),) = ranks.run(1, written, tmp_path, keep, (10, 20, 30, 40))
    assert states == {tmp_path.name: 40} | {f"step-{done}": done for done in kept}
    assert published == "40" and steps == kept


@pytest.mark.xdist_group("ranks")
def test_a_step_that_is_taken_again_keeps_one_state(tmp_path):
    """A resumed run saves the state that it started from again, and nothing is lost of those before."""
    ((states, _, steps),) = ranks.run(1, written, tmp_path, 3, (10, 20, 20, 30))
    assert states == {tmp_path.name: 30, "step-10": 10, "step-20": 20} and steps == [10, 20]


def resumed(folder, device):
    on = lambda t: t.to(device)
    state = {"done": torch.tensor(3), "w": on(torch.ones(2)), "k": on(torch.arange(3))}
    checkpoints.save(folder, state, 3, 1, lambda at: None)
    found = checkpoints.load(folder, state | {"k": state["k"].to("meta")})
    assert {name: t.device for name, t in found.items()} == {name: state[name].device for name in "done w".split()} | {
        "k": torch.device("cpu")
    }
    assert all(torch.equal(found[name].cpu(), state[name].cpu()) for name in state)
    assert safetensors.load(folder / checkpoints.STATE, device)["w"].device == state["w"].device


@pytest.mark.xdist_group("ranks")
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
    state = tmp_path / "run" / "checkpoints" / "step-20" / "state.safetensors"
    state.parent.mkdir(parents=True)
    safetensors.save(state, {"done": torch.tensor(20)})
    with pytest.raises(ValueError, match="outside a run, wanted run.json in a folder above"):
        checkpoints.run_of(state)
    (tmp_path / "run" / "run.json").write_text("{}")
    for path in (state, state.parent):
        assert checkpoints.run_of(path) == (tmp_path / "run", state)
    with pytest.raises(ValueError, match="got no state.safetensors there, wanted the folder of a run"):
        checkpoints.run_of(tmp_path / "run")
