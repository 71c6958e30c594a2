"""FSQ: equality with vector-quantize-pytorch where that is right, exact codes in any dtype, noise and rotations."""

import math

import pytest
import torch
from torch.func import grad
from vector_quantize_pytorch import FSQ

from fquant import INT8, dequantize, lora, quantize, random, tree
from fquant.vq.scalar import fsq, projection_layers
from tests.helpers.vq.fsq import EVEN, LEVELS, both
from tests.helpers.vq.peers import assert_close, drawn, ours, theirs

CASES = {
    "plain": (LEVELS, {}),
    "symmetric": (LEVELS, {"symmetric": True}),
    "hard": (LEVELS, {"hard_clamp": True}),
    "symmetric, hard": (LEVELS, {"symmetric": True, "hard_clamp": True}),
    "pairs": ((2,) * 6, {"symmetric": True}),
    "rotated": (EVEN, {"rotation": True}),
    "rotated, symmetric": (EVEN, {"rotation": True, "symmetric": True, "num_codebooks": 2}),
    "codebooks": (LEVELS, {"num_codebooks": 3}),
    "projected": (LEVELS, {"dim": 7}),
    "projected without bias": (LEVELS, {"dim": 3, "bias": False}),
    "projected to codebooks": (LEVELS, {"dim": 7, "num_codebooks": 2, "symmetric": True}),
}


@pytest.mark.parametrize("levels, options", CASES.values(), ids=CASES)
def test_is_the_peers(levels, options):
    peer, state = both(levels, options)
    x = drawn(3, 40, state.dim, size=1.5)
    weight = drawn(3, 40, state.dim, seed=3)
    x_peer, codes = peer(x)
    got = fsq.apply(state, x)
    assert torch.equal(got.codes, codes.long()) and torch.equal(fsq.encode(state, x), got.codes)
    assert_close((got.x, fsq.decode(state, got.codes)), (x_peer.detach(), peer.indices_to_codes(codes).detach()))
    assert_close(
        ours(state, lambda s, x: (fsq.apply(s, x).x * weight).sum(), x),
        theirs(peer, lambda p, x: (p(x)[0] * weight).sum(), x),
    )
    size = math.prod(levels)
    digits = fsq.decode_levels(state, got.codes)
    assert torch.equal(digits, peer.indices_to_level_indices(codes).long())
    assert size == peer.codebook_size and 0 <= codes.min() and codes.max() < size


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("levels", [(8, 5, 5, 5), (3, 4), (1000, 999), (7,) * 22], ids=str)
def test_every_level_is_reached_and_is_its_own(levels, symmetric):
    """Codes above 2^24 are exact. The peer computes them in float32, where they are not."""
    state = fsq.init(0, levels, symmetric=symmetric)
    d = len(levels)
    rows = torch.arange(max(levels))[:, None] % torch.tensor(levels)
    codes = sum(rows[:, i] * math.prod(levels[:i]) for i in range(d))
    x = fsq.decode(state, codes)
    exact = (rows - torch.tensor(levels) // 2).double() / (torch.tensor(levels) // 2)
    if symmetric:
        exact = 2 * rows.double() / (torch.tensor(levels) - 1) - 1
    torch.testing.assert_close(x.double(), exact, rtol=0, atol=1e-6)
    assert torch.equal(fsq.decode_levels(state, codes), rows)
    # A large input is on the last level, and its negative on the first, however many there are.
    ends = fsq.encode(state, torch.stack([torch.full((d,), -50.0), torch.full((d,), 50.0)]))
    assert ends.tolist() == [0, math.prod(levels) - 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats_are_quantised_in_float32(dtype):
    """In bfloat16 itself half of the codes would be unused, because integers above 256 are not exact."""
    state = fsq.init(0, (8, 8, 8, 8))
    x = drawn(4096, 4).to(dtype)
    got = fsq.apply(state, x)
    wide = fsq.apply(state, x.float())
    assert got.x.dtype is dtype and torch.equal(got.x, wide.x.to(dtype)) and torch.equal(got.codes, wide.codes)
    assert len(got.codes.unique()) > 1500
    assert torch.equal(got.codes, FSQ([8, 8, 8, 8])(x.float()[None])[1][0].long())


def test_a_projected_state_keeps_its_floats_for_narrow_rows():
    state = fsq.init(0, (5, 5, 5), dim=6)
    x = drawn(10, 6).bfloat16()
    slope = grad(lambda p: fsq.apply(tree.map_at("params", lambda _: p, state), x).x.float().square().sum())
    assert {t.dtype for t in tree.leaves(slope(state.params))} == {torch.float32}


def test_a_projection_may_be_packed_and_adapted():
    state = fsq.init(0, (5, 5, 5), dim=8)
    packed = tree.map_at(r"params\.project_in\.weight", lambda w: quantize(w, INT8), state)
    plain = tree.map_at(r"params\.project_in\.weight", dequantize, packed)
    x = drawn(20, 8)
    assert_close(fsq.apply(packed, x).x, fsq.apply(plain, x).x)
    adapters = lora.init(packed, r"params\.project_in\.weight", rank=2)
    slope = grad(lambda a: fsq.apply(lora.attach(packed, a), x).x.square().sum())(adapters)
    assert slope["params.project_in.weight"].b.ne(0).any()
    assert torch.equal(fsq.encode(lora.attach(packed, adapters), x), fsq.encode(packed, x))


def test_noise_is_where_and_what_it_says():
    """A quarter of the scalars get uniform noise in ±1/2 and a clamp; codes are those without noise."""
    state = fsq.init(0, (5,) * 4, symmetric=True, noise_dropout=0.25)
    x = 0.3 * drawn(20_000, 4)
    still = fsq.apply(state, x)
    moved = fsq.apply(state, x, random.key(5))
    by = moved.x - still.x
    assert torch.equal(still.codes, moved.codes) and moved.x.abs().max() <= 1
    inner = by[still.x.abs() <= 0.5]  # not clamped
    assert abs((inner != 0).double().mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / inner.numel())
    some = inner[inner != 0].double()
    assert some.abs().max() <= 0.5 and abs(some.mean()) < 4 * math.sqrt(1 / 12 / len(some))
    assert abs(some.square().mean() - 1 / 12) < 4 * math.sqrt(1 / 180 / len(some))
    assert torch.equal(moved.x, fsq.apply(state, x, random.key(5)).x)
    assert not torch.equal(moved.x, fsq.apply(state, x, random.key(6)).x)


def test_noise_of_a_row_is_that_of_its_key_wherever_the_row_is():
    state = fsq.init(0, (5,) * 4, symmetric=True, noise_dropout=0.5)
    x, keys = drawn(6, 7, 4), random.fold(random.key(1), torch.arange(6))
    whole = fsq.apply(state, x, keys).x
    parts = [fsq.apply(state, x[i], keys[i]).x for i in (slice(0, 4), slice(4, 6))]
    assert torch.equal(whole, torch.cat(parts))


def test_gradient_is_that_of_the_bound():
    """A unit of output is L // 2 levels (plain) or (L - 1) / 2 (symmetric); a clamped scalar has no gradient."""
    x = torch.tensor([[-2.0, -0.3, 0.2, 3.0]])
    slope = lambda state: grad(lambda x: fsq.apply(state, x).x.sum())(x)
    hard = fsq.init(0, (5,) * 4, symmetric=True, hard_clamp=True)
    torch.testing.assert_close(slope(hard), torch.tensor([[0.0, 1.0, 1.0, 0.0]]))
    soft = fsq.init(0, (5,) * 4, symmetric=True)
    torch.testing.assert_close(slope(soft), 1 - x.tanh().square())
    plain = fsq.init(0, (5,) * 4)
    torch.testing.assert_close(slope(plain), 1.001 * (1 - x.tanh().square()))
    curve = grad(lambda x: grad(lambda x: fsq.apply(soft, x).x.sum())(x).sum())(x)
    torch.testing.assert_close(curve, -2 * x.tanh() * (1 - x.tanh().square()))


def test_a_fixed_rotation_is_orthogonal_and_of_its_key():
    a, b, again = (fsq.init(key, EVEN, rotation=True).rotation for key in (0, 1, random.key(0)))
    assert a is not None and b is not None and again is not None
    torch.testing.assert_close(a @ a.T, torch.eye(4))
    assert torch.equal(a, again) and not torch.allclose(a, b)


def test_rotations_are_uniform_among_all():
    """Each entry has mean 0 and mean square 1/d, which plain QR, with diagonals of one sign, would fail."""
    turns = torch.stack([projection_layers.orthogonal(random.key(seed), 3) for seed in range(400)]).double()
    assert turns.mean(0).abs().max() < 5 * math.sqrt(1 / 3 / 400)
    assert (turns.square().mean(0) - 1 / 3).abs().max() < 5 * math.sqrt((1 / 5 - 1 / 9) / 400)


WRONG = {
    "no levels": (dict(levels=()), r"levels are \(\); wanted one number a scalar"),
    "one level": (dict(levels=(5, 1)), r"levels are \(5, 1\); .* from 2 to 1000"),
    "too many": (dict(levels=(1001,)), r"levels are \(1001,\); .* from 2 to 1000"),
    "too many codes": (dict(levels=(1000,) * 7), r"make 2\^70 codes; use codebooks"),
    "two, plain": (dict(levels=(5, 2)), r"have a 2, .* use symmetric=True"),
    "noise, plain": (dict(noise_dropout=0.5), "noise_dropout moves codes .* use symmetric=True"),
    "no probability": (dict(noise_dropout=1.5, symmetric=True), "noise_dropout is 1.5; wanted a probability"),
    "no codebooks": (dict(num_codebooks=0), "num_codebooks 0; wanted at least 1"),
    "no dim": (dict(dim=0), "dim is 0 .* wanted at least 1"),
    "a bias of nothing": (dict(bias=True), "options of a projection, but dim is that of the scalars, 4"),
}


@pytest.mark.parametrize("options, message", WRONG.values(), ids=WRONG)
def test_contradictions_are_refused(options, message):
    with pytest.raises(ValueError, match="fsq.init: .*" + message):
        fsq.init(0, **{"levels": LEVELS, **options})
