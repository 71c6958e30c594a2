"""Devices as four figures a rank: memory, memory bandwidth, arithmetic rate and link to the other ranks.

Memory is the figure of ``nvidia-smi`` (``rocm-smi`` for the MI300X). Rates are the makers' peaks: dense bfloat16 with
float32 sums, and bytes in one direction, half of NVLink's advertised figure. Sources are NVIDIA's data sheets, its
white papers on GA102, AD102 and Blackwell, and AMD's data sheet of the MI300X.
"""

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True)
class Device:
    """Bytes of memory, bytes a second from it, FLOPs a second, bytes a second to a neighbour."""

    memory: int
    bandwidth: float
    flops: float
    link: float


@dataclass(frozen=True)
class Bound:
    """Lower bounds of a step in seconds: arithmetic, memory traffic and sends, which may overlap."""

    compute: float
    memory: float
    wire: float

    @property
    def seconds(self) -> float:
        """Return the longest of the three."""
        return max(self.compute, self.memory, self.wire)

    @property
    def limit(self) -> str:
        """Return the name of the longest."""
        return next(name for name in ("compute", "memory", "wire") if getattr(self, name) == self.seconds)


def bound(device: Device, flops: int, moved: int, sent: int) -> Bound:
    """Return the times of ``device`` for ``flops`` FLOPs, ``moved`` bytes of memory traffic and ``sent`` bytes."""
    return Bound(flops / device.flops, moved / device.bandwidth, sent / device.link)


PCIE4, PCIE5 = 32e9, 64e9  # of 16 lanes

DEVICES: dict[str, Device] = {
    "b200": Device(183359 * MIB, 8.0e12, 2250e12, 900e9),
    "h200": Device(143771 * MIB, 4.8e12, 989e12, 450e9),
    "h100": Device(81559 * MIB, 3.35e12, 989e12, 450e9),
    "a100-80": Device(81920 * MIB, 2.039e12, 312e12, 300e9),
    "a100-40": Device(40960 * MIB, 1.555e12, 312e12, 300e9),
    "l40s": Device(46068 * MIB, 864e9, 362e12, PCIE4),
    "a10": Device(23028 * MIB, 600e9, 125e12, PCIE4),
    "l4": Device(23034 * MIB, 300e9, 121e12, PCIE4),
    "rtx5090": Device(32607 * MIB, 1.792e12, 209.5e12, PCIE5),
    "rtx4090": Device(24564 * MIB, 1.008e12, 165.2e12, PCIE4),
    "rtx3090": Device(24576 * MIB, 936e9, 71e12, PCIE4),
    "mi300x": Device(196592 * MIB, 5.3e12, 1307e12, 448e9),
}
