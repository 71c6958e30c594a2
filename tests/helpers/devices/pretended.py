"""A program on a machine with CUDA devices that are not there, as far as a program goes before it computes.

    python -m tests.helpers.devices.pretended '{"count": 1, "free": 1048576}' examples.qlora --device cuda

torch then reports ``count`` devices with ``free`` bytes each, or warns as it does of a driver that is ``old``. Ranks
meet over gloo, because NCCL is not there. Nothing can be put on such a device, so a program must end before that.
"""

import json
import sys
import warnings
from runpy import run_module
from typing import Any

import torch

from fquant.compile import roofline
from shard import device_mesh

OLD = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
    "driver by downloading and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx "
    "(Triggered internally at CUDAFunctions.cpp:109.)"
)


def pretend(count: int = 1, free: int = 80 << 30, old: bool = False) -> None:
    """Let torch of this process report such devices."""
    cuda: Any = torch.cuda

    def is_available() -> bool:
        if old:
            warnings.warn(OLD, stacklevel=2)
        return not old

    torch.backends.cuda.is_built = lambda: True
    cuda.is_available, cuda.device_count = is_available, lambda: count
    cuda.set_device, cuda.current_device = lambda device: None, lambda: 0
    cuda.mem_get_info = lambda device: (free, free)
    cuda.get_device_name = lambda device=None: roofline.DEVICES["h100"].card
    device_mesh.BACKENDS = "cpu:gloo,cuda:gloo"
    device_mesh._check_backend = lambda device, backend: None


if __name__ == "__main__":
    machine, module, *sys.argv[1:] = sys.argv[1:]
    pretend(**json.loads(machine))
    run_module(module, run_name="__main__", alter_sys=True)
