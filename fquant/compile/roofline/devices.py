"""Devices as figures: what a device computes, moves and sends in a second, and the share of it that kernels reach.

The makers' peaks are dense products with float32 sums, and bytes in one direction, half of NVLink's advertised figure.
Memory is the figure of ``nvidia-smi`` (``rocm-smi`` for the MI300X). Sources are NVIDIA's data sheets, its white papers
on GA102, AD102 and Blackwell, and AMD's data sheet of the MI300X.

No kernel reaches a peak. The shares of it are those of an H100, and other cards are assumed to reach the same:

    products    0.72 of 989 TFLOP/s: bfloat16 products of a decoder's sizes; 8192 cubed reached 0.81, on an H200 0.80
    attention   0.35 of 989 TFLOP/s: forward and backward of 4 x 2048 tokens in heads of 128, on an H200
    memory      0.85 of 3.35 TB/s: elementwise chains; a copy reached 0.90, on an H200 0.90 of 4.8 TB/s
    links       0.80 of NVLink and 0.86 of PCIe: published, for messages of many MB

``LAUNCH`` and ``LATENCY`` are estimates: a kernel of a recorded CUDA graph, and a collective of few bytes.

A device without an entry is measured once a process (:func:`measured`): a product in float32 and in bfloat16, an
attention, a copy and a call. Its figures are then what was reached, and the shares are 1. The figure of bfloat16 is at
least that of float32, as packed weights are multiplied in float32 on CPUs without products in bfloat16.
"""

import functools
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ...device import HOST, parse
from ...kernels.ops.attention import attention

MIB = 2**20
PCIE3, PCIE4, PCIE5 = 16e9, 32e9, 64e9  # of 16 lanes
LAUNCH, LATENCY = 2e-6, 20e-6


@dataclass(frozen=True)
class Shares:
    """The shares of a device's peaks that kernels reach; attention's is of the peak of products."""

    products: float = 0.72
    attention: float = 0.35
    memory: float = 0.85
    link: float = 0.80
    host: float = 0.86


class Chip(NamedTuple):
    """Figures of a device for the estimates of fquant/kernels/cuda_plans.py."""

    generation: int  # of our kernels: 80, 90 or 100
    processors: int  # multiprocessors
    clock: float  # under load


@dataclass(frozen=True)
class Device:
    """Peaks of a device, a second: FLOPs in bf16 or f16, in f32 and in 8 bits, and bytes of its memory and links.

    ``card`` is its name as torch has it, and ``type`` the type of torch's device. Without ``chip`` a product with a
    packed weight is estimated by its rows alone.
    """

    name: str
    memory: int  # bytes
    bandwidth: float
    flops: float
    link: float  # to a neighbour
    flops_f32: float  # without TF32
    flops_8bit: float
    host: float  # to the host's memory
    cache: int  # bytes of the last level
    card: str = ""
    share: Shares = field(default=Shares())
    launch: float = LAUNCH  # seconds between two kernels
    latency: float = LATENCY  # of a collective or a copy
    type: str = "cuda"
    chip: Chip | None = None

    def rate(self, dtype: torch.dtype) -> float:
        """Return the peak of products of ``dtype``; float64 counts as float32, which is faster on many cards."""
        if dtype.itemsize == 1:
            return self.flops_8bit
        return self.flops if dtype.itemsize == 2 else self.flops_f32


_CARDS = (
    Device("b200", 183359 * MIB, 8.0e12, 2250e12, 900e9, 75e12, 4500e12, PCIE5, 126 * MIB, "NVIDIA B200"),
    Device("h200", 143771 * MIB, 4.8e12, 989e12, 450e9, 67e12, 1979e12, PCIE5, 50 * MIB, "NVIDIA H200"),
    Device("h100", 81559 * MIB, 3.35e12, 989e12, 450e9, 67e12, 1979e12, PCIE5, 50 * MIB, "NVIDIA H100 80GB HBM3"),
    Device("a100-80", 81920 * MIB, 2.039e12, 312e12, 300e9, 19.5e12, 624e12, PCIE4, 40 * MIB, "NVIDIA A100-SXM4-80GB"),
    Device("a100-40", 40960 * MIB, 1.555e12, 312e12, 300e9, 19.5e12, 624e12, PCIE4, 40 * MIB, "NVIDIA A100-SXM4-40GB"),
    Device("l40s", 46068 * MIB, 864e9, 362e12, PCIE4, 91.6e12, 733e12, PCIE4, 96 * MIB, "NVIDIA L40S"),
    Device("a10", 23028 * MIB, 600e9, 125e12, PCIE4, 31.2e12, 250e12, PCIE4, 6 * MIB, "NVIDIA A10"),
    Device("l4", 23034 * MIB, 300e9, 121e12, PCIE3, 30.3e12, 242e12, PCIE3, 48 * MIB, "NVIDIA L4"),
    Device(
        "rtx5090", 32607 * MIB, 1.792e12, 209.5e12, PCIE5, 104.8e12, 419e12, PCIE5, 96 * MIB, "NVIDIA GeForce RTX 5090"
    ),
    Device(
        "rtx4090", 24564 * MIB, 1.008e12, 165.2e12, PCIE4, 82.6e12, 330.3e12, PCIE4, 72 * MIB, "NVIDIA GeForce RTX 4090"
    ),
    Device("rtx3090", 24576 * MIB, 936e9, 71e12, PCIE4, 35.6e12, 284e12, PCIE4, 6 * MIB, "NVIDIA GeForce RTX 3090"),
    Device(
        "mi300x", 196592 * MIB, 5.3e12, 1307e12, 448e9, 163.4e12, 2615e12, PCIE5, 256 * MIB, "AMD Instinct MI300X"
    ),
)  # fmt: skip
_CHIPS = {
    "b200": Chip(100, 148, 1.9e9), "h200": Chip(90, 132, 1.755e9), "h100": Chip(90, 132, 1.755e9),
    "a100-80": Chip(80, 108, 1.41e9), "a100-40": Chip(80, 108, 1.41e9), "l40s": Chip(80, 142, 2.49e9),
    "a10": Chip(80, 72, 1.695e9), "l4": Chip(80, 58, 2.04e9), "rtx5090": Chip(80, 170, 2.41e9),
    "rtx4090": Chip(80, 128, 2.52e9), "rtx3090": Chip(80, 82, 1.695e9),
}  # fmt: skip
DEVICES: dict[str, Device] = {device.name: replace(device, chip=_CHIPS.get(device.name)) for device in _CARDS}
_ALIASES = {"a100": "a100-80"}
_HERE = ("auto", HOST.type, "cuda")


def named(name: str) -> Device:
    """Return the card called ``name``, or the device of this machine that ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` is.

    Raises ValueError for another name, and for a device that is not there.
    """
    if (card := DEVICES.get(_ALIASES.get(name, name))) is not None:
        return card
    if name.partition(":")[0] in _HERE:
        return of(parse(name))
    raise ValueError(f"device {name} is unknown; wanted one of {', '.join((*DEVICES, *_ALIASES, *_HERE))}")


def of(device: torch.device) -> Device:
    """Return the entry of the card that ``device`` is, or its measured figures if it has none."""
    module = torch.get_device_module(device)
    card = module.get_device_name(device) if hasattr(module, "get_device_name") else ""
    return next((x for x in DEVICES.values() if x.card == card), None) or measured(device)


@functools.cache
def measured(device: torch.device) -> Device:
    """Return the figures of ``device`` as reached in half a second, the best of several runs.

    On the host, the threads of this process count, and a rank sends to another through memory: two copies a byte.
    """
    small = torch.ones(1, dtype=torch.float32, device=device)
    launch = _seconds(lambda: small + small, device)
    copy = _bytes_copied(device)
    f32 = _flops(torch.float32, device)
    bf16 = max(f32, _flops(torch.bfloat16, device))  # a CPU without products in bf16 can have them in float32
    memory = getattr(torch.get_device_module(device), "get_device_properties", None)
    share = Shares(1.0, _attention(device) / bf16, 1.0, 1.0, 1.0)
    return Device(
        device.type, memory(device).total_memory if memory and device.type == "cuda" else _host_memory(), copy, bf16,
        copy / 4, f32, bf16, copy / 2, 0, "", share, launch, launch, device.type,
    )  # fmt: skip


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _seconds(f: Callable[[], Any], device: torch.device, most: float = 0.03) -> float:
    """Return the least seconds of a call of ``f``, of those that fit into ``most``, after one that is not counted."""
    synchronize = torch.get_device_module(device).synchronize
    best, end = float("inf"), time.perf_counter() + most
    while best == float("inf") or time.perf_counter() < end:
        f()
        synchronize()
        start = time.perf_counter()
        f()
        synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def _flops(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOPs a second of products of squares, which grow until one takes some milliseconds."""
    size, least, most = 128, 5e-3, 16384
    while True:
        a = torch.ones(size, size, dtype=dtype, device=device)
        seconds = _seconds(lambda a=a: a @ a, device)
        if seconds > least or size == most:
            return 2 * size**3 / seconds
        size = min(most, size * 2 ** max(1, int(math.log2(least / seconds) / 3)))


def _bytes_copied(device: torch.device) -> float:
    """Return the bytes a second that a copy reads and writes, of more than fit into a cache."""
    a = torch.ones((64 if device == HOST else 512) * MIB, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * a.nbytes / _seconds(lambda: b.copy_(a), device)


def _attention(device: torch.device) -> float:
    """Return the FLOPs a second of causal attention, with the half that is computed counted."""
    q = torch.ones(1, 8, 1024, 64, dtype=torch.bfloat16, device=device)
    *_, t, e = q.shape
    return 2 * 2 * q.shape[1] * e * (t * (t + 1) // 2) / _seconds(lambda: attention(q, q, q), device)
