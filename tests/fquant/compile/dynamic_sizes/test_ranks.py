"""Ranks with other lengths: they agree on one size to pad to, or all raise within seconds."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.func import grad

import shard
from fquant import DynamicSize, Padded, jit
from fquant.compile.dynamic_sizes.results import same_up_to_rounding
from tests.helpers import ranks
from tests.helpers.arrays import named, normal

pytestmark = pytest.mark.xdist_group("ranks")

LENGTHS = [(3, 5), (8, 8), (2, 7), (4, 1), (1, 3), (7, 15)]  # of each rank


def rows(n, rank):
    return normal(n, 3, seed=10 * n + rank)


def step(x, w, total):
    """Return the sum over ranks of gradients, and this rank's rows, in x f64[n 3]."""
    return total(grad(lambda w: (x @ w).tanh().square().sum())(w), axes=("fsdp",)), (x @ w).sin()


def captured_step(size, f=step):
    mesh = shard.mesh(fsdp=dist.get_world_size())
    f = partial(f, total=partial(shard.psum, mesh=mesh))
    return f, jit(f, dynamic={"x": Padded(size, 0, 0.0)})


def each_length(size):
    """Call a step with the lengths of this rank; return the sizes that it is traced for."""
    (f, captured), rank, w = captured_step(size), dist.get_rank(), normal(3, 3)
    for lengths in LENGTHS:
        x = rows(lengths[rank], rank)
        same_up_to_rounding(captured(x, w), f(x, w))
    return [key.sizes[0] for key in captured.traced]


def test_ranks_that_agree_pad_to_the_size_of_the_longest():
    assert ranks.run(2, each_length, DynamicSize("n", 4, agree=True), timeout=60) == [[8, 4, 16]] * 2


def of_padded_shape():
    group, found = shard.mesh(fsdp=2).get_group("fsdp"), []

    def total(x):
        return shard.all_gather(x, group).square().sum(), x + 1

    captured = jit(total, dynamic={"x": Padded(DynamicSize("n", (2, 3), agree=True, verify=None), 0, 0.0)})
    for lengths in ((2, 1), (1, 2), (2, 3), (1, 1)):
        value, more = captured(torch.ones(lengths[dist.get_rank()]))
        assert value.item() == sum(lengths) and torch.equal(more, torch.full((lengths[dist.get_rank()],), 2.0))
        found.append([key.sizes[0] for key in captured.traced])
    return found


def test_ranks_that_agree_may_have_collectives_of_the_padded_shape():
    """The function on other lengths would not be defined, so there is nothing to verify by."""
    assert ranks.run(2, of_padded_shape, timeout=60) == [[[2], [2], [2, 3], [2, 3]]] * 2


def test_without_agreement_ranks_may_pad_to_other_sizes():
    """The shapes of the collectives are those of weights. Verification would be at other calls, so there is none."""
    assert ranks.run(2, each_length, DynamicSize("n", 4, verify=None), timeout=60) == [[4, 8], [8, 4, 16]]


# --- errors on every rank ---------------------------------------------------------------------------------------------


def call(size, lengths, f=step):
    """Call a step once for each entry of ``lengths``; return the text of its error."""
    _, captured = captured_step(size, f)
    try:
        for each in lengths:
            captured(rows(each[dist.get_rank()], 0), normal(3, 3))
    except Exception as error:
        return str(error)
    return ""


def averaged(x, w, total):
    return total(grad(lambda w: (x @ w).tanh().square().mean())(w), axes=("fsdp",))


def refuses_on_one(x, w, total):
    if dist.get_rank() == 1 and len(x) == 5:
        raise OSError("no such length here")
    return step(x, w, total)


MEAN = "{} is padded to 8, on which the result depends: the result differs by .* of its norm"
ERRORS = {  # the size, lengths of ranks, the function, and the errors of ranks
    "only one verifies": (
        DynamicSize("n", 4), [(8, 5)], step,
        [r"rank 0 step; rank 1 step \(to verify padding; on ranks of different sizes use DynamicSize\(agree"] * 2,
    ),
    "too long on one": (
        DynamicSize("n", (4, 8), agree=True), [(3, 9)], step,
        ["rank 1: jit\\(step\\): x has n = 9, wanted at most 8", "^jit\\(step\\): x has n = 9, wanted at most 8"],
    ),
    "a result that depends on padding": (
        DynamicSize("n", 4, agree=True), [(8, 8), (8, 5)], averaged,
        [MEAN.format("n of another rank"), MEAN.format("n = 5")],
    ),
    "a trace that fails on one": (
        DynamicSize("n", 4, agree=True), [(3, 5)], refuses_on_one,
        ["rank 1: no such length here", "no such length here"],
    ),
}  # fmt: skip


@named("case", ERRORS)
def test_errors_are_raised_on_every_rank(case):
    size, lengths, f, messages = ERRORS[case]
    found = ranks.run(2, call, size, lengths, f, timeout=30)
    assert all(re.search(message, text) for message, text in zip(messages, found, strict=True)), found
