"""The work of nodes equals what is counted by hand: FLOPs, bytes, decoded values, slabs and launches."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from fquant import NF4, grouped_linear, linear, quantize, tree
from fquant.compile import roofline
from fquant.compile.roofline import DEVICES, Work, scratch, seconds, traffic, work
from fquant.compile.roofline.nodes import (
    ATTENTION,
    COPY,
    DECODE,
    ELEMENTWISE,
    FEW,
    LOSS,
    NORM,
    PRODUCT,
    THIN_PRODUCT,
)
from fquant.compile.trace import trace
from fquant.device import HOST
from fquant.kernels.cuda_plans import Card, Few, Tiled, estimate, grouped_plan, plan_for, slabs
from fquant.kernels.ops.attention import attention
from fquant.kernels.ops.nll import nll
from fquant.kernels.ops.norm import rms_norm
from fquant.kernels.spec import Spec
from shard.transport.host import arrived, fetch
from tests.helpers.arrays import named

H100, L4 = DEVICES["h100"], DEVICES["l4"]
CPU = dataclasses.replace(H100, type=HOST.type, chip=None)
UNKNOWN = dataclasses.replace(H100, chip=None)
LARGE_CACHE = dataclasses.replace(UNKNOWN, cache=160 << 20)
BF16, F32 = torch.bfloat16, torch.float32


def meta(*shape, dtype=F32):
    return torch.empty(shape, dtype=dtype, device="meta")


def nodes(f, *args):
    """Return the calls of a captured graph that are work."""
    captured = trace(lambda args: f(*args), args)
    return [node for node in captured.module.graph.nodes if work(node, H100)]


def only(f, *args):
    (node,) = nodes(f, *args)
    return node


def ids(n):
    return torch.empty(n, dtype=torch.int64, device="meta")


def rounded(*shape):
    return meta(*shape, dtype=BF16)


A, B, C, R = 256, 512, 1024, 16  # sides
SQUARE, BIG, LOW = A * A, A * B, 2 * A * B * R  # elements, elements, FLOPs
THIN = 4 * (BIG + B * R + A * R)  # bytes
ROWS = 2 * 4 * 7 * 64 + 8 * 7  # bytes of seven rows, read and written, and of their numbers
CASES = {
    "product": (torch.mm, (meta(A, B), meta(B, C)), Work(PRODUCT, 2 * A * B * C, F32, moved=4 * (BIG + B * C + A * C))),
    "bf16": (torch.mm, (rounded(A, B), rounded(B, A)), Work(PRODUCT, 2 * BIG * A, BF16, moved=2 * (2 * BIG + SQUARE))),
    "thin": (torch.mm, (meta(A, B), meta(B, R)), Work(THIN_PRODUCT, LOW, F32, moved=THIN)),
    "its gradient": (lambda g, x: g.mT @ x, (meta(A, R), meta(A, B)), Work(THIN_PRODUCT, LOW, F32, moved=THIN)),
    "sine": (torch.sin, (meta(100, 50),), Work(ELEMENTWISE, moved=2 * 4 * 5000)),
    "broadcast": (lambda x: x.expand(100, 50).sin(), (meta(50),), Work(ELEMENTWISE, moved=4 * (50 + 5000))),
    "chain": (lambda x, y: (x + y) * x - 1.0, (meta(100, 50), meta(100, 50)), Work(ELEMENTWISE, moved=3 * 4 * 5000)),
    "rows of a table": (lambda w, i: w[i], (meta(1000, 64), ids(7)), Work(ELEMENTWISE, moved=ROWS)),
    "embedding": (lambda w, i: F.embedding(i, w), (meta(1000, 64), ids(7)), Work(ELEMENTWISE, moved=ROWS)),
    "attention": (
        lambda q, k: attention(q, k, k)[0],
        (rounded(1, 4, 8, 16), rounded(1, 2, 8, 16)),
        Work(ATTENTION, 4 * 4 * 16 * 36, BF16, moved=2 * (512 + 256 + 512) + 4 * 32),
    ),
    "norm": (lambda x, w: rms_norm(x, w, 1e-5)[0], (meta(8, 16), meta(16)), Work(NORM, moved=4 * (256 + 16 + 8))),
    "loss": (lambda x, t: nll(x, t, -100), (meta(8, 16), ids(8)), Work(LOSS, moved=4 * 128 + 8 * 8 + 4 * 8)),
    "fetch": (lambda x: arrived(fetch(x, HOST)), (meta(100),), Work(COPY, sent=400, launches=0)),
}


@named("name", CASES)
def test_counted_by_hand(name):
    f, args, wanted = CASES[name]
    node = only(f, *args)
    assert work(node, H100) == (wanted,)
    assert seconds(node, H100) == wanted.seconds(H100) + wanted.launches * H100.launch


def test_views_and_arguments_take_nothing():
    captured = trace(lambda x: x.mT[:5].reshape(5, -1), meta(10, 20))
    assert [node for node in captured.module.graph.nodes if work(node, H100) and node.op != "call_function"] == []
    assert seconds(next(iter(captured.module.graph.nodes)), H100) == 0


def test_what_is_written_over_is_written():
    captured = trace(lambda args: tree.map(lambda m, g: 0.9 * m + g, *args), ({"a": meta(100)}, {"a": meta(100)}))
    free = [traffic(n) for n in captured.module.graph.nodes if work(n, H100)]
    given = ({"a": meta(100)}, {"a": meta(100)})
    over = trace(lambda args: tree.map(lambda m, g: 0.9 * m + g, *args), given, {id(given[0]["a"])})
    kept = [traffic(n) for n in over.module.graph.nodes if work(n, H100)]
    assert free == kept == [(800, 400)]


# --- packed weights ---------------------------------------------------------------------------------------------------

OUT, WIDTH = 32768, 4096  # 256 MiB in bf16: two slabs
NUM = OUT * WIDTH
CODES = NUM // 2 + NUM // 64 * 4


def product(rows):
    """Return the node of a product with a packed weight."""
    w = tree.map(lambda t: t.to("meta"), quantize(torch.zeros(64, 64, dtype=BF16), NF4))
    codes, scale = meta(OUT, WIDTH // 2, dtype=torch.uint8), meta(OUT, WIDTH // 64)
    w = dataclasses.replace(w, codes=codes, scale=scale, shape=(OUT, WIDTH))
    return only(linear, meta(rows, WIDTH, dtype=BF16), w)


def test_few_rows_read_packed_bytes():
    moved = CODES + 2 * FEW * (OUT + WIDTH)
    assert work(product(FEW), UNKNOWN) == (Work(PRODUCT, 2 * FEW * NUM, BF16, NUM, moved),)
    assert scratch(product(FEW), UNKNOWN) == 0


@pytest.mark.parametrize("card", ["a100", "h100", "b200"])
@pytest.mark.parametrize("rows", [1, 33, 300, 4096])
def test_the_kernel_that_is_chosen_is_priced(card, rows):
    """Its estimate, with the figures of the card; slabs where they are chosen."""
    device = roofline.named(card)
    chip, spec = device.chip, Spec(NF4, (OUT, WIDTH), BF16)
    plan = plan_for(rows, spec, BF16, False, True, chip.generation)
    parts = work(product(rows), device)
    if isinstance(plan, Tiled):
        assert [part.kind for part in parts] == [DECODE, PRODUCT] and rows >= 300
        return
    operations, copied = device.flops / (chip.processors * chip.clock), device.bandwidth * device.share.memory
    given = Card(chip.processors, chip.clock, operations, copied)
    splits = 1 if isinstance(plan, Few) else plan.splits
    launches = 1 + (splits > 1)
    kernel = estimate(plan, rows, WIDTH, OUT, 4, chip.generation, given) - launches * 2e-6
    held = 4 * splits * rows * OUT * (splits > 1)
    moved = CODES + 2 * rows * (OUT + WIDTH)
    wanted = Work(PRODUCT, 2 * rows * NUM, BF16, moved=moved, launches=launches, kernel=kernel, scratch=held)
    assert parts == (wanted,) and wanted.seconds(device) >= kernel
    assert scratch(product(rows), device) == held


def test_a_grouped_product_is_one_kernel_for_all_groups():
    """That of a matrix as wide as all groups, with the mean rows of a group; in float32 the host loops over slabs."""
    w = quantize(torch.zeros(8, 64, 256, dtype=BF16), NF4)
    w = tree.map(lambda t: t.to("meta"), w)
    counts = torch.empty(8, dtype=torch.int64, device="meta")
    (part,) = work(only(grouped_linear, meta(400, 256, dtype=BF16), w, counts), H100)
    chip = H100.chip
    card = Card(chip.processors, chip.clock, 989e12 / (chip.processors * chip.clock), 0.85 * 3.35e12)
    wanted = estimate(grouped_plan(50, 90), 50, 256, 64 * 8, 4, 90, card) - 2e-6
    assert part.kernel == pytest.approx(wanted, rel=1e-12) and part.launches == 1 and part.flops == 2 * 400 * 64 * 256
    assert [part.kind for part in work(only(grouped_linear, meta(400, 256), w, counts), H100)] == [DECODE, PRODUCT]


@pytest.mark.parametrize(
    ("device", "moves", "number"), [(LARGE_CACHE, 0, 2), (UNKNOWN, 2 * NUM, 2), (CPU, 0, 1)],
    ids=["large cache", "small cache", "host"],
)  # fmt: skip
def test_many_rows_decode_a_slab(device, moves, number):
    node, x = product(1000), 2 * 1000 * WIDTH
    decode, multiply = work(node, device)
    assert decode == Work(DECODE, decoded=NUM, moved=CODES + moves, launches=number, scratch=scratch(node, device))
    moved = x * number + 2 * 1000 * OUT + moves
    assert multiply == Work(PRODUCT, 2 * 1000 * NUM, BF16, moved=moved, launches=number)
    assert scratch(node, device) == (slabs(1000, WIDTH).size if device is not CPU else 0)
