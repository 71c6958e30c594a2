"""Tests of fquant.device: the texts of devices, and what a machine or a job makes of them."""

import re
import warnings

import pytest
import torch

from fquant import device
from fquant.device import HOST, parse

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
