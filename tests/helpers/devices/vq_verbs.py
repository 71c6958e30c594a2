"""The verbs of quantisers of vectors, each with the arguments of one call."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fquant import random, vq
from tests.helpers.arrays import randn
from tests.helpers.vq.family import DIM, LEARN, STATES

Verb = tuple[Callable[..., Any], tuple[Any, ...]]
X, KEY = randn(3, 7, 64), random.key(5)
MASK = torch.arange(21).reshape(3, 7) % 5 > 0
LOSSES = ("commitment", "cross_entropy", "diversity", "orthogonal")
BOOKS: dict[str, dict[str, Any]] = {
    "euclidean": {}, "cosine": {"metric": "cosine"}, "learnable": {"learnable": True}, "affine": {"affine": True}
}  # fmt: skip


def books() -> dict[str, Verb]:
    """Codebooks of every kind: searched, sampled, learned, and their losses and estimators of gradients."""
    verbs: dict[str, Verb] = {}
    for kind, options in BOOKS.items():
        book = vq.init(2, 16, 64, **options)
        learn = lambda b, x, m, k: vq.update(b, vq.apply(b, x, k, mask=m, draw=True).stats, threshold=2.0)
        verbs |= {
            f"{kind} decode": (lambda b, x: vq.decode(b, vq.encode(b, x)), (book, X)),
            f"{kind} top": (lambda b, x: vq.encode(b, x, top=3), (book, X)),
            f"{kind} sample": (vq.sample, (book, X, KEY)),
            f"{kind} moments": (vq.moments, (book, X, MASK)),
            f"{kind} losses": (lambda b, x, k: vq.apply(b, x, k, losses=LOSSES), (book, X, KEY)),
            f"{kind} kmeans": (vq.kmeans, (book, X, KEY)),
        }
        if kind != "learnable":
            verbs[f"{kind} update"] = (learn, (book, X, MASK, KEY))
        for estimator in ("direct", "straight_through", "rotation", "directional", "gumbel"):
            f = partial(vq.apply, gradient=getattr(vq, estimator))
            verbs[f"{kind} {estimator}"] = (f, (book, X, KEY))
    verbs["mask"] = (lambda lengths: vq.mask(lengths, 7), (torch.tensor([2, 3]),))
    return verbs


def states() -> dict[str, Verb]:
    """Quantisers that are composed of books."""
    verbs: dict[str, Verb] = {}
    for name, (verb, make) in STATES.items():
        state, x = make(), randn(4, 5, DIM, seed=3)
        more = {"draw": True} if name in LEARN else {}
        learn = lambda s, x, k, verb=verb, more=more: verb.update(s, verb.apply(s, x, k, **more).stats)
        verbs |= {
            f"{name} apply": (verb.apply, (state, x)),
            f"{name} update": (learn, (state, x, KEY)),
            f"{name} decode": (lambda s, x, verb=verb: verb.decode(s, verb.encode(s, x)), (state, x)),
        }
    residual = STATES["residual"][1]()
    verbs["beam"] = (lambda s, x: vq.beam.encode(s, x, 3), (residual, randn(4, 5, DIM)))
    return verbs


def scalars() -> dict[str, Verb]:
    """Quantisers of scalars, projections, and what each starts from."""
    made: dict[str, tuple[Any, Callable[[Any], Any]]] = {
        "fsq": (vq.fsq, lambda key: vq.fsq.init(key, (5, 5, 4), 64)),
        "lfq": (vq.lfq, lambda key: vq.lfq.init(key, 6, 64)),
        "latent": (vq.latent, lambda key: vq.latent.init(key, (5, 4), 64)),
        "fsp": (vq.fsp, lambda key: vq.fsp.init(key, (5, 5), 64)),
        "random_projection": (vq.random_projection, lambda key: vq.random_projection.init(key, 64, 16, 8)),
    }
    verbs: dict[str, Verb] = {}
    for name, (verb, make) in made.items():
        verbs |= {
            f"{name} init": (make, (KEY,)),
            f"{name} apply": (verb.apply, (make(KEY), X, KEY)),
            f"{name} decode": (lambda s, x, verb=verb: verb.decode(s, verb.encode(s, x)), (make(KEY), X)),
        }
    bits = vq.binary.init(3, 6)
    verbs["binary"] = (vq.binary.apply, (bits, X[..., :6].contiguous(), KEY))
    for name, make in (
        ("vq", lambda key: vq.init(key, 16, 64)),
        ("simvq", lambda key: vq.simvq.init(key, 7, 6)),
        ("implicit", lambda key: vq.implicit.init(key, 7, 6)),
        ("residual", lambda key: vq.residual.init_books(key, 7, 4, 3, dim=6)),
        ("hierarchical", lambda key: vq.hierarchical.init(key, 7, 6, (1, 3, 5))),
    ):
        verbs[f"{name} init"] = (make, (KEY,))
    sharded = vq.sharded.init(2, 16, 64, 0, 16)
    verbs["sharded decode"] = (lambda s, x: vq.sharded.decode(s, vq.sharded.encode(s, x)), (sharded, X))
    verbs["sharded update"] = (
        lambda s, x, k: vq.sharded.update(s, vq.sharded.apply(s, x, k, draw=True).stats),
        (sharded, X, KEY),
    )
    return verbs


VQ: dict[str, Verb] = books() | states() | scalars()
