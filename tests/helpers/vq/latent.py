"""Latent quantisation beside vector-quantize-pytorch: a peer and our state with its projections."""

from dataclasses import replace

import torch
from vector_quantize_pytorch import LatentQuantize

from fquant.vq.scalar import latent
from tests.helpers.vq.peers import projections

LEVELS = (5, 8, 4, 3)


def both(options):
    torch.manual_seed(1)
    state = latent.init(0, LEVELS, **options)
    peer = LatentQuantize(levels=list(LEVELS), dim=state.dim, num_codebooks=state.num_codebooks)
    return peer, replace(state, params=replace(state.params, projections=projections(peer)))
