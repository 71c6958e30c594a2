"""SimVQ beside vector-quantize-pytorch: our state and a peer with its parameters."""

import warnings
from typing import Any

import torch

from fquant.vq.codebook import simvq

with warnings.catch_warnings(action="ignore"):  # the package uses deprecated functions of torch
    import vector_quantize_pytorch as peer

D, K = 6, 20


def net(state) -> Any:
    layers: list[Any] = []
    for dense in state.params:
        out, width = dense.weight.shape
        one = torch.nn.Linear(width, out, bias=dense.bias is not None)
        one.weight.data.copy_(dense.weight)
        if dense.bias is not None:
            one.bias.data.copy_(dense.bias)
        layers += [one, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def pair(named, **options) -> Any:
    state = simvq.init(3, K, D, **options)
    them: Any = peer.SimVQ(D, K, codebook_transform=net(state), frozen_codebook_dim=options.get("frozen_dim"), **named)
    them.frozen_codebook = state.frozen.clone()
    return state, them
