"""Implicit neural codebooks beside vector-quantize-pytorch: our residual state and a peer with its parameters."""

import warnings
from dataclasses import replace
from typing import Any

import torch

from fquant import vq
from fquant.vq.codebook import implicit
from fquant.vq.composite import residual
from fquant.vq.scalar.projection_layers import Dense
from tests.helpers.vq.peers import drawn

with warnings.catch_warnings(action="ignore"):  # the package uses deprecated functions of torch
    import vector_quantize_pytorch as peer

D = 5


def qinco(named=None, **options) -> Any:
    sizes = (6, 9, 9)
    state = residual.init_implicit(2, sizes, D, **options)
    torch.manual_seed(1)
    with warnings.catch_warnings(action="ignore"):
        them: Any = peer.ResidualVQ(dim=D, codebook_size=sizes, implicit_neural_codebook=True, **(named or {}))
    dense = lambda layer, of=lambda t: t.detach().clone(): Dense(of(layer.weight), of(layer.bias))

    def net(mlp, *of):
        return implicit.Net(
            dense(mlp.proj_in, *of), [implicit.Block(dense(b[0], *of), dense(b[2], *of)) for b in mlp.layers]
        )

    def taken(of):
        books = [replace(vq.init(0, 1, 1), codes=of(layer._codebook.embed)[0]) for layer in them.layers]
        return [books[0], *(implicit.Implicit(b, net(mlp, of)) for b, mlp in zip(books[1:], them.mlps, strict=True))]

    layers = []
    for mine, codes, yours in zip(
        state.layers, (drawn(k, D, seed=i) for i, k in enumerate(sizes)), them.layers, strict=True
    ):
        yours._codebook.embed.data.copy_(codes[None])
        yours._codebook.embed_avg.data.copy_(codes[None])
        book = mine if isinstance(mine, vq.Book) else mine.book
        layers.append(replace(book, codes=codes, sums=codes.clone()))
    nets = [net(mlp) for mlp in them.mlps]
    layers = [layers[0], *(implicit.Implicit(book, net) for book, net in zip(layers[1:], nets, strict=True))]
    return replace(state, layers=layers), them.train(), taken
