"""Retarget a trace: the graph of a function on another device than the host, made without that device.

A build of torch for CPUs describes ops on fake CUDA tensors, but aborts where one of them needs a gradient. A fake CPU
tensor would let a function and torch take branches for CPUs. So a function is traced with tensors of the device meta
in place of the device's, with or without a card. Then the graph is moved to the device:

    arguments      fake tensors of the device, which share storages as the given ones do
    factories      ``device=`` becomes the device's, as it does wherever else an op names a device
    constants      numbers from ``torch.tensor(0.1)`` are made by the device; other constants are copied there once
    every value    computed again, without gradients, as the device's ops describe it

A constant on the host is copied at each replay, and the host waits for that copy, which no CUDA graph can record. So
none stays there. Arguments may stay, such as weights in pinned memory (``host`` of :func:`stand_ins`), with what is
computed from them there.

While it is traced, a function sees the device meta. An op whose kernel depends on the device must be one op in the
graph, such as those of fquant.kernels. Autocast for the device does not see such tensors, so it raises.

A function of the host is traced so too if it maps a forward derivative, vmap(jvp): then torch makes tangents of the
device meta beside those of the host.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg
from torch.overrides import TorchFunctionMode

from ...device import HOST, META
from .. import graph as graphs
from .fake_tensor import Fake

_aten = torch.ops.aten
_CONSTANTS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)  # which read Python values


def with_index(device: torch.device) -> torch.device:
    """Return ``device`` with the number of the current one, 0 without a card; the host and meta have none."""
    if device.type in (HOST.type, META.type) or device.index is not None:
        return device
    module = torch.get_device_module(device)
    return torch.device(device.type, module.current_device() if module.is_available() else 0)


def device_of(named: Iterable[tuple[str, Tensor]]) -> tuple[torch.device, set[int]]:
    """Return the device of the tensors, the host without any, and the ids of those in pinned memory of the host.

    Pinned tensors may be beside those of another device. Raises TypeError for any other mixture.
    """
    named = list(named)
    far = [(path, t) for path, t in named if t.device != HOST]
    if not far:
        return HOST, set()
    (first, t), pinned = far[0], set[int]()
    for path, other in named:
        if other.device == HOST and other.is_pinned():
            pinned.add(id(other))
        elif other.device != t.device:
            fix = f"move it with {path}.to({str(t.device)!r})"
            raise TypeError(f"{path} is on {other.device}, and {first} on {t.device}; wanted one device: {fix}")
    return t.device, pinned


def stand_ins(
    tensors: Sequence[Tensor], device: torch.device, mode: FakeTensorMode, host: Collection[int] = ()
) -> list[Tensor]:
    """Return fake tensors on ``device`` with the layouts and shared storages of ``tensors``.

    Those whose ids are in ``host`` are on the host.
    """
    bases = dict[int, Tensor]()
    return [_stand_in(t, HOST if id(t) in host else device, mode, bases) for t in tensors]


def _stand_in(t: Tensor, device: torch.device, mode: FakeTensorMode, bases: dict[int, Tensor]) -> Tensor:
    """Return a view of the base for the storage of ``t``, which is made in ``bases`` unless it is there."""
    storage = t.untyped_storage()
    with mode, torch.no_grad():
        if storage._cdata not in bases:
            bases[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
        base, size = bases[storage._cdata], t.element_size()
        whole = base.narrow(0, 0, len(base) // size * size).view(t.dtype)  # no index, which needs a card
        return whole.as_strided(t.shape, t.stride(), t.storage_offset())


class Constants(TorchFunctionMode):
    """Make tensors from Python values on the host, and copy them to ``device`` or its stand-in, the device meta.

    torch would make them on meta, without values, and not record that. Calls inside autocast raise TypeError.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func``, in two steps if it makes a constant on the device."""
        check_autocast(self.device)  # which the function may have entered
        kwargs = kwargs or {}
        if func not in _CONSTANTS:
            return func(*args, **kwargs)
        default = args[0].device if func is Tensor.new_tensor else None
        given = default if kwargs.get("device") is None else torch.device(kwargs["device"])
        data = args[-1] if args else kwargs.get("data")
        if given is None or given.type not in (META.type, self.device.type) or isinstance(data, Tensor):
            return func(*args, **kwargs)
        if func is Tensor.new_tensor:  # torch has no device for that of a mapped tensor
            func, args, kwargs = torch.tensor, (data,), {"dtype": args[0].dtype} | kwargs
            kwargs.pop("data", None)
        return func(*args, **(kwargs | {"device": HOST})).to(META)


def check_autocast(device: torch.device) -> None:
    """Raise TypeError if autocast is on for ``device``, whose casts a trace on stand-ins does not have."""
    if torch.is_autocast_enabled(device.type):
        raise TypeError(
            f"jit: autocast is on for {device.type}, which a captured function cannot follow; cast in the function"
        )


def retarget(module: GraphModule, device: torch.device) -> None:
    """Move the graph of ``module`` from the device meta to ``device``, and compute its fake values again."""
    graph, mode, bases = module.graph, Fake(), dict[int, Tensor]()
    constants = _constants(module)
    with torch.no_grad():
        for node in list(graph.nodes):
            if node.op == "placeholder":
                t = node.meta["val"]
                node.meta["val"] = _stand_in(t, device if t.is_meta else HOST, mode, bases)
            elif node.op == "get_attr":
                _place_constant(module, node, device, mode)
            elif node.op == "call_function":
                moved = (META, HOST) if node in constants else (META,)
                move = lambda x, moved=moved: device if x in moved else x
                node.args, node.kwargs = (map_aggregate(x, move) for x in (node.args, node.kwargs))
                if node in constants and not node.all_input_nodes:
                    node.kwargs = {**node.kwargs, "device": device}
                _recompute(node, mode)
                _remove_copy(node, constants)
    graph.lint()
    module.recompile()


def _constants(module: GraphModule) -> set[Node]:
    """Return the nodes on the host that no argument of the graph and no tensor of the device leads to."""
    found = set[Node]()
    for node in module.graph.nodes:
        made = node.op == "get_attr" or (node.op == "call_function" and set(node.all_input_nodes) <= found)
        if made and graphs.tensors(node) and all(t.device == HOST for t in graphs.tensors(node)):
            found.add(node)
    return found


def _place_constant(module: GraphModule, node: Node, device: torch.device, mode: FakeTensorMode) -> None:
    """Let the device make a number; copy another constant to the device, where there is one."""
    t: Tensor = getattr(module, str(node.target))
    if t.ndim == 0:
        kwargs = {"dtype": t.dtype, "device": device, "pin_memory": False}
        full = graphs.insert_before(node, _aten.full.default, ([], t.item()), t, kwargs)
        _recompute(full, mode)
        node.replace_all_uses_with(full)
        module.graph.erase_node(node)
        return
    (node.meta["val"],) = stand_ins([t], device, mode)
    if torch.get_device_module(device).is_available():
        setattr(module, str(node.target), t.to(device))


def _recompute(node: Node, mode: FakeTensorMode) -> None:
    given: Any = map_arg((node.args, node.kwargs), lambda near: near.meta["val"])
    args, kwargs = given
    if graphs.is_wait(node):
        node.meta["val"] = args[0]
        return
    with mode:
        if torch.Tag.inplace_view in getattr(node.target, "tags", ()):
            args = (args[0].detach(), *args[1:])  # whose own shape stays as it is
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def _remove_copy(node: Node, constants: Collection[Node]) -> None:
    """Remove a copy of a constant to the device, where it is already."""
    if node.target is not _aten._to_copy.default or node in constants:
        return
    (near,) = node.all_input_nodes
    made = near in constants or near.target is _aten.full.default
    if made and graphs.tensor_layouts(near) == graphs.tensor_layouts(node):
        node.replace_all_uses_with(near)
        node.graph.erase_node(node)
