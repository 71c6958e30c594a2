"""Tests of fquant.random against published vectors, a scalar Threefry, and moments of the distributions."""

import math

import numpy as np
import pytest
import torch
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fquant import random
from fquant.kernels.reference.random_bits import MASK, threefry

KEYS = random.fold(random.key(7), torch.arange(5))  # [b]
P = torch.tensor(0.5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_known_answers_of_random123(counter, key, want):
    assert threefry(key, counter) == want
    tensors = threefry(*[tuple(torch.tensor([w]) for w in pair) for pair in (key, counter)])
    assert tuple(x.item() for x in tensors) == want


def test_bits_are_the_words_of_threefry_at_flat_positions():
    seed = 0x123456789ABCDEF0
    got = random.bits(random.key(seed), (3, 3)).flatten().tolist()
    pairs = [threefry((seed & MASK, seed >> 32), (j, 0)) for j in range(5)]
    assert got == [word for pair in pairs for word in pair][:9]


DRAWS = {
    "bits": random.bits,
    "uniform": random.uniform,
    "uniform64": lambda k, shape: random.uniform(k, shape, torch.float64),
    "normal": random.normal,
    "normal64": lambda k, shape: random.normal(k, shape, torch.float64),
    "kaiming_uniform": lambda k, shape: random.kaiming_uniform(k, shape, 16),
    "bernoulli": lambda k, shape: random.bernoulli(k, 0.3, shape),
    "dropout": lambda k, shape: random.dropout(torch.ones(shape), 0.3, k),
}
draws = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


@draws
def test_keys_that_lead_the_shape_equal_vmap_and_equal_a_loop(draw):
    together = draw(KEYS, (5, 3, 7))
    assert torch.equal(together, vmap(lambda k: draw(k, (3, 7)))(KEYS))
    assert torch.equal(together, torch.stack([draw(k, (3, 7)) for k in KEYS]))
    assert torch.equal(together[[4, 1]], draw(KEYS[[4, 1]], (2, 3, 7)))
    assert not torch.equal(together[0], together[1])


@draws
def test_values_do_not_depend_on_how_long_the_first_axis_is(draw):
    assert torch.equal(draw(KEYS[0], (9, 5))[:4], draw(KEYS[0], (4, 5)))


@draws
def test_a_scalar_an_empty_and_an_odd_shape(draw):
    assert draw(KEYS[0], ()).shape == ()
    assert draw(KEYS, (5,)).shape == (5,)
    assert draw(KEYS[0], (0, 3)).shape == (0, 3)
    assert draw(KEYS[:0], (0, 3)).shape == (0, 3)
    assert draw(KEYS[0], (7,)).shape == (7,)


@draws
def test_traced_on_fake_tensors_and_compiled_equal_eager(draw):
    def f(k):
        return draw(k, (5, 3, 2))

    other = random.fold(KEYS, 1)
    assert torch.equal(make_fx(f, tracing_mode="fake")(KEYS)(other), f(other))
    assert torch.equal(torch.compile(f, backend="aot_eager", fullgraph=True)(other), f(other))


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    a = random.normal(KEYS[0], (4,))
    random.permutation(KEYS[0], 9)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(a, random.normal(KEYS[0], (4,)))


def test_fold_separates_numbers_names_orders_and_what_is_drawn():
    k = random.key(0)
    seen = [k, random.fold(k, 0), random.fold(k, 1), random.fold(k, -1), random.fold(k, 2**40), random.fold(k, "a")]
    seen += [random.fold(k, "b"), random.fold(random.fold(k, 0), 1), random.fold(random.fold(k, 1), 0), random.key(1)]
    assert len({int(s) for s in seen}) == len(seen)
    drawn = random.bits(k, (64, 2))
    assert not set(((drawn[:, 0] << 32) | drawn[:, 1]).tolist()) & {int(random.fold(k, i)) for i in range(64)}


def test_a_key_is_its_own():
    assert random.key(KEYS) is KEYS


def test_fold_is_stable_over_processes_and_versions():
    assert int(random.fold(random.key(0), "dropout")) == -5608461417320119230
    assert int(random.fold(random.key(-1), 3)) == -4428504869939440015


def test_names_are_hashed_by_fnv_1a():
    """Compare with the vectors of Fowler, Noll and Vo, its authors."""
    for name, wanted in {"": 0xCBF29CE484222325, "a": 0xAF63DC4C8601EC8C, "foobar": 0x85944171F73967E8}.items():
        assert random._hash(name) % 2**64 == wanted


def test_fold_broadcasts_and_takes_tensors_like_numbers():
    grid = random.fold(KEYS[:, None], torch.arange(3))
    assert grid.shape == (5, 3)
    assert all(grid[i, j] == random.fold(KEYS[i], j) for i in range(5) for j in range(3))
    assert torch.equal(vmap(random.fold, (0, None))(KEYS, "x"), random.fold(KEYS, "x"))
    assert torch.equal(vmap(random.fold)(KEYS, torch.arange(5)), random.fold(KEYS, torch.arange(5)))


NUM = 200_000
SIGMA = 1 / math.sqrt(NUM)


def test_words_are_uniform_in_every_bit_and_uncorrelated():
    words = random.bits(random.key(3), (NUM,))
    assert words.min() >= 0 and words.max() < 2**32
    ones = ((words[:, None] >> torch.arange(32)) & 1).double().mean(0)
    assert (ones - 0.5).abs().max() < 5 * 0.5 * SIGMA
    counts = torch.bincount(words >> 24, minlength=256).double()
    chi2 = ((counts - NUM / 256) ** 2 / (NUM / 256)).sum()
    assert abs(chi2 - 255) < 5 * math.sqrt(2 * 255)
    u = words.double() / 2**32 - 0.5
    neighbour = random.bits(random.key(4), (NUM,)).double() / 2**32 - 0.5
    for a, b in [(u[:-1], u[1:]), (u[:-2], u[2:]), (u, neighbour)]:
        assert abs((a * b).mean() * 12) < 5 * SIGMA


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_uniform_lies_below_one_and_has_its_moments(dtype):
    u = random.uniform(random.key(1), (NUM,), dtype)
    assert u.dtype == dtype and u.min() >= 0 and u.max() < 1
    step = torch.finfo(dtype).eps / 2
    assert torch.equal(u.double() / step, (u.double() / step).round())  # on the grid, so never rounded up to one
    assert abs(u.double().mean() + step / 2 - 0.5) < 5 * SIGMA / math.sqrt(12)
    assert abs(u.double().var() - 1 / 12) < 5 * SIGMA * math.sqrt(1 / 180)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_normal_has_its_moments_and_its_tails(dtype):
    z = random.normal(random.key(2), (NUM,), dtype)
    assert z.dtype == dtype
    z = z.double()
    loose = 2e-3 if dtype == torch.bfloat16 else 0.0
    assert abs(z.mean()) < 5 * SIGMA + loose
    assert abs(z.var() - 1) < 5 * SIGMA * math.sqrt(2) + loose
    assert abs((z**4).mean() - 3) < 5 * SIGMA * math.sqrt(96) + 6 * loose
    assert abs((z[::2] * z[1::2]).mean()) < 5 * math.sqrt(2) * SIGMA  # the cosine against the sine of a pair
    for edge in (-2.0, -0.5, 0.0, 1.0, 3.0):
        below = 0.5 * (1 + math.erf(edge / math.sqrt(2)))
        assert abs((z < edge).double().mean() - below) < 5 * SIGMA * math.sqrt(below * (1 - below)) + 2 * loose


def test_kaiming_uniform_has_the_bound_of_torch():
    w = random.kaiming_uniform(random.key(5), (400, 300), fan_in=300)
    peer = torch.nn.init.kaiming_uniform_(torch.empty(400, 300), a=math.sqrt(5))
    assert w.abs().max() <= 300**-0.5
    assert abs(w.abs().max() - peer.abs().max()) < 1e-5
    assert abs(w.std() - peer.std()) < 2e-4 and abs(w.mean()) < 5 * peer.std() / math.sqrt(w.numel())


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_bernoulli_is_true_as_often_as_asked(p):
    mask = random.bernoulli(random.key(6), p, (NUM,))
    assert mask.dtype == torch.bool
    assert abs(mask.double().mean() - p) <= 5 * SIGMA * math.sqrt(p * (1 - p))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_scales_what_it_keeps_and_its_gradient_is_the_mask(dtype):
    x = torch.full((5, 40, 30), 2.0, dtype=dtype)
    y = random.dropout(x, 0.2, KEYS)
    assert y.dtype == dtype
    assert set(y.unique().tolist()) == {0.0, (x[0, 0, 0] * (1 / 0.8)).item()}
    assert abs((y == 0).double().mean() - 0.2) < 5 * math.sqrt(0.16 / x.numel())
    g = grad(lambda x: random.dropout(x, 0.2, KEYS).float().sum())(x)
    assert torch.equal(g == 0, y == 0) and torch.allclose(g.float() * 2, y.float())
    each = vmap(grad(lambda x, k: random.dropout(x, 0.2, k).float().sum()))(x, KEYS)
    assert torch.equal(each, g)
    assert random.dropout(x, 0.0, KEYS) is x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_dropout_of_a_tensor_has_the_bits_of_numbers(dtype):
    rates, x = [0.0, 0.1, 0.5, 0.3, 0.999], random.normal(random.fold(KEYS, 1), (5, 40, 30), dtype)
    got = random.dropout(x, torch.tensor(rates, dtype=torch.float64), KEYS)
    assert torch.equal(got, torch.stack([random.dropout(*one) for one in zip(x, rates, KEYS, strict=True)]))
    with pytest.raises(ValueError, match=r"p: got torch.float32 \(5,\), wanted float64 \(5,\), one for each key"):
        random.dropout(x, torch.tensor(rates, dtype=torch.float32), KEYS)


def test_dropout_zeroes_what_is_not_finite_where_it_drops():
    y = random.dropout(torch.full((1000,), torch.inf), 0.5, KEYS[0])
    assert set(y.tolist()) == {0.0, torch.inf}


def test_permutation_is_one_and_favours_no_place():
    orders = random.permutation(random.fold(random.key(8), torch.arange(6000)), 5)  # [6000 5]
    assert torch.equal(orders.sort(-1).values, torch.arange(5).expand(6000, 5))
    counts = torch.nn.functional.one_hot(orders, 5).double().mean(0)
    assert (counts - 0.2).abs().max() < 5 * math.sqrt(0.16 / 6000)
    four = random.fold(random.key(8), torch.arange(4))
    assert torch.equal(orders[:4], vmap(lambda k: random.permutation(k, 5))(four))
    f = lambda k: random.permutation(k, 11)
    assert torch.equal(make_fx(f, tracing_mode="fake")(KEYS[0])(KEYS[1]), f(KEYS[1]))
    assert torch.equal(torch.compile(f, backend="aot_eager", fullgraph=True)(KEYS[1]), f(KEYS[1]))
    assert random.permutation(KEYS[0], 0).shape == (0,)


BAD = {
    "a float key": (lambda: random.bits(torch.zeros(()), (2,)), TypeError, r"key: got torch\.float32, wanted an int64"),
    "an int as key": (lambda: random.bits(3, (2,)), TypeError, r"key: got int, wanted .*random\.key\(seed\)"),
    "a key beside": (lambda: random.bits(KEYS, (4, 5)), ValueError, r"key: shape \(5,\) does not lead \(4, 5\)"),
    "a key too deep": (lambda: random.normal(KEYS, ()), ValueError, r"key: shape \(5,\) does not lead \(\)"),
    "a float seed": (lambda: random.key(1.5), TypeError, "seed: got float, wanted an int"),
    "a float key as seed": (
        lambda: random.key(torch.zeros(())),
        TypeError,
        r"key: got torch\.float32, wanted an int64",
    ),
    "a wide seed": (lambda: random.key(2**63), ValueError, "seed: got 9223372036854775808, wanted an integer of 64"),
    "float data": (lambda: random.fold(KEYS, 0.5), TypeError, "data: got float, wanted an int, a str or an int64"),
    "int32 data": (lambda: random.fold(KEYS, KEYS.int()), TypeError, r"data: got torch\.int32, wanted int64"),
    "fan in": (lambda: random.kaiming_uniform(KEYS, (5, 2), 0), ValueError, "fan_in: got 0, wanted at least 1"),
    "p above": (lambda: random.bernoulli(KEYS, 1.5, (5,)), ValueError, r"p: got 1.5, wanted .* \[0, 1\]"),
    "dropping all": (lambda: random.dropout(torch.ones(5), 1.0, KEYS), ValueError, r"p: got 1.0, wanted .* \[0, 1\)"),
    "p nan": (lambda: random.dropout(torch.ones(5), math.nan, KEYS), ValueError, "p: got nan"),
    "n": (lambda: random.permutation(KEYS, -1), ValueError, "n: got -1, wanted at least 0"),
    "n of halves": (lambda: random.permutation(KEYS, 2.5), TypeError, "n: got 2.5, wanted an int"),
    "fan in a str": (lambda: random.kaiming_uniform(KEYS, (5, 2), "a"), TypeError, "fan_in: got 'a', wanted an int"),
    "p a str": (lambda: random.bernoulli(KEYS, "a", (5,)), TypeError, "p: got 'a', wanted a probability"),
    "dropout of a str": (lambda: random.dropout(torch.ones(5), "a", KEYS), TypeError, "p: got 'a', wanted a prob"),
    "shape": (lambda: random.normal(KEYS, 5), TypeError, r"shape: got 5, wanted a tuple of ints, such as \(2, 3\)"),
    "shape of bits": (lambda: random.bits(KEYS, "ab"), TypeError, "shape: got 'ab', wanted a tuple of ints"),
    "size": (lambda: random.uniform(KEYS, (5, 2.0)), TypeError, r"shape: got \(5, 2.0\), wanted a tuple of ints"),
    "negative": (lambda: random.normal(KEYS, (5, -1)), ValueError, r"shape: got \(5, -1\), wanted sizes of at least 0"),
    "integers": (lambda: random.normal(KEYS, (5,), torch.int64), TypeError, "dtype: got torch.int64, wanted a float"),
    "8 bits": (lambda: random.normal(KEYS, (5,), torch.float8_e5m2), TypeError, "dtype: got .*, wanted a float dtype"),
    "no key": (lambda: random.permutation(3, 3), TypeError, "key: got int, wanted an int64 tensor"),
    "no key of p": (lambda: random.dropout(torch.ones(()), P, None), TypeError, "key: got NoneType, wanted an int64"),
    "no dtype": (lambda: random.uniform(KEYS, (5,), "f32"), TypeError, "dtype: got 'f32', wanted a float dtype"),
    "bool of numpy": (lambda: random.key(np.bool_(True)), TypeError, "seed: got bool"),
}


def test_integers_of_numpy_are_integers():
    assert torch.equal(random.key(np.int64(3)), random.key(3)) and torch.equal(random.key(np.uint8(3)), random.key(3))
    key = random.key(3)
    assert torch.equal(random.fold(key, np.int32(5)), random.fold(key, 5))
    assert torch.equal(random.normal(key, (np.int64(4),)), random.normal(key, (4,)))
    assert torch.equal(random.permutation(key, np.int64(4)), random.permutation(key, 4))


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_says_what_is_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()
