"""Conversion from vector-quantize-pytorch: its parameters as ours, and gradients of both in one structure."""

from dataclasses import replace

import torch
from torch.func import grad

from fquant import tree
from fquant.vq.scalar import projection_layers


def drawn(*shape, seed=0, size=1.0):
    return size * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def projections(peer, of=lambda t: t.detach().clone()):
    """Return ``of`` the projections of the peer's module, by default clones; None if it has none."""
    if isinstance(peer.project_out, torch.nn.Identity):
        return None
    return projection_layers.Projections(_dense(peer.project_in, of), _dense(peer.project_out, of))


def _dense(layer, of):
    bias = getattr(layer, "bias", None)
    weight = of(layer.weight)
    return projection_layers.Dense(
        weight if isinstance(layer, torch.nn.Linear) else weight.T,  # the peer's cosine projection is [in out]
        None if bias is None else of(bias),
    )


def like(state, peer):
    """Replace the projections and the rotation of ``state`` by those of the peer's module."""
    turn = getattr(peer, "orthogonal_rot", None)
    assert (state.rotation is None) == (turn is None)
    assert tree.structure(state.params) == tree.structure(projections(peer))
    return replace(state, params=projections(peer), rotation=turn)


def theirs(peer, loss, x):
    """Return the gradients of ``loss(peer, x)`` for x and the projections."""
    peer.zero_grad()
    x = x.clone().requires_grad_()
    loss(peer, x).backward()
    return x.grad, projections(peer, lambda t: t.grad)


def ours(state, loss, x):
    """Return the gradients of ``loss(state, x)`` for x and the projections."""
    if state.params is None:
        return grad(lambda x: loss(state, x))(x), None
    return grad(lambda x, params: loss(replace(state, params=params), x), (0, 1))(x, state.params)


def assert_close(got, wanted, tolerance=1e-5):
    """Check that two trees have one structure and close leaves."""
    assert tree.structure(got) == tree.structure(wanted)
    for (path, a), b in zip(tree.items(got), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, p=path: f"{p}: {m}")
