"""Vocabulary-parallel losses and their derivatives against those of the whole head, and their collectives."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.func import grad, grad_and_value, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import shard
from fquant import FP4, INT8, NF4, Packed, cost, dequantize, jit, lora, quantize, random, remat, tree
from fquant.communication import LOCAL, identity
from models import decoder, fused_cross_entropy
from models.blocks import IGNORE
from models.config import Config
from shard import Rules
from shard.passes.deduplicate import deduplicate_gathers
from shard.passes.prefetch import prefetch_gathers
from tests.helpers import ranks
from tests.helpers.sharding.meshes import dims_of

pytestmark = pytest.mark.xdist_group("ranks")

# --- a head alone -----------------------------------------------------------------------------------------------------

VOCAB, DIM, MOST = 2003, 48, 12


def table(dtype):
    """Draw rows of which some are much larger, so that some predictions are almost certain."""
    drawn = random.normal(random.key(5), (VOCAB, DIM))
    return (drawn * torch.where(torch.arange(VOCAB) % 7 == 0, 2.0, 0.3)[:, None]).to(dtype)


HEADS = {
    "f64": (torch.float64, identity),
    "f32": (torch.float32, identity),
    "bf16": (torch.bfloat16, identity),
    "f16": (torch.float16, identity),
    "nf4": (torch.float32, partial(quantize, format=NF4)),
    "fp4, bf16": (torch.bfloat16, partial(quantize, format=FP4)),
    "int8": (torch.float32, partial(quantize, format=INT8)),
    "nf4, f64": (torch.float64, lambda t: quantize(t.float(), NF4)),
}
TOKENS = ((2, 5), (0, 5), (3, 4), (1, 1), (2, 6))  # of each rank


def tokens_of(rank, dtype, weight, shape):
    """Draw x [b t d] and targets [b t] of a rank: some ignored, some almost certain, some of these wrong."""
    draw = torch.Generator().manual_seed(rank)
    targets = torch.randint(0, VOCAB, shape, generator=draw)
    x = 0.3 * torch.randn((*shape, DIM), generator=draw)
    flat, chosen = x.view(-1, DIM), targets.view(-1)
    for i in range(0, len(flat), 3):
        chosen[i] = chosen[i] // 7 * 7
        flat[i] = weight[chosen[i]] * (0.06 + 0.002 * i)
        chosen[i] = chosen[i] if i % 2 else VOCAB - 1 - chosen[i]
    chosen[1::4] = IGNORE
    return x.to(dtype), targets


def setting(name, behind, tokens=MOST, shapes=TOKENS):
    """Return this rank's part of a block, the block, its path, a comm, and the tokens of this rank."""
    dtype, pack = HEADS[name]
    weight, (n, rank) = table(dtype), (dist.get_world_size(), dist.get_rank())
    block = {"norm": torch.ones(DIM, dtype=dtype), "head": pack(weight)} if behind else pack(weight)
    mesh, rules = shard.mesh(fsdp=n), Rules()
    placed = shard.local(shard.place(block, dims_of(block), rules, mesh))
    x, targets = tokens_of(rank, dtype, weight.float(), shapes[rank % len(shapes)])
    return placed, block, "head" if behind else "", shard.comm(mesh, rules, tokens=tokens), x, targets


def loss(x, block, path, targets, comm, count=1.0):
    return fused_cross_entropy.cross_entropy(x, tree.get(comm.part(block, x, path), path), targets, count, chunk=4)


def exactly(x, weight, targets):
    """Compute loss and gradient of each token in float64 from logits rounded to x's dtype."""
    dense = dequantize(weight) if isinstance(weight, Packed) else weight
    logits, at = (x.flatten(0, -2) @ dense.to(x.dtype).mT).double(), targets.flatten()
    others = logits.softmax(-1) * (torch.arange(VOCAB) != at[:, None])
    slopes = torch.where(torch.arange(VOCAB) == at[:, None], -others.sum(-1, keepdim=True), others)
    count = at != IGNORE
    values = F.cross_entropy(logits, at, reduction="none", ignore_index=IGNORE)
    return values, torch.where(count[:, None], slopes, 0) @ dense.to(x.dtype).double()


def of_tokens(name, behind):
    """Check the precision against one process on every rank; return the collectives."""
    placed, block, path, comm, x, targets = setting(name, behind)
    with shard.traffic() as traffic:
        dx, value = grad_and_value(loss)(x, placed, path, targets, comm)
    want_dx, want = grad_and_value(loss)(x, block, path, targets, LOCAL)
    exact, slopes = exactly(x, tree.get(block, path), targets)
    u, wide = torch.finfo(x.dtype).eps / 2, x.dtype in (torch.float32, torch.float64)
    size = slopes.norm(dim=-1).clamp(min=20 if x.dtype is torch.float64 else 0)  # its slope is softmax - 1
    off = [(t.double().flatten(0, -2) - slopes).norm(dim=-1) / size.clamp(min=1e-300) for t in (dx, want_dx)]
    assert bool((off[0] <= (8 if wide else 2) * off[1] + (16 if wide else 1) * u).all()), off
    assert (dx.shape, dx.dtype, value.dtype) == (x.shape, x.dtype, want.dtype)
    assert torch.equal(dx[targets == IGNORE], torch.zeros_like(dx[targets == IGNORE]))
    close = partial(torch.testing.assert_close, rtol=16 * u if wide else u, atol=0)
    close(value, want)
    close(value.double(), exact.sum())
    with shard.traffic() as values:
        close(loss(x, placed, path, targets, comm), value)
    assert values.calls == [*traffic.calls[:-2], traffic.calls[-1]]  # all but the gradient
    return traffic.calls, placed.layout.size


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "n", "behind"),
    [*((name, n, n == 3) for name in HEADS for n in (2, 3)), ("f32", 5, False), ("bf16", 5, True)],
)
def test_losses_are_those_of_the_whole_head(name, n, behind):
    x = torch.empty(0, DIM, dtype=HEADS[name][0])
    m, wide = n * MOST, max(4, x.itemsize)
    for calls, size in ranks.run(n, of_tokens, name, behind):
        (what, lacking, _), *rest = calls
        assert what == "reduce_scatter" and lacking < size / 2
        assert rest == [
            ("all_gather", m * DIM * x.itemsize, n),
            ("all_gather", m * 8, n),
            ("all_gather", n * m * wide, n),
            ("reduce_scatter", m * DIM * wide, n),
            ("reduce_scatter", m * wide, n),
        ]
        assert sum(payload for _, payload, _ in calls) < size


# --- transforms -------------------------------------------------------------------------------------------------------

remat2 = partial(remat, order=2)


def squares(f):
    """Return the sum of squares of the gradient, to differentiate again."""
    return lambda x, *rest: grad(f)(x, *rest).square().sum()


def over_rows(f):
    """Map ``f`` over x and its targets; share all else."""
    return vmap(f, (0, None, None, 0, None))


def traced(x, block, path, targets, comm):
    f = lambda x, block, targets: grad(loss)(x, block, path, targets, comm)
    return make_fx(f, tracing_mode="fake")(x, block, targets)(x, block, targets)


TRANSFORMS = {  # name: (the head is gathered for it, f(x, block, path, targets, comm))
    "value": (False, loss),
    "grad": (False, grad_and_value(loss)),
    "examples": (False, over_rows(grad(loss))),
    "values of examples": (False, over_rows(loss)),
    "grad of examples": (False, grad(lambda *given: over_rows(loss)(*given).square().sum())),
    "remat": (False, lambda *given: grad(remat(loss))(*given)),
    "jit": (False, lambda x, block, path, targets, comm: jit(grad_and_value(loss))(x, block, path, targets, comm)),
    "make_fx": (False, traced),
    "jvp": (True, lambda x, *rest: jvp(lambda x: loss(x, *rest), (x,), (x.flip(0),))),
    "jvp of examples": (True, lambda x, *rest: jvp(lambda x: over_rows(grad(loss))(x, *rest), (x,), (x.flip(0),))),
    "grad of grad": (True, grad(squares(loss))),
    "grad of grad of remat": (True, lambda x, *rest: grad(squares(remat2(loss)))(x, *rest)),
    "jvp of grad": (True, lambda x, *rest: jvp(lambda x: grad(loss)(x, *rest), (x,), (x.flip(0),))),
}
FEW = ("value", "grad", "examples", "grad of examples", "jit", "jvp", "grad of grad")


def sharded_and_gathered(name, behind, names):
    """Compare the transforms of a sharded head with those of a gathered one."""
    placed, _, path, comm, x, targets = setting(name, behind, shapes=((2, 5), (2, 0), (2, 6)))
    size = placed.layout.size
    for transform in names:
        whole, f = TRANSFORMS[transform]
        with shard.traffic() as traffic:
            got = tree.leaves(f(x, placed, path, targets, comm))
        want = tree.leaves(f(x, placed, path, targets, replace(comm, cut=None)))
        assert any(t.count_nonzero() for t in want) or not x.numel()
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, msg=lambda text, at=transform: f"{at}: {text}")
        assert (("all_gather", size, dist.get_world_size()) in traffic.calls) == whole, transform


@pytest.mark.parametrize(
    ("n", "name", "behind", "names"),
    [
        (2, "f64", True, FEW),
        *(
            pytest.param(n, name, behind, tuple(TRANSFORMS), marks=pytest.mark.slow)
            for n, name, behind in ((2, "f64", False), (3, "f64", True), (3, "nf4, f64", True))
        ),
    ],
)
def test_every_transform(n, name, behind, names):
    ranks.run(n, sharded_and_gathered, name, behind, names, timeout=240)


# --- what is refused --------------------------------------------------------------------------------------------------


KINDS = {"value": lambda: loss, "grad": lambda: grad(loss), "captured": lambda: jit(grad(loss))}


def refused(kind, wrong):
    """Check that every rank refuses a target outside of the vocabulary on one rank, or too many tokens."""
    placed, _, path, comm, x, targets = setting("f32", True)
    with pytest.raises(ValueError, match="13 tokens have a loss, and this comm is for at most 12 a rank"):
        loss(x.new_zeros(1, 13, DIM), placed, path, targets.new_zeros(1, 13), comm)
    bad = targets.clone()
    if dist.get_rank() == 0:
        bad[0, 0] = wrong
    KINDS[kind]()(x, placed, path, bad, comm)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [("value", VOCAB), ("grad", -1), ("captured", -101), pytest.param("captured", 2**40, marks=pytest.mark.slow)],
)
def test_what_is_refused(kind, wrong):
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run(2, refused, kind, wrong)
    assert all("index out of range" in failure.message for failure in caught.value.failures.values())
    assert "IndexError" in [failure.type for failure in caught.value.failures.values()]


# --- a decoder --------------------------------------------------------------------------------------------------------


def config(tied):
    return Config(
        vocab=2001, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden=128, max_positions=64,
        tied=tied,
    )  # fmt: skip


SEQ = 8
ROWS = {2: 3, 3: 2, 4: 5}  # of a batch: ranks have different numbers of them, and of three one has none
PASSES = {
    "plain": (),
    "prefetch": (prefetch_gathers(),),
    "all": (shard.passes.regather_blocks(), deduplicate_gathers(), prefetch_gathers()),
}


def model(tied, packed, targets):
    cfg = config(tied)
    base = tree.map(lambda t: 3 * t, decoder.init(cfg, random.key(0)))
    if packed:
        base = tree.map_at("embed" if tied else "final.head", partial(quantize, format=NF4), base)
    return cfg, base, tree.map(lambda t: t + 0.05, lora.init(base, targets, rank=3, key=1))


def batch(rows):
    tokens = torch.randint(0, 2001, (rows, SEQ + 1), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1], torch.where(tokens[:, 1:] % 5 == 0, IGNORE, tokens[:, 1:])


def trained(adapters, base, x, y, cfg, comm=LOCAL):
    return decoder.loss(lora.attach(base, adapters), x, y, cfg, comm, count=float(y.shape[-1] * 3))


def steps(axes, tied, packed, targets):
    """Return loss and gradients of a step on the mesh, captured in several ways, and the bytes sent."""
    cfg, base, adapters = model(tied, packed, targets)
    mesh, rules = shard.mesh(**axes), Rules()
    placed, adapters = shard.place((base, adapters), decoder.dims(cfg), rules, mesh, cfg)
    x, y = shard.share(batch(ROWS[dist.get_world_size()]), mesh, rules)
    comm = shard.comm(mesh, rules, recompute=False, tokens=2 * SEQ)
    given = adapters, shard.local(placed), x, y, cfg
    with shard.traffic() as eager:
        wanted = grad_and_value(trained)(*given, comm)
    with shard.traffic() as whole:
        grad_and_value(trained)(*given, replace(comm, cut=None))
    for passes in PASSES.values():
        step = jit(grad_and_value(trained), passes=passes)
        for _ in range(2):
            with shard.traffic() as traffic:
                found = step(*given, comm)
            assert all(map(torch.equal, tree.leaves(found), tree.leaves(wanted)))
        predicted = cost(grad_and_value(trained), *given, comm, passes=passes)
        assert sum(c.sent for c in predicted.collectives) == traffic.sent
    return *shard.reduce(wanted, mesh, rules), eager.sent, whole.sent


LINEARS = r"layers\.\d+\.(q|down)"


@pytest.mark.parametrize(
    ("axes", "tied", "packed", "targets"),
    [
        ({"fsdp": 2}, False, False, LINEARS),
        pytest.param({"fsdp": 3}, True, False, LINEARS, marks=pytest.mark.slow),
        pytest.param({"fsdp": 3}, False, True, LINEARS, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2}, True, True, LINEARS, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "fsdp": 2}, False, False, LINEARS, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2}, False, False, rf"final\.head|{LINEARS}", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_that_of_one_process_for_fewer_bytes(axes, tied, packed, targets):
    n = math.prod(axes.values())
    cfg, base, adapters = model(tied, packed, targets)
    want, value = grad_and_value(trained)(adapters, base, *batch(ROWS[n]), cfg)
    for grads, got, sent, whole in ranks.run(n, steps, axes, tied, packed, targets, timeout=240):
        for mine, wanted in zip(tree.leaves(grads), tree.leaves(want), strict=True):
            # In norm: small elements of one process itself are more than 1e-4 from those in float64.
            assert (mine - wanted).norm() <= 1e-4 * wanted.norm() + 1e-6
        torch.testing.assert_close(got, value, rtol=1e-6, atol=0)
        assert sent < whole if targets == LINEARS else sent == whole  # an adapter of the head is for all of it
