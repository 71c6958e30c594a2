"""Stochastic rounding: unbiased, to neighbours only, the same bits in every way to compute it."""

import pytest
import torch
from torch.func import vmap

from fquant import jit, optim, random, tree
from fquant.optim.stochastic_rounding import round_stochastically
from tests.helpers.arrays import named, randn
from tests.helpers.optim.runs import ours

KEY = random.key(3)
halves = named("dtype", [torch.bfloat16, torch.float16])


@halves
@pytest.mark.parametrize("value", [1.0 + 2**-9 + 2**-12, -0.3371, 3e-6, 60001.0])
def test_the_mean_is_the_number_and_only_neighbours_occur(value, dtype):
    x = torch.full((100_000,), value)
    got = round_stochastically(x, dtype, KEY)
    near = torch.tensor(value).to(dtype)
    grid = torch.stack([(near.view(torch.int16) + i).view(dtype) for i in (-1, 0, 1)]).float()
    found = got.unique().float()
    gap = found.max() - found.min()
    assert len(found) == 2 and all(x in grid for x in found) and found.min() < value < found.max()
    assert abs(got.double().mean() - x[0].double()) < 4 * 0.5 * gap / 100_000**0.5


@halves
def test_what_has_no_neighbours_is_kept(dtype):
    x = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), -float("inf"), float("nan")])
    assert torch.equal(round_stochastically(x, dtype, KEY).view(torch.int16)[:6], x.to(dtype).view(torch.int16)[:6])
    assert round_stochastically(x, dtype, KEY)[6].isnan()
    assert round_stochastically(torch.full((99,), 65519.0), torch.float16, KEY).isfinite().all()
    wide = randn(9)
    assert torch.equal(round_stochastically(wide, torch.float32, KEY), wide)


@halves
def test_the_same_bits_in_a_slice_and_captured(dtype, device):
    x, key = randn(10, 7).to(device), KEY.to(device)
    want = round_stochastically(x, dtype, key)
    assert torch.equal(round_stochastically(x[3:], dtype, key, 21), want[3:])
    captured = jit(lambda x, key: round_stochastically(x, dtype, key))
    assert torch.equal(captured(x, key), want) and torch.equal(captured(x, key), want)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="vmap of torch 2.11 has no rule for views of other dtypes")
@halves
def test_the_same_bits_under_vmap(dtype, device):
    x, key = randn(10, 7).to(device), KEY.to(device)
    want = round_stochastically(x, dtype, key)
    assert torch.equal(vmap(lambda x: round_stochastically(x, dtype, key))(torch.stack([x + 1, x]))[1], want)
    both = vmap(lambda x, key: round_stochastically(x, dtype, key))(torch.stack([x, x]), torch.stack([key + 1, key]))
    assert torch.equal(both[1], want) and not torch.equal(both[0], want)


def test_leaves_draw_by_their_paths_and_slices_what_the_whole_draws():
    params = {"a": randn(8, 4).bfloat16(), "b": randn(8, 4).bfloat16(), "c": randn(3)}
    updates = tree.map(lambda p: torch.full_like(p, 1e-3, dtype=torch.float32), params)
    whole = optim.apply_updates(params, updates, KEY)
    rows = lambda tree_: {name: t[2:] for name, t in tree_.items()}
    part = optim.apply_updates(rows(params), rows(updates), KEY, {"a": 8, "b": 8})
    assert torch.equal(part["a"], whole["a"][2:]) and torch.equal(part["b"], whole["b"][2:])
    assert torch.equal(whole["c"], params["c"] + updates["c"])
    alone = optim.apply_updates({"b": params["a"]}, {"b": updates["a"]}, KEY)
    assert not torch.equal(alone["b"], whole["a"])
    with pytest.raises(ValueError, match="start: got 'd', which is no path of the parameters"):
        optim.apply_updates(params, updates, KEY, {"d": 1})


def test_small_updates_of_bf16_parameters_are_not_lost():
    """A gradient of one sign moves each parameter by a rate a step, a fiftieth of a bf16 step in the last place."""
    params = {"w": torch.full((40, 100), 0.1).bfloat16()}
    gradients = [{"w": torch.ones(40, 100)}] * 50
    opt = optim.adamw(1e-5, weight_decay=0.0, moments=optim.DYNAMIC8)
    moved = lambda key: (ours(opt, params, gradients, key)[0]["w"].double() - params["w"].double()).mean().item()
    assert moved(None) == 0.0 and abs(moved(KEY) + 50 * 1e-5) < 0.1 * 50 * 1e-5
