"""Moments of optimisers in the host's memory, fetched leaf by leaf while a step runs.

    opt = optim.adamw(1e-3, moments=optim.DYNAMIC8, memory=shard.PINNED)
    state = opt.init(params)                                # moments in pinned memory, parameters on their device

A step reads and writes each moment once, and uses it briefly. So moments need not be on the device, which holds those
of three leaves (``fquant/optim/leaves.py``). Gradients and parameters stay. This is the optimiser of ZeRO-Offload
(Ren et al. 2021), but for its place: the update runs on the device, so its bits are those of a step with all moments
there. AdamW moves 8 bytes an element each way in float32, and 2 in 8 bits.

    1 B parameters, a link of 50 GB/s    moments on the host, GB    at least, ms a step
    float32                                       8.0                       160
    DYNAMIC8                                      2.0                        41

If parameters are on the host, moments are in its memory anyway, and nothing is copied. Otherwise a step has no
derivative, and asking for one raises.
"""

import torch
from torch import Tensor

from fquant.autodiff import is_dual
from fquant.communication import Memory, Wait
from fquant.device import HOST

from .host_memory import pinned_like
from .transport.host import arrived, fetch, store


def _is_near(device: torch.device) -> bool:
    """Return True if a parameter on ``device`` is in the memory of the host."""
    return device.type == HOST.type


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, param: Tensor) -> Tensor:
    if param.is_meta or _is_near(param.device):
        return torch.zeros(shape, dtype=dtype, device=param.device)
    return pinned_like(torch.empty(shape, dtype=dtype, device="meta")).zero_()


def _fetch(moment: Tensor, param: Tensor) -> Wait:
    if _is_near(param.device):
        return lambda: moment
    _check_far(moment, param)
    _check_constant(moment)
    copy = fetch(moment, param.device)
    return lambda: arrived(copy)


def _check_far(moment: Tensor, param: Tensor) -> None:
    if moment.device.type == param.device.type:
        fix = "copy the state into that of init(params), which is there"
        raise ValueError(f"got a moment on the device of its parameter; wanted pinned memory of the host; {fix}")


def _check_constant(t: Tensor) -> None:
    kind = "gradient" if t.requires_grad and torch.is_grad_enabled() else "tangent" if is_dual(t) else ""
    if kind:
        fix = "a copy to the host has none; keep moments beside the parameters, or detach the arguments of the step"
        raise TypeError(f"a {kind} through moments in the host's memory was asked for; {fix}")


def _store(old: Tensor, new: Tensor) -> Wait:
    if _is_near(new.device):
        return lambda: new
    _check_constant(new)
    copy = store(old, new)
    return lambda: arrived(copy)


PINNED = Memory(_zeros, _fetch, _store)
