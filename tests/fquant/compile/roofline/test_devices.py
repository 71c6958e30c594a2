"""Devices: the table is complete, cards are found by their names, and any other device is measured once."""

import dataclasses

import pytest
import torch

from fquant.compile import roofline
from fquant.compile.roofline import DEVICES, Device, measured, of
from fquant.compile.roofline import devices as module
from fquant.device import HOST
from tests.helpers.arrays import named


@named("name", DEVICES)
def test_figures_are_figures(name):
    device = DEVICES[name]
    assert device.name == name and device.type == "cuda" and device.card
    peaks = {field: x for field, x in dataclasses.asdict(device).items() if isinstance(x, int | float)}
    assert all(x > 0 for x in peaks.values())
    assert device.flops_f32 < device.flops < device.flops_8bit and device.link < device.bandwidth
    assert all(0 < x <= 1 for x in dataclasses.asdict(device.share).values())


def test_rates_of_dtypes():
    device = DEVICES["h100"]
    assert device.rate(torch.bfloat16) == device.rate(torch.float16) == 989e12
    assert device.rate(torch.float32) == device.rate(torch.float64) == 67e12
    assert device.rate(torch.float8_e4m3fn) == device.rate(torch.int8) == 1979e12


def test_this_machine_is_measured_once():
    found = of(HOST)
    assert found is of(HOST) is measured(HOST)
    assert (found.name, found.type) == ("cpu", "cpu")
    assert all(x > 0 for x in (found.memory, found.bandwidth, found.flops, found.flops_f32, found.link, found.launch))
    assert found.flops >= found.flops_f32  # products in bf16 can be had in float32
    assert 1e8 < found.flops_f32 < 1e14 and 1e7 < found.bandwidth < 1e13


@pytest.mark.parametrize("card", ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"])
def test_a_card_is_found_by_its_name(card, monkeypatch):
    """An unknown one, the PCIe model of a known one among them, is measured."""
    unknown = dataclasses.replace(DEVICES["l4"], name="measured")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    monkeypatch.setattr(module, "measured", lambda device: unknown)
    found = of(torch.device("cuda", 0))
    assert isinstance(found, Device) and found.name == ("h100" if card.endswith("HBM3") else "measured")


def test_names():
    assert roofline.named("h100") is DEVICES["h100"] and roofline.named("a100") is DEVICES["a100-80"]
    assert roofline.named("cpu") is measured(HOST)
    with pytest.raises(ValueError, match="^device h300 is unknown; wanted one of b200, .*, a100, auto, cpu, cuda$"):
        roofline.named("h300")


def test_a_device_that_is_not_here():
    if torch.cuda.is_available():
        assert roofline.named("cuda") == roofline.named("auto") == of(torch.device("cuda", 0))
        return
    assert roofline.named("auto") is measured(HOST)
    with pytest.raises(ValueError, match="^device: got cuda:1, but torch .*; use cpu or auto$"):
        roofline.named("cuda:1")
