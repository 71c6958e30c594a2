"""Devices that cannot be had: each fault is one line on stderr and exit status 2, of commands as a user starts them.

One is started as a whole, and the others in processes that have imported torch. What a machine without CUDA cannot show
is shown on one that pretends to have it (tests/helpers/devices/pretended.py).
Every program's line is in tests/examples/common/test_devices.py, and a tree of several devices that is placed is in
tests/shard/test_placement.py.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shard
from fquant import jit
from fquant.device import HOST
from tests.helpers import ranks

pytestmark = pytest.mark.xdist_group("ranks")

ROOT = Path(__file__).parents[2]
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
SMALL = ["--mesh", "fsdp=1", "--batch", "1", "--seq", "16", "--rank", "1", "--checkpoint", "full"]
ABSENT = r"device: got cuda, but torch .* is built without CUDA|device: got cuda, but torch .* finds no device.*"
COMMANDS = {  # the machine, None for this one; the command; and its line
    "no CUDA": (None, ["examples.qlora", "--device", "cuda"], rf"qlora: ({ABSENT}); use cpu or auto"),
    "plan of no CUDA": (None, ["examples.plan", "--device", "cuda"], rf"plan: ({ABSENT}); use cpu or auto"),
    "an old driver": (
        {"old": True},
        ["examples.qlora", "--device", "cuda"],
        r"qlora: device: got cuda, but CUDA initialization: The NVIDIA driver on your system is too old \(found "
        r"version 11040\)\. Please update .*; use cpu or auto",
    ),
    "more ranks than devices": (
        {"count": 2},
        ["examples.qlora", "--device", "cuda", "--mesh", "fsdp=4"],
        "qlora: device: got 4 local ranks for 2 CUDA devices; use a --mesh of at most 2, or cpu",
    ),
    "a base that does not fit": (
        {"free": 4_000_000},
        ["examples.qlora", "--device", "cuda", *SMALL],
        r"qlora: --model .*: a step needs 0\.13 GiB a rank, and cuda:0 has 0\.00 GiB for it; use more fsdp, "
        r"and a smaller --batch or --seq",
    ),
}  # fmt: skip


@no_cuda
@pytest.mark.parametrize(
    ("machine", "command", "line"),
    [pytest.param(*x, id=name, marks=[pytest.mark.slow] * ("fit" in name)) for name, x in COMMANDS.items()],
)
def test_one_line_and_status_2(machine, command, line, tmp_path):
    pretended = [] if machine is None else ["tests.helpers.devices.pretended", json.dumps(machine)]
    out = ["--out", str(tmp_path / "run")] if "qlora" in command[0] else []
    command = [*pretended, *command, *out]
    if line == COMMANDS["no CUDA"][2]:
        done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300)
        status, printed = done.returncode, done.stderr
    else:
        process = ranks.server().Process(target=started, args=(command, tmp_path / "stderr"))
        process.start()
        process.join(300)
        status, printed = process.exitcode, (tmp_path / "stderr").read_text()
    assert status == 2, printed
    assert printed.count("\n") == 1
    assert re.fullmatch(line + "\n", printed), printed
    assert not (tmp_path / "run").exists()


def started(command, stderr):
    """Run a command as ``python -m`` does, with its errors in a file."""
    with stderr.open("w") as file:
        os.dup2(file.fileno(), 2)
    sys.argv[1:] = command[1:]
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def meshes():
    """Return the errors of a mesh on devices that are not there."""
    found = []
    for device in ("cuda", torch.device("cuda", 3)):
        try:
            shard.mesh(device=device, fsdp=1)
        except ValueError as error:
            found.append(str(error))
    return found


@no_cuda
def test_a_mesh_without_a_card():
    ((first, second),) = ranks.run(1, meshes)
    assert first.startswith("device: got cuda, but torch ") and first.endswith("; use cpu or auto")
    assert second.startswith("device: got cuda:3, but torch ") and "\n" not in first + second


@pytest.mark.parametrize("first", ["host", "device"])
def test_one_tree_on_two_devices(first):
    """The device meta stands in for a card: it is another device than the host."""
    host, far = torch.ones(3), torch.ones(3, device="meta")
    params = {"a": host, "b": far} if first == "host" else {"a": far, "b": host}

    @jit
    def double(params):
        return params["a"] * 2

    near, there = ("a", "b") if first == "host" else ("b", "a")
    with pytest.raises(TypeError) as caught:
        double(params)
    fix = f"move it with params.{near}.to('meta')"
    wanted = f"params.{near} is on {HOST}, and params.{there} on meta; wanted one device: {fix}"
    assert str(caught.value) == wanted
