"""examples.common.run_folder: a resumed run is the one that was started, and nothing is left of killed writers."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from examples.common import run_folder, runs
from examples.common.checkpoints import RUN
from examples.qlora import cli as qlora
from examples.qlora.options import Options as QLoraOptions
from examples.vqvae import cli as vqvae
from examples.vqvae.options import Options
from fquant.io import safetensors
from shard import agree
from shard.checkpoint import MANIFEST
from tests.helpers import ranks
from tests.helpers.files.holders import holding

BOTH = pytest.mark.parametrize(("program", "kind"), [(vqvae, Options), (qlora, QLoraOptions)], ids=["vqvae", "qlora"])


STATE = "adapter_model.safetensors"


def with_checkpoint(folder):
    (folder / "checkpoints" / "step-1").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints" / "step-1" / MANIFEST).write_text("{}")


def content(options):
    return {"mesh": options.mesh, "options": json.loads(json.dumps(options.shared()))}


@BOTH
def test_a_run_of_other_options_is_not_continued(program, kind, tmp_path, capsys):
    run_folder.record(tmp_path / RUN, content(kind(seed=7, mesh="dp=1")))
    for _ in range(2):  # before its first state, and after
        assert program.main(["--resume", str(tmp_path), "--seed", "8"]) == 2
        assert "--seed was 7 and is now 8; resume with the options" in capsys.readouterr().err
        with_checkpoint(tmp_path)


@BOTH
def test_options_come_back(program, kind, tmp_path):
    given = kind(seed=7, steps=9, mesh="dp=2")
    run_folder.record(tmp_path / RUN, content(given))
    assert run_folder.restored(kind, tmp_path / RUN) == given
    folder, name = ["--resume", str(tmp_path)], program.PROGRAM.name
    again = runs.parse(kind(), folder, name)
    assert again == dataclasses.replace(given, resume=tmp_path)
    assert runs.parse(kind(), [*folder, "--steps", "11"], name).steps == 11


@BOTH
def test_an_elastic_command_begins_or_goes_on(program, kind, tmp_path):
    """With the options of the command line alone, so that a mesh is that of the processes there are."""
    given, name = ["--elastic", "--out", str(tmp_path), "--seed", "7"], program.PROGRAM.name
    first = runs.parse(kind(), given, name)
    assert (first.out, first.resume, first.seed) == (tmp_path, None, 7)
    run_folder.record(tmp_path / RUN, content(kind(seed=7, steps=9, mesh="dp=3")))
    again = runs.parse(kind(), given, name)
    assert again == dataclasses.replace(first, out=None, resume=tmp_path) and again.axes(5) == {"fsdp": 5}
    with pytest.raises(ValueError, match="--elastic begins a run in --out or goes on there; give --out"):
        kind(elastic=True).check()


@BOTH
def test_a_folder_without_a_run_is_refused(program, kind, tmp_path, capsys):
    with_checkpoint(tmp_path)
    assert program.main(["--resume", str(tmp_path)]) == 2
    assert "there is no run.json; wanted the folder of a run. A run that was stopped" in capsys.readouterr().err


def test_a_flipped_bit_of_the_record_is_refused(tmp_path):
    """Or changes no option; a record of an earlier release, without a digest, is read as it is."""
    path, right = tmp_path / RUN, {**content(QLoraOptions(seed=7, mesh="dp=2")), "inputs": {"--data x": "0" * 32}}
    run_folder.record(path, right)
    raw, draw, refused = path.read_bytes(), random.Random(0), 0
    assert list(json.loads(raw))[-1] == "digest" and run_folder.read(path) == right
    for _ in range(3000):
        spoilt, bit = bytearray(raw), draw.randrange(8 * len(raw))
        spoilt[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoilt)
        try:
            found = run_folder.read(path)
        except ValueError as error:
            assert str(error).startswith(f"{path}: ")
            refused += 1
        else:
            assert {key: found[key] for key in right} == right
    assert refused > 2000
    for length in range(len(raw.rstrip())):
        path.write_bytes(raw[:length])
        with pytest.raises(ValueError, match=r"run.json: holds no options of a run"):
            run_folder.read(path)
    run_folder.write(path, right)
    assert run_folder.read(path) == right


def test_the_first_free_folder(tmp_path):
    wanted = str(tmp_path / "a")
    for name in ("a", "a-2", "a-3"):
        found = run_folder.free(None, wanted)
        assert found == tmp_path / name
        found.mkdir()


def test_a_folder_that_is_free(tmp_path):
    """So is one that holds what is left of a run.json; --resume is named if there is something to resume."""
    assert run_folder.free(tmp_path, "") == tmp_path
    (tmp_path / ".run.json.0123abcd.tmp").write_text("{")
    assert run_folder.free(tmp_path, "") == tmp_path
    (tmp_path / "mine").write_text("")
    with pytest.raises(ValueError, match="is not empty; choose another folder$"):
        run_folder.free(tmp_path, "")
    run_folder.record(tmp_path / RUN, content(Options()))
    with pytest.raises(ValueError, match=f"choose another folder, or --resume {tmp_path}$"):
        run_folder.free(tmp_path, "")


@BOTH
@pytest.mark.parametrize("flag", ["out", "resume"])
def test_a_folder_in_which_another_process_runs_is_refused(program, kind, flag, tmp_path):
    """It names the process; the next start of an elastic run waits for the last to end, and a killed one has ended."""
    run_folder.record(tmp_path / RUN, content(kind(mesh="dp=1")))
    options = dataclasses.replace(kind(elastic=True), **{flag: tmp_path})
    with holding(tmp_path / run_folder.LOCK) as process, mock.patch.object(run_folder, "TAKEOVER", 0.5):
        for given in (options, dataclasses.replace(options, elastic=False)):
            with pytest.raises(ValueError, match=f"is in use by host .*, process {process.pid}, since"):
                run_folder.held(given, "").__enter__()
    (tmp_path / RUN).unlink()
    with run_folder.held(options, "") as found:
        assert found == options
    with holding(tmp_path / run_folder.LOCK, 0.5), run_folder.held(options, ""):
        pass


def test_runs_that_begin_at_once_have_folders_of_their_own(tmp_path):
    """Other ranks than the first hold nothing; nothing is left of a run that did not begin."""
    wanted = str(tmp_path / "a")
    with run_folder.held(Options(), wanted) as one, run_folder.held(Options(), wanted) as other:
        assert (one.out, other.out) == (tmp_path / "a", tmp_path / "a-2")
        with mock.patch.dict(os.environ, RANK="1"), run_folder.held(one, wanted) as found:
            assert found is one
    assert not os.listdir(tmp_path)


def test_the_command_holds_the_folder(tmp_path, capsys):
    tiny = "--codes 8 --dim 4 --hidden 8 --patch 8 --steps 1 --batch 7 --mesh dp=1".split()
    with holding(tmp_path / run_folder.LOCK) as process:
        assert vqvae.main([*tiny, "--out", str(tmp_path)]) == 2
    assert f"process {process.pid}, since" in capsys.readouterr().err


WRITER = """
import os, sys, torch
from fquant.io import safetensors
from fquant.lazy import Lazy
kill = lambda: os.kill(os.getpid(), 9)
safetensors.write(sys.argv[1], {"a": torch.ones(1 << 20), "b": Lazy(kill, torch.ones(3))})
"""


def announced(options, inputs):
    run_folder.check_same(options, inputs)
    run_folder.announce(options, inputs)
    return run_folder.is_saved(options)


@pytest.mark.xdist_group("ranks")
def test_what_a_killed_writer_leaves_is_removed_when_the_run_resumes(tmp_path):
    options = Options(out=tmp_path, mesh="dp=1")
    assert ranks.run(1, announced, options, {}) == [False]
    inner = tmp_path / "best" / "adapter"
    inner.mkdir(parents=True)
    for folder in (tmp_path, inner):
        safetensors.write(folder / STATE, {"done": torch.tensor(1)})
        process = subprocess.run([sys.executable, "-c", WRITER, str(folder / STATE)])
        assert process.returncode == -signal.SIGKILL
        (leftover,) = folder.glob(".*.tmp")
        assert leftover.name.startswith(f".{STATE}.")
    others = [tmp_path / ".notes.tmp", inner / "deeper" / ".x.0123abcd.tmp"]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (tmp_path / "checkpoints" / ".step-3.0123abcd.tmp").mkdir(parents=True)  # a checkpoint that is not whole
    resumed = dataclasses.replace(options, out=None, resume=tmp_path)
    with_checkpoint(tmp_path)
    assert ranks.run(1, announced, resumed, {}) == [True]
    assert sorted(tmp_path.rglob("*.tmp")) == sorted(others)
    assert {path.name for path in inner.iterdir()} == {STATE, "deeper"}
    assert os.listdir(tmp_path / "checkpoints") == ["step-1"]


def announced_elsewhere(root):
    os.chdir(root / f"host-{dist.get_rank()}")
    try:
        with mock.patch.object(agree, "SEEN_WITHIN", 0.5):
            run_folder.announce(Options(out=Path("run"), mesh="dp=2"), {})
    finally:
        os.chdir(root)


@pytest.mark.xdist_group("ranks")
def test_a_folder_that_not_all_ranks_see_is_refused_at_the_start(tmp_path):
    """As on two hosts with disks of their own, where the checkpoints of rank 1 would be missed."""
    for rank in range(2):
        (tmp_path / f"host-{rank}").mkdir()
    fault = "run/run.json: is not there, and another rank made it; use a folder that all ranks see"
    with pytest.raises(ranks.RankFailure) as found:
        ranks.run(2, announced_elsewhere, tmp_path, timeout=20)
    assert [fault in found.value.failures[rank].message for rank in range(2)] == [True, True]


@pytest.mark.xdist_group("ranks")
def test_an_input_that_changed_is_named(tmp_path):
    """On each rank; so is one that is missing, in the record or now, and a record without any."""
    options = Options(out=tmp_path, mesh="dp=2")
    resumed = dataclasses.replace(options, out=None, resume=tmp_path)
    was = run_folder.digests({"--data x": {"w": torch.ones(3)}, "--model y": torch.zeros(2)})
    now = run_folder.digests({"--data x": {"w": torch.ones(3)}, "--model y": torch.zeros(2) + 1e-9})
    run_folder.record(tmp_path / RUN, content(options))
    with pytest.raises(ranks.RankFailure, match="has no digests of the run's input; start a new run with --out"):
        ranks.run(2, announced, resumed, was)
    (tmp_path / RUN).unlink()
    for given in (options, resumed, resumed):
        assert ranks.run(2, announced, given, was) == [False, False]
    name = run_folder.run_name(tmp_path)
    for inputs, fault in (
        (now, "--model y has another content than when"),
        ({"--model y": was["--model y"]}, "--data x is not there, and was when"),
        ({"z.jinja": "0", **was}, "z.jinja is there, and was not when"),
    ):
        with pytest.raises(ranks.RankFailure, match=f"{fault} the run was started; restore what it was, or") as found:
            ranks.run(2, announced, resumed, inputs)
        assert list(found.value.failures) == [0, 1]
    assert run_folder.read(tmp_path / RUN)["inputs"] == was and os.listdir(tmp_path) == [RUN]
    assert run_folder.run_name(tmp_path) == name
