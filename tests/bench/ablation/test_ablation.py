"""The ablation of the capture: refusals, what a part is worth, and that every part keeps the bits."""

from functools import partial

import pytest
import torch

from tests.bench import ablation
from tests.bench.step import Figures, measure
from tests.bench.step_sides import Shape

SMALL = Shape(layers=1, dim=64, hidden=128, vocab=256, heads=2, kv_heads=1, batch=2, seq=16, rank=2)


def figures(seconds, over):
    return Figures(first=9.0, steps=[seconds], loaded=100.0, peak=100.0 + over, loss=1.0, facts={})


@pytest.mark.parametrize(
    ("args", "said"), [(["--steps", "0"], "--steps is 0; wanted at least 1"), (["--layers", "0"], "--layers is 0")]
)
def test_bad_options(args, said, capsys):
    assert ablation.main(args) == 2
    assert said in capsys.readouterr().err


def test_what_a_part_is_worth():
    """Of time 3 % or of memory 5 %, and the transport 5 % of the time."""
    whole, worth = figures(1.0, 100), ablation.worth
    assert worth("without fusion", figures(1.04, 104), whole) == "time"
    assert worth("without fusion", figures(1.02, 106), whole) == "memory"
    assert worth("without fusion", figures(1.04, 106), whole) == "time and memory"
    assert worth("without fusion", figures(0.9, 90), whole) == "neither"
    assert worth("without shared memory of ranks", figures(1.04, 90), whole) == "neither"
    assert worth("without shared memory of ranks", figures(1.06, 90), whole) == "time"


def test_a_child_can_import_every_contestant():
    """A spawned process does not import the ``__main__`` of a package, so what it runs is elsewhere."""
    for name, side in ablation.sides(torch.float32).items():
        assert isinstance(side.make, partial) and side.make.func.__module__ == "tests.bench.ablation", name


def test_rows():
    found = {ablation.WHOLE: figures(1.0, 100), ablation.ON_TWO: figures(2.0, 50)}
    found |= {f"without {part}": figures(3.0, 75) for part in ablation.PARTS}
    rows = ablation.table("a shape", found)
    assert rows.row_count == len(found) == 2 + len(ablation.PARTS)
    ratios = list(rows.columns[2].cells)
    assert ratios == ["", "", *["3.00"] * 5, "1.50"]  # of that on as many ranks


@pytest.mark.slow
def test_every_part_keeps_the_bits():
    """Contestants have the loss of the whole capture after two steps; Inductor has its own elementwise functions."""
    found, missing = measure(ablation.sides(torch.float32), SMALL, 1, 2)
    assert not missing
    losses = {whole: {name: f.loss for name, f in found.items() if ablation.whole_of(name) == whole}
              for whole in (ablation.WHOLE, ablation.ON_TWO)}  # fmt: skip
    compiled = losses[ablation.WHOLE].pop("without fusion, with Inductor")
    assert all(len(set(each.values())) == 1 for each in losses.values())
    assert compiled == pytest.approx(losses[ablation.WHOLE][ablation.WHOLE], rel=1e-5)
