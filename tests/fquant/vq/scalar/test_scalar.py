"""Properties of all scalar quantisers: every verb under every transform, files, dtypes and arbitrary input."""

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.func import grad, jvp, vmap

from fquant import func, jit, random, tree
from fquant.io import safetensors
from fquant.vq import random_projection
from fquant.vq.codebook.rows import direction
from fquant.vq.scalar import fsq, latent, lfq
from tests.helpers.vq.peers import assert_close, drawn
from tests.helpers.vq.scalar_cases import CASES, width

KEY = random.key(5)
every = pytest.mark.parametrize("name", CASES)
DIFFERENTIABLE = [name for name in CASES if name != "projection"]


def rows(name, *shape, seed=0, dtype=torch.float32):
    return 0.6 * drawn(*shape, width(CASES[name][1]), seed=seed).to(dtype)


def call(name):
    """Return ``apply`` at a temperature at which entropies have a gradient."""
    verbs, state, _ = CASES[name]
    warm = isinstance(state, lfq.LFQ) or name == "residual lfq"
    return (lambda *a, **k: verbs.apply(*a, **k, inv_temperature=0.7)) if warm else verbs.apply


def scalar(name):
    """Return a scalar function of ``apply``: a sum of its output with distinct weights, and all losses."""

    def f(state, x, key=None):
        got = call(name)(state, x, key)
        weight = torch.linspace(0.5, 1.5, got.x.numel(), dtype=got.x.dtype).reshape(got.x.shape)
        return (got.x * weight).sum() + sum(loss.sum.sum() for loss in got.losses.values())

    return f


@every
@given(data=st.data())
def test_any_row_has_a_code_that_says_what_it_becomes(name, data):
    verbs, state, size = CASES[name]
    n, d = data.draw(st.integers(0, 4)), width(state)
    numbers = st.floats(width=32) | st.floats(-2, 2, width=32)
    x = torch.tensor(data.draw(st.lists(numbers, min_size=n * d, max_size=n * d))).reshape(n, d)
    got = call(name)(state, x)
    codes = verbs.encode(state, x)
    assert torch.equal(codes, got.codes) and codes.dtype is torch.int64
    assert ((codes >= -1) & (codes < size)).all()
    assert torch.equal(verbs.decode(state, codes), got.x) and got.x.isfinite().all()
    bad = ~x.isfinite().all(-1)
    if (x[~bad].abs() < 1e8).all():  # float32 cannot represent the fourth power of larger numbers
        assert all(t.isfinite().all() for t in tree.leaves(got.losses))
    assert got.x[bad].eq(0).all() and codes[bad].eq(-1).all()
    stats = [int(n) for n in tree.leaves(got.stats)]
    assert sum(stats) == n and stats[1] == 0 and stats[2] >= int(bad.sum())
    assert verbs.update(state, got.stats) is state


@pytest.mark.parametrize("name", ["lfq", "latent", "residual lfq"])
def test_a_code_is_that_of_what_it_decodes_to(name):
    verbs, state, size = CASES[name]
    codes = torch.arange(size)
    if name == "residual lfq":
        codes = torch.stack([codes, codes.flip(0), codes.roll(5)], -1)
    assert torch.equal(verbs.encode(state, verbs.decode(state, codes)), codes)


@pytest.mark.parametrize(
    "verbs, state",
    [
        (fsq, fsq.init(0, (5, 4, 3), num_codebooks=3, rotation=True)),
        (lfq, lfq.init(0, 3, num_codebooks=3)),
        (latent, latent.init(0, (5, 4, 3), num_codebooks=3)),
        (random_projection, random_projection.init(0, 6, 20, 3, num_codebooks=3)),
    ],
    ids=["fsq", "lfq", "latent", "projection"],
)
def test_a_codebook_without_a_code_adds_nothing(verbs, state):
    whole, some = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, -1, 3], [-1, -1, -1]])
    wanted = verbs.decode(state, whole).unflatten(-1, (3, 3)) * (some >= 0)[..., None]
    assert torch.equal(verbs.decode(state, some), wanted.flatten(-2))


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if "projected" in name or name == "residual fsq"])
def test_a_row_that_overflows_on_its_way_is_a_bad_one(name):
    """Its projection is inf - inf."""
    verbs, state, _ = CASES[name]
    state = tree.map_at(r".*project_in\.weight", lambda t: 4 * torch.ones_like(t), state)
    x = rows(name, 5)
    x[2, ::2], x[2, 1::2] = 3e38, -3e38
    got, wanted = call(name)(state, x), call(name)(state, x[[0, 1, 3, 4]])
    assert got.x[2].eq(0).all() and got.codes[2].eq(-1).all() and verbs.encode(state, x)[2].eq(-1).all()
    assert [int(n) for n in tree.leaves(got.stats)] == [4, 0, 1]
    assert_close(got.losses, wanted.losses)
    slope = grad(lambda p: scalar(name)(replace(state, params=p), x))(state.params)
    assert all(t.isfinite().all() for t in tree.leaves(slope))


@pytest.mark.parametrize(
    "verbs, state",
    [(fsq, fsq.init(0, (5,) * 4, rotation=True)), (lfq, lfq.init(0, 4, rotation=True, spherical=True))],
    ids=["fsq", "lfq"],
)
def test_a_row_that_overflows_when_it_is_turned_is_a_bad_one(verbs, state):
    x = torch.stack([3e38 * state.rotation[:, 0].sign(), torch.ones(4)])
    got = verbs.apply(state, x)
    assert got.codes[0] == -1 and got.codes[1] >= 0 and got.x[0].eq(0).all()
    assert [int(n) for n in tree.leaves(got.stats)] == [1, 0, 1]
    assert all(t.isfinite().all() for t in tree.leaves(got.losses))


@pytest.mark.parametrize("size", [1e-30, 1e-19, 1.0, 1e19, 1e30])
def test_a_direction_is_that_of_a_row_of_any_length(size):
    """So are its derivatives; zeros stay zeros."""
    x, v = drawn(20, 5).double(), drawn(20, 5, seed=1).double()
    x[0, 1:] = 0
    exact = lambda x: torch.nn.functional.normalize(x, dim=-1)
    assert_close(direction((size * x).float()), exact(x).float(), 1e-6)
    slope = lambda f, x: grad(lambda x: (f(x) * v).sum())(x)
    assert_close(slope(direction, size * x) * size, slope(exact, x), 1e-9)
    curve = lambda f: grad(lambda x: (slope(f, x) * v).sum())(x)
    assert_close(curve(direction), curve(exact), 1e-9)
    zeros = torch.zeros(2, 5)
    assert direction(zeros).eq(0).all() and grad(lambda x: direction(x).sum())(zeros).eq(1).all()


@every
def test_leading_dims_are_rows(name):
    verbs, state, _ = CASES[name]
    x = rows(name, 2, 3, 4)
    whole = verbs.apply(state, x)
    flat = verbs.apply(state, x.reshape(24, -1))
    assert_close((whole.x.flatten(0, 2), whole.codes.flatten(0, 2)), (flat.x, flat.codes), 1e-6)
    assert_close(whole.losses, flat.losses)
    one = verbs.apply(state, x[1, 2, 3], KEY)
    assert one.x.ndim == 1 and one.codes.shape == whole.codes.shape[3:]


@every
def test_examples_may_be_mapped(name):
    """vmap over rows, keys and states equals a loop."""
    _, state, _ = CASES[name]
    x, keys = rows(name, 3, 4), random.fold(KEY, torch.arange(3))
    f = call(name)
    assert_close(vmap(lambda x, k: f(state, x, k))(x, keys), stack([f(state, x[i], keys[i]) for i in range(3)]), 1e-6)
    states = [tree.map(lambda t, i=i: t * (1 + 0.1 * i), state) for i in range(3)]
    if tree.leaves(state):
        mapped = vmap(lambda s, x: f(s, x))(tree.map(lambda *t: torch.stack(t), *states), x)
        assert_close(mapped, stack([f(s, x[i]) for i, s in enumerate(states)]), 1e-6)
        verbs = CASES[name][0]
        decoded = vmap(lambda codes: verbs.decode(state, codes))(mapped.codes)
        assert_close(decoded, verbs.decode(state, mapped.codes), 1e-6)
    if name in DIFFERENTIABLE:
        slopes = vmap(grad(scalar(name), 1), (None, 0, 0))(state, x, keys)
        assert_close(slopes, stack([grad(scalar(name), 1)(state, x[i], keys[i]) for i in range(3)]), 1e-5)


def stack(trees):
    return tree.map(lambda *leaves: torch.stack(leaves), *trees)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_forward_and_reverse_agree_and_the_second_derivative_is_that_of_the_first(name):
    _, state, _ = CASES[name]
    x, v = rows(name, 7, dtype=torch.float64), rows(name, 7, seed=1, dtype=torch.float64)
    f = scalar(name)
    slope = grad(f, 1)
    got = jvp(lambda x: f(state, x, KEY), (x,), (v,))[1]
    torch.testing.assert_close(got, (slope(state, x, KEY) * v).sum(), rtol=1e-9, atol=1e-9)
    along = lambda x: (slope(state, x, KEY) * v).sum()
    twice = grad(along)(x)
    for w in (v, rows(name, 7, seed=2, dtype=torch.float64)):
        near = (along(x + 1e-5 * w) - along(x - 1e-5 * w)) / 2e-5
        torch.testing.assert_close((twice * w).sum(), near, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(jvp(along, (x,), (v,))[1], (twice * v).sum(), rtol=1e-9, atol=1e-9)


QUICK = ("fsq, noisy", "fsp, projected", "lfq, projected", "residual lfq", "binary")  # the rest adds little


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_captured_is_uncaptured_to_the_bit_on_any_rows(name):
    """A step is traced once, on finite rows, and replayed on others, some of them bad or masked."""
    _, state, _ = CASES[name]
    verbs = CASES[name][0]
    f = call(name)

    def step(params, state, x, key, mask):
        state = replace(state, params=params) if params is not None else state
        got = f(state, x, key, mask)
        return got.x.square().sum() + sum(loss.sum.sum() for loss in got.losses.values()), (got, verbs.encode(state, x))

    def both(params, state, x, key, mask):
        if params is None:
            return step(params, state, x, key, mask)
        return grad(step, has_aux=True)(params, state, x, key, mask)

    captured = jit(both)
    params = getattr(state, "params", None)
    for seed in range(3):
        x, key, mask = rows(name, 2, 9, seed=seed), random.key(seed), torch.ones(2, 9, dtype=torch.bool)
        if seed:
            x[0, seed, 0], x[1, 0] = math.nan, math.inf
            mask[1, 3 * seed :] = False
        got, wanted = captured(params, state, x, key, mask), both(params, state, x, key, mask)
        assert tree.structure(got) == tree.structure(wanted)
        for (path, a), b in zip(tree.items(got), tree.leaves(wanted), strict=True):
            assert torch.equal(a, b), path
    assert len(captured.traced) == 1


@every
def test_a_file_holds_a_state(name, tmp_path):
    verbs, state, _ = CASES[name]
    safetensors.save(tmp_path / "state", state)
    loaded = safetensors.load(tmp_path / "state")
    assert tree.structure(loaded) == tree.structure(state)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(loaded), tree.leaves(state), strict=True))
    x = rows(name, 5)
    assert torch.equal(verbs.encode(loaded, x), verbs.encode(state, x))


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if name != "binary" and CASES[name][1].params])
def test_params_are_floats_all_of_which_train(name):
    _, state, _ = CASES[name]
    slope = func.grad(lambda p, x: scalar(name)(replace(state, params=p), x))(state.params, rows(name, 20))
    assert tree.structure(slope) == tree.structure(state.params)
    for path, t in tree.items(slope):
        assert t.dtype is torch.float32 and t.ne(0).any(), path


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_what_comes_out_has_the_dtype_of_what_came_and_losses_at_least_float32(name, dtype):
    verbs, state, _ = CASES[name]
    x = rows(name, 30).to(dtype)
    got = call(name)(state, x, KEY)
    assert got.x.dtype is dtype
    wide = torch.promote_types(dtype, torch.float32)
    assert {t.dtype for t in tree.leaves(got.losses)} <= {wide}
    wanted = call(name)(state, x.to(wide), KEY)
    assert torch.equal(got.x, wanted.x.to(dtype)) and torch.equal(got.codes, wanted.codes)
    assert verbs.decode(state, got.codes, dtype).dtype is dtype


@every
def test_wrong_calls_are_refused(name):
    verbs, state, size = CASES[name]
    d, module = width(state), verbs.__name__.rpartition(".")[2]
    x = rows(name, 3)
    for verb in (verbs.encode, verbs.apply):
        label = f"{module}.{verb.__name__}: "
        with pytest.raises(ValueError, match=label + rf"x is \(3, {d + 1}\); wanted {d} in the last dim"):
            verb(state, torch.ones(3, d + 1))
        with pytest.raises(TypeError, match=label + "x is torch.int64; wanted floats"):
            verb(state, torch.ones(3, d, dtype=torch.int64))
    with pytest.raises(TypeError, match=f"{module}.apply: mask is torch.int64; wanted bool"):
        verbs.apply(state, x, mask=torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=rf"{module}.apply: mask is \(2,\) beside x \(3, {d}\); wanted one bool a row"):
        verbs.apply(state, x, mask=torch.ones(2, dtype=torch.bool))
    codes = verbs.encode(state, x)
    inner = "lfq|fsq" if module == "residual" else module
    for wrong in (size, -2):
        with pytest.raises(
            IndexError, match=rf"({inner}).decode: the code at \([\d, ]*\) is {wrong}; .* \[0, {size}\)"
        ):
            verbs.decode(state, codes.index_fill(0, torch.tensor([1]), wrong))
    with pytest.raises(TypeError, match=rf"({inner}).decode: codes are torch.float32; wanted a tensor of integers"):
        verbs.decode(state, codes.float())
    if codes.ndim == 2 and module != "residual":
        with pytest.raises(ValueError, match=r"codes are \(3, 3\); wanted 2 codebooks in the last dim"):
            verbs.decode(state, torch.zeros(3, 3, dtype=torch.int64))


@pytest.mark.slow
@every
def test_compiled_is_one_graph(name):
    _, state, _ = CASES[name]
    x, f = rows(name, 2, 9), call(name)
    torch._dynamo.reset()
    got = torch.compile(lambda x, key: f(state, x, key), backend="aot_eager", fullgraph=True)(x, KEY)
    assert_close(got, f(state, x, KEY), 1e-6)
