"""Adapters and the weights that they adapt: initialisation, attaching, stacking.

An adapter of a stack of weights [*stack out in], such as the experts of a layer, has a [*stack rank in] and
b [*stack out rank]. Either may lack the dims of the stack: all members then share it. ``grouped_linear`` multiplies
with the attached stack, or ``vmap`` of ``linear``, if nothing is shared.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .. import random, tree
from ..adapted.dora import row_norms, unwound
from ..adapted.merge_aware import check
from ..adapted.nodes import AdaptedSlots, Ia3, LoraSlots, Scaled
from ..communication import AfterLoad, Loadable, LookedUpRows
from ..device import HOST
from ..grouped_products import full_shape
from ..kernels.dispatch import has_no_values
from ..lazy import Lazy
from ..packed import Packed
from ..packed_linear import Adapted, Lora
from ..quantized_training.recipes import Trainable
from ..tree import expect

Adapters = dict[str, Lora]
_is_adapters = lambda x: isinstance(x, dict) and all(isinstance(w, Lora | Ia3 | LoraSlots) for w in x.values())


def init(
    base: Any, targets: str, rank: int, alpha: float = 16.0, key: int | Tensor = 0, *, init: str = "kaiming",
    dora: bool = False, rank_stabilised: bool = False, dropout: float = 0.0, dtype: torch.dtype = torch.float32,
    shared: bool = False,
) -> Adapters:  # fmt: skip
    """Create an adapter with a zero update for every weight of ``base`` whose whole path matches ``targets``.

    ``a`` is "kaiming" (uniform in ±1/sqrt(in)) or "gaussian" (standard deviation 1/rank), and ``b`` is zero. Values
    depend on ``key`` and the path alone: they are drawn on the key's device and moved to the weight's. ``base`` may
    hold meta tensors, which have no device, or Lazy leaves, except for ``dora``. A stack of weights [stack out in]
    gets an adapter for each, or one for all if ``shared``. Raises ValueError if nothing matches, a match is not a
    weight [out in] or a stack, and for DoRA of a stack.
    """
    expect(init in ("kaiming", "gaussian"), f"init is {init!r}; wanted 'kaiming' or 'gaussian'")
    expect(rank >= 1, f"rank is {rank}; wanted at least 1")
    expect(0 <= dropout < 1, f"dropout is {dropout}; wanted 0 <= dropout < 1")
    key = random.key(key)
    adapters: Adapters = {}
    for path, w in matching(base, targets):
        with tree.at(path):
            *many, out, width = _shape(w, stacked=True)
            expect(not (many and dora), "got DoRA for a stack of weights, which is not implemented; use LoRA")
            many = [] if shared else many
            own, shape = random.fold(key, path), (*many, rank, width)
            a = random.kaiming_uniform(own, shape, width) if init == "kaiming" else random.normal(own, shape) / rank
            if dora and (isinstance(w, Lazy) or any(map(has_no_values, tree.leaves(w)))):
                raise ValueError("DoRA starts from the norms of rows, and this weight has not been read; read it first")
            magnitude = row_norms(unwound(w)[0]).to(dtype) if dora else None
            a = a.to(_device(w, a.device), dtype)
            adapters[path] = Lora(a, a.new_zeros(*many, out, rank), magnitude, alpha, rank_stabilised, dropout)
    return adapters


def matching(base: Any, targets: str) -> list[tuple[str, Any]]:
    """Return the path and the weight of every leaf whose whole path matches ``targets``; ValueError if none does."""
    weights = tree.items(base, is_leaf=lambda x: isinstance(x, Packed | Adapted | Loadable))
    found = [(path, w) for path, w in weights if re.fullmatch(targets, path)]
    known = ", ".join(sorted({re.sub(r"\d+", "*", path) for path, _ in weights}))
    expect(found, f"targets {targets!r} match no weight; the weights are {known}")
    return found


def attach(base: Any, adapters: Any, key: Tensor | None = None, merge_aware: bool = False) -> Any:
    """Attach each adapter to its weight of ``base``; a subtree that is not loaded keeps its adapters for ``load``.

    ``key`` i64[] or i64[batch] enables dropout; with one key an example, masks do not depend on the rank that computes.
    ``merge_aware`` computes with the weights that ``merge_packed`` will make (see :mod:`fquant.merge_aware`); do not
    cast such adapters. Raises TypeError for adapters that are not a dict of Lora or of Ia3. Raises ValueError for one
    whose path or shape does not fit. Merge-aware, it does so for dropout, DoRA, IA3 and learned vectors.
    """
    if not _is_adapters(adapters):
        fix = "; the arguments are swapped, call attach(base, adapters)" if base and _is_adapters(base) else ""
        raise TypeError(f"attach got adapters of type {type(adapters).__name__}; wanted a dict of path to Lora{fix}")
    keys = {} if key is None else {path: random.fold(key, path) for path, w in adapters.items() if _drops(w)}
    return _Attach(merge_aware=merge_aware)(base, (adapters, keys))


@dataclass(frozen=True)
class _Attach:
    """``attach`` below ``prefix``, a path and a dot; a value, because it is a static field of an AfterLoad."""

    prefix: str = field(default="", compare=False)  # for errors; layers that differ in it alone are traced once
    merge_aware: bool = False

    def __call__(self, x: Any, waiting: tuple[Adapters, dict[str, Tensor]]) -> Any:
        adapters, keys = waiting
        if isinstance(x, Loadable):
            return AfterLoad(x, waiting, self) if adapters else x
        if "" in adapters:
            with tree.at(self.prefix[:-1]):
                if isinstance(adapters[""], Ia3):
                    return _scaled(x, adapters[""], self.merge_aware)
                if isinstance(adapters[""], LoraSlots):
                    return _of_slots(x, adapters[""], keys.get(""), self.merge_aware)
                lora, (*many, out, width) = adapters[""], _shape(x, stacked=True)
                a, b = tuple(lora.a.shape), tuple(lora.b.shape)
                fits = (b[-2], a[-1]) == (out, width) and a[-2] == b[-1]
                if not fits or (many and not all(list(lead) in ([], many) for lead in (a[:-2], b[:-2]))):
                    lead = "".join(f"{n} " for n in many)
                    fault = f"an adapter a {a}, b {b} does not fit a weight {(*many, out, width)}"
                    raise ValueError(f"{fault}; wanted a [{lead}rank {width}], b [{lead}{out} rank]")
                if self.merge_aware:
                    check(x.table if isinstance(x, LookedUpRows) else x, lora, dropout="" in keys)
                return Adapted(x, lora, keys.get(""), self.merge_aware)
        left = set(adapters)

        def visit(name: str, child: Any) -> Any:
            inside = {path for path in adapters if path == name or path.startswith(name + ".")}
            left.difference_update(inside)
            within = lambda items: {path[len(name) + 1 :]: v for path, v in items.items() if path in inside}
            return (
                replace(self, prefix=f"{self.prefix}{name}.")(child, (within(adapters), within(keys)))
                if inside
                else child
            )

        out = tree.map_children(visit, x)
        if left:
            names = ", ".join(name for name, _ in tree.children(x) or []) or "a leaf"
            missing = repr(self.prefix + min(left))
            raise ValueError(f"adapter {missing} has no weight to be attached to; there is {names}")
        return out


def _drops(w: Any) -> bool:
    """Return True for an adapter that has dropout."""
    return w.dropout is not None if isinstance(w, LoraSlots) else getattr(w, "dropout", 0) > 0


def _of_slots(x: Any, slots: LoraSlots, key: Tensor | None, merge_aware: bool) -> AdaptedSlots:
    expect(not merge_aware, "merge-aware got slots, which is not implemented; attach them without merge_aware")
    out, width = _shape(x)
    for lora in slots.stacks:
        a, b = tuple(lora.a.shape), tuple(lora.b.shape)
        fits = len(a) == len(b) == 3 and (b[1], a[2]) == (out, width) and a[:2] == (b[0], b[2])
        wanted = f"wanted a [slots rank {width}], b [slots {out} rank]"
        expect(fits, f"slots of a {a}, b {b} do not fit a weight {(out, width)}; {wanted}")
    return AdaptedSlots(x, slots, key)


def _scaled(x: Any, ia3: Ia3, merge_aware: bool) -> Scaled:
    expect(not merge_aware, "merge-aware got IA3, which is not implemented; attach it without merge_aware")
    out, width = _shape(x)
    for name, factors, size in (("inputs", ia3.inputs, width), ("outputs", ia3.outputs, out)):
        got = None if factors is None else tuple(factors.shape)
        expect(got in (None, (size,)), f"{name} {got} do not fit a weight {(out, width)}; wanted {(size,)}")
    return Scaled(x, ia3)


def init_ia3(base: Any, outputs: str, inputs: str = "", dtype: torch.dtype = torch.float32) -> dict[str, Ia3]:
    """Create (IA)³ factors of one for weights whose whole path matches ``outputs`` or ``inputs``.

    In the paper, outputs are those of keys and values, and inputs those of ``down``. A path may match both. Raises
    ValueError if a pattern that is not empty matches nothing, or a match is not a weight [out in].
    """
    found: dict[str, Ia3] = {}
    for name, targets, dim in (("outputs", outputs, 0), ("inputs", inputs, 1)):
        for path, w in matching(base, targets) if targets else []:
            with tree.at(path):
                size = _shape(w)[dim]
                ones = torch.ones(size, dtype=dtype, device=_device(w, HOST))
                found[path] = replace(found.get(path, Ia3()), **{name: ones})
    return found


def _device(w: Any, otherwise: torch.device) -> torch.device:
    """Return the device of a weight, or of what a Lazy will read; ``otherwise`` that of a meta tensor."""
    if isinstance(w, Lazy):
        return w.device
    return next((t.device for t in tree.leaves(w) if isinstance(t, Tensor) and not t.is_meta), otherwise)


def stack(many: list[Adapters]) -> Adapters:
    """Stack adapters of one structure along a new dim 0, for vmap."""
    return tree.map(lambda *leaves: torch.stack(leaves), *many)


def _shape(w: Any, stacked: bool = False) -> tuple[int, ...]:
    match w:
        case Lazy(like=like):
            return _shape(like, stacked)
        case Adapted(base=base) | AdaptedSlots(base=base) | Scaled(base=base):
            return _shape(base, stacked)
        case Trainable(weight=weight):
            return _shape(weight, stacked)
        case LookedUpRows(table=table, size=size):
            return size, _shape(table)[1]
        case Packed():
            shape = full_shape(w)
        case Tensor():
            shape = tuple(w.shape)
        case _:
            raise ValueError(f"a {type(w).__name__} is no weight; wanted a tensor or Packed [out in]")
    fits = len(shape) == 2 or (stacked and len(shape) > 2)
    expect(fits, f"a weight of shape {shape} cannot be adapted; wanted [out in]")
    return shape
