"""Gradient descent beside vector-quantize-pytorch: the states are equal after each step.

The whole state is differentiated and descends: a constant has a gradient of zeros, and stays.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.func import grad

from fquant import tree
from fquant.vq import mean
from fquant.vq.codebook import implicit, simvq
from fquant.vq.composite import residual
from fquant.vq.scalar import fsp, fsq, latent, lfq, projection_layers
from tests.helpers.vq import fsp as of_fsp
from tests.helpers.vq import fsq as of_fsq
from tests.helpers.vq import latent as of_latent
from tests.helpers.vq import lfq as of_lfq
from tests.helpers.vq import qinco as of_beam
from tests.helpers.vq import residual_books as of_books
from tests.helpers.vq import simvq as of_simvq
from tests.helpers.vq.peers import assert_close, drawn, projections

with warnings.catch_warnings(action="ignore"):
    import vector_quantize_pytorch as peer

STEPS, RATE = 4, 0.2


class Case(NamedTuple):
    """A state and its peer, the function of each from rows to (out, codes, loss), and its trainable part."""

    state: Any
    them: Any
    verbs: Any
    ours: Callable[[Any, torch.Tensor], tuple]
    theirs: Callable[[Any, torch.Tensor], tuple]
    part: Callable[[Any], Any]
    taken: Callable[[Any], Any]


def scalar(verbs, pair, ours, theirs, part=lambda state: state.params):
    them, state = pair
    return Case(state, them, verbs, ours, theirs, part, lambda p: projections(p, lambda t: t))


def fsq_case():
    return scalar(
        fsq, of_fsq.both(of_fsq.LEVELS, {"dim": 7}),
        lambda s, x: (*(got := fsq.apply(s, x))[:2], 0.0, got.stats),
        lambda p, x: (*p(x), 0.0),
    )  # fmt: skip


def fsp_case():
    def ours(s, x):
        got = fsp.apply(s, x)
        return got.x, got.codes, 0.1 * mean(got.losses["moments"]), got.stats

    def theirs(p, x):
        out, codes, loss, _ = p(x)
        return out, codes, 0.1 * loss

    return scalar(fsp, of_fsp.both({"dim": 7, "moments": "kurt"}), ours, theirs)


def lfq_case(name):
    def ours(s, x):
        got = lfq.apply(s, x, inv_temperature=of_lfq.WARM)
        return got.x, got.codes, mean(got.losses["entropy"]) + 2.0 * mean(got.losses["commitment"]), got.stats

    def theirs(p, x):
        out = p(x, inv_temperature=of_lfq.WARM)
        return out[0], out[1], out[2]

    return scalar(lfq, of_lfq.both(*of_lfq.CASES[name]), ours, theirs)


def latent_case():
    """Compare without the losses, which train nothing in the peer (``test_latent``)."""

    def theirs(p, x):
        out, codes, _ = p(x.mT)
        return out.mT, codes, 0.0

    ours = lambda s, x: (*(got := latent.apply(s, x))[:2], 0.0, got.stats)
    return scalar(latent, of_latent.both({"dim": 7}), ours, theirs, lambda s: s.params.projections)


def simvq_loss(got):
    return (mean(got.losses["codebook"]) + 0.25 * mean(got.losses["commitment"])).sum()


def simvq_case(**options):
    state, them = of_simvq.pair({}, **options)

    def taken(them):
        linear = [layer for layer in them.code_transform if isinstance(layer, torch.nn.Linear)]
        return [projection_layers.Dense(one.weight, one.bias) for one in linear]

    ours = lambda s, x: ((got := simvq.apply(s, x)).x, got.codes, simvq_loss(got), got.stats)
    return Case(state, them, simvq, ours, lambda p, x: p(x), lambda s: s.params, taken)


def residual_simvq_case():
    state = residual.init_simvq(1, 20, 6, 3)
    them: Any = peer.ResidualSimVQ(dim=6, num_quantizers=3, codebook_size=20)
    for mine, yours in zip(state.layers, them.layers, strict=True):
        yours.frozen_codebook = mine.frozen.clone()
        yours.code_transform.weight.data.copy_(mine.params[0].weight)

    ours = lambda s, x: ((got := residual.apply(s, x)).x, got.codes, simvq_loss(got), got.stats)
    theirs = lambda p, x: (lambda out, codes, losses: (out, codes, losses.sum()))(*p(x))
    part = lambda s: [layer.params[0].weight for layer in s.layers]
    return Case(
        state, them, residual, ours, theirs, part, lambda p: [layer.code_transform.weight for layer in p.layers]
    )


def of_residual(state, them, part, taken):
    def ours(s, x):
        got = residual.apply(s, x)
        return got.x, got.codes, mean(got.losses["commitment"]).sum(), got.stats

    theirs = lambda p, x: (lambda out, codes, losses: (out, codes, losses.sum()))(*p(x))
    return Case(state, them, residual, ours, theirs, part, taken)


def implicit_case():
    state, them, taken = of_beam.qinco()
    parts = lambda layers: [
        (layer.book.codes, layer.net) if isinstance(layer, implicit.Implicit) else layer.codes for layer in layers
    ]
    return of_residual(state, them, lambda s: parts(s.layers), lambda p: parts(taken(lambda t: t)))


def learnable_case(**options):
    state, them = of_books.pair(learnable=True, **options)
    embeds = lambda p: [layer._codebook.embed[0] for layer in p.layers]
    ends = lambda p: [] if state.params is None else [projections(p, lambda t: t)]
    part = lambda s: [*(book.codes for book in s.layers), *([] if s.params is None else [s.params])]
    return of_residual(state, them, part, lambda p: [*embeds(p), *ends(p)])


CASES = {
    "fsq": fsq_case,
    "fsp": fsp_case,
    "lfq": lambda: lfq_case("projected"),
    "lfq, cosine": lambda: lfq_case("cosine, scaled"),
    "latent": latent_case,
    "simvq": simvq_case,
    "simvq, hidden": lambda: simvq_case(hidden=(9, 7)),
    "residual simvq": residual_simvq_case,
    "implicit": implicit_case,
    "learnable": learnable_case,
    "learnable, projected": lambda: learnable_case(dim=9),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_the_peers(name):
    case = CASES[name]()
    state, descent = case.state, torch.optim.SGD(case.them.parameters(), RATE)
    start = tree.map(torch.clone, state)
    case.them.train()
    for i in range(STEPS):
        x, target = (drawn(3, 20, width(case), seed=seed) for seed in (50 + i, 100 + i))
        descent.zero_grad()
        out, codes, loss = case.theirs(case.them, x.clone().requires_grad_())  # the peer treats constants differently
        ((out - target).square().mean() + loss).backward()
        descent.step()

        def ours(state, x=x, target=target):
            out, codes, loss, stats = case.ours(state, x)
            return (out - target).square().mean() + loss, (out, codes, stats)

        slope, (mine, found, stats) = grad(ours, has_aux=True)(state)
        assert torch.equal(found, codes.long()), i
        assert_close(mine, out.detach())
        state = case.verbs.update(tree.map(lambda t, g: t - RATE * g, state, slope), stats)
        assert_close(case.part(state), tree.map(torch.detach, case.taken(case.them)))
    moved = zip(tree.leaves(case.part(state)), tree.leaves(case.part(start)), strict=True)
    assert all(not torch.equal(*both) for both in moved)
    before = dict(tree.items(start))
    still = [path for path in before if "frozen" in path or "values" in path]
    assert still or name not in ("simvq", "residual simvq", "latent")
    assert all(torch.equal(t, before[path]) for path, t in tree.items(state) if path in still)


def width(case):
    return getattr(case.state, "dim", None) or case.state.params[-1].weight.shape[0]
