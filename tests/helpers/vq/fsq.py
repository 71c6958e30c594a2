"""FSQ beside vector-quantize-pytorch: a peer and our state with its parameters."""

import torch
from vector_quantize_pytorch import FSQ

from fquant.vq.scalar import fsq
from tests.helpers.vq.peers import like

LEVELS, EVEN = (8, 5, 5, 6), (5, 5, 5, 5)
OPTIONS = {  # our option: the peer's name
    "symmetric": "preserve_symmetry",
    "hard_clamp": "bound_hard_clamp",
    "rotation": "orthogonal_rotation",
    "bias": "projection_has_bias",
}


def both(levels, options):
    """Return the peer's module and our state with the same parameters."""
    torch.manual_seed(1)
    renamed: dict = {OPTIONS.get(name, name): value for name, value in options.items()}
    peer = FSQ(levels, **renamed).eval()
    return peer, like(fsq.init(0, levels, **options), peer)
