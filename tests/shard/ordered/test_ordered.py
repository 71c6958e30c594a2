"""Ordered sums: gradients and losses of a decoder have the same bits on any mesh, in any chunks, captured or not.

The oracles are one process, and gradients of all rows at once in float64.
"""

import math

import pytest
import torch
from torch.func import grad_and_value, vmap

import shard
from fquant import NF4_DQ, jit, lora, quantize, random, tree
from models import decoder
from models.config import Config
from tests.helpers import ranks
from tests.helpers.kernels.threads import num_threads

pytestmark = pytest.mark.xdist_group("ranks")

CFG = Config(vocab=96, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden=96)
ROWS, LENGTH = 11, 16
CASES = [({"dp": 2, "fsdp": 2}, 2, False, torch.bfloat16), ({"fsdp": 3}, 1, True, torch.float32)]
EVERY = [
    (axes, chunks, captured, dtype)
    for axes in ({"fsdp": 1}, {"fsdp": 2}, {"dp": 3}, {"dp": 2, "fsdp": 2}, {"fsdp": 5}, {"dp": 8})
    for chunks, captured in ((1, True), (1, False) if axes == {"dp": 8} else (2, False))
    for dtype in (torch.float32, torch.bfloat16)
]


def weights():
    """Return adapters and a quantised base, whose table is larger than the tokens that are looked up."""
    dense = decoder.init(CFG, random.key(0))
    packed = tree.map_at("layers.*.(q|k|v|o|gate|up|down)", lambda t: quantize(t, NF4_DQ), dense)
    adapters = lora.init(packed, "layers.*.(q|v|down)", 4, key=1)
    draw = torch.Generator().manual_seed(0)
    return tree.map(lambda t: torch.randn(t.shape, generator=draw) * 0.1, adapters), packed


def total(axes, chunks, dtype, captured, count=1.0):
    """Return the ordered gradient and value on this rank."""
    mesh, rules = shard.mesh(**axes), shard.Rules()
    adapters, base = weights()
    base, adapters = shard.place((base, adapters), decoder.dims(CFG), rules, mesh, CFG)
    comm = shard.comm(mesh, rules, tokens=LENGTH * shard.max_local_rows(ROWS, mesh, rules), by_row=True)
    tokens = torch.randint(0, CFG.vocab, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    mine = shard.share(tokens, mesh, rules).tensor_split(chunks)

    def f(adapters, base, chunks):
        def loss(adapters, row):
            params = lora.attach(base, adapters)
            return decoder.loss(params, row[:-1], row[1:], CFG, comm, dtype=dtype, count=count)

        return shard.ordered.grad_and_value(loss, mesh, rules, ROWS, dtype)(adapters, chunks)

    with num_threads(1 if mesh.size() > 1 else 2):
        return (jit(f) if captured else f)(adapters, shard.local(base), mine)


@pytest.mark.parametrize(
    ("axes", "chunks", "captured", "dtype"),
    [*CASES, *(pytest.param(*x, marks=pytest.mark.slow) for x in EVERY if x not in CASES)],
    ids=str,
)
def test_the_bits_are_those_of_one_process(axes, chunks, captured, dtype):
    (want,) = ranks.run(1, total, {"fsdp": 1}, 1, dtype, False, timeout=120)
    for got in ranks.run(math.prod(axes.values()), total, axes, chunks, dtype, captured, timeout=120):
        differ = [path for path, t in tree.items(got) if not torch.equal(t, tree.get(want, path))]
        assert not differ


def test_the_sum_is_that_of_all_rows():
    (got,) = ranks.run(1, total, {"fsdp": 1}, 3, torch.float32, False)
    adapters, base = weights()
    tokens = torch.randint(0, CFG.vocab, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))

    def loss(adapters):
        params = lora.attach(base, tree.map(torch.Tensor.double, adapters))
        return decoder.loss(params, tokens[:, :-1], tokens[:, 1:], CFG, dtype=torch.float64, count=1.0)

    for (path, t), (_, want) in zip(tree.items(got), tree.items(grad_and_value(loss)(adapters)), strict=True):
        torch.testing.assert_close(t.double(), want.double(), rtol=1e-4, atol=1e-5 * float(want.abs().max()), msg=path)


@pytest.mark.parametrize("fsdp", [1, 2])
def test_a_row_needs_a_count(fsdp):
    """The gradients of rows add up, so a loss over the targets of one row would be as many times too large."""
    with pytest.raises(ranks.RankFailure, match="count: missing, and the gradients of rows add up; give the number of"):
        ranks.run(fsdp, total, {"fsdp": fsdp}, 1, torch.float32, False, None)


WIDE = Config(vocab=640, dim=512, num_layers=1, num_heads=8, num_kv_heads=4, head_dim=64, hidden=704)


def wide(threads, dtype, sizes):
    """Return the ordered gradient of adapters of wide layers and a dense head, in chunks of ``sizes``."""
    mesh, rules = shard.mesh(fsdp=1), shard.Rules()
    dense = decoder.init(WIDE, random.key(0))
    base = tree.map_at("layers.*.(q|k|v|o|gate|up)", lambda t: quantize(t, NF4_DQ), dense)
    draw = torch.Generator().manual_seed(0)
    adapters = lora.init(base, "layers.*.(q|v|down)", 16, key=1)
    adapters = tree.map(lambda t: torch.randn(t.shape, generator=draw) * 0.05, adapters)
    tokens = torch.randint(0, WIDE.vocab, (sum(sizes), 34), generator=draw)

    def loss(adapters, row):
        params = lora.attach(base, adapters)
        return decoder.loss(params, row[:-1], row[1:], WIDE, dtype=dtype, count=1.0)

    with num_threads(threads):
        return shard.ordered.grad_and_value(loss, mesh, rules, sum(sizes), dtype)(adapters, tokens.split(sizes))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wide_products_do_not_depend_on_the_rows_beside_either(dtype, threads):
    """torch chooses the kernel of a product by its rows: on AMX dense ones of these widths have other bits."""
    (want,) = ranks.run(1, wide, threads, dtype, [11])
    for sizes in ([1] * 11, [5, 6], [3, 3, 3, 2]):
        (got,) = ranks.run(1, wide, threads, dtype, sizes)
        assert not [path for path, t in tree.items(got) if not torch.equal(t, tree.get(want, path))]


def mapped(axes):
    """Return ordered gradients of two vectors of parameters at once, and of each alone."""
    mesh, rules = shard.mesh(**axes), shard.Rules()
    both, x = torch.tensor([[0.3, -0.7], [1.1, 0.2]]), torch.arange(14.0).reshape(7, 2)
    f = shard.ordered.grad_and_value(lambda w, row: (w * row).sum().sin(), mesh, rules, 7)
    mine = shard.share(x, mesh, rules)
    return vmap(lambda w: f(w, [mine]))(both), [f(w, [mine]) for w in both]


@pytest.mark.parametrize("axes", [{"fsdp": 1}, {"fsdp": 3}], ids=str)
def test_vmap(axes):
    for stacked, alone in ranks.run(math.prod(axes.values()), mapped, axes):
        for at in (0, 1):
            assert torch.equal(stacked[at], torch.stack([one[at] for one in alone]))


def tensor_parallel(axes):
    """Return a product whose inputs are split over fsdp, summed by ``exit``, and its gradient, twice."""
    mesh = shard.mesh(**axes)
    group, at, n = mesh.get_group("fsdp"), mesh.get_local_rank("fsdp"), axes["fsdp"]
    draw = torch.Generator().manual_seed(0)
    x, w = torch.randn(5, 24, generator=draw), torch.randn(7, 24, generator=draw)

    def f(x):
        own = shard.enter(x, group).tensor_split(n, -1)[at] @ w.tensor_split(n, -1)[at].T
        return shard.exit(own, group).sin().sum()

    return [grad_and_value(f)(x) for _ in range(2)]


@pytest.mark.parametrize("n", [2, 3])
def test_tensor_parallel_sums_depend_on_the_ranks_of_their_axis_alone(n):
    found = ranks.run(n, tensor_parallel, {"fsdp": n}) + ranks.run(2 * n, tensor_parallel, {"dp": 2, "fsdp": n})
    want = found[0][0]
    assert all(torch.equal(got, t) for one in found for twice in one for got, t in zip(twice, want, strict=True))


def wrong(rows, given):
    mesh, rules = shard.mesh(fsdp=2), shard.Rules()
    f = shard.ordered.grad_and_value(lambda w, row: (w * row).sum(), mesh, rules, rows)
    f(torch.ones(2), [torch.ones(given, 2)])


@pytest.mark.parametrize(
    ("rows", "given", "message"),
    [(8, 3, "got 3 of 8 rows on rank 0 of 2, wanted 4"), (1, 1, "got 1 rows for 2 ranks, wanted at least as many")],
)
def test_other_rows_than_those_of_a_rank_are_refused(rows, given, message):
    with pytest.raises(ranks.RankFailure, match=message):
        ranks.run(2, wrong, rows, given)


def row_sums(axes, rows):
    """Return the sum of drawn values of all rows, of which this rank gives its own, and the fault of one too many."""
    mesh, rules = shard.mesh(**axes), shard.Rules()
    sizes = 10.0 ** torch.arange(-3, rows - 3)[:, None]
    values = torch.randn(rows, 3, generator=torch.Generator().manual_seed(2)) * sizes
    mine = shard.share(values, mesh, rules)
    with pytest.raises(ValueError, match=r"ordered\.sum_rows: got \d+ of \d+ rows on rank \d of \d, wanted \d+; pass"):
        shard.ordered.sum_rows(torch.zeros(len(mine) + 1, 3), rows, mesh, rules)
    return shard.ordered.sum_rows(mine, rows, mesh, rules)


@pytest.mark.parametrize(("axes", "rows"), [({"fsdp": 2}, 7), ({"dp": 2, "fsdp": 2}, 3), ({"fsdp": 3}, 8)])
def test_sums_of_rows_do_not_depend_on_the_mesh(axes, rows):
    (wanted,) = ranks.run(1, row_sums, {"fsdp": 1}, rows)
    for found in ranks.run(math.prod(axes.values()), row_sums, axes, rows):
        assert torch.equal(found, wanted)
