"""examples.common.progress: a line a step in a file, and now and then one that people read."""

from dataclasses import dataclass

import pytest

from examples.common.progress import METRICS, Report, lines, metrics


@dataclass(frozen=True)
class Step:
    step: int
    loss: float
    validation: float | None = None


def told(x):
    return f"loss {x.loss:.1f}"


def run(folder, steps, total, done=0, first=True):
    with Report(folder, first, total, done, told) as shown:
        for i in steps:
            shown.step(Step(i, i / 2))
        shown.say("it is done")


def test_every_step_is_written_and_a_tenth_is_told(tmp_path, capsys):
    run(tmp_path, range(40), 40)
    assert metrics(tmp_path) == [{"step": i, "loss": i / 2, "validation": None} for i in range(40)]
    printed = capsys.readouterr().out.splitlines()
    assert printed == [f"step {i:4d}/40  loss {(i - 1) / 2:.1f}" for i in range(4, 41, 4)] + ["it is done"]


def test_every_validation_is_printed(tmp_path, capsys):
    with Report(tmp_path, True, 40, 0, told) as shown:
        shown.step(Step(1, 0.5, 2.5))
        shown.step(Step(2, 1.0))
    assert capsys.readouterr().out == "step    2/40  loss 0.5\n"


def test_a_line_is_there_as_soon_as_its_step(tmp_path):
    with Report(tmp_path, True, 3, 0, told) as shown:
        shown.step(Step(0, 1.0))
        assert lines(tmp_path) == ['{"step": 0, "loss": 1.0, "validation": null}\n']


def test_what_is_resumed_keeps_what_was_done_and_no_more(tmp_path):
    run(tmp_path, range(7), 9)
    run(tmp_path, range(5, 9), 9, done=5)
    assert [x["step"] for x in metrics(tmp_path)] == list(range(9))
    run(tmp_path, range(2), 9)
    assert [x["step"] for x in metrics(tmp_path)] == [0, 1]


def test_another_rank_says_and_writes_nothing(tmp_path, capsys):
    run(tmp_path, range(3), 3, first=False)
    assert capsys.readouterr().out == "" and not (tmp_path / METRICS).exists()


def test_the_file_is_closed_after_a_failure(tmp_path):
    with pytest.raises(KeyError), Report(tmp_path, True, 3, 0, told) as shown:
        raise KeyError
    assert shown.metrics.closed and not shown.progress.live.is_started
