"""examples.vqvae.quantisers: every quantiser on offer trains."""

import typing
from dataclasses import replace

import pytest
import torch
from vector_quantize_pytorch import FSQ

from examples.vqvae import quantisers, train
from examples.vqvae.options import Options
from fquant import random, tree, vq
from fquant.vq.scalar import fsp, fsq, projection_layers
from tests.helpers import ranks
from tests.helpers.cases import slow_after
from tests.helpers.vq.peers import assert_close, drawn, projections

pytestmark = pytest.mark.xdist_group("ranks")
STEPS = 8
CASES = {  # layers, groups, codes a layer
    "vq": (1, 1, 8),
    "cosine": (1, 1, 8),
    "learnt": (1, 1, 8),
    "simvq": (1, 1, 8),
    "fsq": (1, 1, 8),
    "fsp": (1, 1, 8),
    "lfq": (1, 1, 8),
    "bsq": (1, 1, 8),
    "latent": (1, 1, 20),
    "implicit": (2, 1, 8),
    "vq, layers": (2, 1, 8),
    "learnt, layers": (2, 1, 8),
    "simvq, layers": (2, 1, 8),
    "fsq, layers": (2, 1, 8),
    "lfq, layers": (2, 1, 8),
    "vq, groups": (1, 2, 8),
    "lfq, groups": (2, 2, 8),
    "implicit, groups": (2, 2, 4),
}
QUICK = [case for case in CASES if "," not in case] + ["vq, layers", "vq, groups"]
cases = [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


def test_every_name_is_here():
    assert {name.partition(",")[0] for name in CASES} == set(typing.get_args(quantisers.Name))


def a_few_steps(options):
    """Return the state before and after some steps, and their measurements."""
    run, training = train.start(options)
    before = tree.map(torch.clone, (training.net, training.quantiser))  # because steps donate their arguments
    steps = []
    for _ in range(options.steps):
        training, step = train.take(run, training)
        steps.append(step)
    return before, (training.net, training.quantiser), steps


@pytest.mark.parametrize("case", slow_after(1, cases))
def test_it_trains(case):
    layers, groups, codes = CASES[case]
    name = case.partition(",")[0]
    options = Options(name, codes, layers, groups, dim=4, hidden=8, patch=8, steps=STEPS, batch=8, lr=1e-2)
    (((net, state), (net_after, state_after), steps),) = ranks.run(1, a_few_steps, options)
    losses = [step.loss for step in steps]
    assert sum(losses[-2:]) < sum(losses[:2])
    assert all(len(step.perplexity) == layers * groups for step in steps)
    for (path, a), b in zip(tree.items(net), tree.leaves(net_after), strict=True):
        assert not torch.equal(a, b), path
    made = quantisers.make(name, codes, layers, options.dim, random.key(0), groups)
    moved = {path for (path, a), b in zip(tree.items(state), tree.leaves(state_after), strict=True) if (a != b).any()}
    assert set(quantisers.trained_leaves(made, state)) <= moved
    fixed = {path for path in tree.paths(state) if path.endswith(("frozen", "rotation"))}
    assert not fixed & moved and (moved or name == "fsq")
    if made.learns:
        assert steps[0].perplexity[0] > 1  # because books start at the k-means of the first latents
        assert {path for path in tree.paths(state) if path.endswith("counts")} <= moved


def test_what_is_trained_is_put_back():
    for case, (layers, groups, codes) in CASES.items():
        made = quantisers.make(case.partition(",")[0], codes, layers, 4, random.key(0), groups)
        parts = quantisers.trained_leaves(made, made.state)
        changed = quantisers.replace_leaves(made.state, tree.map(lambda t: t + 1, parts))
        assert tree.structure(changed) == tree.structure(made.state)
        for (path, a), b in zip(tree.items(made.state), tree.leaves(changed), strict=True):
            assert torch.equal(b, a + 1 if path in parts else a), (case, path)
        assert bool(parts) == (case.partition(",")[0] not in ("vq", "cosine")), case


@pytest.mark.parametrize("num_codes", [27, 64, 512, 625, 1000, 4096])
def test_every_level_is_used_where_rows_are_spread(num_codes):
    """FSP uses all codes alike if rows follow its distribution. Codes equal the peer's."""
    chosen = quantisers.levels(num_codes)
    rows = torch.linspace(-4, 4, 401)[:, None].expand(-1, len(chosen))
    for verbs in (fsq, fsp):
        digits = projection_layers.digits_of(verbs.encode(verbs.init(0, chosen), rows), chosen)
        assert [len(each.unique()) for each in digits.unbind(-1)] == list(chosen), verbs.__name__
    u = random.uniform(random.key(num_codes), (100 * num_codes, len(chosen)), torch.float64)
    codes = fsp.encode(fsp.init(0, chosen), torch.atanh(2 * u - 1).clamp(-9, 9).float())
    assert vq.perplexity(torch.bincount(codes, minlength=num_codes).float()) > 0.97 * num_codes
    rows, peer = drawn(4000, 4), FSQ(list(chosen), dim=4)
    state = replace(fsq.init(0, chosen, 4), params=projections(peer))
    with torch.no_grad():
        assert torch.equal(fsq.encode(state, rows), peer(rows[None])[1][0].long())


def test_books_begin_at_what_the_layers_before_leave():
    rows, psum = drawn(300, 4), lambda t: t
    made = quantisers.make("vq", 5, 2, 4, random.key(0), 2)
    got = quantisers.books_at_kmeans(made.state, rows, random.key(1), (0, 300), psum)
    for i, group in enumerate(got.groups):
        left = rows[:, 2 * i : 2 * i + 2]
        for j, layer in enumerate(group.layers):
            key = random.fold(random.fold(random.key(1), i), j)
            wanted = vq.kmeans(made.state.groups[i].layers[j], left, key)
            assert_close(layer, wanted, 0.0)
            left = left - vq.decode(wanted, vq.encode(wanted, left))
    scalars = quantisers.make("fsq", 8, 1, 4, random.key(0)).state
    assert quantisers.books_at_kmeans(scalars, rows, random.key(1), (0, 300), psum) is scalars
