"""The benchmark of many adapters: refusals, bits, and a small run from the command line."""

from functools import partial

import pytest
import torch

from tests.bench.adapters import __main__ as adapters
from tests.bench.step_sides import Shape

SMALL = Shape(layers=1, dim=64, hidden=128, vocab=256, heads=2, kv_heads=1, batch=3, seq=16, rank=2)


def test_bad_options(capsys):
    assert adapters.main(["--repeats", "0"]) == 2
    assert "--repeats is 0; wanted at least 1" in capsys.readouterr().err
    assert adapters.main(["--batch", "2", "--ranks", "4", "8", "16"]) == 2
    assert "--ranks is (4, 8, 16); wanted at most 2, the batch, of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "wrap"), [((), lambda step: step), ((), adapters.in_order), ((3, 2), adapters.in_order)],
    ids=["stacked", "stacked in order", "slots in order"],
)  # fmt: skip
def test_each_has_the_bits_of_its_run_alone(ranks, wrap):
    """Count those that have, and not one that was changed.

    Products of slots of low rank have another layout than those of one adapter, so torch's may have other bits.
    """
    many_runs = partial(adapters.mixed_runs, ranks=ranks) if ranks else adapters.runs
    one, many, alone = many_runs(SMALL, torch.float32, wrap=wrap)
    for _ in range(2):
        for run in (one, many, *alone):
            run()
    assert adapters.equal_bits(many, alone) == 3
    next(iter(alone[1].adapters.values())).b[0, 0] += 1
    assert adapters.equal_bits(many, alone) == 2
    assert 0 < one.peak() and 0 < many.peak()


@pytest.mark.parametrize("ranks", [(), (16, 4)], ids=["stacked", "slots"])
def test_in_bfloat16_each_has_the_bits_of_its_run_alone_in_order(ranks):
    """With torch's products on AMX none has."""
    shape = Shape(layers=1, dim=512, hidden=640, vocab=600, heads=8, kv_heads=4, batch=4, seq=24, rank=8)
    many_runs = partial(adapters.mixed_runs, ranks=ranks) if ranks else adapters.runs
    _, many, alone = many_runs(shape, torch.bfloat16, wrap=adapters.in_order)
    for _ in range(2):
        for run in (many, *alone):
            run()
    assert adapters.equal_bits(many, alone) == 4


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[], ["--ranks", "2", "3", "--in-order"]], ids=["stacked", "slots"])
def test_a_small_run(capsys, ranks):
    sizes = "--layers 1 --dim 64 --hidden 128 --vocab 256 --heads 2 --kv-heads 1 --batch 3 --seq 16 --rank 2".split()
    assert adapters.main([*sizes, *ranks, "--dtype", "f32", "--repeats", "1"]) == 0
    shown = capsys.readouterr().out
    assert "3 of 3 adapters have the bits of their runs alone" in shown
    assert all(name in shown for name in (adapters.ONE, adapters.MANY, adapters.ALONE, adapters.PEFT))
