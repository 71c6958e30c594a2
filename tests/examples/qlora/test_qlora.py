"""The main job: started as a user starts it, on a small model, through every way it can go wrong."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest

from examples.common import run_folder, runs
from examples.common.training_step import State
from examples.plan import cli as plan
from examples.qlora import cli, fitting, options
from examples.qlora.options import Options
from fquant import NF4_DQ, lora
from fquant.format import FORMATS
from fquant.io import peft
from models import hf
from models.export import bitsandbytes
from tests.helpers.model_folders import TINY, tiny_model
from tests.helpers.sharding.checkpoints import last_bytes, last_state

ROOT = Path(__file__).parents[3]
SMALL = ["--rank", "4", "--seq", "32", "--batch", "4", "--holdout", "4", "--steps", "4"]
STEPS = 8  # of the run that others are compared with: enough to be killed in the middle
together = pytest.mark.xdist_group("qlora")  # one worker makes that run


def start(*args, **env):
    return subprocess.Popen(
        [sys.executable, "-m", "examples.qlora", *map(str, args)],
        cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(process, timeout=120):
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def steps(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def wait_for(folder, count, also=lambda: True, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists() and len(steps(folder)) >= count and also():
            return
        time.sleep(0.02)
    raise AssertionError(f"no {count} steps within {seconds} s")


@pytest.fixture(scope="module")
def whole(model, text, tmp_path_factory):
    """A run on two ranks from its beginning to its end: its options, its folder and what it printed."""
    args = ["--model", model, "--data", text, *SMALL, "--steps", STEPS, "--dropout", "0.1", "--accumulate", "2"]
    args += ["--save-every", "2", "--lr", "0.01", "--dtype", "f32", "--checkpoint", "none"]
    out = tmp_path_factory.mktemp("whole") / "run"
    status, printed, err = finish(start(*args, "--out", out))
    assert status == 0, err
    return args, out, printed


@together
def test_two_ranks_write_everything(whole):
    _, out, printed = whole
    assert "held-out perplexity" in printed and "bytes of the base" in printed
    assert {p.name for p in out.iterdir()} == {
        "adapter", "checkpoints", "loss.png", "metrics.jsonl", "result.json", "run.json"
    }  # fmt: skip
    assert [s["step"] for s in steps(out)] == list(range(STEPS))
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    adapters = peft.load(out / "adapter", partial(hf.path_of, cfg=TINY))
    assert len(adapters) == 14 and all(x.b.abs().max() > 0 for x in adapters.values())
    assert len(json.loads((out / "run.json").read_text())["ranks"]) == 2


@pytest.mark.slow
@together
@pytest.mark.parametrize(
    ("mesh", "mode"),
    [
        ("fsdp=1", "selective"),
        ("fsdp=2", "none"),
        ("dp=2", "full"),
        ("fsdp=3", "selective"),
        ("dp=2,fsdp=2", "none"),
    ],
)
def test_ranks_and_checkpointing_change_no_bit(mesh, mode, whole, tmp_path):
    args, out, _ = whole  # on fsdp=2; nothing is recomputed, because all of it fits
    status, _, err = finish(start(*args, "--mesh", mesh, "--checkpoint", mode, "--out", tmp_path / "run"))
    assert status == 0, err
    found, wanted = ([s["loss"] for s in steps(folder)] for folder in (tmp_path / "run", out))
    assert found == wanted
    same = [(folder / "adapter" / "adapter_model.safetensors").read_bytes() for folder in (tmp_path / "run", out)]
    assert same[0] == same[1]


@pytest.mark.parametrize("program", [options.Options, plan.Options], ids=["qlora", "plan"])
def test_every_format_is_offered(program):
    assert set(get_args(get_type_hints(program)["format"])) == {*FORMATS, "none"}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["aq_2x8", "aq_3x8"])
def test_vectors_are_learnt_alike_on_any_mesh(model, text, tmp_path, format):
    losses = []
    for mesh in ("fsdp=1", "fsdp=2", "dp=2"):
        args = (
            "--model",
            model,
            "--data",
            text,
            *SMALL,
            "--format",
            format,
            "--mesh",
            mesh,
            "--out",
            tmp_path / mesh,
            "--dtype",
            "f32",
        )
        status, printed, err = finish(start(*args))
        assert status == 0 and f"{format} base" in printed, err
        losses.append([s["loss"] for s in steps(tmp_path / mesh)])
        assert losses[-1] == pytest.approx(losses[0], abs=1e-5) and losses[0][-1] < losses[0][0]


@pytest.mark.cuda
def test_losses_on_a_device_are_those_on_the_host(model, text, tmp_path, device):
    args = ["--model", model, "--data", text, *SMALL, "--mesh", "fsdp=1", "--dtype", "f32", "--lr", "0.01"]
    found = []
    for where in ("cpu", device):
        out = tmp_path / str(where).replace(":", "")
        status, _, err = finish(start(*args, "--device", where, "--out", out))
        assert status == 0, err
        found.append([s["loss"] for s in steps(out)])
    assert len(found[0]) == 4 and found[1] == pytest.approx(found[0], abs=1e-3)


@pytest.mark.slow
def pids(folder):
    return {rank["rank"]: rank["pid"] for rank in json.loads((folder / "run.json").read_text())["ranks"]}


@together
def test_a_run_survives_the_death_of_a_rank_and_a_signal_to_the_bit(whole, tmp_path):
    """A rank is killed, and named; all begin again; SIGTERM ends the run with a checkpoint; --resume does the rest."""
    args, out, _ = whole
    cut = tmp_path / "cut"
    process = start(*args, "--out", cut, "--save-every", "1", "--restarts", "1")
    wait_for(cut, 3)
    before = pids(cut)
    os.kill(before[1], signal.SIGKILL)
    wait_for(cut, 1, lambda: pids(cut) != before)
    time.sleep(0.5)  # in its first step, which is traced
    process.send_signal(signal.SIGTERM)
    status, printed, err = finish(process)
    named, left = err.splitlines()  # and nothing of semaphores that the killed rank might have left
    assert f"rank 1 (pid {before[1]}) was killed by SIGKILL; the other ranks were stopped; all begin again" in named
    assert status == 143 and f"continue with python -m examples.qlora --resume {cut}" in left, err
    assert not (cut / "result.json").exists() and f"stopped after step {len(steps(cut))};" in left

    status, _, err = finish(start("--resume", cut))  # the rest is in the run's folder
    assert status == 0, err
    same(out, cut)


def same(out, cut):
    """Compare the results of two runs, and that each step of both is written once."""
    adapter = "adapter/adapter_model.safetensors"
    assert last_bytes(out) == last_bytes(cut) and (out / adapter).read_bytes() == (cut / adapter).read_bytes()
    assert [s["loss"] for s in steps(out)] == [s["loss"] for s in steps(cut)]
    assert [s["step"] for s in steps(cut)] == list(range(STEPS)) and not list(cut.rglob("*.tmp"))


@together
def test_a_run_from_before_dtype_and_checkpoint_resumes(whole, tmp_path):
    """Options had other names then, and the residual stream was float32."""
    _, out, _ = whole
    former = tmp_path / "former"
    shutil.copytree(out, former)
    run = json.loads((out / "run.json").read_text())
    run["options"] = {k: v for k, v in run["options"].items() if k not in ("checkpoint", "dtype")} | {"keep": "inputs"}
    del run["digest"], run["inputs"]
    (former / "run.json").write_text(json.dumps(run))
    restored = runs.parse(Options(resume=former), ["--resume", str(former)], "qlora")
    assert (restored.checkpoint, restored.dtype, restored.rank) == ("full", "f32", 4)
    run_folder.check_resumed(former, restored)
    assert Options.upgraded({"keep": "selected", "format": "vq3"})["format"] == "aq_3x8"


@pytest.mark.slow
def test_a_dense_base(model, text, tmp_path):
    """--format none, the baseline: the base stays in the files' dtype, and the table has no packed column."""
    args = ("--model", model, "--data", text, *SMALL, "--mesh", "fsdp=1", "--format", "none", "--out", tmp_path / "run")
    status, printed, err = finish(start(*args))
    assert status == 0 and "base + adapter" in printed and "packed" not in printed, err
    found = json.loads((tmp_path / "run" / "result.json").read_text())
    assert found["bytes_packed"] == found["bytes_bf16"] and found["perplexity_packed"] == found["perplexity_bf16"]
    assert steps(tmp_path / "run")[-1]["loss"] < steps(tmp_path / "run")[0]["loss"]


@pytest.mark.slow
def test_a_folder_that_is_quantised_is_trained(model, text, tmp_path):
    """Two ranks train beside a bitsandbytes folder, with the losses of the same base quantised here."""
    cfg, params = hf.load(model)
    quantised_folder = tmp_path / "bitsandbytes"
    special = {key: json.loads((model / "config.json").read_text())[key] for key in ("bos_token_id", "eos_token_id")}
    bitsandbytes.save(quantised_folder, cfg, params, NF4_DQ, extra=special)
    shutil.copy(model / "tokenizer.json", quantised_folder)
    found = []
    for folder, format in ((model, "nf4_dq"), (quantised_folder, "none")):
        out = tmp_path / format
        args = ("--model", folder, "--data", text, *SMALL, "--mesh", "fsdp=2", "--format", format, "--out", out)
        status, _, err = finish(start(*args))
        assert status == 0, err
        found.append([step["loss"] for step in steps(out)])
    assert found[0] == found[1]


def test_the_checkpointing_mode_is_the_fastest_that_fits(model, monkeypatch):
    options = Options(model=model, seq=32, batch=4, rank=4)
    peaks = dict(none=300, selective=200, full=100)
    monkeypatch.setattr(
        fitting.pricing, "price", lambda job, axes, device: SimpleNamespace(peak=peaks[job.checkpoint], base=0)
    )
    for room, mode in ((400, "none"), (300, "selective"), (150, "full"), (0, "full")):
        monkeypatch.setattr(fitting.devices, "available_memory", lambda device, room=room: room)
        assert fitting.choose_checkpoint(options, {"fsdp": 2}) == mode


@together
def test_a_run_is_resumed_with_the_options_it_had(whole, tmp_path, capsys):
    args, out, _ = whole
    refused(capsys, "--lr was 0.01 and is now 0.5", *args, "--resume", out, "--lr", "0.5")
    shutil.copytree(out / "checkpoints", tmp_path / "checkpoints")
    refused(capsys, "there is no run.json", *args, "--resume", tmp_path)


@together
def test_saved_state_is_a_tree(whole):
    state = last_state(whole[1])
    assert isinstance(state, State) and int(state.done) == STEPS
    assert isinstance(state.trained["layers.0.q"], lora.Lora)


@pytest.mark.slow
def test_under_torchrun(model, text, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    args = ["-m", "examples.qlora", "--model", model, "--data", text, *SMALL, "--out", out]
    process = subprocess.Popen(
        [*map(str, command + args)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    status, printed, err = finish(process)
    assert status == 0, err
    assert len(steps(out)) == 4 and "held-out perplexity" in printed


def _truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _long_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])


def _magic(folder):
    (folder / "model.safetensors").write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." * 20)


def _architecture(folder):
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mamba", "architectures": ["Mamba"]}
    (folder / "config.json").write_text(json.dumps(config))


SPOILT = {
    "truncated": (_truncated, "model.safetensors"),
    "header larger than the file": (_long_header, "header"),
    "wrong magic": (_magic, "model.safetensors"),
    "unknown architecture": (_architecture, "mamba"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_model(name, model, text, tmp_path, capsys):
    spoil, said = SPOILT[name]
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    spoil(folder)
    refused(capsys, said, "--model", folder, "--data", text, *SMALL, "--out", tmp_path / "run")


def test_block_that_does_not_divide(text, tmp_path, capsys):
    folder = tiny_model(tmp_path / "model", dataclasses.replace(TINY, dim=96, head_dim=24))
    args = ("--model", folder, "--data", text, *SMALL, "--out", tmp_path / "run")
    refused(capsys, "layers.0.q: dim 1 = 96 is not a multiple of nf4_dq's block 64; use --block 32", *args)


BAD = {
    "--stepz 3": "--stepz is no option; did you mean --steps?",
    "--mesh fsdp": "cannot read 'fsdp'",
    "--mesh tp=2": "axis 'tp' is unknown",
    "--mesh fsdp=0": "size 0",
    "--targets q,z": "'z' is no weight",
    "--targets q,qkv": "'qkv' is no weight of a layer; wanted all, or some of q,k,v,o,gate,up,down",
    "--block 48": "block is 48",
    "--format none --block 64": "--block is 64 with --format none",
    "--rank 0": "--rank is 0",
    "--steps 0": "--steps is 0",
    "--lr nan": "--lr is nan",
    "--dropout 1": "--dropout is 1.0",
    "--seq 65": "--seq is 65; wanted at most 64",
    "--data missing.txt": "missing.txt",
    "--model missing": "missing",
    "--resume missing": "there is no run.json",
}


@pytest.mark.parametrize("args", BAD)
def test_bad_option(args, model, text, tmp_path, capsys):
    out = [] if "--resume" in args else ["--out", tmp_path / "run"]
    refused(capsys, BAD[args], "--model", model, "--data", text, *SMALL, *out, *args.split())


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "empty"), ("short", "tokens"), ('{"txt": "unknown key"}\n', "txt"), ("\udcff", "UTF-8")],
)
def test_bad_data(content, said, model, tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    path.write_text(content, errors="surrogateescape")
    refused(capsys, said, "--model", model, "--data", path, *SMALL, "--out", tmp_path / "run")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "run.json: holds no options of a run"),
        ('{"mesh": "fsdp=1"}', "run.json: holds no options of a run (KeyError('options'))"),
        ('{"mesh": "fsdp=1", "options": {"speed": 9}}', "run.json: option 'speed' is unknown"),
    ],
)
def test_spoilt_run(content, said, tmp_path, capsys):
    (tmp_path / "run.json").write_text(content)
    refused(capsys, said, "--resume", tmp_path)


def test_folder_that_is_taken(model, text, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("precious")
    status = cli.main(["--model", str(model), "--data", str(text), *SMALL, "--out", str(tmp_path / "run")])
    assert status == 2 and "is not empty" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["mine"]


def test_mesh_that_is_not_the_world(model, text, tmp_path, capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    args = ("--model", model, "--data", text, *SMALL, "--mesh", "dp=2,fsdp=2", "--out", tmp_path / "run")
    refused(capsys, "has 4 ranks, and there are 3 processes", *args)


def refused(capsys, said, *args):
    """Exit status 2, one line that holds ``said``, nothing written."""
    args = [str(arg) for arg in args]
    assert cli.main(args) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and err.startswith("qlora: "), err
    if "--out" in args:
        assert not Path(args[args.index("--out") + 1]).exists()
