"""LFQ: equality with vector-quantize-pytorch where that is right; entropies against the sum over all codes."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad
from torch.utils._python_dispatch import TorchDispatchMode

from fquant import random, tree
from fquant.vq import mean
from fquant.vq.scalar import lfq
from tests.helpers.vq.lfq import CASES, WARM, both
from tests.helpers.vq.peers import assert_close, drawn, ours, theirs


def total(got, weight):
    return (got.x * weight).sum() + mean(got.losses["entropy"]) + 2.0 * mean(got.losses["commitment"])


@pytest.mark.parametrize("options, named", CASES.values(), ids=CASES)
def test_is_the_peers(options, named):
    peer, state = both(options, named)
    x = drawn(3, 40, state.dim, size=0.5)
    weight = drawn(3, 40, state.dim, seed=3)
    (x_peer, codes, loss), parts = peer(x, inv_temperature=WARM, return_loss_breakdown=True)
    got = lfq.apply(state, x, inv_temperature=WARM)
    assert torch.equal(got.codes, codes.long()) and torch.equal(lfq.encode(state, x), got.codes)
    assert_close((got.x, lfq.decode(state, codes)), (x_peer.detach(), peer.indices_to_codes(codes).detach()))
    found = lfq.entropies(state, x, inv_temperature=WARM)
    assert_close(found, (parts.per_sample_entropy.detach(), parts.batch_entropy.detach()))
    assert_close(mean(got.losses["commitment"]), parts.commitment.detach())
    assert_close(mean(got.losses["entropy"]) + 2.0 * mean(got.losses["commitment"]), loss.detach())
    assert_close(
        ours(state, lambda s, x: total(lfq.apply(s, x, inv_temperature=WARM), weight), x), of_peer(peer, x, weight)
    )


def of_peer(peer, x, weight):
    """Return the gradients of the peer's total."""

    def loss(peer, x):
        out = peer(x, inv_temperature=WARM)
        return (out[0] * weight).sum() + out[2]

    return theirs(peer, loss, x)


@pytest.mark.parametrize("options, named", CASES.values(), ids=CASES)
def test_masked_rows_and_bad_rows_are_not_there(options, named):
    """Results equal the peer's on the other rows. (Given a mask it takes no mean over rows for the entropy of the mean,
    so it returns the rows' entropy; one NaN makes all its losses NaN.)"""
    peer, state = both(options, named)
    x, mask = drawn(3, 40, state.dim, size=0.5), torch.arange(120).reshape(3, 40) % 5 > 0
    weight = drawn(3, 40, state.dim, seed=3)
    x[0, 1, 2], x[1, 1, 0], x[2, 0] = math.nan, math.inf, math.nan  # the last is masked, too
    keep = mask & x.isfinite().all(-1)
    assert keep.sum() == 96 - 2
    got = lfq.apply(state, x, mask=mask, inv_temperature=WARM)
    (x_peer, codes, _), parts = peer(x[keep][None], inv_temperature=WARM, return_loss_breakdown=True)
    assert torch.equal(got.codes[keep], codes[0].long()) and got.codes[~keep].eq(-1).all()
    assert_close(got.x[keep], x_peer[0].detach())
    assert got.x[~keep].eq(0).all() and lfq.decode(state, got.codes)[~keep].eq(0).all()
    assert [int(n) for n in (got.stats.kept, got.stats.masked, got.stats.bad)] == [94, 24, 2]
    found = lfq.entropies(state, x, mask=mask, inv_temperature=WARM)
    assert_close(found, (parts.per_sample_entropy.detach(), parts.batch_entropy.detach()))
    assert_close(mean(got.losses["commitment"]), parts.commitment.detach())
    slope, params = ours(state, lambda s, x: total(lfq.apply(s, x, mask=mask, inv_temperature=WARM), weight), x)
    assert slope[~keep].eq(0).all()
    assert_close((slope[keep][None], params), of_peer(peer, x[keep][None], weight[keep][None]))


def exact(state, z, inv_temperature):
    """Return both entropies of z [n c d] from the probabilities of all codes of each row, in float64."""
    ones = (torch.arange(2**state.bits)[:, None] >> torch.arange(state.bits).flip(0)) & 1
    codes = (ones * 2 - 1).double() * state.scale
    if state.spherical:
        codes = F.normalize(codes, dim=-1) * state.scale
    log_p = (2 * inv_temperature * z.double() @ codes.T).log_softmax(-1)  # [n c K]
    each = -(log_p.exp() * log_p).sum(-1).mean()
    p = log_p.exp().mean(0)
    return each, torch.special.entr(p).sum(-1).mean()


@pytest.mark.parametrize("inv_temperature", [0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("bits, spherical", [(1, False), (2, True), (5, False), (9, True), (12, False)])
def test_entropies_are_those_of_all_codes(bits, spherical, inv_temperature):
    state = lfq.init(0, bits, num_codebooks=2, spherical=spherical, scale=0.7)
    x = drawn(30, 2 * bits)
    z = x.reshape(30, 2, bits).double()
    z = F.normalize(z, dim=-1) * 0.7 if spherical else z
    assert_close(
        lfq.entropies(state, x.double(), inv_temperature=inv_temperature), exact(state, z, inv_temperature), 1e-9
    )
    assert_close(
        lfq.entropies(state, x, inv_temperature=inv_temperature),
        tuple(t.float() for t in exact(state, z, inv_temperature)),
    )


def test_gradients_of_entropies_are_those_of_all_codes():
    state = lfq.init(0, 5, num_codebooks=2)
    x = drawn(20, 10, size=0.3).double()

    def wanted(x):
        each, of_mean = exact(state, x.reshape(20, 2, 5), 3.0)
        return each - 2 * of_mean

    def got(x):
        each, of_mean = lfq.entropies(state, x, inv_temperature=3.0)
        return each - 2 * of_mean

    assert_close(grad(got)(x), grad(wanted)(x), 1e-9)
    v = drawn(20, 10, seed=4).double()
    assert_close(grad(lambda x: (grad(got)(x) * v).sum())(x), grad(lambda x: (grad(wanted)(x) * v).sum())(x), 1e-9)
    assert grad(got)(1e6 * x).isfinite().all() and grad(got)(torch.zeros_like(x)).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_rows_have_no_entropy_and_no_gradient_however_large(dtype):
    state, size = lfq.init(0, 6), torch.finfo(dtype).max
    x = size * torch.tensor([[1.0, -1, 1, 1, -1, 1], [1, 1, 1, 1, 1, 1]], dtype=dtype)
    each, of_mean = lfq.entropies(state, x)
    assert each == 0 and abs(of_mean - math.log(2.0)) < 1e-6
    assert grad(lambda x: sum(lfq.entropies(state, x)))(x).eq(0).all()
    for logit in (50.0, 87.0) + (700.0,) * (dtype is torch.float64):  # a representable entropy is found
        x = torch.full((1, 6), logit / 400, dtype=dtype)
        a = 400 * x[0, 0].double()
        found = lfq.entropies(state, x)[0].double()
        torch.testing.assert_close(found, 6 * (1 + a) * (-a).exp(), rtol=1e-5, atol=0)


def test_many_codes_that_are_alike_have_all_their_entropy():
    """The peer floors probabilities at 1e-5, so for 2^18 equal codes it finds 11.5 of 12.5 nats."""
    state = lfq.init(0, 18)
    for found in lfq.entropies(state, torch.zeros(7, 18)):
        torch.testing.assert_close(found, torch.tensor(18 * math.log(2.0)))


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(t.numel() for t in tree.leaves(out) if isinstance(t, torch.Tensor)), 0)
        return out


def test_no_tensor_is_rows_times_codes():
    state, x = lfq.init(0, 16), drawn(300, 16)
    slope = grad(lambda x: mean(lfq.apply(state, x).losses["entropy"]))
    with Largest() as seen:
        slope(x)
    assert 300 * 2**8 <= seen.numel <= 300 * 2**9 and 2**16 < 300 * 2**9


def test_groups_of_bits_add_their_entropies():
    state = lfq.init(0, 36, group=9, dim=36)
    x = drawn(40, 36, size=0.2).double()
    each, of_mean = lfq.entropies(state, x, inv_temperature=1.0)
    parts = [exact(replace(state, bits=9), t.reshape(40, 1, 9), 1.0) for t in x.chunk(4, -1)]
    assert_close((each, of_mean), tuple(sum(part[i] for part in parts) for i in range(2)), 1e-9)
    small = lfq.init(0, 6)
    together = lfq.entropies(small, x[:, :6], inv_temperature=1.0)[1]
    apart = lfq.entropies(replace(small, group=2), x[:, :6], inv_temperature=1.0)[1]
    assert apart > together


@pytest.mark.parametrize("keys", [(), (5,), (5, 30)], ids=str)
def test_a_share_of_the_rows_is_drawn_by_key(keys):
    """Each key draws the given share of its rows uniformly, so the mean over draws is that of all rows."""
    state = lfq.init(0, 3, share=0.3)
    x = drawn(5, 60, 3, size=0.5) if len(keys) < 2 else drawn(5, 30, 4, 3, size=0.5)
    key = random.fold(random.key(0), torch.arange(math.prod(keys)).reshape(keys))
    rows = math.prod(x.shape[:-1])
    got = lfq.apply(state, x, key, inv_temperature=1.0)
    each_key = rows // math.prod(keys)
    assert got.losses["entropy"].count == math.prod(keys) * math.ceil(0.3 * each_key)
    assert torch.equal(got.losses["commitment"].sum, lfq.apply(state, x).losses["commitment"].sum)
    every = lfq.entropies(state, x, inv_temperature=1.0)[0]
    draws = torch.stack([
        lfq.entropies(state, x, random.fold(key, i), inv_temperature=1.0)[0] for i in range(200)
    ])  # fmt: skip
    assert draws.std() > 0 and abs(draws.mean() - every) < 5 * draws.std() / math.sqrt(200)


def test_a_share_of_a_key_is_drawn_wherever_its_rows_are():
    state = lfq.init(0, 3, share=0.5)
    x, keys = drawn(6, 20, 3, size=0.5), random.fold(random.key(1), torch.arange(6))
    seen = []
    for some in (slice(0, 6), slice(0, 2), slice(2, 6)):
        lfq.apply(state, x[some], keys[some], psum=lambda sums: seen.append(sums) or sums)
    whole, first, second = seen
    assert_close(whole, tree.map(torch.add, first, second), 1e-4)


def test_without_rows_there_is_no_entropy():
    state = lfq.init(0, 4)
    for x, mask in ((torch.empty(0, 4), None), (drawn(3, 4), torch.zeros(3, dtype=torch.bool))):
        got = lfq.apply(state, x, mask=mask)
        assert all(mean(loss) == 0 and loss.count == 0 for loss in got.losses.values())
        assert grad(lambda x: total(lfq.apply(state, x, mask=mask), 1.0))(x).eq(0).all()  # noqa: B023


def test_bits_are_signs_the_first_the_most_significant():
    state = lfq.init(0, 3, num_codebooks=2)
    x = torch.tensor([[1.0, -2.0, 3.0, 0.0, 0.0, 0.1]])
    assert lfq.encode(state, x).tolist() == [[5, 1]]
    assert lfq.decode(state, torch.tensor([[5, 1]])).tolist() == [[1, -1, 1, -1, -1, 1]]
    wide = lfq.init(0, 62, group=2)
    ends = torch.stack([torch.ones(62), -torch.ones(62)])
    assert lfq.encode(wide, ends).tolist() == [2**62 - 1, 0] and torch.equal(
        lfq.decode(wide, lfq.encode(wide, ends)), ends
    )


WRONG = {
    "no bits": (dict(bits=0), "bits are 0; wanted from 1 to 62"),
    "bits": (dict(bits=63), "bits are 63; wanted from 1 to 62; use codebooks"),
    "together": (dict(bits=25), r"the mean of rows would be 2\^25 probabilities; use group="),
    "a group": (dict(group=3), "group is 3; wanted from 1 to 24 bits that divide 4"),
    "scale": (dict(scale=0.0), "scale is 0.0; wanted a positive number"),
    "clamp": (dict(clamp=0.5), "clamp is 0.5, below scale 1.0, which no scalar could reach"),
    "activation": (dict(activation="relu"), "activation is 'relu'; wanted one of identity, tanh"),
    "share": (dict(share=0.0), r"share is 0.0; wanted a part of the rows in \(0, 1\]"),
    "cosine of nothing": (dict(cosine=1.0), "options of a projection, but dim is that of the scalars, 4"),
    "cosine with bias": (dict(cosine=math.inf, dim=7), "cosine is inf; wanted a positive number"),
}


@pytest.mark.parametrize("options, message", WRONG.values(), ids=WRONG)
def test_contradictions_are_refused(options, message):
    with pytest.raises(ValueError, match="lfq.init: .*" + message):
        lfq.init(0, **{"bits": 4, **options})
