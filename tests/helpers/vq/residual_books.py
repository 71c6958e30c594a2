"""Residuals of books beside vector-quantize-pytorch: a state, a peer with its codes, and their comparison."""

import warnings
from dataclasses import replace
from typing import Any

import torch

from fquant import vq
from fquant.vq.composite import residual
from tests.helpers.vq.peers import drawn, projections

with warnings.catch_warnings(action="ignore"):  # the package uses deprecated functions of torch
    import vector_quantize_pytorch as peer

B, N, D, L, K = 3, 20, 6, 4, 12
STE = {"rotation_trick": False}
STRAIGHT = {"gradient": vq.straight_through}


def make(num_codes=K, **options):
    """Return a state whose codes are spread like the residuals of their layer."""
    sizes = (num_codes,) * L if isinstance(num_codes, int) else num_codes
    state = residual.init_books(3, sizes, D, **options)
    if options.get("metric") == "cosine":
        return state
    spread = [drawn(*book.codes.shape, seed=7 + i, size=0.7**i) for i, book in enumerate(state.layers)]
    layers = [replace(book, codes=c, sums=c.clone()) for book, c in zip(state.layers, spread, strict=True)]
    return replace(state, layers=layers)


def pair(num_codes=K, named=None, **options) -> Any:
    state = make(num_codes, **options)
    torch.manual_seed(1)
    with warnings.catch_warnings(action="ignore"):
        them: Any = peer.ResidualVQ(
            dim=state.dim,
            codebook_dim=D,
            codebook_size=num_codes,
            **({"num_quantizers": L} if isinstance(num_codes, int) else {}),
            shared_codebook=options.get("shared", False),
            use_cosine_sim=options.get("metric") == "cosine",
            learnable_codebook=options.get("learnable", False),
            ema_update=not options.get("learnable", False),
            quantize_dropout=options.get("dropout", False),
            **(named or {}),
        )
    for book, layer in zip(state.layers, them.layers, strict=False):
        layer._codebook.embed.data.copy_(book.codes[None])
        layer._codebook.embed_avg.data.copy_(book.codes[None])
    return replace(state, params=projections(them)), them.train()


def same_state(state, them):
    for i, (book, layer) in enumerate(zip(state.layers, them.layers, strict=False)):
        code = layer._codebook
        for one, other in ((book.codes, code.embed), (book.counts, code.cluster_size), (book.sums, code.embed_avg)):
            torch.testing.assert_close(one, other.detach()[0], rtol=1e-5, atol=1e-5, msg=lambda m, i=i: f"{i}: {m}")
