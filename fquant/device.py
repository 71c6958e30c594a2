"""Devices as values: the host, and the device that a text such as ``cuda:1`` names.

    device = parse("auto")                      # a CUDA device if torch can use one, and else the host
    cfg, params = hf.load(folder, device=device)

A device is an argument, or that of a tensor at hand. Nothing here is global, and no import chooses one. ``HOST`` is the
memory of the processor, to which files are read and in which ranks compare their arguments. Tensors of ``META`` have no
memory.

A process computes on one device. ``cuda`` without a number is the one with the number of the local rank, which torchrun
gives to each process of a machine. So all ranks get the same text, and no two share a device.
"""

import os
import warnings
from numbers import Integral

import torch
from torch import Tensor

HOST = torch.device("cpu")
META = torch.device("meta")


def parse(device: str | torch.device) -> torch.device:
    """Return the device that ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` names, with its number; initialise nothing.

    ``auto`` is ``cuda`` if torch can use CUDA, and else the host. A torch.device is checked in the same way.

    Raises ValueError for another text, if torch cannot use CUDA here, and for a number that no device has. Raises
    ValueError for more local ranks than devices, and for several ranks on the device of one number.
    """
    kind, colon, number = (text := str(device)).partition(":")
    if text == "cpu" or (text == "auto" and why_no_cuda()):
        return HOST
    if not (text == "auto" or kind == "cuda") or (colon and not (number.isascii() and number.isdigit())):
        raise ValueError(f"device: got {text!r}; wanted auto, cpu, cuda or cuda:N")
    if why := why_no_cuda():
        raise ValueError(f"device: got {text}, but {why}; use cpu or auto")
    rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if ranks > (count := torch.cuda.device_count()):
        raise ValueError(f"device: got {ranks} local ranks for {_named(count)}; use at most {count} a machine")
    index = int(number) if number else rank
    if ranks > 1 and number and (isinstance(device, str) or index != rank):
        raise ValueError(f"device: got {text} for {ranks} local ranks; wanted a device for each; use cuda")
    if index >= count:
        raise ValueError(f"device: got cuda:{index} on a machine with {_named(count)}; use one that is there")
    return torch.device("cuda", index)


def is_recording(device: torch.device) -> bool:
    """Return True if a CUDA graph is being recorded on ``device``, so that nothing may read its values."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def finish_writes(t: Tensor) -> None:
    """Wait until a device has written what it still copies to ``t``, if that is pinned memory of the host."""
    if t.device == HOST and t.is_pinned():
        torch.cuda.synchronize()


def memory_of(t: Tensor) -> Tensor:
    """Return the memory of the contiguous ``t``, u8[nbytes]. The stride of one element alone is ignored."""
    flat = t.reshape(()).reshape(1) if t.numel() == 1 else t.reshape(-1)
    return flat.view(torch.uint8)


def why_no_cuda() -> str:
    """Return why torch cannot use CUDA in this process, or an empty text if it can."""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    with warnings.catch_warnings(record=True) as seen:  # torch warns of a driver that is too old
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    if seen:
        return str(seen[0].message).partition(" (Triggered")[0].splitlines()[0]
    return f"torch {torch.__version__} finds no device, or no driver of CUDA {torch.version.cuda} or later"


def _named(count: int) -> str:
    return f"{count} CUDA device" + "s" * (count != 1)


def is_integer(x: object) -> bool:
    """Return True for an int, an integer of NumPy, or a symbolic one; a bool is none."""
    return isinstance(x, int | torch.SymInt | Integral) and not isinstance(x, bool)
