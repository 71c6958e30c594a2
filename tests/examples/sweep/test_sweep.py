"""examples.sweep: each experiment has the bits of examples.qlora alone."""

import dataclasses
import json
import shutil
from functools import partial

import pytest
import torch

from examples.common import runs
from examples.common.command_line import quantised
from examples.common.progress import metrics
from examples.qlora import cli as qlora
from examples.qlora import measure
from examples.qlora import train as alone
from examples.sweep import cli, train
from examples.sweep.options import Options
from fquant import INT8, lora, tree
from fquant.io import peft
from models import hf
from tests.helpers import ranks
from tests.helpers.cases import slow_after
from tests.helpers.model_folders import TINY, tiny_model
from tests.helpers.sharding.checkpoints import last_state

pytestmark = pytest.mark.xdist_group("ranks")
SMALL = {"rank": 4, "seq": 32, "batch": 4, "holdout": 8, "checkpoint": "none", "steps": 3, "lr": 1e-2}


def both(options, steps):
    """Train the sweep, and each experiment alone; return the groups, both states and both losses of each step."""
    run, training = train.start(options)
    swept = []
    for _ in range(steps):
        training, step = train.take(run, training)
        swept.append(step.losses)
    found = []
    for one in options.experiments():
        (its, state), losses = alone.start(one), []
        for _ in range(steps):
            state, step = alone.take(its, state)
            losses.append(step.loss)
        found.append((state, losses))
    return run.groups, training.many, [list(x) for x in zip(*swept, strict=True)], found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One layer, because a run takes most of its time to trace layers."""
    return tiny_model(tmp_path_factory.mktemp("llama"), dataclasses.replace(TINY, num_layers=1))


CASES = {
    "seeds": (1, {"vary": ("seed=0,1",), "dtype": "bf16", "dropout": 0.1}),
    "rates and ranks": (1, {"vary": ("lr=1e-2,3e-2", "rank=2,4"), "dtype": "f32"}),
    "seeds, dropout, micro-batches, two ranks": (
        2, {"vary": ("seed=0,1,2",), "dropout": 0.25, "accumulate": 2, "dtype": "bf16"},
    ),
    "recomputed": (1, {"vary": ("lr=1e-2,2e-2",), "checkpoint": "full", "dtype": "bf16"}),
    "optimisers": (1, {"vary": ("optimizer=adamw,lion,sgd", "clip=0.1"), "dtype": "f32"}),
    "a dense base": (2, {"vary": ("seed=0,1",), "format": "none", "dtype": "bf16"}),
    "distilled": (1, {"vary": ("lr=1e-2,2e-2",), "objective": "distill", "dtype": "bf16"}),
    "alphas": (1, {"vary": ("alpha=8,16",), "format": "int8", "dtype": "f32", "targets": "q,embed"}),
}  # fmt: skip


@pytest.mark.parametrize(("count", "given"), slow_after(1, [*CASES.values()]), ids=CASES)
def test_each_has_the_bits_of_its_own_run(model, text, count, given):
    options = Options(**{"model": model, "data": text, **SMALL, "mesh": f"fsdp={count}", **given})
    for groups, many, losses, found in ranks.run(count, both, options, 2, timeout=400):
        assert sorted(i for group in groups for i in group) == list(range(len(many)))
        for i, (state, wanted) in enumerate(found):
            assert losses[i] == wanted
            assert tree.paths(state) == tree.paths(many[i])
            assert all(map(torch.equal, tree.leaves(state), tree.leaves(many[i]))), options.names()[i]
        assert len({str(tree.leaves(state)) for state in many}) == len(many)  # the experiments differ


def differs(options):
    """Return the groups where stacked gradients are not those alone."""
    true = train.gradients
    train.gradients = lambda many, *args: [tree.map(lambda t: t * (1 + (len(many) > 1)), x) for x in true(many, *args)]
    try:
        return train.start(options)[0].groups
    finally:
        train.gradients = true


def test_a_group_with_other_bits_is_split(model, text):
    options = Options(model=model, data=text, **SMALL, mesh="fsdp=1", vary=("lr=1e-2,2e-2", "rank=2,4"), dtype="f32")
    assert ranks.run(1, differs, options, timeout=200) == [((0,), (2,), (1,), (3,))]


def test_a_run_writes_everything(model, text, tmp_path, capsys):
    """Started as a user does, in this process; data vary, and the best adapter is that of the lowest loss."""
    other = tmp_path / "other.txt"
    shutil.copy(text, other)
    flags = ["--model", model, "--seq", 32, "--batch", 4, "--holdout", 8, "--steps", 4, "--mesh", "fsdp=1", "--rank", 2]
    flags += [
        "--checkpoint",
        "none",
        "--validate-every",
        2,
        "--vary",
        f"data={text},{other}",
        "lr=1e-3,1e-2",
        "--out",
        tmp_path / "run",
    ]
    (status,) = ranks.run(1, command, [str(flag) for flag in flags], timeout=300)
    assert status == 0
    out = tmp_path / "run"
    names = [f"data={name},lr={lr}" for name in (text.stem, "other") for lr in ("0.001", "0.01")]
    assert {path.name for path in out.iterdir()} == {
        *names, "best", "checkpoints", "metrics.jsonl", "result.json", "run.json", "sweep.png",
    }  # fmt: skip
    found = metrics(out)
    assert [step["losses"][:2] for step in found] == [step["losses"][2:] for step in found]  # the same text
    results = {x["name"]: x["loss"] for x in json.loads((out / "result.json").read_text())["experiments"]}
    assert list(results) == names and found[-1]["validations"] == pytest.approx(list(results.values()))
    steps = [step["validations"] for step in found if step["validations"]]
    lowest = min(range(len(steps)), key=lambda i: min(steps[i]))
    assert json.loads((out / "best" / "best.json").read_text())["validation"] == min(steps[lowest])
    name = names[steps[lowest].index(min(steps[lowest]))]
    if lowest == len(steps) - 1:
        path_of = partial(hf.path_of, cfg=TINY)
        best, its = (peft.load(out / where / "adapter", path_of) for where in ("best", name))
        assert all(map(torch.equal, tree.leaves(best), tree.leaves(its)))
    assert int(last_state(out).done) == 4


def test_the_best_adapter_is_merged(model, text, tmp_path):
    given = {
        "vary": ("lr=1e-2,2e-2",),
        "format": "int8",
        "merge_aware": True,
        "out": tmp_path / "run",
        "mesh": "fsdp=1",
    }
    options = Options(**{"model": model, "data": text, **SMALL, **given})
    assert ranks.run(1, runs.work, cli.PROGRAM, options, timeout=300) == [None]
    found = json.loads((tmp_path / "run" / "result.json").read_text())["experiments"]
    name = min(found, key=lambda x: x["loss"])["name"]
    cfg, dense = hf.load(model)
    adapters = peft.load(tmp_path / "run" / name / "adapter", partial(hf.path_of, cfg=cfg))
    wanted, _ = lora.merge_packed(quantised(dense, INT8), adapters)
    _, got = hf.load(tmp_path / "run" / "merged")
    assert all(map(torch.equal, tree.leaves(got), tree.leaves(wanted)))


def validated(options):
    """Return the held-out losses of every experiment before its first step, and the number of traces of a loss."""
    begun = alone.start_many(options.experiments())
    losses = [measure.mean_loss(run, run.local, state.trained) for run, state in begun]
    return losses, len(begun[0][0].evaluate.traced)


def test_experiments_share_the_traces_of_validation(model, text):
    """One for each rank and size of a batch; one for each experiment would be more than jit allows."""
    values = {"vary": ("lr=1e-2,2e-2,3e-2", "rank=1,2"), "dtype": "f32", "holdout": 6, "mesh": "fsdp=1"}
    options = Options(model=model, data=text, **SMALL | values)
    ((losses, traces),) = ranks.run(1, validated, options, timeout=200)
    assert losses == pytest.approx([losses[0]] * 6) and traces == 2 * 2


def command(args):
    return cli.main(args)


REFUSED = {
    "unknown": (["--vary", "seq=1,2"], "--vary seq=1,2: 'seq' cannot vary; wanted one of lr, rank, alpha"),
    "number": (["--vary", "lr=fast"], "--vary lr=fast: cannot read 'fast'; wanted a number"),
    "choice": (["--vary", "optimizer=adamw,adam"], "--vary optimizer=adamw,adam: got 'adam'; wanted one of adamw"),
    "twice": (["--vary", "lr=1", "lr=2"], "--vary lr=2: 'lr' is given twice; wanted all its values in one place"),
    "same": (["--vary", "lr=1,1"], "--vary: two values have one name; leave one out"),
    "range": (["--vary", "lr=1e-3,0"], "--lr is 0.0; wanted a number above 0"),
    "nothing": (["--vary"], "--vary: got nothing, wanted at least one option and its values"),
}


@pytest.mark.parametrize(("args", "said"), REFUSED.values(), ids=REFUSED)
def test_refused(model, text, tmp_path, capsys, args, said):
    assert cli.main(["--model", str(model), "--data", str(text), "--out", str(tmp_path / "a"), *args]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("sweep: ") and said in printed and printed.count("\n") == 1


def test_names_and_experiments():
    options = Options(vary=("lr=1e-4,2e-4", "data=a/x.jsonl,b/y.jsonl"), rank=3)
    assert options.names() == ["lr=0.0001,data=x", "lr=0.0001,data=y", "lr=0.0002,data=x", "lr=0.0002,data=y"]
    experiments = options.experiments()
    assert {type(one) for one in experiments} == {type(qlora.PROGRAM.options)}
    assert [(one.lr, str(one.data), one.rank) for one in experiments[1:3]] == [
        (1e-4, "b/y.jsonl", 3),
        (2e-4, "a/x.jsonl", 3),
    ]
    assert len(Options().names()) == 6
    assert dataclasses.replace(options, vary=("warmup=0,3",)).experiments()[1].warmup == 3
