"""Tests of fquant.device: the texts of devices, what a machine or a job makes of them, and the memory of tensors."""

import math
import re
import warnings

import pytest
import torch

from fquant import device
from fquant.device import HOST, memory_of, parse
from fquant.io import safetensors
from shard.bundle import raw
from tests.helpers.arrays import same_bits

MESSAGE = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update it"


@pytest.fixture
def machine(monkeypatch):
    """A machine with ``count`` CUDA devices, as rank ``rank`` of ``ranks`` local ones."""

    def pretend(count, rank=0, ranks=1):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return pretend


@pytest.mark.parametrize(
    ("text", "count", "rank", "ranks", "wanted"),
    [
        ("cpu", 0, 0, 1, "cpu"),
        ("cpu", 8, 1, 2, "cpu"),
        ("cpu", 1, 1, 2, "cpu"),
        ("auto", 0, 0, 1, "cpu"),
        ("auto", 0, 1, 2, "cpu"),
        ("auto", 1, 0, 1, "cuda:0"),
        ("auto", 4, 3, 4, "cuda:3"),
        ("cuda", 1, 0, 1, "cuda:0"),
        ("cuda", 8, 5, 8, "cuda:5"),
        ("cuda:0", 1, 0, 1, "cuda:0"),
        ("cuda:7", 8, 0, 1, "cuda:7"),
        (torch.device("cpu"), 0, 0, 1, "cpu"),
        (torch.device("cuda"), 2, 1, 2, "cuda:1"),
        (torch.device("cuda:1"), 2, 1, 2, "cuda:1"),
    ],
)
def test_device_of_a_text(machine, text, count, rank, ranks, wanted):
    machine(count, rank, ranks)
    assert parse(text) == torch.device(wanted) and parse(parse(text)) == parse(text)


@pytest.mark.parametrize(
    ("text", "count", "rank", "ranks", "message"),
    [
        ("gpu", 1, 0, 1, "device: got 'gpu'; wanted auto, cpu, cuda or cuda:N"),
        ("", 1, 0, 1, "device: got ''; wanted"),
        ("cpu:0", 1, 0, 1, "device: got 'cpu:0'; wanted"),
        ("cuda:", 1, 0, 1, "device: got 'cuda:'; wanted"),
        ("cuda:-1", 1, 0, 1, "device: got 'cuda:-1'; wanted"),
        ("cuda:x", 1, 0, 1, "device: got 'cuda:x'; wanted"),
        ("auto:1", 1, 0, 1, "device: got 'auto:1'; wanted"),
        ("cuda:²", 1, 0, 1, "device: got 'cuda:²'; wanted"),
        (torch.device("meta"), 1, 0, 1, "device: got 'meta'; wanted"),
        ("cuda", 0, 0, 1, f"device: got cuda, but torch {torch.__version__} finds no device, or no driver of CUDA"),
        ("cuda:1", 1, 0, 1, "device: got cuda:1 on a machine with 1 CUDA device; use one that is there"),
        ("cuda:9", 8, 0, 1, "device: got cuda:9 on a machine with 8 CUDA devices; use one that is there"),
        ("cuda", 1, 0, 2, "device: got 2 local ranks for 1 CUDA device; use at most 1 a machine"),
        ("cuda", 1, 1, 2, "device: got 2 local ranks for 1 CUDA device; use at most 1 a machine"),
        ("auto", 2, 0, 3, "device: got 3 local ranks for 2 CUDA devices; use at most 2 a machine"),
        ("cuda:0", 4, 0, 2, "device: got cuda:0 for 2 local ranks; wanted a device for each; use cuda"),
        (torch.device("cuda:1"), 4, 0, 2, "device: got cuda:1 for 2 local ranks; wanted a device for each; use cuda"),
    ],
)
def test_faults_are_one_line(machine, text, count, rank, ranks, message):
    machine(count, rank, ranks)
    with pytest.raises(ValueError, match="^" + re.escape(message)) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_a_build_without_cuda(machine, monkeypatch):
    machine(1)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert parse("auto") == HOST
    with pytest.raises(ValueError, match=f"but torch {re.escape(torch.__version__)} is built without CUDA; use cpu"):
        parse("cuda")


def test_an_old_driver_is_named(machine, monkeypatch):
    machine(1)

    def is_available():
        warnings.warn(f"{MESSAGE} (Triggered internally at CUDAFunctions.cpp:109.)\n  return count", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    assert device.why_no_cuda() == MESSAGE
    with pytest.raises(ValueError, match=re.escape(f"device: got cuda, but {MESSAGE}; use cpu or auto")):
        parse("cuda")


ONE = {
    "a column of one row": torch.tensor([[1.5, 2.5]])[:, 0],
    "an imaginary part": torch.tensor([1 + 2j]).imag,
    "of a matrix": torch.arange(6.0).view(2, 3)[1:, 1:2],
    "no dims": torch.tensor(3.0),
    "broadcast": torch.tensor([4.0]).expand(1, 1),
}


@pytest.mark.parametrize("t", ONE.values(), ids=ONE)
def test_the_memory_of_one_element_has_its_bytes(t, tmp_path):
    """An element alone is contiguous with any stride, but torch refuses to view it as bytes."""
    values = torch.tensor(t.tolist())
    assert memory_of(t).tolist() == list(values.numpy().tobytes()) == raw(t).tolist()
    safetensors.save(tmp_path / "x", {"t": t, "beside": torch.ones(2)})
    assert same_bits(safetensors.load(tmp_path / "x")["t"], values)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 3), (5,)])
def test_the_memory_of_a_tensor_has_its_bytes(shape):
    t = torch.arange(math.prod(shape)).reshape(shape)
    assert memory_of(t).tolist() == list(t.numpy().tobytes())
