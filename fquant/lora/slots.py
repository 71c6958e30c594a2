r"""Many adapters over one base in one step: slots of mixed rank, each with hyperparameters and an end of its own.

    room = {4: 2, 16: 3}                                                          # slots of each rank
    like = [(lora.init(base, targets, rank), n) for rank, n in room.items()]
    bank = slots.init(like, optimizer, {"lr": 1e-3})                              # list[Slots], all free
    bank = slots.fill(bank, slots.free(bank, own), own, optimizer, {"lr": 3e-4}, key=1)
    bank, losses = slots.step(bank, loss, optimizer, base, tokens)                # tokens [slots rows t]

    def loss(adapters, key, base, tokens):                                        # f[slots]
        params = lora.attach(base, adapters, key)
        return decoder.token_losses(params, tokens[..., :-1], tokens[..., 1:], cfg).mean((1, 2))

    def optimizer(own):                                                           # own: the numbers of one slot
        return optim.adamw(optim.cosine(own["lr"], total=1000))

A bank is a list of Slots, and each of these has room for adapters of one structure, stacked. Dim 0 of every tensor is
the slot: of adapters, of batches and of activations. The products with the base have the rows of all slots, so a packed
weight is decoded once. Low-rank products are batched by rank, without padding (``fquant.adapted.slots``).

*Bits.* A slot shares nothing with others but the rows of products. So it has the bits of its run alone where those of a
row do not depend on the rows beside it, or on layouts. On the host both run inside ``fquant.batch_invariant()``.

*Ends.* A slot that is stopped keeps its bits: adapter, moments and count. Its rows are still computed. ``fill`` writes
another adapter over it. Shapes stay, so a captured step is not traced again.

*On a mesh* ``shard.share(bank, mesh, rules)`` gives each rank a part of the slots. Their gradients need no reduction.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from .. import optim, random, tree
from ..adapted.nodes import Lora, LoraSlots
from ..optim import Optimizer
from ..tree import expect, node

Adapters = dict[str, Lora]
Own = dict[str, Tensor]  # hyperparameters of one slot
Optimizers = Callable[[Own], Optimizer[Any]]


@node
class Slots:
    """Adapters of one structure, and what each trains by; dim 0 of every tensor is the slot."""

    adapters: Adapters  # a f[slots rank in], b f[slots out rank]; alpha and dropout are the fields below
    state: Any  # of the optimiser, for each slot
    own: Own  # [slots], the hyperparameters that the optimiser is made from
    alpha: Tensor  # f64[slots]
    key: Tensor  # i64[slots], of dropout
    count: Tensor  # i64[slots], steps done
    active: Tensor  # bool[slots]
    dropout: Tensor | None = None  # f64[slots]; absent if no slot of the bank has any


Bank = list[Slots]


class Slot(NamedTuple):
    """The place of an adapter: the number of its Slots in the bank, and its number there."""

    stack: int
    index: int


def init(
    like: Sequence[tuple[Adapters, int]], optimizer: Optimizers, own: Mapping[str, float | Tensor],
    dropout: bool = False,
) -> Bank:  # fmt: skip
    """Create a bank with room for n adapters of the structure of each of ``like``; all slots are free, and zero.

    ``optimizer(own)`` is the optimiser of a slot; the values of ``own`` say the dtypes: a float is f32[], an int i64[].
    ``dropout`` is for adapters with dropout. Raises ValueError for adapters of other paths, DoRA, and no slots.
    """
    expect(like, "like: got no adapters, wanted a pair of adapters and number of slots for each structure")
    bank, names = [], list(like[0][0])
    for i, (adapters, n) in enumerate(like):
        expect(n >= 1, f"like.{i}: got {n} slots, wanted at least 1")
        expect(list(adapters) == names, f"like.{i}: adapters of other paths than those of like.0; wanted the same")
        one: Adapters = tree.map(torch.zeros_like, {path: _bare(path, lora) for path, lora in adapters.items()})
        numbers = {name: torch.zeros_like(_number(x, one)) for name, x in own.items()}
        many = tree.map(lambda t, n=n: t.new_zeros(n, *t.shape), (one, optimizer(numbers).init(one), numbers))
        zeros = lambda dtype, n=n, one=one: torch.zeros(n, dtype=dtype, device=tree.leaves(one)[0].device)
        rates, (stacked, state, numbers), long = zeros(torch.float64) if dropout else None, many, torch.int64
        fixed = zeros(torch.float64), zeros(long), zeros(long), zeros(torch.bool)
        bank.append(Slots(stacked, state, numbers, *fixed, rates))
    return bank


def free(bank: Bank, adapters: Adapters) -> Slot:
    """Return the first free slot for ``adapters``, which waits for the device; ValueError if there is none."""
    kind = _kind(adapters)
    stacks = [i for i, slots in enumerate(bank) if _kind(tree.map(lambda t: t[0], slots.adapters)) == kind]
    for i in stacks:
        for index, is_active in enumerate(bank[i].active.tolist()):
            if not is_active:
                return Slot(i, index)
    rank = next(iter(adapters.values())).a.shape[-2] if adapters else 0
    raise ValueError(f"no slot is free for adapters of rank {rank} among {len(stacks)} stacks like them; stop one")


def fill(
    bank: Bank, slot: Slot, adapters: Adapters, optimizer: Optimizers, own: Mapping[str, float | Tensor],
    key: int | Tensor = 0,
) -> Bank:  # fmt: skip
    """Write ``adapters`` into ``slot``, with moments and a count of zero; other slots keep their bits.

    Alpha and dropout are those of the adapters, one for all paths. Raises ValueError for adapters that do not fit.
    """
    slots = bank[slot.stack]
    wanted, got = _kind(tree.map(lambda t: t[0], slots.adapters)), _kind(adapters)
    expect(
        got == wanted, f"slot {tuple(slot)} is for adapters of other paths or shapes; use slots.free(bank, adapters)"
    )
    expect(set(own) == set(slots.own), f"own: got {sorted(own)}, wanted {sorted(slots.own)}, as in init")
    alphas, rates = {lora.alpha for lora in adapters.values()}, {lora.dropout for lora in adapters.values()}
    expect(len(alphas) == 1, f"alpha: got {sorted(alphas)} in one slot, wanted one; scale b of the others instead")
    expect(len(rates) == 1, f"dropout: got {sorted(rates)} in one slot, wanted one for all paths")
    fault = f"dropout: got {max(rates)} in a bank without; use slots.init(..., dropout=True)"
    expect(slots.dropout is not None or max(rates) == 0, fault)
    numbers = {name: _number(own[name], adapters) for name in slots.own}
    one = {path: _bare(path, lora) for path, lora in adapters.items()}
    number = lambda x, like: torch.full((), x, dtype=like.dtype, device=like.device)
    new = Slots(
        one, optimizer(numbers).init(one), numbers, number(alphas.pop(), slots.alpha),
        random.key(key).to(slots.key.device), number(0, slots.count), number(True, slots.active),
        None if slots.dropout is None else number(rates.pop(), slots.dropout),
    )  # fmt: skip
    is_here = torch.arange(len(slots.key), device=slots.key.device) == slot.index
    write = lambda old, t: torch.where(is_here.reshape(-1, *[1] * t.ndim), t, old)
    return [*bank[: slot.stack], tree.map(write, slots, new), *bank[slot.stack + 1 :]]


def stop(bank: Bank, slot: Slot) -> Bank:
    """Stop a slot: later steps leave its adapter, moments and count as they are, and ``free`` finds it."""
    slots = bank[slot.stack]
    is_here = torch.arange(len(slots.key), device=slots.key.device) == slot.index
    return [*bank[: slot.stack], replace(slots, active=slots.active & ~is_here), *bank[slot.stack + 1 :]]


def take(bank: Bank, slot: Slot) -> Adapters:
    """Return the adapters of a slot with their alpha and dropout, such as to save them; waits for the device."""
    slots = bank[slot.stack]
    alpha = float(slots.alpha[slot.index])
    rate = 0.0 if slots.dropout is None else float(slots.dropout[slot.index])
    one: Adapters = tree.map(lambda t: t[slot.index].clone(), slots.adapters)
    return {path: replace(lora, alpha=alpha, dropout=rate) for path, lora in one.items()}


def joined(bank: Bank, adapters: Sequence[Adapters] | None = None) -> dict[str, LoraSlots]:
    """Return what ``lora.attach`` takes: the adapters of all slots by path, or ``adapters`` in their place."""
    many = [slots.adapters for slots in bank] if adapters is None else adapters
    rates = [slots.dropout for slots in bank if slots.dropout is not None]
    alpha, dropout = torch.cat([slots.alpha for slots in bank]), torch.cat(rates) if rates else None
    return {path: LoraSlots([each[path] for each in many], alpha, dropout) for path in many[0]}


def step(
    bank: Bank, loss: Callable[..., Tensor], optimizer: Optimizers, *args: Any, dtype: torch.dtype | None = None
) -> tuple[Bank, Tensor]:
    """Take one step of every active slot; return the bank, and the losses f[slots] before the step.

    ``loss(adapters, key, *args)`` returns f[slots] of the :func:`joined` adapters, each from its own adapter alone.
    ``key`` i64[slots] is for ``lora.attach``; it is another in each step. ``dtype`` is that of products with adapters.
    The loss of a free slot has no meaning. Raises ValueError for losses of another shape.
    """
    n, key = sum(len(slots.key) for slots in bank), torch.cat([random.fold(s.key, s.count) for s in bank])

    def total(adapters: list[Adapters]) -> tuple[Tensor, Tensor]:
        used = adapters if dtype is None else tree.map(lambda t: t.to(dtype), adapters)
        losses = loss(joined(bank, used), key, *args)
        expect(losses.shape == (n,), f"loss: got shape {tuple(losses.shape)}, wanted {(n,)}, one for each slot")
        return losses.sum(), losses

    grads, losses = grad(total, has_aux=True)([slots.adapters for slots in bank])
    return [_updated(slots, each, optimizer) for slots, each in zip(bank, grads, strict=True)], losses


def _updated(slots: Slots, grads: Adapters, optimizer: Optimizers) -> Slots:
    """Return slots after an update of those that are active."""

    def one(own: Own, active: Tensor, *rest: Any) -> Any:
        old = rest[2], rest[1]
        return tree.map(lambda t, new: torch.where(active, new, t), old, optim.step(optimizer(own), *rest))

    if not len(slots.key):  # on a mesh of more ranks than slots
        return slots
    adapters, state = vmap(one)(slots.own, slots.active, grads, slots.state, slots.adapters)
    return replace(slots, adapters=adapters, state=state, count=slots.count + slots.active)


def _bare(path: str, lora: Lora) -> Lora:
    expect(lora.magnitude is None, f"{path}: got DoRA in a slot, which is not implemented; use LoRA")
    return replace(lora, alpha=1.0, dropout=0.0)


def _number(x: float | Tensor, beside: Any) -> Tensor:
    if isinstance(x, Tensor):
        return x
    dtype = torch.int64 if isinstance(x, int) else torch.float32
    return torch.full((), x, dtype=dtype, device=tree.leaves(beside)[0].device)


def _kind(adapters: Adapters) -> dict[str, tuple[Any, ...]]:
    """Return what adapters of one stack have in common."""
    return {
        path: (*((t.shape, t.dtype) for t in tree.leaves(lora)), lora.rank_stabilised)
        for path, lora in adapters.items()
    }
