"""What a run reads is what it read at its start, or an error names the file; a checkpoint is that of its run."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from examples.common import runs
from examples.qlora import cli
from examples.qlora.options import Options
from tests.helpers import ranks

pytestmark = pytest.mark.xdist_group("ranks")
SMALL = {"rank": 4, "seq": 32, "batch": 4, "holdout": 8, "dtype": "f32", "checkpoint": "none", "mesh": "fsdp=1"}


def work(options):
    return runs.work(cli.PROGRAM, options)


def ran(options):
    """Run, and return the message of a fault."""
    return ranks.run(1, work, options, timeout=240)[0]


def edited(**more):
    """Return a function that sets keys of a file of JSON."""
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | more))


def flipped(path):
    """Flip a bit of an embedding, between two samples of its bytes."""
    data = bytearray(path.read_bytes())
    data[100_000] ^= 1
    path.write_bytes(data)


CHANGES = {  # of a file that training reads
    "rope_theta": ("model/config.json", edited(rope_theta=12345.0, rope_parameters=None), "has another content than"),
    "eps": ("model/config.json", edited(rms_norm_eps=1e-3), "has another content than"),
    "tokenizer": ("model/tokenizer.json", edited(truncation=None), "has another content than"),
    "special tokens": ("model/tokenizer_config.json", edited(pad_token="<|endoftext|>"), "has another content than"),
    "no config": ("model/tokenizer_config.json", Path.unlink, "is not there, and was"),
    "template": ("model/chat_template.jinja", lambda path: path.write_text("{{ messages }}"), "is there, and was not"),
    "weights": ("model/model.safetensors", flipped, "has another content than"),
    "template of an option": ("own.jinja", lambda path: path.write_text("{{ messages }}"), "has another content than"),
}


@pytest.fixture(scope="module")
def copied(text, model, tmp_path_factory):
    """Two runs of two steps with equal shapes, over a copy of the model and a template."""
    root = tmp_path_factory.mktemp("copied")
    shutil.copytree(model, root / "model")
    weights = root / "model" / "model.safetensors"
    save_file(load_file(weights), weights)  # without digests, as other programs write it
    (root / "own.jinja").write_text("{{ messages[0].content }}")
    (root / "model" / "tokenizer_config.json").write_text("{}")
    own = {"model": root / "model", "chat_template": str(root / "own.jinja"), "out": root / "run"}
    options = Options(data=text, lr=0.01, steps=2, **SMALL, **own)
    assert ran(options) is None and ran(dataclasses.replace(options, seed=1, out=root / "other")) is None
    return options


@pytest.mark.parametrize(("file", "change", "fault"), CHANGES.values(), ids=CHANGES)
def test_a_file_that_changed_is_named(copied, file, change, fault):
    path = copied.out.parent / file
    before = path.read_bytes() if path.exists() else None
    change(path)
    try:
        found = str(ran(dataclasses.replace(copied, out=None, resume=copied.out, steps=3)))
    finally:
        path.unlink(missing_ok=True)
        if before is not None:
            path.write_bytes(before)
    assert f"{copied.out}: {path} {fault} when the run was started; restore what it was, or" in found


def test_a_checkpoint_of_another_run_is_refused(copied, tmp_path):
    """Which has the same shapes; the run's own goes on."""
    shutil.copytree(copied.out, tmp_path / "run")
    own, other = (run / "checkpoints" / "step-2" for run in (tmp_path / "run", copied.out.parent / "other"))
    shutil.rmtree(own)
    shutil.copytree(other, own)
    resumed = dataclasses.replace(copied, out=None, resume=tmp_path / "run", steps=3)
    assert f"{own}: is a checkpoint of run" in str(ran(resumed))
    shutil.rmtree(own)
    shutil.copytree(copied.out / "checkpoints" / "step-2", own)
    assert ran(resumed) is None
