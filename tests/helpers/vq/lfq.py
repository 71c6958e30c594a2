"""LFQ beside vector-quantize-pytorch: options of both, a peer and our state with its parameters."""

import torch
from vector_quantize_pytorch import LFQ

from fquant.vq.scalar import lfq
from tests.helpers.vq.peers import like

WARM = 0.5  # an inverse temperature at which no probability is below 1e-5, the floor under the peer's logarithm
CASES = {  # of 4 bits: our options, and the peer's
    "plain": ({}, {}),
    "codebooks": ({"num_codebooks": 3}, {"num_codebooks": 3}),
    "scaled": ({"scale": 0.25}, {"codebook_scale": 0.25}),
    "spherical": ({"spherical": True}, {"spherical": True}),
    "spherical, scaled": ({"spherical": True, "scale": 2.0}, {"spherical": True, "codebook_scale": 2.0}),
    "clamped": ({"clamp": 1.5}, {"soft_clamp_input_value": 1.5}),
    "tanh": ({"activation": "tanh"}, {"straight_through_activation": torch.nn.Tanh()}),
    "rotated": ({"rotation": True, "num_codebooks": 2}, {"orthogonal_rotation": True, "num_codebooks": 2}),
    "gamma": ({"gamma": 0.3}, {"diversity_gamma": 0.3}),
    "softplus": ({"offset": 5.0}, {"experimental_softplus_entropy_loss": True}),
    "softplus, offset": (
        {"offset": 1.0, "gamma": 2.0},
        {"experimental_softplus_entropy_loss": True, "entropy_loss_offset": 1.0, "diversity_gamma": 2.0},
    ),
    "projected": ({"dim": 7}, {"dim": 7}),
    "projected without bias": ({"dim": 7, "bias": False, "num_codebooks": 2}, {"dim": 7, "projection_has_bias": False,
                                                                             "num_codebooks": 2}),
    "cosine": ({"dim": 7, "cosine": 1.0}, {"dim": 7, "cosine_sim_project_in": True}),
    "cosine, scaled": (
        {"dim": 7, "cosine": 3.0},
        {"dim": 7, "cosine_sim_project_in": True, "cosine_sim_project_in_scale": 3.0},
    ),
}  # fmt: skip


def both(options, named):
    torch.manual_seed(1)
    peer = LFQ(codebook_size=16, entropy_loss_weight=1.0, commitment_loss_weight=2.0, **named)
    return peer, like(lfq.init(0, 4, **options), peer)
