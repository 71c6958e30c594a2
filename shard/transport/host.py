"""Transport between a device and the host: copies that are issued, run on streams of their own, and are waited for.

    y = fetch(x, device)    x, in the host's pinned memory   ->  its copy on the device
    y = stash(x)            x, on a device                   ->  its copy in the host's pinned memory
    y = store(host, x)      the same, in the place of ``host``, which has the layout of x; ``store_`` writes to ``host``
    arrived(y)              waits for any, and returns y

Like a collective, a copy is an *issue* and a *wait*, so that passes can move them apart. The arguments of a step that
``Rules(offload="block")`` keeps on the host are fetched block by block. Activations are stashed after the forward's
last use of them, and fetched before the backward's first. Moments of an optimiser are fetched before the update of
their leaf, and stored behind it (shard/optimizer_memory.py).

*Streams.* Each direction has a stream, because a device copies in both at once. The issue lets it wait for the current
stream: the result's memory may have had readers before, and the source must be computed. The wait lets the current
stream wait for the copy. So the copy's use of both tensors is between two points of the current stream. Memory that is
freed there is safe to use again, without ``record_stream``. Source and result are held until the wait, by this module.
A CUDA graph records the same: the copy's stream forks from the capturing one and joins it again. No call waits on the
host, which must synchronise before it reads what was stashed or stored (``device.finish_writes``); only a ``fetch`` may
follow.

*Pinned memory.* A copy runs beside the host only from or to memory that the system cannot move. Such memory is slow to
get, and a recorded graph keeps its addresses. So buffers of ``stash`` stay for the next, of the same size. One is free
if this module alone holds its memory. Those that a graph records are for graphs alone from then on: nothing in them
is live between replays. ``store`` makes memory for as long as its result lives. A step that donates the old tensor has
``store_`` in its place, which a graph can record.

If the device is the host, each op is a plain copy, so that programs, passes and tests run everywhere. The ops have vmap
rules and no derivatives: bytes of a base are constants, and activations travel in graphs that are differentiated.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fquant.compile import is_traced
from fquant.device import HOST

from ..host_memory import pinned, pinned_like


class _Copy(NamedTuple):
    """A copy under way: both ends, which stay alive, and on a device its index and the event behind the copy."""

    source: Tensor
    result: Tensor
    device: torch.device
    event: Any = None
    recorded: bool = False  # in a graph, so that the event can never be asked


_UNDER_WAY: dict[int, _Copy] = {}  # by the storage of the result
_BUFFERS: dict[tuple[bool, int], list[Tensor]] = {}  # pinned, by use in recorded graphs and bytes


def _fetch(host: Tensor, device: torch.device) -> Tensor:
    if device.type != HOST.type and not host.is_pinned():
        fault = f"fetch: {tuple(host.shape)} of {host.dtype} is in pageable memory"
        raise ValueError(f"{fault}; wanted pinned memory, as place and init give it")
    result = torch.empty_like(host, device=device)
    return _issue(host, result, result.device)  # which has a number


def _stash(x: Tensor) -> Tensor:
    if x.device.type == HOST.type:
        return _issue(x, torch.empty_like(x), x.device)
    like = torch.empty_like(x, device="meta")  # dense, in the order of the dims of x
    raw = _buffer(x.numel() * x.element_size())
    return _issue(x, raw.view(x.dtype).as_strided(like.shape, like.stride()), x.device)


def _store(host: Tensor, x: Tensor) -> Tensor:
    return _store_(torch.empty_like(host) if x.device.type == HOST.type else pinned_like(host), x)


def _store_(host: Tensor, x: Tensor) -> Tensor:
    if (host.dtype, host.shape) != (x.dtype, x.shape):
        wanted = f"{host.dtype} {tuple(host.shape)}, like what it replaces"
        raise ValueError(f"store: got {x.dtype} {tuple(x.shape)}; wanted {wanted}")
    return _issue(x, host, x.device)


def _issue(source: Tensor, result: Tensor, device: torch.device) -> Tensor:
    """Start the copy of ``source`` to ``result``, one of which is on ``device``."""
    if device.type == HOST.type:
        result.copy_(source)
        copy = _Copy(source, result, device)
    else:
        stream, event = _stream(device, result.device == device), torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            result.copy_(source, non_blocking=True)
        event.record(stream)
        copy = _Copy(source, result, device, event, _is_recording())
    _forget()
    _UNDER_WAY[_storage(result)] = copy._replace(result=result.detach())  # another tensor, which _holders counts
    return result


def _arrived(x: Tensor) -> Tensor:
    copy = _UNDER_WAY.pop(_storage(x), None)
    if copy is None:
        raise RuntimeError(f"arrived: no copy to {tuple(x.shape)} of {x.dtype} is under way; wait for each once")
    if copy.event is not None:
        torch.cuda.current_stream(copy.device).wait_event(copy.event)
    return x


def _forget() -> None:
    """Drop copies whose result nothing else holds, after an error between issue and wait."""
    for storage, copy in list(_UNDER_WAY.items()):
        if _holders(copy.result) == 1 and _is_over(copy):
            del _UNDER_WAY[storage]


def _is_over(copy: _Copy) -> bool:
    """Return True if a copy that is not waited for no longer runs; a recorded one never did."""
    return copy.event is None or copy.recorded or (not _is_recording() and copy.event.query())


def _buffer(nbytes: int) -> Tensor:
    """Return a free buffer of pinned memory, u8[nbytes]; a graph that is recorded takes one of ordinary replays."""
    recording = _is_recording()
    kept = _BUFFERS.setdefault((recording, nbytes), [])
    found = next((t for t in kept if _holders(t) == 1), None)
    if found is None:
        others = _BUFFERS.get((False, nbytes), []) if recording else []
        place = next((i for i, t in enumerate(others) if _holders(t) == 1), None)
        found = pinned(nbytes) if place is None else others.pop(place)
        kept.append(found)
    return found


def _is_recording() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _holders(t: Tensor) -> int:
    """Return the number of tensors that share the memory of ``t``, itself included."""
    return torch._C._storage_Use_Count(_storage(t)) - 1  # type: ignore[attr-defined]  # less this call's


@cache
def _stream(device: torch.device, to_device: bool) -> Any:
    return torch.cuda.Stream(device)


def _fake_fetch(host: Tensor, device: torch.device) -> Tensor:
    """Describe the result of ``fetch``: on the device meta where tensors of any device are traced as those of meta."""
    tracing = is_traced() and device.type != HOST.type
    return torch.empty_like(host, device="meta" if host.device.type == "meta" or tracing else device)


def _fake_stash(x: Tensor) -> Tensor:
    return torch.empty_like(x, device=x.device if x.device.type == "meta" else HOST)


def _vmap_store(info: Any, dims: Any, *tensors: Tensor) -> tuple[Tensor, int]:
    front = lambda t, at: t.expand(info.batch_size, *t.shape) if at is None else t.movedim(at, 0)
    return store(*map(front, tensors, dims)), 0


_LIBRARY = torch.library.Library("fquant", "FRAGMENT")
for _name, _signature, _compute, _fake, _keys in (
    ("fetch", "(Tensor host, Device device) -> Tensor", _fetch, _fake_fetch, ("CPU",)),
    ("stash", "(Tensor x) -> Tensor", _stash, _fake_stash, ("CPU", "CUDA")),
    ("store", "(Tensor host, Tensor x) -> Tensor", _store, lambda host, x: torch.empty_like(host), ("CPU", "CUDA")),
    ("store_", "(Tensor(a!) host, Tensor x) -> Tensor(a!)", _store_, lambda host, x: host, ("CPU", "CUDA")),
    ("arrived", "(Tensor x) -> Tensor", _arrived, lambda x: x, ("CPU", "CUDA")),
):
    _LIBRARY.define(_name + _signature, tags=(torch.Tag.pt2_compliant_tag,))
    for _key in _keys:
        _LIBRARY.impl(_name, _compute, _key)
    torch.library.register_fake(f"fquant::{_name}", _fake, lib=_LIBRARY)
fetch, stash, store, arrived = (
    getattr(torch.ops.fquant, name).default for name in ("fetch", "stash", "store", "arrived")
)
for _op in (fetch, stash, arrived):  # any dim may be mapped, because a copy keeps all dims in order
    torch.library.register_vmap(_op, lambda info, dims, x, *rest, op=_op: (op(x, *rest), dims[0]), lib=_LIBRARY)
torch.library.register_vmap(store, _vmap_store, lib=_LIBRARY)
