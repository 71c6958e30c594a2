"""examples.common.tracking: TensorBoard's own reader finds the figures; a package that is missing is named."""

import sys

import pytest

from examples.common import tracking

FIGURES = {"step": 0, "loss": 2.5, "lr": 1e-3, "validation": None, "perplexity": [1.0], "bad": float("nan"), "ok": True}


def test_numbers():
    assert tracking.numbers_in(FIGURES) == {"loss": 2.5, "lr": 1e-3}


@pytest.mark.filterwarnings("ignore")  # tensorboard warns of its own dependencies
def test_tensorboard_reads_the_figures_of_a_run_and_its_continuation(tmp_path):
    pytest.importorskip("tensorboard", reason="is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in ((0, 4), (2, 6)):  # the second goes on after two steps
        tracker = tracking.start("tensorboard", tmp_path, first, {})
        for step in range(first, last):
            tracker.log(step + 1, FIGURES | {"loss": step / 2})
        tracker.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(found.Tags()["scalars"]) == {"loss", "lr"}
    losses = {event.step: event.value for event in found.Scalars("loss")}
    assert losses == {step + 1: step / 2 for step in range(6)}


def test_no_tracker_writes_nothing(tmp_path):
    tracker = tracking.start(None, tmp_path, 0, {})
    tracker.log(1, FIGURES)
    tracker.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_is_named(monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"--track {name}: .*; install it with pip install 'fquant\[track\]'"):
        tracking.check(name)


@pytest.mark.slow  # starts a process of its own
def test_wandb_keeps_an_offline_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for first, last in ((0, 2), (2, 4)):
        tracker = tracking.start("wandb", tmp_path, first, {"lr": 1e-3})
        for step in range(first, last):
            tracker.log(step + 1, FIGURES)
        tracker.close()
    name = (tmp_path / "wandb-id.txt").read_text()
    runs = list((tmp_path / "wandb").glob(f"offline-run-*-{name}"))
    assert len(runs) >= 1 and all(list(run.glob("*.wandb")) for run in runs)
