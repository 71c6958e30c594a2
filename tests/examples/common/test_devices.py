"""Tests of examples.common.devices: ranks, refusals and memory of a device, as every program has them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import pretrain
from examples.common import devices
from examples.evaluate import cli as evaluate
from examples.generate import cli as generate
from examples.qlora import cli as qlora
from examples.qlora.options import Options
from examples.sweep import cli as sweep
from examples.vqvae import cli as vqvae
from fquant import tree
from fquant.device import HOST

ROOT = Path(__file__).parents[3]
PROGRAMS = {"qlora": qlora, "sweep": sweep, "vqvae": vqvae, "generate": generate, "evaluate": evaluate}
no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture
def machine(monkeypatch):
    """A machine with so many CUDA devices."""

    def pretend(count):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return pretend


def given(name, tmp_path):
    return ["--prompt", "a", "--model", str(tmp_path)] if name == "generate" else []


@no_cuda
@pytest.mark.parametrize("name", PROGRAMS)
def test_cuda_without_cuda_is_one_line(name, tmp_path, capsys):
    assert PROGRAMS[name].main(["--device", "cuda", *given(name, tmp_path)]) == 2
    _, err = capsys.readouterr()
    assert err.startswith(f"{name}: device: got cuda, but torch ") and "; use cpu or auto" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_unknown_device_is_one_line(name, tmp_path, capsys):
    assert PROGRAMS[name].main(["--device", "tpu", *given(name, tmp_path)]) == 2
    assert capsys.readouterr().err == f"{name}: device: got 'tpu'; wanted auto, cpu, cuda or cuda:N\n"


@no_cuda
def test_pretrain_without_cuda(tmp_path):
    with pytest.raises(ValueError, match="^device: got cuda, but torch"):
        pretrain.main(pretrain.Options(tmp_path, device="cuda"))


@no_cuda
@pytest.mark.slow
def test_under_torchrun_the_line_stands_once(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "examples.vqvae", "--device", "cuda", "--out", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and done.stderr.count("vqvae: ") == 1
    assert "device: got cuda, but torch" in done.stderr


@pytest.mark.parametrize("name", ["qlora", "sweep", "vqvae"])
def test_more_local_ranks_than_devices(name, machine, capsys):
    machine(2)
    assert PROGRAMS[name].main(["--device", "cuda", "--mesh", "fsdp=4"]) == 2
    wanted = "device: got 4 local ranks for 2 CUDA devices; use a --mesh of at most 2, or cpu"
    assert capsys.readouterr().err == f"{name}: {wanted}\n"


def test_one_device_for_several_ranks(machine, capsys):
    machine(2)
    assert qlora.main(["--device", "cuda:1", "--mesh", "fsdp=2"]) == 2
    assert "got cuda:1 for 2 local ranks; wanted a device for each; use cuda" in capsys.readouterr().err


def test_a_driver_that_is_too_old(machine, monkeypatch, capsys):
    machine(1)
    text = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."

    def is_available():
        torch.warnings.warn(text + "\nPlease update", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert qlora.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == f"qlora: device: got cuda, but {text}; use cpu or auto\n"


def test_a_device_that_its_driver_refuses(machine, monkeypatch):
    machine(1)

    def refuse(device):
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might be")

    monkeypatch.setattr(torch.cuda, "set_device", refuse)
    with pytest.raises(devices.Refused, match="got cuda:0, but CUDA error: all CUDA-capable devices are busy or") as it:
        devices.begin("cuda")
    assert "\n" not in str(it.value)


def test_the_ranks_that_a_program_starts(machine):
    for count, wanted in ((0, 2), (1, 1), (4, 4), (9, 8)):
        machine(count)
        assert Options(batch=8).axes() == {"fsdp": wanted}
        assert Options(batch=8, device="cpu").axes() == {"fsdp": 2}
        assert Options(batch=8).axes(3) == {"fsdp": 3} and Options(mesh="dp=5").axes() == {"dp": 5}
    assert Options(device="cuda:3").axes() == {"fsdp": 1}


def test_the_device_is_no_option_of_the_run():
    assert "device" not in Options(device="cpu").shared()


@pytest.mark.parametrize("name", PROGRAMS)
def test_help(name, capsys):
    with pytest.raises(SystemExit):
        PROGRAMS[name].main(["--help"])
    assert "--device DEVICE" in (out := capsys.readouterr().out) and "cuda where torch can use" in " ".join(out.split())


def test_memory_of_the_host():
    used, held = devices.memory(HOST)
    assert used == held > 50 * 2**20 and devices.available_memory(HOST) > 0
    assert devices.memory_text(used, held) == f"{used / 2**20:.0f} MiB a rank"
    assert devices.memory_text(2**20, 2**21) == "1 MiB of tensors a rank, 2 held"


def test_memory_of_a_cuda_device(monkeypatch):
    began = []
    for name, value in (("max_memory_allocated", 7), ("max_memory_reserved", 9), ("mem_get_info", (5, 11))):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", began.append)
    device = torch.device("cuda", 1)
    assert devices.memory(device) == (7, 9) and began == [device] and devices.available_memory(device) == 5


def test_tensors_of_the_host_stay():
    x = {"a": torch.zeros(3), "b": None}
    assert devices.to(x, HOST) is x
    assert tree.leaves(devices.to(x, HOST))[0] is x["a"]
