"""Record the ops that a function calls on fake tensors as a torch.fx graph.

torch's own tracer (``make_fx``) also serves symbolic shapes, subclasses of tensors and other objects, and takes
milliseconds for an op. A capture has fake tensors of fixed shapes alone. So one dispatch mode makes a node for each op,
and the fake mode describes its results. The fake values of nodes are aliases, because a later op in place may change
the shape of a tensor.

A tensor that ``torch.tensor`` makes of Python values is a constant of the graph. The value of a number that was made so
may be asked for, also after ops on such numbers.
"""

import operator
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_impls import fast_detach
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node
from torch.fx import traceback as fx_traceback
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ...device import HOST, META
from ..errors import place

_aten = torch.ops.aten
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
_KEPT = (_aten.size.default, _aten.stride.default, _aten.storage_offset.default)  # composite ops that stay whole
_ZEROS = _aten._efficientzerotensor.default
_CONSTANT = "_tensor_constant"
_recorders: list["Recorder"] = []


def is_traced() -> bool:
    """Return True inside a capture, by this module or by torch's tracer."""
    return bool(_recorders) or get_proxy_mode() is not None


def recorder() -> "Recorder | None":
    """Return what records the present capture; None outside of one, and inside torch's tracer."""
    return _recorders[-1] if _recorders and get_proxy_mode() is None else None


def record(f: Callable[..., Sequence[Tensor]], fakes: Sequence[Tensor], mode: FakeTensorMode) -> GraphModule:
    """Return the graph of ``f(*fakes)``, whose inputs are the fake tensors of ``mode`` in order."""
    graph, root = Graph(), torch.nn.Module()
    recorder = Recorder(graph, root, mode, META if any(t.device == META for t in fakes) else HOST)
    for i, t in enumerate(fakes):
        recorder.name(t, graph.placeholder(f"arg{i}_1"))
    _recorders.append(recorder)
    try:
        with mode, _Called(), recorder:
            results = f(*fakes)
        graph.output([recorder.node_of(t) for t in results])
    finally:
        _recorders.pop()
    return _LazyGraphModule(root, graph)  # whose code is written when it first runs, after passes have changed it


def draws(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True if a call of ``op`` draws from a generator; one with a probability of dropout does unless it is 0."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = {arg.name: arg.default_value for arg in op._schema.arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    return bool(given.get("dropout_p", given.get("dropout", 1)))


class _Called(TorchFunctionMode):
    """Leaves a frame with the torch function that is called, for errors (errors.py)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Makes a node of ``graph`` for each op; constants become attributes of ``root``."""

    def __init__(self, graph: Graph, root: torch.nn.Module, mode: FakeTensorMode, device: torch.device) -> None:
        super().__init__()
        self.graph, self.root, self.mode = graph, root, mode
        self._device = device
        self.drawn = list[OpOverload]()  # ops that draw random numbers, in order
        self._graphs = [graph]  # the whole graph, and those within it that are recorded aside
        # Held weakly, because torch copies a tensor that it would give to a caller if there is another owner.
        self._nodes: MutableMapping[Tensor, Node] = WeakTensorKeyDictionary()
        self._values: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()  # of numbers that are known

    def name(self, t: Tensor, node: Node) -> None:
        """Let ``node`` stand for ``t`` from now on, whose value is not known."""
        self._values.pop(t, None)
        node.meta["val"] = _alias(t)
        self._nodes[t] = node

    def known(self, t: Tensor) -> Node | None:
        """Return the node of a tensor; None if the trace has none."""
        return self._nodes.get(t)

    def node_of(self, t: Tensor) -> Node:
        """Return the node of a tensor; one that no op of the trace made is a constant."""
        if (found := self._nodes.get(t)) is not None:
            if found.graph not in self._graphs:
                fault = "a tensor that a repeated function made in an earlier call is used"
                raise RuntimeError(f"jit: {fault} ({found.name}); return it, and pass it to the next call")
            return found
        target = f"{_CONSTANT}{sum(name.startswith(_CONSTANT) for name in self.root.__dict__)}"
        setattr(self.root, target, t)
        node = self._nodes[t] = self._graphs[0].get_attr(target)
        node.meta["val"] = t if isinstance(t, FakeTensor) else self.mode.from_tensor(t)
        return node

    def stand_for(self, node: Node) -> Tensor:
        """Return a new tensor for which ``node`` stands."""
        t = _alias(node.meta["val"])
        self.name(t, node)
        return t

    @contextmanager
    def aside(self) -> Iterator[Graph]:
        """Record in a graph of its own, which is yielded; constants stay those of the whole graph."""
        self.graph = Graph()
        self._graphs.append(self.graph)
        try:
            yield self.graph
        finally:
            self._graphs.pop()
            self.graph = self._graphs[-1]

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an op, and make its node."""
        kwargs = kwargs or {}
        given = list(tensors((*args, *kwargs.values())))
        if any(type(t) not in _PLAIN for t in given):
            return NotImplemented
        if any(map(_is_plain_zero, given)):
            with self:
                args, kwargs = _map((args, kwargs), lambda t: self._zeros_like(t) if _is_plain_zero(t) else t)
                return op(*args, **kwargs)
        if op is _ZEROS:  # whose caller takes the device of a mapped fake tensor for META
            kwargs = kwargs | {"device": self._device}
        if op is torch.ops.prim.device.default:  # the device of a tensor, which is no op of a graph
            return op(*args, **kwargs)
        if _is_composite(op, given[0].device.type if given else None):
            with self:
                return op.decompose(*args, **kwargs)
        if op is _aten.is_nonzero.default:
            with self:
                return (args[0] != 0).item()
        known = all(t in self._values for t in given)
        if known and given and torch.Tag.data_dependent_output in op.tags:
            return self._on_values(op, args, kwargs)
        op = _aten.lift_fresh_copy.default if op is _aten.lift_fresh.default else op
        node_args, node_kwargs = _map((args, kwargs), self.node_of)
        name = self.graph._target_to_str(op.overloadpacket.__name__)
        results = op(*args, **kwargs)
        node = self.graph.create_node("call_function", op, node_args, node_kwargs, name)
        self.drawn += [op] if draws(op, args, kwargs) else []
        if fx_traceback.has_preserved_node_meta():
            node.meta["stack_trace"], node.meta["backward"] = place()
        values = list[tuple[Tensor, Tensor]]()
        if op is _aten.lift_fresh_copy.default and results.numel() == 1:
            with unset_fake_temporarily():
                values = [(results, args[0].clone())]
        elif known and given and torch.Tag.nondeterministic_seeded not in op.tags:
            values = self._computed(results, op, args, kwargs)
        self._name_results(results, node)
        for t, value in values:
            self._values[t] = value
        return results

    def _zeros_like(self, t: Tensor) -> Tensor:
        """Return what stands for such a tensor in the trace."""
        return _ZEROS(t.shape, dtype=t.dtype, device=self._device)

    def _name_results(self, results: Any, node: Node) -> None:
        if isinstance(results, Tensor):
            self.name(results, node)
        elif isinstance(results, list | tuple):
            node.meta["val"] = type(results)(_alias(t) if isinstance(t, Tensor) else t for t in results)
            for i, t in enumerate(results):
                if isinstance(t, Tensor):
                    self.name(t, self.graph.call_function(operator.getitem, (node, i)))

    def _on_values(self, op: OpOverload, args: Any, kwargs: Any) -> Any:
        args, kwargs = _map((args, kwargs), self._values.__getitem__)
        with unset_fake_temporarily():
            return op(*args, **kwargs)

    def _computed(self, results: Any, op: OpOverload, args: Any, kwargs: Any) -> list[tuple[Tensor, Tensor]]:
        """Return the values of the results of an op of known numbers, if these are numbers."""
        given = list(tensors([results]))
        if not all(t.numel() == 1 for t in given):
            return []
        return [*zip(given, tensors([self._on_values(op, args, kwargs)]), strict=True)]


def _alias(t: Tensor) -> Tensor:
    return fast_detach(t.fake_mode, t) if isinstance(t, FakeTensor) else t.detach()


def _is_plain_zero(t: Tensor) -> bool:
    """Return True for a tensor of zeros that vmap made without telling a mode: a tangent of what does not move."""
    return type(t) is Tensor and t._is_zerotensor()


@cache
def _is_composite(op: OpOverload, device: str | None) -> bool:
    """Return True for an op that autograd would have replaced with others, which an inference mode does not."""
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd  # type: ignore[attr-defined]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if op in _KEPT or not (implicit in op.py_kernels or has_kernel(op.name(), implicit)):
        return False
    key = None if device is None else torch._C._dispatch_key_for_device(device)
    return key is None or not has_kernel(op.name(), key)


def tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in ``values`` and the lists and tuples in it."""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from tensors(x)


def _map(x: Any, f: Callable[[Tensor], Any]) -> Any:
    if isinstance(x, Tensor):
        return f(x)
    if isinstance(x, list | tuple):
        return type(x)(_map(each, f) for each in x)
    return {name: _map(each, f) for name, each in x.items()} if isinstance(x, dict) else x
