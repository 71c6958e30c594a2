"""The cost of a graph equals the measured cost of a replay: memory, FLOPs, bytes and collectives."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.func import grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import shard
from fquant import LOCAL, cost, jit, linear, remat, tree
from fquant.kernels.ops import attention as kernel
from models import decoder
from tests.helpers import ranks
from tests.helpers.arrays import named
from tests.helpers.cases import slow_after
from tests.helpers.live_memory import Peak
from tests.helpers.qlora_step import CFG, loss, start, step, tokens_of

STEPS = {
    "step": (step, lambda: (*start(), tokens_of(0))),
    "remat": (partial(step, comm=replace(LOCAL, wrap=remat)), lambda: (*start(), tokens_of(0))),
    "dropout": (step, lambda: (*start(dropout=0.3), tokens_of(0), torch.arange(2))),
    "grad of a chain": (grad(lambda x: x.sin().exp().tanh().sum()), lambda: (torch.ones(1000),)),
    "views": (lambda x: (x.mT[:5] + 1).reshape(-1)[::2].sum(), lambda: (torch.ones(40, 30),)),
    "argument returned": (lambda x: {"same": x, "view": x[:3], "new": x + 1}, lambda: (torch.ones(40, 30),)),
}
each_step = named("name", STEPS)


class Bytes(TorchDispatchMode):
    """The bytes of arguments and results of all ops but views."""

    def __init__(self):
        super().__init__()
        self.read = self.written = self.ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        size = lambda x: tree.nbytes(list({id(t): t for t in tree.leaves(x) if isinstance(t, torch.Tensor)}.values()))
        where = lambda x: {t.untyped_storage().data_ptr() for t in tree.leaves(x) if isinstance(t, torch.Tensor)}
        self.ops += 1
        if not where(out) <= where((args, kwargs)) or func._schema.is_mutable:
            self.read, self.written = self.read + size((args, kwargs)), self.written + size(out)
        return out


@cache
def captured(name):
    """Return the step, captured and run once so that the next call is a replay, its arguments, and its cost."""
    f, args = STEPS[name]
    replay, args = jit(f), args()
    replay(*args)
    return replay, args, cost(f, *args)


@pytest.mark.parametrize("name", slow_after(2, STEPS))
def test_peak_is_what_a_replay_holds(name):
    replay, args, predicted = captured(name)
    with Peak() as peak:
        result = replay(*args)
    assert predicted.arguments == tree.nbytes(args) and predicted.peak == predicted.arguments + peak.most
    assert sum(held.nbytes for held in predicted.holding) == predicted.peak
    assert [held.nbytes for held in predicted.holding] == sorted(
        (held.nbytes for held in predicted.holding), reverse=True
    )
    del result


def test_the_peak_names_what_holds_it():
    predicted = cost(lambda p: (p["w"] @ p["w"].mT).exp().sum(), {"w": torch.ones(100, 50), "unused": torch.ones(7)})
    assert [(held.by, held.nbytes) for held in predicted.holding] == [
        ("aten.mm.default", 40_000), ("aten.exp.default", 40_000), ("p.w", 20_000), ("p.unused", 28),
    ]  # fmt: skip


def test_donation_and_remat_need_less():
    update = lambda state, grads: tree.map(lambda m, g: 0.9 * m + g, state, grads)
    state, grads = ({"a": torch.ones(100, 100), "b": torch.ones(100, 100)} for _ in range(2))
    assert cost(update, state, grads, fuse=False).peak == 4 * 40_000 + 40_000 + 80_000
    assert cost(update, state, grads, fuse=False, donate=("state",)).peak == 4 * 40_000 + 80_000
    assert cost(update, state, grads).peak == 4 * 40_000 + 80_000
    assert cost(update, state, grads, donate=("state",)).peak == 4 * 40_000

    args = (*start(), tokens_of(0))
    plain, donated = cost(step, *args), cost(step, *args, donate=("adapters", "state"))
    assert donated.peak <= plain.peak and donated.flops == plain.flops
    assert cost(step, *args, comm=replace(LOCAL, wrap=remat)).flops > plain.flops


@each_step
def test_flops_are_torchs_count(name):
    replay, args, predicted = captured(name)
    with FlopCounterMode(display=False) as counter:
        replay(*args)
    assert predicted.flops == counter.get_total_flops()


def test_flops_of_a_packed_product():
    """A weight takes as many FLOPs packed as dense."""
    adapters, _, base = start()
    x = torch.ones(2, 5, CFG.dim)
    for w in (base.layers[0].q, torch.ones(base.layers[0].q.shape)):
        assert cost(linear, x, w).flops == 2 * 10 * CFG.dim**2
        assert cost(grad(lambda x, w: linear(x, w).sum()), x, w).flops == 2 * 10 * CFG.dim**2  # of y nothing is needed


@each_step
def test_bytes_are_those_of_all_ops(name):
    replay, args, predicted = captured(name)
    with Bytes() as seen:
        replay(*args)
    assert (predicted.read, predicted.written, predicted.nodes >= seen.ops) == (seen.read, seen.written, True)


def test_convolution_counts():
    x, w = torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3)
    assert cost(F.conv2d, x, w).flops == 2 * 4 * 3 * 9 * 36


def test_attention_counts():
    """Count attention as torch does on GPUs, and half of it if it is causal."""
    name = "_scaled_dot_product_flash_attention"
    ours, back = (getattr(torch.ops.aten, f"{name}_for_cpu{of}") for of in ("", "_backward"))
    theirs, their_back = (flop_registry[getattr(torch.ops.aten, f"{name}{of}")] for of in ("", "_backward"))
    q, k, mask = torch.ones(2, 6, 7, 4), torch.ones(2, 6, 9, 4), torch.zeros(2, 1, 7, 9)
    y, lse = ours(q, k, k, attn_mask=mask)
    forward = cost(lambda q, k, mask: ours(q, k, k, attn_mask=mask), q, k, mask)
    assert forward.flops == theirs(q, k, k, out_val=y) == 4 * 2 * 6 * 7 * 9 * 4
    backward = cost(lambda q, k, y, lse, m: back(y, q, k, k, y, lse, 0.0, False, attn_mask=m), q, k, y, lse, mask)
    assert backward.flops == their_back(y, q, k, k, out_val=(q, k, k)) == 10 * 2 * 6 * 7 * 9 * 4
    assert cost(lambda q: ours(q, q, q, is_causal=True), q).flops == 4 * 2 * 6 * (7 * 8 // 2) * 4
    causal = cost(lambda q, lse: back(q, q, q, q, q, lse, 0.0, True), q, lse)
    assert causal.flops == 10 * 2 * 6 * (7 * 8 // 2) * 4
    assert cost(lambda q: kernel.attention(q, q, q), q).flops == 4 * 2 * 6 * (7 * 8 // 2) * 4
    slope = cost(lambda q, lse: kernel.attention_backward(q, q, lse, q, q, q), q, q[..., 0])
    assert slope.flops == 10 * 2 * 6 * (7 * 8 // 2) * 4


@pytest.mark.parametrize("name", slow_after(2, STEPS))
def test_shapes_suffice(name):
    _, args, predicted = captured(name)
    meta = tree.map(lambda t: t.to("meta"), args)
    assert cost(STEPS[name][0], *meta) == predicted


# --- on a mesh --------------------------------------------------------------------------------------------------------


def on_a_mesh(world):
    mesh, rules = shard.mesh(fsdp=world), shard.Rules()
    adapters, _, base = start()
    placed, adapters = shard.place((base, adapters), decoder.dims(CFG), rules, mesh, CFG)
    comm, local = shard.comm(mesh, rules), shard.local(placed)
    f = lambda adapters, base, tokens, comm: shard.reduce(
        torch.func.grad_and_value(loss)(adapters, base, tokens, None, comm), mesh, rules
    )
    replay = jit(f)
    traces = []
    for i in range(2):
        tokens = tokens_of(i + dist.get_rank())
        with shard.traffic() as traffic, Peak() as peak:
            got = replay(adapters, local, tokens, comm)
        wanted = f(adapters, local, tokens, comm)
        assert all(map(torch.equal, tree.leaves(got), tree.leaves(wanted)))
        traces.append(traffic)
    predicted = cost(f, adapters, local, tokens, comm)
    with Peak() as peak:
        replay(adapters, local, tokens, comm)
    assert predicted.peak == predicted.arguments + peak.most
    assert len(replay.traced) == 1 and traces[0].calls == traces[1].calls
    assert sum(c.count for c in predicted.collectives) == len(traffic.calls)
    assert sum(c.payload for c in predicted.collectives) == traffic.payload()
    assert sum(c.sent for c in predicted.collectives) == traffic.sent
    assert {c.ranks for c in predicted.collectives} <= {world}
    assert predicted.peak == predicted.arguments + peak.most
    gathered = cost(lambda x: shard.all_gather(x, mesh.get_group("fsdp")).sum(), torch.ones(1000))
    assert gathered.peak == 4000 + world * 4000 + 4  # what is waited for is what was sent for, and is there once
    assert gathered.read == 4000 + world * 4000 and gathered.written == world * 4000 + 4
    return [(c.name, c.count, c.payload) for c in predicted.collectives]


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("world", slow_after(1, [2, 1, 3]))
def test_captured_on_ranks_is_eager_and_costs_what_is_counted(world):
    found = ranks.run(world, on_a_mesh, world, timeout=120)
    assert all(predicted == found[0] for predicted in found)
    if world > 1:
        gathers = {name: count for name, count, _ in found[0]}
        blocks = CFG.num_layers + 1  # but the embedding; again in the backward
        assert gathers["all_gather"] == 2 * blocks + 1


def donated_in_flight():
    def f(a):
        return a + 1, shard.all_gather(a, dist.group.WORLD).sum()

    captured, a, sums = jit(f, donate=("a",)), torch.full((1 << 20,), float(dist.get_rank())), []
    for _ in range(5):
        a, total = captured(a)
        sums.append(total.item() / a.numel())
    return sums


@pytest.mark.xdist_group("ranks")
def test_what_a_collective_still_reads_is_not_written():
    assert ranks.run(2, donated_in_flight) == [[1.0, 3.0, 5.0, 7.0, 9.0]] * 2


def gathered():
    x = torch.ones(1000, 2)
    plain = cost(lambda x: shard.all_gather(x, dist.group.WORLD).sum(), x)
    copied = cost(lambda x: shard.all_gather(x.mT, dist.group.WORLD).sum(), x)
    return plain.peak - plain.arguments, copied.peak - copied.arguments, plain.read, plain.written


@pytest.mark.xdist_group("ranks")
def test_a_gather_takes_its_result_once():
    """The copy that a gather reads, if there is one, is held until the wait."""
    one, two = 8_000, 16_000
    assert ranks.run(2, gathered) == [(two + 4, two + one, one + two, two + 4)] * 2
