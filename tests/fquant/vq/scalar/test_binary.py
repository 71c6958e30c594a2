"""Binary mapping: equality with vector-quantize-pytorch except for the draw, and the frequencies of drawn codes."""

import math

import pytest
import torch
from torch.func import grad
from vector_quantize_pytorch.binary_mapper import BinaryMapper

from fquant import random, tree
from fquant.vq import mean
from fquant.vq.scalar import binary
from tests.helpers.vq.peers import assert_close, drawn


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("free", [math.log(2.0), 0.1])
def test_is_the_peers_but_for_the_draw(bits, free):
    peer, state = BinaryMapper(bits, kl_loss_threshold=free), binary.init(0, bits, free=free)
    x, weight = drawn(3, 40, bits, size=2.0), drawn(3, 40, 2**bits, seed=3)
    wanted, codes, loss = peer(x, deterministic=True, return_indices=True)
    got = binary.apply(state, x)
    assert torch.equal(got.codes, codes) and torch.equal(binary.encode(state, x), codes)
    assert_close((got.x, mean(got.losses["kl"])), (wanted, loss))
    assert torch.equal(got.x, binary.decode(state, codes))
    assert_close(binary.log_prob(state, x, codes), peer.log_prob(x, indices=codes))

    def total(x):
        got = binary.apply(state, x)
        return (got.x * weight).sum() + mean(got.losses["kl"]) + binary.log_prob(state, x, codes).sum()

    there = x.clone().requires_grad_()
    wanted, loss = peer(there, deterministic=True)
    ((wanted * weight).sum() + loss + peer.log_prob(there, indices=codes).sum()).backward()
    assert_close(grad(total)(x), there.grad)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_codes_are_drawn_with_their_probabilities(temperature):
    state, logits = binary.init(0, 3), torch.tensor([1.0, -0.5, 2.0])
    n = 40_000
    got = binary.apply(state, logits.expand(n, 3), random.key(4), temperature=temperature)
    p = binary.log_prob(state, (logits / temperature).expand(8, 3), torch.arange(8)).exp()
    torch.testing.assert_close(p.sum(), torch.tensor(1.0))
    share = torch.bincount(got.codes, minlength=8) / n
    assert ((share - p).abs() < 5 * (p * (1 - p) / n).sqrt()).all()
    assert torch.equal(got.x, binary.decode(state, got.codes))


def test_the_draw_changes_no_gradient_and_is_of_its_key():
    state, x = binary.init(0, 4), drawn(6, 5, 4)
    weight = drawn(6, 5, 16, seed=2)
    slope = grad(lambda x, key: (binary.apply(state, x, key).x * weight).sum())
    assert torch.equal(slope(x, random.key(1)), slope(x, None))
    warm = grad(lambda x: (binary.apply(state, x, random.key(1), temperature=3.0).x * weight).sum())
    assert torch.equal(warm(x), slope(x, None))
    keys = random.fold(random.key(2), torch.arange(6))
    whole = binary.apply(state, x, keys).codes
    assert torch.equal(whole, torch.cat([binary.apply(state, x[i], keys[i]).codes for i in (slice(0, 2), slice(2, 6))]))
    assert not torch.equal(whole, binary.apply(state, x, random.key(3)).codes)


def test_rows_that_do_not_count_are_nowhere():
    state = binary.init(0, 4, free=0.1)
    x, mask = drawn(5, 8, 4, size=2.0), torch.arange(40).reshape(5, 8) % 3 > 0
    x[1, 3, 2], x[2, 0] = math.nan, math.inf
    keep = mask & x.isfinite().all(-1)
    got, wanted = binary.apply(state, x, mask=mask), binary.apply(state, x[keep])
    assert_close((got.x[keep], got.codes[keep]), (wanted.x, wanted.codes))
    assert got.x[~keep].eq(0).all() and got.codes[~keep].eq(-1).all()
    assert torch.equal(binary.decode(state, got.codes), got.x)
    assert_close(mean(got.losses["kl"]), mean(wanted.losses["kl"]))
    assert [int(n) for n in tree.leaves(got.stats)] == [int(keep.sum()), int((~mask).sum()), int((mask & ~keep).sum())]
    slope = grad(
        lambda x: mean(binary.apply(state, x, mask=mask).losses["kl"]) + binary.log_prob(state, x, got.codes).sum()
    )
    assert slope(x)[~keep].eq(0).all() and slope(x).isfinite().all()
    assert binary.log_prob(state, x, got.codes)[~keep].eq(0).all()


def test_narrow_floats_are_computed_in_float32():
    state, x = binary.init(0, 6), drawn(50, 6).bfloat16()
    got = binary.apply(state, x, random.key(0))
    assert got.x.dtype is torch.bfloat16 and torch.equal(got.codes, binary.apply(state, x.float(), random.key(0)).codes)
    assert binary.log_prob(state, x, got.codes).dtype is torch.float32


def test_wrong_calls_are_refused():
    with pytest.raises(ValueError, match="binary.init: bits are 21; wanted from 1 to 20"):
        binary.init(0, 21)
    with pytest.raises(ValueError, match="binary.init: free is -1.0; wanted at least 0"):
        binary.init(0, 2, free=-1.0)
    state = binary.init(0, 3)
    with pytest.raises(ValueError, match="binary.apply: temperature is 0.0; wanted more than 0"):
        binary.apply(state, drawn(2, 3), temperature=0.0)
    with pytest.raises(ValueError, match=r"binary.log_prob: codes are \(3,\) beside x \(2, 3\); wanted one a row"):
        binary.log_prob(state, drawn(2, 3), torch.zeros(3, dtype=torch.int64))
