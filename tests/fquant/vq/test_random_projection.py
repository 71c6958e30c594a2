"""Random projections: the codes of vector-quantize-pytorch, and of the vector with the smallest angle."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad
from vector_quantize_pytorch import RandomProjectionQuantizer

from fquant import tree
from fquant.vq import random_projection
from tests.helpers.vq.peers import assert_close, drawn


def both(heads, norm):
    """Return a peer for each head, because one of several heads adds a Linear before the codebooks."""
    torch.manual_seed(1)
    make = partial(RandomProjectionQuantizer, dim=12, codebook_size=50, codebook_dim=6, norm=norm)
    peers = [make() for _ in range(heads)]
    weight = torch.cat([peer.rand_projs for peer in peers]).mT
    return peers, random_projection.RandomProjection(
        weight, torch.cat([peer.vq.codebook for peer in peers]).detach(), norm
    )


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("heads", [1, 3])
def test_is_the_peers(heads, norm):
    peers, state = both(heads, norm)
    x = drawn(3, 40, 12, size=2.0) + 1
    each = [peer(x) for peer in peers]
    codes = torch.stack(each, -1) if heads > 1 else each[0]
    got = random_projection.apply(state, x)
    assert torch.equal(random_projection.encode(state, x), codes) and torch.equal(got.codes, codes) and not got.losses
    assert torch.equal(got.x, random_projection.decode(state, codes))
    assert torch.equal(got.x, torch.cat([state.vectors[h][each[h]] for h in range(heads)], -1))
    targets = [(some + 1) % 50 for some in each]

    def loss(x):
        logits = random_projection.logits(state, x)
        return sum(F.cross_entropy(logits[..., h, :].flatten(0, -2), targets[h].reshape(-1)) for h in range(heads))

    there = x.clone().requires_grad_()
    wanted = torch.stack([peer(there, indices=some) for peer, some in zip(peers, targets, strict=True)]).sum()
    wanted.backward()
    assert_close((loss(x), grad(loss)(x)), (wanted.detach(), there.grad))


@pytest.mark.parametrize("num_codes", [1, 1023, 1024, 1025, 3000])
def test_codes_are_of_the_smallest_angle_whatever_the_tile(num_codes):
    state = random_projection.init(3, 10, num_codes, 4, num_codebooks=2)
    x = drawn(200, 10)
    z = torch.einsum("nd,hed->nhe", F.layer_norm(x.double(), (10,)), state.weight.double())
    angle = torch.einsum("nhe,hke->nhk", F.normalize(z, dim=-1), F.normalize(state.vectors.double(), dim=-1)).acos()
    chosen = angle.gather(-1, random_projection.encode(state, x)[..., None]).squeeze(-1)
    torch.testing.assert_close(chosen, angle.min(-1).values, rtol=0, atol=1e-6)


def test_equal_vectors_have_the_first_code():
    state = random_projection.init(0, 4, 3000, 3)
    same = random_projection.RandomProjection(state.weight, state.vectors[:, :1].expand(-1, 3000, -1), True)
    assert random_projection.encode(same, drawn(20, 4)).eq(0).all()


def test_it_begins_at_random_by_its_key():
    """Projections have the variance of Xavier's; vectors have length 1 and all directions."""
    state = random_projection.init(0, 400, 500, 100, num_codebooks=2)
    variance = state.weight.double().square().mean()
    assert abs(variance - 2 / 500) < 5 * 2 / 500 * math.sqrt(2 / state.weight.numel())
    torch.testing.assert_close(state.vectors.norm(dim=-1), torch.ones(2, 500))
    assert state.vectors.mean((0, 1)).norm() < 2 / math.sqrt(1000)
    again, other = (random_projection.init(key, 400, 500, 100, num_codebooks=2) for key in (0, 1))
    assert_close(again, state, 0)
    assert not torch.equal(other.weight, state.weight) and not torch.equal(state.weight[0], state.weight[1])


def test_nothing_has_a_gradient_and_bad_rows_have_no_code():
    state = random_projection.init(0, 5, 20, 4, num_codebooks=2)
    x = drawn(6, 5)
    assert grad(lambda x: random_projection.apply(state, x).x.sum())(x).eq(0).all()
    x[2, 1], x[3] = math.nan, math.inf
    mask = torch.tensor([True, True, True, False, True, False])
    got = random_projection.apply(state, x, mask=mask)
    assert got.codes[[2, 3, 5]].eq(-1).all() and got.x[[2, 3, 5]].eq(0).all()
    assert torch.equal(got.codes[[0, 1, 4]], random_projection.encode(state, drawn(6, 5))[[0, 1, 4]])
    assert [int(n) for n in tree.leaves(got.stats)] == [3, 2, 1]
    half = random_projection.apply(state, x.bfloat16(), mask=mask)
    assert half.x.dtype is torch.bfloat16
    assert torch.equal(half.codes, random_projection.apply(state, x.bfloat16().float(), mask=mask).codes)


@pytest.mark.parametrize("wrong, message", [
    (dict(dim=0, width=0), "dim is 0, width is 0; wanted at least 1"),
    (dict(dim=1), "dim is 1, and a row of one number has no variance; use norm=False"),
])  # fmt: skip
def test_contradictions_are_refused(wrong, message):
    with pytest.raises(ValueError, match="projection.init: " + message):
        random_projection.init(0, **{"dim": 5, "num_codes": 20, "width": 4, **wrong})
