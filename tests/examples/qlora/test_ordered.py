"""Losses of held-out rows have the same bits on any mesh where sums are ordered; the oracle is one process."""

import dataclasses
import itertools
import json
import math

import pytest
import torch

from examples.qlora import measure, train
from examples.qlora.options import Options
from fquant import tree
from tests.helpers import ranks
from tests.helpers.arrays import named
from tests.helpers.cases import slow_after

pytestmark = pytest.mark.xdist_group("ranks")
SMALL = {"rank": 4, "seq": 32, "batch": 4, "holdout": 7, "dtype": "f32", "checkpoint": "none", "steps": 2}
OBJECTIVES = {
    "sft": {"data": "text"},
    "dpo": {"data": "pairs", "objective": "dpo"},
    "orpo": {"data": "pairs", "objective": "orpo"},
    "merge-aware": {"data": "text", "merge_aware": True},
}
MESHES = ({"fsdp": 2}, {"fsdp": 5}, {"dp": 3}, {"dp": 2, "fsdp": 2})  # of five ranks some have no row of a batch


@pytest.fixture(scope="module")
def data(text, tmp_path_factory):
    """Return files of text and of pairs, by name."""
    pairs = [{"prompt": f"f{i}(", "chosen": f"x, {i})", "rejected": f"{i * 7}"} for i in range(30)]
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in pairs))
    return {"text": text, "pairs": path}


def judged(options):
    """Return the figures of drawn adapters, captured and not."""
    run, state = train.start(options)
    draw = torch.Generator().manual_seed(0)
    adapters = tree.map(lambda t: torch.randn(t.shape, generator=draw) * 0.1, state.trained)
    loss = measure.mean_loss if options.objective == "sft" else measure.judged
    eager = dataclasses.replace(run, evaluate=run.evaluate.__wrapped__)
    return loss(run, run.local, adapters), loss(eager, run.local, adapters), measure.mean_loss(run, run.local, {})


FAST = [("sft", 1)]
CASES = [*FAST, *(case for case in itertools.product(OBJECTIVES, range(len(MESHES))) if case not in FAST)]


@named("objective, mesh", slow_after(1, CASES))
def test_held_out_losses_do_not_depend_on_the_mesh(model, data, tmp_path, objective, mesh):
    given = OBJECTIVES[objective] | {"data": data[OBJECTIVES[objective]["data"]], "out": tmp_path / "run"}
    options = Options(model=model, **SMALL, **given, mesh="fsdp=1")
    (wanted,) = ranks.run(1, judged, options, timeout=240)
    assert wanted[0] == wanted[1] != wanted[2]
    axes = MESHES[mesh]
    options = dataclasses.replace(options, mesh=",".join(f"{axis}={size}" for axis, size in axes.items()))
    count = math.prod(axes.values())
    assert ranks.run(count, judged, options, timeout=240) == [wanted] * count
